"""CuPy functions as stages: fn(x), with CuPy's current device and stream set to the stage's.

CuPy's memory pool keeps free blocks by the stream that was current when they were made, so what a stage allocates comes
back to its own stream. Outputs in such memory are held until that stream waits for their reader.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy

from pyxdev._native import Array
from pyxdev.adapters.interface import LEGACY_STREAM, Described, describe, described
from pyxdev.adapters.library import Held, Library

_OWN = (cupy.cuda.memory.PooledMemory, cupy.cuda.memory.Memory, cupy.cuda.memory.MemoryAsync)


class _Handle:
    """A stream, in CUDA's protocol for them."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


class Cupy(Library):
    takes_stage = False
    copies_results = True

    def __init__(self, device: int, handle: int) -> None:
        self._device = cupy.cuda.Device(device)
        with self._device:
            if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14; what was there before is deprecated
                self.stream = cupy.cuda.Stream.from_external(_Handle(handle))
            else:
                self.stream = cupy.cuda.ExternalStream(handle, device)

    @contextmanager
    def current(self) -> Iterator[None]:
        with self._device, self.stream:
            yield

    def wrap(self, array: Array) -> Any:
        return cupy.from_dlpack(array)

    def describe(self, leaf: Any) -> Described:
        if not isinstance(leaf, cupy.ndarray):
            return describe(leaf)
        return described(leaf, leaf.data.ptr, leaf.shape, leaf.dtype, leaf.strides, LEGACY_STREAM)

    def dense(self, leaf: Any) -> Any:
        return cupy.ascontiguousarray(leaf)

    def held(self, leaf: Any) -> Held | None:
        """A view's base is the array that the memory was made for. CuPy's own memory only: what came from elsewhere may
        be known there, and so may what does not begin where its memory does."""
        if not isinstance(leaf, cupy.ndarray):
            return None
        root = leaf if leaf.base is None else leaf.base
        memory = root.data
        if not isinstance(memory.mem, _OWN) or memory.ptr != memory.mem.ptr:
            return None
        return Held(memory, weakref.ref(root))

    def copy(self, array: Array) -> Any:
        with self._device:
            return cupy.from_dlpack(array).copy()

    def callers_stream(self) -> int:
        with self._device:
            return int(cupy.cuda.get_current_stream().ptr)
