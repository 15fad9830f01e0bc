"""Who gets what: the parts of a model's tensors, their devices, and where each part lies in its device's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from pyxdev._native import Runtime
from pyxdev.errors import InvalidArgument, OutOfMemory
from pyxdev.loader.files import Model
from pyxdev.loader.placement import Part, by_function, by_layers, by_rows, shares, whole

ALIGNMENT = 256  # bytes; of every tensor, in its device's memory
SPLIT_MODES = ("layer", "row", "none")

# Names of Array for the file's own type names. All others are raw types: bytes with a shape that counts values.
ARRAY_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


@dataclass(frozen=True)
class Need:
    """What one device gets. `free` is what it had free when the plan was made, in bytes."""

    device: int
    tensors: int
    nbytes: int
    free: int

    @property
    def fits(self) -> bool:
        return self.nbytes <= self.free


@dataclass(frozen=True)
class Plan:
    """Parts in file order. `at` is each part's place in its device's memory, `needs` one entry a device."""

    model: Model
    devices: tuple[int, ...]
    parts: list[Part]
    at: NDArray[np.int64]
    needs: tuple[Need, ...]

    def pieces(self, addresses: Sequence[int], direct_fds: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
        """Rows for a Reader, one for each part that has bytes, and the part that each row stands for. addresses: of
        each device's memory; direct_fds: one a file, -1 where it is not open for direct I/O."""
        tensors, count = self.model.tensors, len(self.parts)
        tensor = np.fromiter((part.tensor for part in self.parts), np.intp, count)
        device = np.fromiter((part.device for part in self.parts), np.intp, count)
        file = np.array(self.model.file_of, np.intp)[tensor]
        rows = np.empty((count, 6), np.int64)
        rows[:, 0] = np.array([file.fd for file in self.model.files], np.int64)[file]
        rows[:, 1] = np.array(direct_fds, np.int64)[file]
        rows[:, 2] = np.array(self.devices, np.int64)[device]
        rows[:, 3] = np.fromiter((tensors[part.tensor].offset + part.offset for part in self.parts), np.int64, count)
        rows[:, 4] = np.fromiter((part.nbytes for part in self.parts), np.int64, count)
        rows[:, 5] = np.array(addresses, np.int64)[device] + self.at
        kept = np.flatnonzero(rows[:, 4])
        return np.ascontiguousarray(rows[kept]), kept

    def check_memory(self) -> None:
        """Raises OutOfMemory, naming the device, where something does not fit."""
        for need in self.needs:
            if not need.fits:
                raise OutOfMemory(
                    f"device {need.device}: {need.nbytes} bytes wanted for {need.tensors} tensors, {need.free} free",
                    status="NO_DEVICE_MEMORY",
                    operation="load",
                )

    def as_dict(self) -> dict[str, Any]:
        """For JSON: `tensors` (name, dtype, shape, bytes, device; for one split by rows `device` is a list) and
        `devices`."""
        owners: list[list[int]] = [[] for _ in self.model.tensors]
        for part in self.parts:
            owners[part.tensor].append(self.devices[part.device])
        return {
            "format": self.model.format,
            "files": [file.path for file in self.model.files],
            "tensors": [
                {
                    "name": tensor.name,
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "bytes": tensor.nbytes,
                    "device": owner[0] if len(owner) == 1 else owner,
                }
                for tensor, owner in zip(self.model.tensors, owners, strict=True)
            ],
            "devices": [
                {
                    "device": need.device,
                    "tensors": need.tensors,
                    "bytes": need.nbytes,
                    "free": need.free,
                    "fits": need.fits,
                }
                for need in self.needs
            ],
        }


def choose_devices(runtime: Runtime, devices: Sequence[SupportsIndex] | None) -> tuple[int, ...]:
    """The devices asked for, or all but integrated ones (these if there is nothing else). Raises InvalidArgument."""
    count = runtime.device_count
    if devices is None:
        discrete = [device for device in range(count) if not runtime.device_info(device).integrated]
        return tuple(discrete or range(count))
    chosen = tuple(devices)
    if not chosen:
        raise InvalidArgument("devices is empty; at least one device is wanted")
    for device in chosen:
        if isinstance(device, bool) or not hasattr(device, "__index__") or not 0 <= int(device) < count:
            raise InvalidArgument(f"devices holds {device!r}; whole numbers from 0 to {count - 1} are allowed")
    if len(set(chosen)) < len(chosen):
        raise InvalidArgument(f"devices names one twice: {list(chosen)}")
    return tuple(int(device) for device in chosen)


def make_plan(
    model: Model,
    runtime: Runtime,
    devices: Sequence[SupportsIndex] | None = None,
    *,
    tensor_split: Sequence[float] | None = None,
    split_mode: str = "layer",
    place: Callable[[str], int] | None = None,
) -> Plan:
    """Places the tensors of a model; see pyxdev.load for the arguments. Allocates nothing."""
    chosen = choose_devices(runtime, devices)
    parts = _place(model, chosen, tensor_split, split_mode, place)
    nbytes = np.fromiter((part.nbytes for part in parts), np.int64, len(parts))
    device = np.fromiter((part.device for part in parts), np.intp, len(parts))
    padded = -(-nbytes // ALIGNMENT) * ALIGNMENT
    at = np.empty(len(parts), np.int64)
    needs = []
    for number, ordinal in enumerate(chosen):
        mine = np.flatnonzero(device == number)
        ends = np.cumsum(padded[mine])
        at[mine] = ends - padded[mine]
        free, _ = runtime.memory_info(ordinal)
        needs.append(Need(ordinal, len(mine), int(ends[-1]) if len(mine) else 0, free))
    return Plan(model, chosen, parts, at, tuple(needs))


def _place(
    model: Model,
    devices: tuple[int, ...],
    tensor_split: Sequence[float] | None,
    split_mode: str,
    place: Callable[[str], int] | None,
) -> list[Part]:
    tensors = model.tensors
    if split_mode not in SPLIT_MODES:
        raise InvalidArgument(f"split_mode is {split_mode!r}; allowed: {', '.join(SPLIT_MODES)}")
    if place is not None:
        if tensor_split is not None or split_mode != "layer":
            raise InvalidArgument("place decides alone; tensor_split and split_mode cannot be given with it")
        return whole(tensors, by_function(tensors, devices, place))
    if split_mode == "row":
        return by_rows(tensors, len(devices), tensor_split)
    if split_mode == "none":
        shares(len(devices), tensor_split)
        return whole(tensors, [0] * len(tensors))
    return whole(tensors, by_layers(tensors, len(devices), tensor_split))
