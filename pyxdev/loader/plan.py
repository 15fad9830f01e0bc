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
from pyxdev.loader.placement import by_function, by_layers, by_rows, shares

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
class Parts:
    """What is read, in file order, one element a part: the tensor, the index of its device, the bytes from `offset` of
    the tensor on, the rows begin to end (0 to -1: all of the tensor), and the place `at` in its device's memory."""

    tensor: NDArray[np.int64]
    device: NDArray[np.int64]
    offset: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    at: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.tensor)


@dataclass(frozen=True)
class Plan:
    """Who gets what of a model. `needs` has one entry a device."""

    model: Model
    devices: tuple[int, ...]
    parts: Parts
    needs: tuple[Need, ...]

    def pieces(
        self, addresses: Sequence[int], direct_fds: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows for a Reader, one for each part that has bytes, and the tensor of each row. addresses: of each device's
        memory; direct_fds: one a file, -1 where it is not open for direct I/O."""
        parts = self.parts
        kept = np.flatnonzero(parts.nbytes)
        tensor, device = parts.tensor[kept], parts.device[kept]
        file = self.model.file_of[tensor]
        rows = np.empty((len(kept), 6), np.int64)
        rows[:, 0] = np.array([one.fd for one in self.model.files], np.int64)[file]
        rows[:, 1] = np.array(direct_fds, np.int64)[file]
        rows[:, 2] = np.array(self.devices, np.int64)[device]
        rows[:, 3] = self.model.tensors.offset[tensor] + parts.offset[kept]
        rows[:, 4] = parts.nbytes[kept]
        rows[:, 5] = np.array(addresses, np.int64)[device] + parts.at[kept]
        return rows, tensor

    @property
    def fits(self) -> bool:
        return all(need.fits for need in self.needs)

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
        for tensor, device in zip(self.parts.tensor.tolist(), self.parts.device.tolist(), strict=True):
            owners[tensor].append(self.devices[device])
        return {
            "format": self.model.format,
            "fits": self.fits,
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
    tensor, device, offset, nbytes, begin, end = _place(model, chosen, tensor_split, split_mode, place)
    padded = -(-nbytes // ALIGNMENT) * ALIGNMENT
    at = np.empty(len(nbytes), np.int64)
    needs = []
    for number, ordinal in enumerate(chosen):
        mine = np.flatnonzero(device == number)
        ends = np.cumsum(padded[mine])
        at[mine] = ends - padded[mine]
        free, _ = runtime.memory_info(ordinal)
        needs.append(Need(ordinal, len(mine), int(ends[-1]) if len(mine) else 0, free))
    return Plan(model, chosen, Parts(tensor, device, offset, nbytes, begin, end, at), tuple(needs))


def _place(
    model: Model,
    devices: tuple[int, ...],
    tensor_split: Sequence[float] | None,
    split_mode: str,
    place: Callable[[str], int] | None,
) -> NDArray[np.int64]:
    """The columns of Parts but the last."""
    tensors, count = model.tensors, len(devices)
    if split_mode not in SPLIT_MODES:
        raise InvalidArgument(f"split_mode is {split_mode!r}; allowed: {', '.join(SPLIT_MODES)}")
    if place is not None and (tensor_split is not None or split_mode != "layer"):
        raise InvalidArgument("place decides alone; tensor_split and split_mode cannot be given with it")
    if split_mode == "row":
        return by_rows(tensors, count, tensor_split)
    if place is not None:
        chosen = by_function(tensors, devices, place)
    elif split_mode == "none":
        shares(count, tensor_split)
        chosen = np.zeros(len(tensors), np.int64)
    else:
        chosen = by_layers(tensors, count, tensor_split)
    whole = np.zeros((6, len(tensors)), np.int64)
    whole[0] = np.arange(len(tensors))
    whole[1] = chosen
    whole[3] = tensors.nbytes
    whole[5] = -1
    return whole
