"""What the devices did and when, measured by events while a trace is on. None of it is there while it is off.

Every stage records an event before and after its work, and what arrives is told by events with times. Times of one
device are elapsed times since an event of its own, the epoch, whose time on the host's clock is known to a few
microseconds. When a copy began is not measured but follows: when its source, its slot and its link were free.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pyxdev import plot
from pyxdev._native import HOST, Event, Runtime
from pyxdev.errors import InvalidArgument
from pyxdev.trace import Span, write

if TYPE_CHECKING:
    from pyxdev.executor.line import Line
    from pyxdev.executor.stages import BoundStage
    from pyxdev.executor.tickets import Microbatch

Stretch = tuple[float, float]  # of time

TRIES = 5  # of which the quickest tells an epoch's time best


@dataclass(frozen=True)
class Summary:
    """Of one trace. Shares are of the time from the first stage's first begin to the last end of any."""

    seconds: float
    stages: tuple[float, ...]  # the share of the time that each stage was at work
    devices: dict[int, float]  # the same for each device, with any of its stages
    bubble: float  # the share of the devices' time without work
    hidden: float  # the share of the time of copies in which the device that they went to was at work


class Work(NamedTuple):
    """One stage and one microbatch. Times are seconds on the runtime's clock."""

    microbatch: int
    called: float  # the stage's function
    returned: float
    arrived: float
    begin: float
    end: float
    nbytes: int  # of its inputs


class Trace:
    """Filled when the trace ends. spans: as pyxdev.trace has them, in nanoseconds since it began. drift: seconds that
    each device's clock went apart from the host's meanwhile, as far as that can be told."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.summary: Summary | None = None
        self.drift: dict[int, float] = {}

    def write(self, path: str | Path) -> None:
        """By its ending: .json for Perfetto and chrome://tracing, .png a picture, which needs the extra [plot]."""
        check_path(path)
        if Path(path).suffix == ".json":
            write(path, self.spans)
        else:
            plot.timeline(path, self.spans, "stages and copies")


def check_path(path: str | Path) -> None:
    if Path(path).suffix not in (".json", ".png"):
        raise InvalidArgument(
            f"a trace cannot be written to {str(path)!r}; names that end in .json or .png are allowed"
        )


class Timers:
    """Events with times. They are kept for the next trace, and because a stream may still wait for one."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._made: set[Event] = set()
        self._unused: list[Event] = []

    def take(self, count: int) -> list[Event]:
        while len(self._unused) < count:
            event = self._runtime.event(timing=True)
            self._made.add(event)
            self._unused.append(event)
        taken, self._unused = self._unused[:count], self._unused[count:]
        return taken

    def give_back(self, events: Sequence[Event]) -> None:
        self._unused += events

    def close_too(self, events: Sequence[Event]) -> None:
        """Those whose places events with times take."""
        self._made.update(events)

    def close(self) -> None:
        for event in self._made:
            event.close()


class Clock:
    """A device's time as the host's."""

    def __init__(self, runtime: Runtime, stage: BoundStage, timers: Timers) -> None:
        self._runtime = runtime
        self._stage = stage
        self.events = timers.take(2 * TRIES)
        self.epoch, self._zero = self._tick(self.events[:TRIES])

    def _tick(self, events: Sequence[Event]) -> tuple[Event, float]:
        """One of the events, and when it came to pass. The device is idle."""
        best = None
        for event in events:
            before = self._runtime.clock()
            event.record(self._stage.stream)
            event.wait()
            after = self._runtime.clock()
            if best is None or after - before < best[0]:
                best = after - before, event, (before + after) / 2
        assert best is not None
        return best[1:]

    def time(self, event: Event) -> float:
        return self._zero + event.elapsed_since(self.epoch)

    def drift(self) -> float:
        event, now = self._tick(self.events[TRIES:])
        return self.time(event) - now


class Track:
    """One stage's events while a trace is on. It stands in for the stage's work."""

    def __init__(self, runtime: Runtime, stage: BoundStage, clocks: dict[int, Clock], timers: Timers) -> None:
        self._runtime = runtime
        self._clocks = clocks
        self.stage = stage
        self.done: dict[int, Work] = {}  # by turn
        self._pending: dict[int, tuple[int, float, float, int]] = {}
        # Arrivals twice: that of the microbatch that has just left is still to be read.
        self.events = timers.take(4 * stage.in_flight)
        self._begins = self.events[: stage.in_flight]
        self._ends = self.events[stage.in_flight : 2 * stage.in_flight]
        self._arrivals = self.events[2 * stage.in_flight :]
        self._inner: Callable[..., Any] = stage.work
        self._untimed = list(stage.slots.arrivals)
        timers.close_too(self._untimed)

    def start(self) -> None:
        self.stage.slots.arrivals[:] = self._arrivals
        self.stage.work = self.run

    def run(self, stage: BoundStage, batch: Microbatch, slot: Any, incoming: Any) -> Any:
        self.read(batch.turn - stage.in_flight)  # it has left, or this one would not have been admitted
        place = batch.turn % stage.in_flight
        called = self._runtime.clock()
        self._begins[place].record(stage.stream)
        try:
            return self._inner(stage, batch, slot, incoming)
        finally:
            self._ends[place].record(stage.stream)
            self._pending[batch.turn] = batch.index, called, self._runtime.clock(), incoming.layout.nbytes

    def read(self, turn: int) -> None:
        """The times of a microbatch that has left."""
        pending = self._pending.pop(turn, None)
        if pending is None:
            return
        microbatch, called, returned, nbytes = pending
        arrivals = self._arrivals
        place = turn % self.stage.in_flight
        arrived, begin, end = (
            self._clocks[event.device].time(event)
            for event in (arrivals[turn % len(arrivals)], self._begins[place], self._ends[place])
        )
        self.done[turn] = Work(microbatch, called, returned, arrived, begin, end, nbytes)

    def stop(self) -> None:
        self.stage.work = self._inner
        self.stage.slots.arrivals[:] = self._untimed

    def rest(self) -> None:
        for turn in list(self._pending):
            self.read(turn)


class Tracing:
    """A trace that is on. start() and stop() find all devices idle."""

    def __init__(self, line: Line, runtime: Runtime, result: Trace) -> None:
        self._line = line
        self._result = result
        first = {stage.device: stage for stage in reversed(line.stages)}
        self._clocks = {device: Clock(runtime, stage, line.timers) for device, stage in sorted(first.items())}
        self._tracks = [Track(runtime, stage, self._clocks, line.timers) for stage in line.stages]
        self._began = runtime.clock()
        for track in self._tracks:
            track.start()

    def stop(self, closed: bool) -> None:
        """closed: the events are gone; what has been read is kept."""
        try:
            if not closed:
                for track in self._tracks:
                    track.rest()
                self._result.drift = {device: clock.drift() for device, clock in self._clocks.items()}
        finally:
            for track in self._tracks:
                track.stop()
            taken = [one.events for one in self._clocks.values()] + [one.events for one in self._tracks]
            self._line.timers.give_back([event for events in taken for event in events])
            self._result.spans = self._spans()
            self._result.summary = self._summarise()

    def _spans(self) -> list[Span]:
        spans: list[Span] = []
        number = itertools.count(1)
        operations: dict[tuple[int, int], int] = {}  # of a turn and a stage
        free: dict[tuple[int, int], float] = {}  # when a link was through with its last copy
        for turn in sorted({turn for track in self._tracks for turn in track.done}):
            for n, track in enumerate(self._tracks):
                work = track.done.get(turn)
                if work is None:
                    continue
                stage = track.stage
                before = track.done.get(turn - len(stage.slots.ring))
                vacant = before.end if before else 0.0
                after = next(number)
                if n == 0:
                    span = "in", stage.device, HOST, f"input of microbatch {work.microbatch}"
                    spans.append(
                        self._span(span, after, 0, n, work, (max(work.called, vacant), work.arrived), work.nbytes)
                    )
                for source in stage.inputs:
                    after = next(number)
                    made = self._tracks[source].done.get(turn, work)
                    way = self._tracks[source].stage.device, stage.device
                    begin = max(made.end, made.returned, vacant, free.get(way, 0.0))
                    free[way] = work.arrived
                    nbytes = work.nbytes if len(stage.inputs) == 1 else 0
                    span = "link", *way, f"{source}>{n} microbatch {work.microbatch}"
                    of = operations.get((turn, source), 0)
                    spans.append(self._span(span, after, of, n, work, (begin, work.arrived), nbytes))
                operations[turn, n] = own = next(number)
                span = f"stage {n} {stage.name}", stage.device, HOST, f"microbatch {work.microbatch}"
                spans.append(self._span(span, own, after, n, work, (work.begin, work.end), 0))
                span = "host", HOST, HOST, f"stage {n} microbatch {work.microbatch}"
                spans.append(self._span(span, 0, 0, n, work, (work.called, work.returned), 0))
        return spans

    def _span(
        self, what: tuple[str, int, int, str], operation: int, after: int, stream: int, work: Work, time: Stretch,
        nbytes: int,
    ) -> Span:  # fmt: skip
        """In nanoseconds since the trace began."""
        engine, device, peer, label = what
        submitted, begin, end = (round(1e9 * (at - self._began)) for at in (work.called, min(time), time[1]))
        return Span(engine, device, peer, operation, after, stream, submitted, begin, end, nbytes, label)

    def _summarise(self) -> Summary | None:
        works = [(track.stage, work) for track in self._tracks for work in track.done.values()]
        if not works:
            return None
        first, last = min(work.begin for _, work in works), max(work.end for _, work in works)
        whole = max(last - first, 1e-12)
        busy = {
            device: _union([(work.begin, work.end) for stage, work in works if stage.device == device])
            for device in self._clocks
        }
        devices = {device: _length(stretches) / whole for device, stretches in busy.items()}
        copies = [span for span in self._result.spans if span.engine == "link" and span.device != span.peer]
        taken = sum(span.end - span.start for span in copies) / 1e9
        began = self._began
        under = sum(_overlap(busy[span.peer], began + span.start / 1e9, began + span.end / 1e9) for span in copies)
        return Summary(
            seconds=whole,
            stages=tuple(sum(work.end - work.begin for work in track.done.values()) / whole for track in self._tracks),
            devices=devices,
            bubble=1 - sum(devices.values()) / len(devices),
            hidden=under / taken if taken else 1.0,
        )


def _union(stretches: Sequence[Stretch]) -> list[Stretch]:
    """Without overlaps, in order."""
    found: list[Stretch] = []
    for begin, end in sorted(stretches):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _length(stretches: Sequence[Stretch]) -> float:
    return sum(end - begin for begin, end in stretches)


def _overlap(stretches: Sequence[Stretch], begin: float, end: float) -> float:
    return sum(max(0.0, min(end, b) - max(begin, a)) for a, b in stretches)
