"""A stage on its device, and the hop from one stage to the next.

For every microbatch, in order:

    hop:    wait for the source's outputs and for a free slot | copy | record `released`, `arrived`
    stage:  wait for `arrived` | wait until outputs of depth microbatches ago were read | the function | record `free`

Every wait is one of a stream for an event; the host waits for nothing here.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from pyxdev._native import Event, Link, Runtime, Stream
from pyxdev.adapters import Activation, Adapter, Value
from pyxdev.executor.plan import Stage, StagePlan
from pyxdev.executor.slots import Blocks, Events, Leaving, Slot, Slots
from pyxdev.executor.tickets import Microbatch, stage_error


class BoundStage:
    """A stage at work: its stream, its slots, and the outputs that are still being read."""

    def __init__(
        self, runtime: Runtime, stage: Stage, index: int, device: int, in_flight: int, depth: int, shrinks: bool,
        adapter: Adapter, leaving: Leaving,
    ) -> None:  # fmt: skip
        self.runtime = runtime
        self.fn = stage.fn
        self.out = stage.out
        self.cost = stage.cost
        self.name = stage.label
        self.index = index
        self.device = device
        self.in_flight = in_flight
        self.depth = depth
        self.adapter = adapter
        self.stream: Stream = runtime.stream(device)
        self.slots = Slots(runtime, device, depth, shrinks, leaving)
        self.blocks = Blocks(runtime, device, leaving)
        self.is_last = False
        self._readers = Events(runtime)
        self._held: deque[tuple[Event, Any, int]] = deque()

    def run(self, batch: Microbatch, slot: Slot, incoming: Value) -> Activation:
        """Queues the stage for one microbatch whose input is in the slot, or on its way there."""
        self.stream.wait(slot.arrived)
        self._settle(batch.turn)
        outgoing = self.adapter.run(self, batch, slot, incoming)
        self.leave(batch, slot)
        outgoing.ready = slot.free
        return outgoing

    def leave(self, batch: Microbatch, slot: Slot) -> None:
        """What the stage has queued for a microbatch ends here. For the last stage that is the microbatch's own end."""
        if self.is_last:
            slot.borrow(batch.exit)
        slot.free.record(self.stream)

    def _settle(self, turn: int) -> None:
        """Lets go of outputs that were handed on depth microbatches ago."""
        while len(self._held) >= self.depth:
            released, keep, reader = self._held.popleft()
            if reader + self.in_flight > turn:  # otherwise the reader has left the executor, and so has its copy
                self.stream.wait(released)
            del keep  # only now may the stage's stream write there again
            self._readers.give_back(released)

    def reader_event(self) -> Event:
        """An event for a reader of this stage's outputs to record; then hold() them."""
        return self._readers.take()

    def hold(self, released: Event, keep: Any, turn: int) -> None:
        """Keeps outputs until this stage's stream waits for their reader, the microbatch of this turn, which has
        recorded `released`."""
        self._held.append((released, keep, turn))

    def report(self, batch: Microbatch, cause: BaseException) -> None:
        """The stage's function raised."""
        batch.fail(stage_error(self.index, self.name, batch.index, cause))

    def plan(self) -> StagePlan:
        return StagePlan(
            self.name, self.device, self.adapter.name, len(self.slots.ring), self.slots.nbytes, self.blocks.nbytes
        )

    def close(self) -> None:
        self._held.clear()
        self.adapter.close()
        self.slots.close()
        self.blocks.close()
        self.stream.close()
        self._readers.close()


class Hop:
    """From one stage to the next."""

    def __init__(self, link: Link, producer: BoundStage, consumer: BoundStage) -> None:
        self.link = link
        self.producer = producer
        self.consumer = consumer

    def send(self, batch: Microbatch, source: Activation) -> Slot:
        """Queues the copy of the producer's outputs into the consumer's next slot."""
        slot = self.consumer.slots.take(batch.turn, source.layout.nbytes)
        released = self.producer.reader_event()
        send(self.link, source, slot, released)
        self.producer.hold(released, source.keep, batch.turn)
        return slot


def send(link: Link, source: Activation, slot: Slot, released: Event) -> None:
    """Copies an activation into a slot. Its arrays go one after the other on one link, so the first waits and the last
    records; only where a link takes small and large copies different ways, each waits for the one before."""
    spans = source.spans or [(0, 0, 0)]  # nothing to copy keeps the order too
    last = len(spans) - 1
    ready: Event | None = source.ready
    free: Event | None = slot.free
    for n, (offset, address, nbytes) in enumerate(spans):
        turns = n < last and link.path(nbytes) != link.path(spans[n + 1][2])
        link.copy(
            slot.address + offset,
            address,
            nbytes,
            source_ready=ready,
            dest_free=free,
            released=released if n == last else None,
            arrived=slot.arrived if n == last or turns else None,
        )
        ready, free = slot.arrived if turns else None, None
