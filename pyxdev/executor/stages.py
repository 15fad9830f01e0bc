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
from pyxdev.adapters import Activation, Adapter, Joined, Layouts, Value
from pyxdev.executor.plan import Stage, StagePlan
from pyxdev.executor.slots import Blocks, Events, Leaving, Slot, Slots
from pyxdev.executor.tickets import Microbatch, stage_error


class BoundStage:
    """A stage at work: its stream, its slots, and the outputs that are still being read."""

    def __init__(
        self, runtime: Runtime, stage: Stage, index: int, device: int, in_flight: int, depth: int, shrinks: bool,
        inputs: tuple[int, ...], readers: int, adapter: Adapter, leaving: Leaving,
    ) -> None:  # fmt: skip
        """inputs: the numbers of the stages that it reads. readers: how many stages read its outputs."""
        self.runtime = runtime
        self.fn = stage.fn
        self.out = stage.out
        self.cost = stage.cost
        self.name = stage.label
        self.index = index
        self.device = device
        self.in_flight = in_flight
        self.inputs = inputs
        self.adapter = adapter
        self.stream: Stream = runtime.stream(device)
        self.slots = Slots(runtime, device, depth, shrinks, leaving)
        self.blocks = Blocks(runtime, device, leaving)
        self.is_last = False
        self._readers = Events(runtime)
        self._held: deque[tuple[Event, Any, int]] = deque()
        self._most_held = depth * readers
        self.kept = False  # whether others than the next stage read the outputs
        self.output: Any = None  # the last Activation, if kept

    def run(self, batch: Microbatch, slot: Slot, incoming: Value) -> Activation:
        """Queues the stage for one microbatch whose input is in the slot, or on its way there."""
        self.stream.wait(slot.arrived)
        self._settle(batch.turn)
        outgoing = self.adapter.run(self, batch, slot, incoming)
        self.leave(batch, slot)
        outgoing.ready = slot.free
        if self.kept:
            self.output = outgoing
        return outgoing

    def leave(self, batch: Microbatch, slot: Slot) -> None:
        """What the stage has queued for a microbatch ends here. For the last stage that is the microbatch's own end."""
        if self.is_last:
            slot.borrow(batch.exit)
        slot.free.record(self.stream)

    def _settle(self, turn: int) -> None:
        """Lets go of outputs that were handed on depth microbatches ago."""
        while len(self._held) >= self._most_held:
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
            self.name, self.device, self.adapter.name, len(self.slots.ring), self.slots.nbytes, self.blocks.nbytes,
            self.inputs,
        )  # fmt: skip

    def close(self) -> None:
        self._held.clear()
        self.output = None
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

    def run(self, batch: Microbatch, source: Activation) -> Activation:
        """Queues the copy of the producer's outputs into the consumer's next slot, and the consumer."""
        slot = self.consumer.slots.take(batch.turn, source.layout.nbytes)
        released = self.producer.reader_event()
        send(self.link, source, slot.address, slot.free, released, slot.arrived)
        self.producer.hold(released, source.keep, batch.turn)
        return self.consumer.run(batch, slot, source.value)

    def close(self) -> None:
        """Nothing was opened."""


class Join:
    """From any earlier stages to one. Their outputs lie in its slot one after the other."""

    def __init__(
        self, runtime: Runtime, links: list[Link], producers: list[BoundStage], consumer: BoundStage, alone: bool,
        layouts: Layouts,
    ) -> None:  # fmt: skip
        self.consumer = consumer
        self._ways = list(zip(links, producers, strict=True))
        self._alone = alone  # x is the one producer's output, not a tuple
        self._layouts = layouts
        self._arrived: Event = runtime.event()
        for producer in producers:
            producer.kept = True

    def run(self, batch: Microbatch, before: Activation) -> Activation:
        """As of a Hop; what the stage before returned is one of the producers' outputs, or is not read here."""
        sources = [producer.output for _, producer in self._ways]
        value = sources[0].value if self._alone else Joined(self._layouts, [source.value for source in sources])
        slot = self.consumer.slots.take(batch.turn, value.layout.nbytes)
        offset = 0
        for (link, producer), source in zip(self._ways, sources, strict=True):
            released = producer.reader_event()
            send(link, source, slot.address + offset, slot.free, released, self._arrived)
            self.consumer.stream.wait(self._arrived)
            producer.hold(released, source.keep, batch.turn)
            offset += source.layout.nbytes
        return self.consumer.run(batch, slot, value)

    def close(self) -> None:
        self._arrived.close()


def send(link: Link, source: Activation, address: int, free: Event, released: Event, arrived: Event) -> None:
    """Copies an activation to an address in a slot. Its arrays go one after the other on one link, so the first waits
    and the last records; only where a link takes small and large copies different ways, each waits for the one
    before."""
    spans = source.spans or [(0, 0, 0)]  # nothing to copy keeps the order too
    last = len(spans) - 1
    ready: Event | None = source.ready
    gate: Event | None = free
    for n, (offset, at, nbytes) in enumerate(spans):
        turns = n < last and link.path(nbytes) != link.path(spans[n + 1][2])
        link.copy(
            address + offset,
            at,
            nbytes,
            source_ready=ready,
            dest_free=gate,
            released=released if n == last else None,
            arrived=arrived if n == last or turns else None,
        )
        ready, gate = arrived if turns else None, None
