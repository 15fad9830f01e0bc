"""Memory of a stage: slots that its inputs arrive in, blocks that its outputs are written to.

A slot is used by every depth-th microbatch, in stream order; a block by one activation at a time, until nothing that
can still read it is left. Both keep their memory for the next microbatch, so that none is allocated after warm-up.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from pyxdev._native import Runtime
from pyxdev._pipeline import Blocks, Events, Slot, SlotRing
from pyxdev.errors import OutOfMemory

__all__ = ["Blocks", "Events", "Leaving", "Slot", "Slots"]

log = logging.getLogger("pyxdev")


class Leaving:
    """Buffers that were replaced by larger ones, and graphs over them, until the microbatches that used them have left
    the executor."""

    def __init__(self, in_flight: int) -> None:
        self._in_flight = in_flight
        self._buffers: deque[tuple[int, Any]] = deque()

    def add(self, buffer: Any, turn: int) -> None:
        """buffer was used by microbatches before this turn; its close() is called."""
        self._buffers.append((turn, buffer))

    def sweep(self, turn: int) -> None:
        """Microbatch `turn` has been admitted, so those up to turn - in_flight have left."""
        while self._buffers and self._buffers[0][0] + self._in_flight <= turn:
            self._buffers.popleft()[1].close()

    def close(self) -> None:
        while self._buffers:
            self._buffers.popleft()[1].close()


class Slots(SlotRing):
    """The slots of one stage's inputs, used in turn. There are as many events as microbatches in flight, so each tells
    of one microbatch as long as that is on its way."""

    def __init__(
        self, runtime: Runtime, device: int, depth: int, in_flight: int, shrinks: bool, leaving: Leaving
    ) -> None:
        super().__init__(runtime, depth, in_flight)
        self._runtime = runtime
        self._device = device
        self._shrinks = shrinks
        self._leaving = leaving

    def enlarge(self, turn: int, nbytes: int) -> Slot:
        """The slot of this turn, which has no room for nbytes yet.

        Raises OutOfMemory, with the depth that fits, unless the depth was chosen automatically and may shrink.
        """
        slot = self.of(turn)
        while slot.nbytes < nbytes:
            try:
                self._grow(slot, turn, nbytes)
            except OutOfMemory as error:
                if not self._shrinks or len(self.ring) == 1:
                    raise self._too_deep(nbytes, error) from error
                self._give_up(slot, turn, nbytes)
                slot = self.of(turn)
        return slot

    def _grow(self, slot: Slot, turn: int, nbytes: int) -> None:
        try:
            buffer = self._runtime.buffer(self._device, max(nbytes, slot.nbytes + slot.nbytes // 2), managed=True)
        except OutOfMemory:
            buffer = self._runtime.buffer(self._device, nbytes, managed=True)
        self._let_go(slot, turn)
        slot.buffer, slot.address, slot.nbytes = buffer, buffer.address, buffer.nbytes

    def _give_up(self, slot: Slot, turn: int, nbytes: int) -> None:
        self.ring.remove(slot)
        self._let_go(slot, turn)
        log.warning(
            "device %d has no room for another slot of %d bytes: %d instead of %d in use",
            self._device, nbytes, len(self.ring), len(self.ring) + 1,
        )  # fmt: skip

    def _let_go(self, slot: Slot, turn: int) -> None:
        """Its memory, and what was made of it, after the microbatches before this turn."""
        for graph in slot.graphs.values():
            self._leaving.add(graph, turn)
        slot.graphs.clear()
        slot.views.clear()
        if slot.buffer is not None:
            self._leaving.add(slot.buffer, turn)

    def _too_deep(self, nbytes: int, error: OutOfMemory) -> OutOfMemory:
        fits = sum(slot.nbytes >= nbytes for slot in self.ring)
        advice = f"depth {fits} fits" if fits else "no depth fits"
        return OutOfMemory(
            f"device {self._device}: {len(self.ring)} slots of {nbytes} bytes are needed, {fits} could be had; "
            f"{advice} ({error})",
            status=error.status, code=error.code, operation=error.operation,
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.ring)

    def close(self) -> None:
        for slot in self.ring:
            for graph in slot.graphs.values():
                graph.close()
            slot.graphs.clear()
            slot.views.clear()
            if slot.buffer is not None:
                slot.buffer.close()
        for event in (*self.arrivals, self.never):
            event.close()
