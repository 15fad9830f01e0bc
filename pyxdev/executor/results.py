"""From the last stage's memory to whoever asked for the result."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from pyxdev._native import HOST, Array, Buffer, Event, Runtime, Stream
from pyxdev._pipeline import Copies, Outputs
from pyxdev.adapters import Activation
from pyxdev.adapters.adapter import NEVER
from pyxdev.executor.rest import come_to_rest

T = TypeVar("T")


class Fetch:
    """Copies outputs of the last stage, which are complete, on a stream of its own. Any thread."""

    def __init__(self, runtime: Runtime, device: int) -> None:
        self._runtime = runtime
        self._device = device
        self._lock = threading.Lock()
        self._buffer: Buffer | None = None
        self.pinned_bytes = 0
        self.stream: Stream = runtime.stream(device)
        self._copies = Copies(self.stream)
        self.complete: Event = runtime.event()  # never recorded, so it is over: `ready` of results that are no copies

    def read(self, output: Activation, take: Callable[[Any], T]) -> T:
        """What take makes of an activation's bytes on the host, uint8 of shape (layout.nbytes,), which are good until
        it returns. One at a time.

        No frame that waits for them has a name for them: the exception of a stage that runs meanwhile, on simulated
        devices, refers to these frames, and a caller who keeps it would keep the memory from being closed.
        """
        nbytes = output.layout.nbytes
        with self._lock:
            buffer = self._room(nbytes)
            self._download(output, buffer)
            self._runtime.host_access(buffer.address, nbytes, write=False)
            return take(np.frombuffer(memoryview(buffer), np.uint8, nbytes) if nbytes else np.empty(0, np.uint8))

    def copies(self, output: Activation, outputs: Outputs) -> tuple[list[Array], Event | None]:
        """The arrays of an activation, copied into memory of their own on the same device, and the event after which
        they are there, if there are any. outputs: of the stage whose activation it is, and which leaves it alone
        until then.

        When nobody refers to a copy any more, its memory serves a later one: freeing it would make the vendors' drivers
        wait for the whole device."""
        try:
            copies, ready = self._copies.of(output)
            if ready is not None:
                outputs.hold(ready, output.keep, NEVER, False)
        except BaseException:
            come_to_rest([self.stream])  # or the memory could be written while a copy still reads it
            raise
        return copies, ready

    def _download(self, output: Activation, buffer: Buffer) -> None:
        try:
            for offset, address, nbytes in output.spans:
                self.stream.copy(buffer.address + offset, address, nbytes, dst_device=HOST, src_device=self._device)
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
        self._copies.close()
        del self.complete  # which results that are left keep
        if self._buffer is not None:
            self._buffer.close()
        self.stream.close()
