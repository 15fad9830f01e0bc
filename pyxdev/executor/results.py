"""From the last stage's memory to whoever asked for the result."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from pyxdev._native import HOST, Array, Buffer, Lease, Runtime, Stream
from pyxdev.adapters import Activation
from pyxdev.adapters.activation import Spec
from pyxdev.executor.rest import come_to_rest


class Fetch:
    """Copies outputs of the last stage, which are complete, to the host. One at a time; any thread."""

    def __init__(self, runtime: Runtime, device: int) -> None:
        self._runtime = runtime
        self._device = device
        self._lock = threading.Lock()
        self._buffer: Buffer | None = None
        self._spare: list[Buffer] = []  # of results that are gone; a result that outlives the executor keeps the list
        self.pinned_bytes = 0
        self.stream: Stream = runtime.stream(device)

    @contextmanager
    def download(self, output: Activation) -> Iterator[Any]:
        """The bytes of an activation as uint8 of shape (layout.nbytes,), valid inside the with."""
        nbytes = output.layout.nbytes
        with self._lock:
            buffer = self._room(nbytes)
            self._run([(buffer.address + offset, address, size, HOST) for offset, address, size in output.spans])
            self._runtime.host_access(buffer.address, nbytes, write=False)
            memory = np.frombuffer(memoryview(buffer), np.uint8, nbytes) if nbytes else np.empty(0, np.uint8)
            try:
                yield memory
            finally:
                del memory

    def copy(self, address: int, spec: Spec) -> Array:
        """An array of the last stage's device, copied into memory of its own. When nobody refers to it any more, the
        memory serves a later result: freeing it would make the vendors' drivers wait for the whole device."""
        with self._lock:
            lease = self._lend(spec.nbytes)
            self._run([(lease.item.address, address, spec.nbytes, self._device)])
        return Array(
            self._runtime, self._device, lease.item.address, spec.shape, spec.dtype, nbytes=spec.nbytes, owner=lease
        )

    def _lend(self, nbytes: int) -> Lease:
        for index in range(len(self._spare) - 1, -1, -1):
            buffer = self._spare[index]
            if buffer.closed:  # by the collector, together with a result that was part of a cycle
                del self._spare[index]
            elif nbytes <= buffer.nbytes <= 2 * nbytes:
                return Lease(self._spare.pop(index), self._spare)
        return Lease(self._runtime.buffer(self._device, nbytes, managed=True), self._spare)

    def _run(self, copies: list[tuple[int, int, int, int]]) -> None:
        """Copies (to, from, bytes, device of the former), and waits for them."""
        try:
            for dst, src, nbytes, device in copies:
                self.stream.copy(dst, src, nbytes, dst_device=device, src_device=self._device)
            self.stream.synchronize()
        except BaseException:
            come_to_rest([self.stream])  # or the memory could be written while a copy still reads it
            raise

    def _room(self, nbytes: int) -> Buffer:
        if self._buffer is None or self._buffer.nbytes < nbytes:
            if self._buffer is not None:
                self._buffer.close()
                self._buffer = None
            self._buffer = self._runtime.buffer(HOST, nbytes, managed=True)
            self.pinned_bytes = nbytes
        return self._buffer

    def close(self) -> None:
        self._spare.clear()
        self._spare = []  # the leases alone keep the old list now, and the last of them frees all
        if self._buffer is not None:
            self._buffer.close()
        self.stream.close()
