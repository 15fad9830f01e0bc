"""A stage on its device, and the hop from one stage to the next.

For every microbatch, in order:

    hop:    wait for the source's outputs and for a free slot | copy | record `released`, `arrived`
    stage:  wait for `arrived` | wait until outputs of depth microbatches ago were read | the function | record `free`

Every wait is one of a stream for an event; the host waits for nothing here.
"""

from __future__ import annotations

from typing import Any

from pyxdev._native import Event, Link, Runtime, Stream
from pyxdev._pipeline import Outputs, deliver, send
from pyxdev.adapters import Activation, Adapter, Joined, Layouts, Value
from pyxdev.adapters.activation import Layout
from pyxdev.executor.graphs import Graphs
from pyxdev.executor.plan import Stage, StagePlan
from pyxdev.executor.slots import Blocks, Leaving, Slot, Slots
from pyxdev.executor.tickets import Microbatch, stage_error


class BoundStage:
    """A stage at work: its stream, its slots, and the outputs that are still being read."""

    def __init__(
        self, runtime: Runtime, stage: Stage, index: int, device: int, in_flight: int, depth: int, shrinks: bool,
        inputs: tuple[int, ...], readers: int, adapter: Adapter, leaving: Leaving, graph: str,
    ) -> None:  # fmt: skip
        """inputs: the numbers of the stages that it reads. readers: how many stages read its outputs.
        graph: as the executor's, where the stage has none of its own."""
        self.runtime = runtime
        self.fn: Any = stage.fn
        self.out = stage.out
        self.cost = stage.cost
        self.sync_check = stage.sync_check
        self.name = stage.label
        self.index = index
        self.device = device
        self.in_flight = in_flight
        self.inputs = inputs
        self.adapter = adapter
        self.stream: Stream = runtime.stream(device)
        self.slots = Slots(runtime, device, depth, in_flight, shrinks, leaving)
        self.ends = [runtime.event() for _ in range(in_flight)]  # of microbatches, by turn; not of the last stage
        self.blocks = Blocks(runtime, device, leaving)
        self.is_last = False
        self.outputs = Outputs(self.stream, in_flight, (depth - 1) * readers + 1)
        self.kept = False  # whether others than the next stage read the outputs
        self.output: Any = None  # the last Activation, if kept
        self.graph = stage.graph or graph
        self.graphs = None if self.graph == "off" else Graphs(self, self.graph, leaving)
        self.streams = [self.stream]
        self._done: Event = runtime.event()
        self._end = self.stream  # where the microbatch that is being queued ends
        self.work: Any = self.graphs.run if self.graphs else adapter.run  # a trace puts itself in between

    def end_here(self) -> None:
        """It is the last stage."""
        self.is_last = True
        if self.graphs:
            self.streams.append(self.runtime.stream(self.device))  # where what they have written is copied

    def run(self, batch: Microbatch, slot: Slot, incoming: Value) -> Activation:
        """Queues the stage for one microbatch whose input is in the slot, or on its way there."""
        self._end = self.stream
        self.stream.wait(slot.arrived)
        self.outputs.settle(batch.turn)
        outgoing: Activation = self.work(self, batch, slot, incoming)
        self.leave(batch, slot)
        outgoing.ready = slot.free
        if self.kept:
            self.output = outgoing
        return outgoing

    def leave(self, batch: Microbatch, slot: Slot) -> None:
        """What the stage has queued for a microbatch ends here. For the last stage that is the microbatch's own end."""
        if self.is_last:
            slot.borrow(batch.exit)
        else:
            slot.free = self.ends[batch.turn % self.in_flight]
        slot.free.record(self._end)

    def aside(self) -> Stream:
        """A stream that goes on from what has been queued so far, beside the stage's next work. The microbatch ends
        there."""
        self._end = self.streams[-1]
        self._done.record(self.stream)
        self._end.wait(self._done)
        return self._end

    def report(self, batch: Microbatch, cause: BaseException) -> None:
        """The stage's function raised."""
        batch.fail(stage_error(self.index, self.name, batch.index, cause))

    def plan(self) -> StagePlan:
        return StagePlan(
            self.name, self.device, self.adapter.name, len(self.slots.ring), self.slots.nbytes, self.blocks.nbytes,
            self.inputs, self.graph, sum(len(slot.graphs) for slot in self.slots.ring),
            self.graphs.eager if self.graphs else "",
        )  # fmt: skip

    def close(self) -> None:
        self.output = None
        self.adapter.close()
        self.slots.close()
        self.outputs.close()  # what they hold goes back to the blocks
        self.blocks.close()
        for stream in self.streams:
            stream.close()
        for event in (*self.ends, self._done):
            event.close()


class Hop:
    """From one stage to the next."""

    def __init__(self, link: Link, producer: BoundStage, consumer: BoundStage) -> None:
        self.link = link
        self.producer = producer
        self.consumer = consumer
        self._layout: Layout | None = None  # of the latest microbatch

    def run(self, batch: Microbatch, source: Activation) -> Activation:
        """Queues the copy of the producer's outputs into the consumer's next slot, and the consumer."""
        self._layout = layout = source.layout
        slot = self.consumer.slots.take(batch.turn, layout.nbytes)
        deliver(self.link, source, slot, self.producer.outputs, batch.turn)
        return self.consumer.run(batch, slot, source.value)

    def sent(self) -> list[tuple[int, int]]:
        """(device, bytes) of what the latest microbatch has sent from there."""
        return [(self.producer.device, self._layout.nbytes if self._layout else 0)]

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
            released = producer.outputs.reader()
            send(link, source, slot.address + offset, slot.free, released, self._arrived)
            self.consumer.stream.wait(self._arrived)
            producer.outputs.hold(released, source.keep, batch.turn)
            offset += source.layout.nbytes
        slot.arrived.record(self.consumer.stream)
        return self.consumer.run(batch, slot, value)

    def sent(self) -> list[tuple[int, int]]:
        """As of a Hop."""
        return [
            (producer.device, producer.output.layout.nbytes if producer.output else 0) for _, producer in self._ways
        ]

    def close(self) -> None:
        self._arrived.close()
