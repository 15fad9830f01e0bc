"""Stages of numba.cuda: fn(stage, x), with numba's current device the stage's; kernels take stage.stream.

numba allocates with cuMemAlloc, which waits for the device, and frees as late; so a stage does better with
stage.empty(), whose memory is passed on without a copy.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from numba import cuda

from pyxdev._native import Array
from pyxdev.adapters.library import Library


class Numba(Library):
    def __init__(self, device: int, handle: int) -> None:
        self._device = cuda.gpus[device]
        with self._device:
            self.stream = cuda.external_stream(handle)

    def current(self) -> AbstractContextManager[Any]:
        device: AbstractContextManager[Any] = self._device
        return device

    def wrap(self, array: Array) -> Any:
        return cuda.as_cuda_array(array, sync=False)  # True would wait on the host
