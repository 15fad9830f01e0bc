"""What the pipeline benchmark times: ways to run the same two stages, and the limits of the machine for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from pyxdev import Executor
from pyxdev._native import Runtime

COPIES = 24  # of one figure


class Run(NamedTuple):
    """Seconds from the first submission to the end of the last microbatch; and of the host's time to submit, waits left
    out."""

    seconds: float
    host: float


class Way(Protocol):
    """One way to run the stages. Each call returns when nothing is in flight any more."""

    path: str  # of its copies: "direct", "staged", or "none"

    def run(self, m: int) -> Run:
        """m microbatches; outputs() has what came out."""

    def stream(self, m: int) -> Run:
        """m microbatches whose outputs nobody keeps; the host's time is not looked at."""

    def outputs(self) -> list[Any]:
        """Of the last run() or loop()."""

    def close(self) -> None: ...


class Looping(Way, Protocol):
    """A way that can also run token loops."""

    def loop(self, sequences: int, steps: int) -> Run:
        """Every step of a sequence takes the output of the step before; outputs() has the last of each."""


class Family(Protocol):
    """Two stages of one length, and the ways to run them."""

    name: str
    tolerance: float  # of error()
    absent: dict[str, str]  # ways that cannot be run here, and why; filled by ways()
    alike: tuple[tuple[str, str], ...]  # pairs of ways whose outputs have the same bits

    def ways(self) -> Iterator[tuple[str, Callable[[], Way]]]:
        """What opens each of them; whoever does closes it."""

    def limits(self) -> Limits: ...
    def error(self, outputs: list[Any]) -> float:
        """How far the outputs of run() are from those of one device: 0 for the same bits."""

    def loop_error(self, outputs: list[Any], steps: int) -> float: ...
    def same(self, outputs: list[Any], others: list[Any]) -> bool: ...
    def close(self) -> None: ...


class Copy(NamedTuple):
    latency: float  # seconds of one copy, from its source being ready until it has arrived
    each: float  # seconds of one of many


@dataclass
class Limits:
    """Seconds of each stage when its device does nothing else, and of the copies between them by path."""

    stages: list[float]
    copies: dict[str, Copy] = field(default_factory=dict)

    def alone(self, path: str) -> float:
        """L: one microbatch through all stages and copies."""
        return sum(self.stages) + (self.copies[path].latency if path in self.copies else 0.0)

    def slowest(self, path: str) -> float:
        """B: the slowest stage or copy."""
        return max(*self.stages, self.copies[path].each if path in self.copies else 0.0)

    def pipeline(self, path: str, m: int) -> float:
        """The least seconds of m microbatches."""
        return self.alone(path) + (m - 1) * self.slowest(path)


def pair(runtime: Runtime) -> tuple[int, int]:
    """The devices of the two stages: the first two, or twice the only one."""
    return 0, min(1, runtime.device_count - 1)


def direct(runtime: Runtime, src: int, dst: int) -> bool:
    """Whether copies can go straight from one to the other; peer access is enabled."""
    return src == dst or (runtime.peer_capable(src, dst) and runtime.peer_enable(src, dst))


def copies(runtime: Runtime, devices: tuple[int, int], nbytes: int) -> dict[str, Copy]:
    """Copies of the first device to the second, by path, with nothing else going on."""
    found = {}
    source, target = (runtime.buffer(device, nbytes) for device in devices)
    arrived = runtime.event()
    for path in ("direct", "staged"):
        if path == "direct" and not direct(runtime, *devices):
            continue
        link = runtime.link(*devices, path=path, max_bytes=nbytes)

        def seconds(ready: Any, link: Any = link) -> float:
            begin = runtime.clock()
            for _ in range(COPIES):
                link.copy(target.address, source.address, nbytes, source_ready=ready, arrived=arrived)
            arrived.wait()
            return (runtime.clock() - begin) / COPIES

        seconds(None)  # the first ones make pinned memory and events
        found[path] = Copy(seconds(arrived), seconds(None))
        link.close()
    for thing in (source, target, arrived):
        thing.close()
    return found


class ByExecutor:
    """Ours, the same for every family. The inputs lie on the first device."""

    def __init__(self, executor: Executor, xs: list[Any], path: str, settle: Callable[[], None] | None = None) -> None:
        """settle: waits for what result() has queued, where it does not wait itself."""
        self.executor, self.xs, self.path = executor, xs, path
        self._settle = settle or (lambda: None)
        self._clock = executor.runtime.clock
        self._outputs: list[Any] = []

    def run(self, m: int) -> Run:
        xs, self._outputs = self.xs, []
        blocked, begin = self._ready()
        self._outputs = list(self.executor.map(xs[i % len(xs)] for i in range(m)))
        return self._done(begin, self._clock(), blocked)

    def stream(self, m: int) -> Run:
        self._outputs = []
        begin = self._clock()
        for _ in self.executor.map(self.xs[i % len(self.xs)] for i in range(m)):
            pass
        self._settle()
        return Run(self._clock() - begin, 0.0)

    def loop(self, sequences: int, steps: int) -> Run:
        submit, self._outputs = self.executor.submit, []
        blocked, begin = self._ready()
        tickets = [submit(x) for x in self.xs[:sequences]]
        for _ in range(steps - 1):
            for k in range(sequences):
                tickets[k] = submit(tickets[k])
        submitted = self._clock()
        self._outputs = [ticket.result() for ticket in tickets]
        return self._done(begin, submitted, blocked)

    def eager(self) -> str:
        """Why a stage that was to run by graphs does not."""
        return next((stage.eager for stage in self.executor.plan().stages if stage.eager), "")

    def _ready(self) -> tuple[float, float]:
        """Seconds blocked so far, and the time. Between stats() and the run comes a microbatch, as before the run of
        every other way; it blocks nowhere."""
        blocked = self._blocked()
        ticket = self.executor.submit(self.xs[0])
        while not ticket.done():
            pass
        ticket.result()
        self._settle()
        return blocked, self._clock()

    def _done(self, begin: float, submitted: float, blocked: float) -> Run:
        """When all is there. What stats() takes is no part of it."""
        self._settle()
        end = self._clock()
        return Run(end - begin, submitted - begin - (self._blocked() - blocked))

    def _blocked(self) -> float:
        return sum(self.executor.stats().blocked.values())

    def outputs(self) -> list[Any]:
        return self._outputs

    def close(self) -> None:
        self._outputs = []
        self.executor.close()
