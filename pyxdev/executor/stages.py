"""A stage on its device, and the hop from one stage to the next.

For every microbatch, in order:

    hop:    wait for the source's outputs and for a free slot | copy | record `released`, `arrived`
    stage:  wait for `arrived` | wait until outputs of depth microbatches ago were read | the function | record `free`

Every wait is one of a stream for an event; the host waits for nothing here.
"""

from __future__ import annotations

from pyxdev._native import Event, Link, Runtime, Stream
from pyxdev._pipeline import Hop, Outputs, StageCore, send
from pyxdev.adapters import Activation, Adapter, Joined, Layouts
from pyxdev.executor.graphs import Graphs
from pyxdev.executor.plan import Stage, StagePlan
from pyxdev.executor.slots import Blocks, Leaving, Slots
from pyxdev.executor.tickets import Microbatch, stage_error

__all__ = ["BoundStage", "Hop", "Join"]


class BoundStage(StageCore):
    """A stage at work: its stream, its slots, and the outputs that are still being read."""

    def __init__(
        self, runtime: Runtime, stage: Stage, index: int, device: int, in_flight: int, depth: int, shrinks: bool,
        inputs: tuple[int, ...], readers: int, adapter: Adapter, leaving: Leaving, graph: str,
    ) -> None:  # fmt: skip
        """inputs: the numbers of the stages that it reads. readers: how many stages read its outputs.
        graph: as the executor's, where the stage has none of its own."""
        slots = Slots(runtime, device, depth, in_flight, shrinks, leaving)
        stream: Stream = runtime.stream(device)
        outputs = Outputs(stream, in_flight, (depth - 1) * readers + 1)
        super().__init__(stream, slots, outputs, index, in_flight)
        self.fn = stage.fn
        self.out = stage.out
        self.cost = stage.cost
        self.sync_check = stage.sync_check
        self.name = stage.label
        self.inputs = inputs
        self.adapter = adapter
        self.blocks = Blocks(runtime, device, leaving)
        self.graph = stage.graph or graph
        self.graphs = None if self.graph == "off" else Graphs(self, self.graph, leaving)
        self.work = self.graphs.run if self.graphs else adapter.run

    def end_here(self) -> None:
        """It is the last stage."""
        self.is_last = True
        if self.graphs:
            self.streams.append(self.runtime.stream(self.device))  # where what they have written is copied

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
        super().close()


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
