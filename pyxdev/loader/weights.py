"""What a load gives: a mapping of arrays that owns the memory behind them."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from pyxdev._native import Array, Buffer, Runtime
from pyxdev.errors import Closed
from pyxdev.loader.plan import ARRAY_DTYPES, Plan
from pyxdev.loader.report import Report


@dataclass(frozen=True)
class Rows:
    """A matrix that is spread over devices by its rows: each of `parts` holds the next run of them."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Array, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class Weights(Mapping[str, Any]):
    """name -> Array on its device (a Rows for a matrix split by rows), in file order. `metadata` is the file's own.

    close(), or leaving the with block, frees all device memory; only what is exported to another library (DLPack,
    __array_interface__) stays until that view is gone. Arrays cannot be used after it.
    """

    def __init__(
        self, plan: Plan, runtime: Runtime, buffers: Sequence[Buffer], report: Report, owned: Runtime | None
    ) -> None:
        """owned: a runtime to close with the weights."""
        self.runtime = runtime
        self.devices = plan.devices
        self.metadata: Mapping[str, Any] = plan.model.metadata
        self.report = report
        self._tensors = plan.model.tensors
        self._parts = plan.parts
        self._buffers = list(buffers)
        self._owned = owned
        self._made: dict[str, Array | Rows] = {}

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {tensor.name: number for number, tensor in enumerate(self._tensors)}

    @functools.cached_property
    def _places(self) -> list[tuple[int, int, int, int, int]]:
        """Each part's device, rows, bytes and place, as plain numbers: those of NumPy take a microsecond each."""
        parts = self._parts
        columns = (parts.device, parts.begin, parts.end, parts.nbytes, parts.at)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    @functools.cached_property
    def _first(self) -> list[int]:
        """The parts of tensor n are those from first[n] up to first[n + 1]."""
        first: list[int] = np.searchsorted(self._parts.tensor, np.arange(len(self._tensors) + 1)).tolist()
        return first

    def __getitem__(self, name: str) -> Any:
        made = self._made.get(name)
        if made is None:
            number = self._numbers[name]
            if not self._buffers:
                raise Closed("the weights are closed")
            made = self._made[name] = self._make(number)
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return (
            f"<pyxdev.Weights {len(self)} tensors on devices {list(self.devices)}{'' if self._buffers else ', closed'}>"
        )

    def _make(self, number: int) -> Array | Rows:
        tensor = self._tensors[number]
        dtype = ARRAY_DTYPES.get(tensor.dtype, tensor.dtype)
        arrays, whole = [], False
        for device, begin, end, nbytes, at in self._places[self._first[number] : self._first[number + 1]]:
            whole = end < 0
            shape = tensor.shape if whole else (end - begin, *tensor.shape[1:])
            buffer = self._buffers[device]
            address = buffer.address + at if nbytes else 0
            arrays.append(Array(self.runtime, self.devices[device], address, shape, dtype, nbytes=nbytes, owner=buffer))
        if whole:
            return arrays[0]
        return Rows(tensor.shape, dtype, tuple(arrays))

    @property
    def closed(self) -> bool:
        """Whether the memory has been given back."""
        return not self._buffers

    def close(self) -> None:
        """Gives the memory back, but for that of devices whose arrays another library may still look at: those give
        theirs back when the last of them is gone."""
        arrays = [weakref.ref(array) for made in self._made.values() for array in _arrays(made)]
        self._made.clear()
        # What was exported and is still there may be looked at by somebody else.
        left = {array.device for ref in arrays if (array := ref()) is not None and array.exported}
        buffers, self._buffers = self._buffers, []
        for buffer in buffers:
            if buffer.device not in left:
                buffer.close()
        owned, self._owned = self._owned, None
        if owned is not None:
            _close_after(owned, [buffer for buffer in buffers if not buffer.closed])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_buffers", None):
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)
            self.close()


def _arrays(made: Array | Rows) -> tuple[Array, ...]:
    return made.parts if isinstance(made, Rows) else (made,)


def _close_after(runtime: Runtime, buffers: list[Buffer]) -> None:
    """Closes the runtime when the last of its buffers has been collected."""
    if not buffers:
        runtime.close()
        return
    left = [len(buffers)]

    def gone() -> None:
        left[0] -= 1
        if not left[0]:
            runtime.close()

    for buffer in buffers:
        weakref.finalize(buffer, gone).atexit = False
