"""The pipeline: microbatches in, results out, in order, with a bounded number in flight."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Self

from pyxdev._native import Runtime
from pyxdev._pipeline import Order
from pyxdev.adapters import Activation, Stopped
from pyxdev.backends import open as open_backend
from pyxdev.errors import Cancelled, Closed, DeviceFault, InvalidArgument, StageInterrupted
from pyxdev.executor import plan as planning
from pyxdev.executor.line import Line, close_own
from pyxdev.executor.plan import Plan, Stage
from pyxdev.executor.progress import with_progress
from pyxdev.executor.rest import PATIENCE
from pyxdev.executor.stages import BoundStage
from pyxdev.executor.tickets import Epoch, Microbatch, Ticket
from pyxdev.executor.tracing import Summary, Trace, Tracing, check_path
from pyxdev.executor.watchdog import GLANCE
from pyxdev.settings import Settings, resolve

TICK = 1e-9  # seconds; the runtime's clock knows no less
BUSY = 0.9  # the share of its time in submit() from which on the submitting thread is the limit


@dataclass(frozen=True)
class Stats:
    """What has happened so far. Times are seconds on the runtime's clock."""

    submitted: int
    in_flight: int
    blocked: dict[str, float]  # the host's time in "admit" (the bound of microbatches in flight) and in "result"
    submission: tuple[float, ...]  # the host's time to queue one of the latest microbatches on each stage, its function
    # and the way into it included
    besides: float  # the rest of that microbatch's time in submit(), waits left out
    limit: str  # a sentence, if the submitting thread keeps the devices from going faster; otherwise empty
    traced: Summary | None  # of the last trace(): busy stages and devices, the bubble, hidden copies


class Executor:
    """Runs stages as a pipeline over devices.

    devices: ordinals, one for each stage, or fewer, which neighbouring stages then share. A device may be named twice.
    stages: callables or Stages; the output of each is the input of the next.
    in_flight: microbatches between submit() and the end of the last stage; "auto": twice the number of stages.
    depth: slots of each hop; "auto": 4, fewer where memory is short.
    watchdog: seconds without progress after which whoever waits logs where the oldest microbatch is, once for each
        stall; None: never.
    adapter: what arrays are to the stages: "numpy" (simulated devices), "torch", "cupy", "numba", "cuda.core", "raw"
        (pyxdev Arrays), or "auto": what a stage is, or its code names.
    graph: whether what a stage queues is captured as a graph, once for each slot and layout of its input, and from then
        on queued by one call: "on"; "auto", where a trial gives the bits of the stage itself; or "off". For stages
        whose work follows from their inputs alone: a graph repeats what was captured, and Python does not run again.
    runtime: a runtime that stays yours; without one the executor opens its own, for `backend` and `machine`.
    host_stage, gate, tile_mb, force_sync: see the settings; what is not given comes from the runtime or the
        environment.

    Any thread may submit and wait. Close it, or use it in a with statement.
    """

    def __init__(
        self,
        devices: Iterable[int],
        stages: Iterable[Callable[..., Any] | Stage],
        *,
        in_flight: int | str = "auto",
        depth: int | str = "auto",
        watchdog: float | None = 10.0,
        adapter: str = "auto",
        graph: str = "off",
        runtime: Runtime | None = None,
        backend: str | None = None,
        machine: Mapping[str, Any] | str | None = None,
        host_stage: object = None,
        gate: object = None,
        tile_mb: object = None,
        force_sync: object = None,
    ) -> None:
        self._order = Order()
        self._guests: set[object] = set()  # one for each thread that waits for a result; close() lets them leave
        self._closed = False
        self._fault: DeviceFault | None = None
        self._epoch = Epoch()
        self._tracing = False
        self._traced: Summary | None = None
        self._submitted = 0
        self._turn = 0
        self._blocked_in_result = 0.0
        declared = planning.check_stages(stages)
        planning.check_graph(graph, "graph")
        self._limit = planning.bound(in_flight, "in_flight", planning.automatic_in_flight(len(declared)))
        watch = planning.patience(watchdog)
        changed = {"host_stage": host_stage, "gate": gate, "tile_mb": tile_mb}
        with ExitStack() as stack:
            if runtime is None:
                settings = resolve({"backend": backend, "force_sync": force_sync, **changed})
                runtime = open_backend(settings=settings, machine=machine)
                stack.callback(close_own, runtime)
            else:
                settings = _changed(runtime, changed, backend=backend, machine=machine, force_sync=force_sync)
            self._runtime = runtime
            self._line = Line(stack, runtime, settings, devices, declared, self._limit, depth, adapter, watch, graph)
            # Nothing in it refers to the executor, so it is also closed when the executor is collected, and before the
            # interpreter takes modules apart.
            self._closing = weakref.finalize(self, stack.pop_all().close)

    # ---- submitting ----

    def submit(self, x: Any) -> Ticket:
        """Queues one microbatch on all stages and returns at once, unless in_flight others are on their way.

        x: arrays and plain values in nested tuples, lists and dicts; a Ticket stands for its result, which then goes
        from device to device without the host. What a stage raises, the ticket's result() raises; until it has, later
        microbatches are cancelled.

        Raises InvalidArgument for what cannot be sent, Cancelled for a ticket without a result, DeviceFault once a
        device has failed, Closed.
        """
        return self._order.run(self._submit, x)

    def _submit(self, x: Any) -> Ticket:
        self._check()
        self._line.costs.begin()
        inputs = self._line.inputs
        source = inputs.output(x, self) if type(x) is Ticket else inputs.read(x, self)
        if self._epoch.failed is not None and self._is_failing():
            batch = Microbatch(self._submitted, -1, self._epoch, self._line.ends)
            self._submitted += 1
            return Ticket(self, batch)
        batch = self._admit()
        self._enqueue(batch, source)
        if self._fault is not None:
            raise _again(self._fault)
        self._raise_interrupt()
        return Ticket(self, batch)

    def _is_failing(self) -> bool:
        """Whether microbatches are cancelled, because somebody has yet to be told of an error."""
        if self._epoch.over:
            self._epoch = Epoch()
            return False
        self._raise_interrupt()
        return True

    def _admit(self) -> Microbatch:
        """Waits for a place among those in flight."""
        try:
            self._line.throttle.withdraw()  # what Ctrl-C left here before it was queued; nothing otherwise
            if not self._line.throttle.admit(0):
                self._line.costs.pause()
                while not self._line.throttle.admit(GLANCE):
                    self._check()
                    self._line.watchdog.look(self._runtime.clock())
                self._line.costs.resume()
        except DeviceFault as fault:
            self._lose(fault)
            raise
        batch = Microbatch(self._submitted, self._turn, self._epoch, self._line.ends)
        self._submitted += 1
        watchdog = self._line.watchdog
        watchdog.indices[batch.turn % self._limit] = batch.index
        watchdog.admitted = batch.turn + 1
        return batch

    def _enqueue(self, batch: Microbatch, source: Activation) -> None:
        """The whole way of a microbatch."""
        line = self._line
        stage = line.first
        try:
            line.leaving.sweep(batch.turn)
            slot = line.inputs.send(batch, source)
            activation = stage.run(batch, slot, source.value)
            line.costs.lap(0)
            for hop in line.hops:
                stage = hop.consumer
                activation = hop.run(batch, activation)
                line.costs.lap(stage.index)
            batch.output = activation
            self._leave(batch)
            line.costs.end()
        except Stopped:
            self._leave_early(batch, stage)
        except BaseException as error:
            self._recover(batch, stage, error)
            if not isinstance(error, Exception):
                raise

    def _leave(self, batch: Microbatch) -> None:
        """The place in flight is given back at the microbatch's end."""
        self._line.throttle.retire_at(batch.exit)
        self._turn = self._line.watchdog.queued = batch.turn + 1

    def _leave_early(self, batch: Microbatch, stage: BoundStage) -> None:
        """A stage raised. What it and those before it have queued is covered by events as ever."""
        try:
            for before in self._line.stages[: stage.index]:  # it need not read all of them
                stage.stream.wait(before.slots.of(batch.turn).free)
            stage.leave(batch, stage.slots.of(batch.turn))
            if not stage.is_last:
                batch.end.record(stage.stream)
            self._leave(batch)
        except BaseException as error:
            self._recover(batch, stage, error)
            if not isinstance(error, Exception):
                raise

    def _recover(self, batch: Microbatch, stage: BoundStage, error: BaseException) -> None:
        """Something other than a stage failed half way, so that no event tells what is still running: the host waits
        for all of it. Where that fails too, the executor is of no more use."""
        if isinstance(error, DeviceFault):
            self._lose(error)
        else:
            try:
                self._line.come_to_rest()
            except DeviceFault as fault:
                self._lose(fault)
        self._line.throttle.withdraw()
        self._turn = self._line.watchdog.queued = batch.turn + 1
        error.add_note(f"in stage {stage.index} ({stage.name}), microbatch {batch.index}")
        if isinstance(error, Exception):
            batch.fail(error)
        else:  # raised by submit() itself
            batch.fail(Cancelled(f"microbatch {batch.index}: interrupted"))
            self._epoch = Epoch()

    def map(self, inputs: Iterable[Any], progress: bool = False) -> Iterator[Any]:
        """The results of all inputs, in order. Lazy: no input is taken before a result is asked for, and never more
        than in_flight beyond the results given. The first error is raised in its place."""
        self._check()
        results = self._map(inputs)
        return with_progress(results, inputs) if progress else results

    def _map(self, inputs: Iterable[Any]) -> Iterator[Any]:
        waiting: deque[Ticket] = deque()
        for x in inputs:
            waiting.append(self.submit(x))
            if len(waiting) == self._limit:
                yield self._next(waiting)
        while waiting:
            yield self._next(waiting)

    def _next(self, waiting: deque[Ticket]) -> Any:
        """The result of the first, whose ticket nobody else has."""
        ticket = waiting.popleft()
        return self.result_of(ticket._batch, None, sole=True)

    # ---- what tickets ask ----

    def is_over(self, batch: Microbatch) -> bool:
        """Whether result_of() would return or raise at once."""
        guest = object()
        try:
            self._guests.add(guest)
            if batch.cancelled or self._closed or self._fault is not None or batch.outcome() is not None:
                return True
            if batch.end.done():
                return True
            self._line.watchdog.look(self._runtime.clock())
            return False
        except DeviceFault as fault:
            self._lose(fault)
            return True
        finally:
            self._guests.discard(guest)

    def result_of(self, batch: Microbatch, timeout: float | None, sole: bool = False) -> Any:
        """See Ticket.result()."""
        if timeout is not None and not timeout >= 0:
            raise InvalidArgument(f"timeout is {timeout!r}; seconds from 0 up, or None for no limit, are allowed")
        guest = object()
        try:
            self._guests.add(guest)
            self._check()
            if _reason(batch) is None:
                self._wait(batch, timeout)
            error = _reason(batch)
            if error is None:
                assert batch.output is not None  # no error, so the last stage has set it
                return self._line.last.adapter.result(self._line.last, self._line.fetch, batch.output, sole)
        except DeviceFault as fault:
            self._lose(fault)
            raise
        finally:
            self._guests.discard(guest)
        if self._epoch.failed is batch:
            self._epoch = Epoch()
        raise error

    def _wait(self, batch: Microbatch, timeout: float | None) -> None:
        """Until the device is through with a microbatch."""
        if batch.end.done():
            return
        begin = now = self._runtime.clock()
        end = inf if timeout is None else begin + timeout
        try:
            while not batch.end.wait(min(GLANCE, max(0.0, end - now))):
                self._check()
                now = self._runtime.clock()
                if end - now < TICK:
                    where = self._line.watchdog.where()
                    raise TimeoutError(f"microbatch {batch.index} is not through after {timeout:g} s; {where}")
                self._line.watchdog.look(now)
        finally:
            self._blocked_in_result += self._runtime.clock() - begin

    # ---- the rest ----

    def plan(self) -> Plan:
        """Devices, links and memory as they are now."""
        return self._line.plan()

    def stats(self) -> Stats:
        """What has happened so far."""
        self._check()
        blocked = {"admit": self._line.throttle.blocked, "result": self._blocked_in_result}
        *submission, besides = self._line.costs.means()
        limit = limit_of(sum(submission) + besides, self._limit, *self._line.costs.span())
        return Stats(
            self._submitted, self._line.throttle.in_flight, blocked, tuple(submission), besides, limit, self._traced
        )

    @contextmanager
    def trace(self, *paths: str | Path) -> Iterator[Trace]:
        """While the with statement lasts, the devices' own times of every stage and copy are measured; then they are
        written to the paths, by their endings: .json for Perfetto, .png a picture. It begins and ends with idle
        devices, and costs two events a stage and microbatch.

        Gives a Trace, which is filled at the end; stats() has its sums. Raises InvalidArgument for another path, and
        for a second trace at once.
        """
        for path in paths:
            check_path(path)
        result = Trace()
        tracing = self._order.run(self._start, result)
        try:
            yield result
        finally:
            self._order.run(self._stop, tracing, result)
            for path in paths:
                result.write(path)

    def _start(self, result: Trace) -> Tracing:
        if self._tracing:
            raise InvalidArgument("a trace of this executor is on already")
        self._idle()
        tracing = Tracing(self._line, self._runtime, result)
        self._tracing = True
        return tracing

    def _stop(self, tracing: Tracing, result: Trace) -> None:
        try:
            if not self._closed:
                self._idle()
        finally:
            tracing.stop(self._closed or self._fault is not None)
            self._tracing = False
            self._traced = result.summary

    def _idle(self) -> None:
        """Waits until nothing is in flight."""
        self._check()
        try:
            for stream in self._line.streams:
                while not stream.synchronize(GLANCE):
                    self._check()
                    self._line.watchdog.look(self._runtime.clock())
        except DeviceFault as fault:
            self._lose(fault)
            raise

    @property
    def runtime(self) -> Runtime:
        """The runtime it runs on."""
        return self._runtime

    @property
    def closed(self) -> bool:
        """Whether close() has been called."""
        return self._closed

    def close(self) -> None:
        """Waits until what is in flight is through, for 30 s at most, and gives everything back. Results not taken are
        lost. Closing twice is harmless."""
        self._closed = True  # whoever is blocked sees it and leaves
        self._order.run(self._close)

    def _close(self) -> None:
        end = monotonic() + PATIENCE
        while self._guests and monotonic() < end:
            sleep(0.001)
        self._closing()
        self._epoch = Epoch()  # an error refers to the frames that it came through

    def __enter__(self) -> Self:
        self._check()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_closing", None) is not None and self._closing.alive:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        devices = [stage.device for stage in self._line.stages]
        return f"<pyxdev.Executor of {len(devices)} stages on devices {devices}{', closed' if self._closed else ''}>"

    def _check(self) -> None:
        if self._closed:
            raise Closed("the executor is closed")
        if self._fault is not None:
            raise _again(self._fault)

    def _lose(self, fault: DeviceFault) -> None:
        """A device has failed, for good."""
        self._fault = self._fault or _again(fault)

    def _raise_interrupt(self) -> None:
        """Ctrl-C that hit a stage is raised by whatever comes next."""
        failed = self._epoch.failed
        if failed is not None and isinstance(failed.error, StageInterrupted):
            self._epoch = Epoch()
            raise failed.error


def limit_of(each: float, in_flight: int, count: int, span: float) -> str:
    """What stats() says of the submitting thread. each: its seconds for one of the last `count` microbatches, which
    were submitted in `span` seconds.

    Where more than fit in flight were submitted one after the other, without waiting, the devices were through sooner.
    """
    share = count * each / span if span else 0.0
    if count <= in_flight or share < BUSY:
        return ""
    return f"the submitting thread is the limit: {each * 1e6:.3g} us a microbatch, {min(1.0, share):.0%} of its time"


def _changed(runtime: Runtime, changed: Mapping[str, object], **fixed: object) -> Settings:
    """The settings of a runtime that is open already, with this executor's arguments."""
    for name, value in fixed.items():
        if value is not None:
            raise InvalidArgument(f"{name} is {value!r}, but it belongs to the runtime, which is open already")
    settings = getattr(runtime, "settings", None) or resolve({})
    wanted = resolve(changed)
    given = {name: getattr(wanted, name) for name, value in changed.items() if value is not None}
    return replace(settings, **given)


def _again(fault: DeviceFault) -> DeviceFault:
    """The same without its traceback, whose frames refer to the caller's tickets."""
    return DeviceFault(str(fault), status="DEVICE_FAULT", code=fault.code, operation=fault.operation)


def _reason(batch: Microbatch) -> BaseException | None:
    """Why there is no result."""
    return Cancelled(f"microbatch {batch.index}: cancelled") if batch.cancelled else batch.outcome()
