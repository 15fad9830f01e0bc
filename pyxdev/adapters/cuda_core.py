"""Stages of cuda.core: fn(stage, x) with StridedMemoryViews, and stage.stream a cuda.core Stream.

Outputs are views from stage.empty(), Buffers, or arrays of any library. A Buffer of a pool is freed in the order of the
stream it was allocated on: that must be stage.stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from cuda.bindings import driver
from cuda.core import Buffer, Device, Stream
from cuda.core.utils import StridedMemoryView

from pyxdev._native import Array
from pyxdev.adapters.interface import LEGACY_STREAM, Described, describe, described, device_of, has_interface
from pyxdev.adapters.library import Library


class CudaCore(Library):
    def __init__(self, device: int, handle: int) -> None:
        self._device = Device(device)
        with self.current():
            self.stream = Stream.from_handle(handle)

    @contextmanager
    def current(self) -> Iterator[None]:
        _, before = driver.cuCtxGetCurrent()
        self._device.set_current()
        try:
            yield
        finally:
            driver.cuCtxSetCurrent(before)

    def wrap(self, array: Array) -> Any:
        return StridedMemoryView.from_dlpack(array, -1)  # in the order of the stage's stream already

    def is_output(self, leaf: Any) -> bool:
        return isinstance(leaf, StridedMemoryView | Buffer) or has_interface(leaf)

    def device_of(self, leaf: Any) -> int:
        return int(leaf.device_id) if isinstance(leaf, StridedMemoryView | Buffer) else device_of(leaf)

    def describe(self, leaf: Any) -> Described:
        if isinstance(leaf, Buffer):
            return described(leaf, int(leaf.handle), (leaf.size,), np.dtype(np.uint8), None, LEGACY_STREAM)
        if isinstance(leaf, StridedMemoryView):
            strides = leaf.strides and [stride * leaf.dtype.itemsize for stride in leaf.strides]
            return described(leaf, leaf.ptr, leaf.shape, leaf.dtype, strides, LEGACY_STREAM)
        return describe(leaf)
