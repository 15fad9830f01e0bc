"""All that a pipeline consists of, opened together and closed together."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack, closing

from pyxdev import adapters
from pyxdev._native import Runtime, Stream
from pyxdev._pipeline import Costs
from pyxdev.adapters import Layouts
from pyxdev.errors import Error, InvalidArgument, OrderViolation
from pyxdev.executor import plan as planning
from pyxdev.executor.inputs import Inputs
from pyxdev.executor.links import Links
from pyxdev.executor.plan import Plan, Stage
from pyxdev.executor.rest import PATIENCE, come_to_rest
from pyxdev.executor.results import Fetch
from pyxdev.executor.slots import Events, Leaving
from pyxdev.executor.stages import BoundStage, Hop, Join
from pyxdev.executor.tracing import Timers
from pyxdev.executor.watchdog import Watchdog
from pyxdev.settings import Settings

log = logging.getLogger("pyxdev")

LATEST = 64  # microbatches, at least, whose submission is measured


class Line:
    """The stages of an executor and what is between them. The stack closes them, the last opened first; it begins by
    waiting for what is in flight."""

    def __init__(
        self, stack: ExitStack, runtime: Runtime, settings: Settings, devices: Iterable[int], declared: list[Stage],
        in_flight: int, depth: int | str, adapter: str, watchdog: float, graph: str,
    ) -> None:  # fmt: skip
        self.in_flight = in_flight
        self.depth = planning.bound(depth, "depth", min(planning.AUTOMATIC_DEPTH, in_flight))
        wired = planning.wire(declared)
        placed = planning.place(devices, declared, runtime.device_count, runtime.backend)
        names = [adapters.choose(stage.adapter or adapter, runtime, stage.fn) for stage in declared]
        for n, (stage, name) in enumerate(zip(declared, names, strict=True)):
            if stage.sync_check is not None and name != "torch":
                raise InvalidArgument(f"stage {n} ({stage.label}) has sync_check and the {name} adapter; torch has it")
        layouts = Layouts()
        self.costs = Costs(runtime, len(declared), max(LATEST, 2 * in_flight))
        self.leaving = stack.enter_context(closing(Leaving(in_flight)))
        self.ends = stack.enter_context(closing(Events(runtime)))
        self.timers = stack.enter_context(closing(Timers(runtime)))
        self.stages: list[BoundStage] = []
        for n, (stage, device, name, sources) in enumerate(zip(declared, placed, names, wired, strict=True)):
            slots = planning.slots(self.depth, sources, n, in_flight) if depth == "auto" else self.depth
            bound = BoundStage(
                runtime, stage, n, device, in_flight, slots, depth == "auto", sources,
                max(1, sum(read.count(n) for read in wired)), adapters.make(name, layouts, runtime.backend),
                self.leaving, graph,
            )  # fmt: skip
            self.stages.append(stack.enter_context(closing(bound)))
        self.first, self.last = self.stages[0], self.stages[-1]
        self.last.end_here()
        self.links = stack.enter_context(closing(Links(runtime, settings)))
        self.hops: list[Hop | Join] = []
        for stage, bound in zip(declared[1:], self.stages[1:], strict=True):
            producers = [self.stages[n] for n in bound.inputs]
            between = [self.links.between(producer.device, bound.device) for producer in producers]
            if bound.inputs == (bound.index - 1,) and (stage.inputs is None or isinstance(stage.inputs, str | int)):
                hop: Hop | Join = Hop(between[0], producers[0], bound)
            else:
                hop = Join(runtime, between, producers, bound, isinstance(stage.inputs, str | int), layouts)
            self.hops.append(stack.enter_context(closing(hop)))
        inputs = Inputs(runtime, self.first, self.last, layouts, in_flight, self.links)
        self.inputs = stack.enter_context(closing(inputs))
        self.fetch = stack.enter_context(closing(Fetch(runtime, self.last.device)))
        self.throttle = stack.enter_context(closing(runtime.throttle(in_flight)))
        self.watchdog = Watchdog(self.stages, self.throttle, watchdog)
        of_stages = [stream for stage in self.stages for stream in stage.streams]
        self.streams = [self.inputs.stream, *of_stages, self.fetch.stream]
        stack.callback(_drain, runtime, self.streams, self.watchdog)

    def come_to_rest(self) -> None:
        """Waits until nothing of it is running. Raises DeviceFault if that does not come about."""
        come_to_rest(self.streams, self.links.all())

    def plan(self) -> Plan:
        memory: dict[int, int] = {}
        for stage in self.stages:
            memory[stage.device] = memory.get(stage.device, 0) + stage.slots.nbytes + stage.blocks.nbytes
        sent: dict[tuple[int, int], int] = {}
        for hop in self.hops:
            for src, nbytes in hop.sent():
                way = src, hop.consumer.device
                sent[way] = sent.get(way, 0) + nbytes
        links = self.links.plan(sent)
        return Plan(
            stages=tuple(stage.plan() for stage in self.stages),
            links=links,
            in_flight=self.in_flight,
            depth=self.depth,
            pinned=sum(link.pinned for link in links) + self.inputs.pinned_bytes + self.fetch.pinned_bytes,
            memory=memory,
        )


def _drain(runtime: Runtime, streams: list[Stream], watchdog: Watchdog) -> None:
    """Waits for the streams, PATIENCE altogether. What goes wrong with a device does not keep anything from closing."""
    try:
        end = runtime.clock() + PATIENCE
        for stream in streams:
            if not stream.synchronize(max(0.0, end - runtime.clock())):
                log.error(
                    "device %d is still busy %g s after close(), memory is freed; %s",
                    stream.device, PATIENCE, watchdog.where(),
                )  # fmt: skip
    except OrderViolation:
        raise
    except Error as error:
        log.debug("closing without waiting: %s", error)


def close_own(runtime: Runtime) -> None:
    """Closes an executor's own runtime; where the caller still has results on its devices, the last of them does."""
    live = runtime.live()
    others = live.streams + live.graphs + live.links + live.rings + live.throttles + live.readers
    if (live.buffers or live.events) and not others:
        runtime.managed = True
    else:
        runtime.close()
