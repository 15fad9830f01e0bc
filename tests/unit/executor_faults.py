"""Seeded fault injections: a life of one small executor, in which something goes wrong in every round.

Each round submits a few microbatches and lets one thing go wrong, or two. Afterwards every ticket has its right result
or an exception that belongs to what went wrong, the executor works or says for good that a device has failed, and at
the end nothing is alive. What hangs is interrupted by a timer.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import random
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from executor_cases import machine

from pyxdev import topology
from pyxdev._native import Array, Buffer, FaultDriver, Runtime
from pyxdev.backends import sim
from pyxdev.errors import BY_STATUS, Cancelled, Closed, DeviceFault, Error, StageError, StageInterrupted
from pyxdev.executor import Executor, Stage, Ticket
from pyxdev.topology import Pair

ROUNDS = 25  # of one executor
PATIENCE = 20.0  # seconds that a life may take
STATUSES = ["DRIVER", "DRIVER", "NO_DEVICE_MEMORY", "NO_PINNED_MEMORY", "NO_HOST_MEMORY", "UNSUPPORTED"]


class Boom(BaseException):
    """Not even an Exception."""


class Step:
    """A stage: adds 1, or raises what is planned for this microbatch."""

    def __init__(self, number: int, plans: dict[tuple[int, int], BaseException]) -> None:
        self.number = number
        self.plans = plans

    def __call__(self, x: Any) -> Any:
        parts = x if isinstance(x, tuple) else (x,)
        key = int(max(part["key"] for part in parts))
        if (self.number, key) in self.plans:
            raise self.plans.pop((self.number, key))
        return {"key": key, "a": sum(part["a"] for part in parts) + np.float32(1)}


class RawStep(Step):
    """The same on bare memory: raises when it is submitted, and some of its work is queued then. As a graph it is given
    no keys, which change."""

    def __call__(self, stage: Any, x: Any = None) -> Any:
        parts = x if isinstance(x, tuple) else (x,)
        keys = {"key": int(max(part["key"] for part in parts))} if "key" in parts[0] else {}
        sources = [part["a"] for part in parts]
        (count,) = sources[0].shape
        y = stage.empty((count,), "float32")
        stage.stream.copy(y.address, sources[0].address, y.nbytes, dst_device=stage.device, src_device=stage.device)
        if (self.number, keys.get("key")) in self.plans:
            raise self.plans.pop((self.number, keys["key"]))
        addresses = [source.address for source in sources]
        target = y.address

        def add() -> None:
            _floats(target, count)[:] = sum(_floats(address, count) for address in addresses) + np.float32(1)

        ranges = [(address, 4 * count) for address in addresses]
        stage.stream.launch(add, cost=1e-4, reads=ranges, writes=[(target, 4 * count)])
        return {**keys, "a": y}


def _like_the_input(x: Any) -> Any:
    return {"key": 0, "a": (x[0] if isinstance(x, tuple) else x)["a"]}


def _floats(address: int, count: int) -> Any:
    return np.frombuffer((ctypes.c_uint8 * (4 * count)).from_address(address), np.float32)


class Counting(Runtime):
    """Counts the buffers that it gives."""

    given = 0

    def buffer(self, device: int, nbytes: int, *, managed: bool = False) -> Buffer:
        self.given += 1
        return super().buffer(device, nbytes, managed=managed)


class Life:
    """One executor, from open to close. counts: what was injected, by kind."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.choose = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.plans: dict[tuple[int, int], BaseException] = {}
        self.fault = FaultDriver(sim.driver(machine(3, seed)))
        self.runtime = Counting(self.fault)
        for src, dst in itertools.permutations(range(3), 2):
            for path in ("direct", "staged"):  # as if they had been tried before
                topology.topology(self.runtime)[src, dst, path] = Pair(src, dst, path, "yes", "verified", path, "")
        choose = self.choose
        count = choose.randint(1, 4)
        joins = count > 2 and choose.random() < 0.5
        self.factor = [1.0]  # of the input, in each stage's output; and what is added to it
        self.offset = [1.0]
        self.raw = raw = choose.random() < 0.4
        self.graph = choose.choice(["off", "auto", "on"]) if raw else "off"
        stages = []
        for n in range(count):
            last = joins and n == count - 1
            stages.append(
                Stage(
                    (RawStep if raw else Step)(n, self.plans),
                    inputs=(0, -1) if last else None,
                    cost=choose.choice([0.0, 1e-3]),
                    out=None if raw else choose.choice([None, _like_the_input]),
                )
            )
            if n:
                self.factor.append(self.factor[-1] + (self.factor[0] if last else 0))
                self.offset.append(self.offset[-1] + 1 + (self.offset[0] if last else 0))
        self.stages = count
        self.executor = Executor(
            [choose.randrange(3) for _ in range(choose.randint(1, count))],
            stages,
            adapter="raw" if raw else "numpy",
            runtime=self.runtime,
            host_stage=choose.choice("01"),
            in_flight=choose.choice(["auto", 1, 2, 5]),
            depth=choose.choice(["auto", 1, 2]),
            graph=self.graph,
        )
        self.keys = itertools.count()
        self.over = False  # a device has failed, or the executor is closed

    # ---- what is right ----

    def input(self, key: int) -> Any:
        array = np.full(8 if key % 3 else 300, key % 1000, np.float32)
        return {"a": array} if self.graph != "off" else {"key": key, "a": array}

    def check(self, y: Any, key: int, times: int = 1) -> None:
        wanted = float(key % 1000)
        for _ in range(times):
            wanted = wanted * self.factor[-1] + self.offset[-1]
        if isinstance(y["a"], Array):
            y = {**y, "a": y["a"].numpy()}
        right = y.get("key", key) == key and np.array_equal(y["a"], np.full_like(self.input(key)["a"], wanted))
        assert right, f"seed {self.seed}: microbatch of key {key} gave {y}, {wanted} was wanted"

    def memory(self) -> tuple[int, int, int]:
        """What changes whenever memory is taken or given back."""
        live = self.runtime.live()
        return self.runtime.given, live.device_bytes, live.pinned_bytes

    # ---- rounds ----

    def live(self, rounds: int = ROUNDS) -> None:
        try:
            for _ in range(rounds):
                if self.over:
                    break
                kind = self.choose.choice(KINDS if self.graph == "off" else FOR_GRAPHS)
                self.counts[kind.__name__] += 1
                kind(self)
                self.fault.arm(0)
                self.plans.clear()
                if not self.over:
                    self.is_well()
        finally:
            self.fault.arm(0)
            self.executor.close()
            if self.runtime.live().any():  # an exception refers to the frames it came through, and they to tickets
                gc.collect()
            assert not self.runtime.live().any(), f"seed {self.seed}: {self.runtime.live()}"
            self.runtime.close()

    def is_well(self) -> None:
        """The executor gives a right result, and nothing is in flight then."""
        key = next(self.keys)
        self.check(self.executor.submit(self.input(key)).result(), key)
        assert self.executor.stats().in_flight == 0, f"seed {self.seed}"

    def run(self, *allowed: type[BaseException], count: int | None = None) -> list[BaseException]:
        """Some microbatches with right results or one of the exceptions allowed, which are returned."""
        seen: list[BaseException] = []
        tickets: list[tuple[Ticket, int]] = []
        for _ in range(count or self.choose.randint(2, 5)):
            key = next(self.keys)
            with self.seeing(seen, *allowed):
                tickets.append((self.executor.submit(self.input(key)), key))
        for ticket, key in tickets:
            with self.seeing(seen, *allowed):
                self.check(ticket.result(), key)
        # Or one whose result() raised another error than its stage's, which nobody has heard of then, would live on in
        # this frame, which belongs to a cycle of an exception's.
        tickets.clear()
        return seen

    @contextlib.contextmanager
    def seeing(self, seen: list[BaseException], *allowed: type[BaseException]) -> Iterator[None]:
        """Keeps an exception of these, or the StageError of one that was raised by a raw stage's own call."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, allowed) and not (self.raw and isinstance(error.__cause__, allowed)):
                raise
            seen.append(error.with_traceback(None))  # or it would keep tickets alive, in a cycle with this frame
        if seen and isinstance(seen[-1], DeviceFault):
            self.over = True


def a_call_fails(life: Life) -> None:
    """Once. Memory that runs out may be done without, and a failure to give memory back changes nothing."""
    status = life.choose.choice(STATUSES)
    at = life.choose.randint(1, 30 * life.stages)
    before = life.memory()
    life.fault.arm(at, status=status)
    seen = life.run(BY_STATUS[status], Cancelled)
    struck = life.fault.calls >= at
    assert struck or not seen, f"seed {life.seed}: {seen} with no call that failed"
    needed = status in ("DRIVER", "UNSUPPORTED") and life.memory() == before and not life.raw
    assert seen or not struck or not needed, f"seed {life.seed}: nobody heard of call {at}"
    if seen and all(isinstance(error, Cancelled) for error in seen):
        raise AssertionError(f"seed {life.seed}: cancelled for no reason: {seen}")


def all_calls_fail(life: Life) -> None:
    """From one call on: then it cannot be known what runs, which is as bad as a device that failed."""
    life.fault.arm(life.choose.randint(1, 30 * life.stages), sticky=True)
    life.run(BY_STATUS["DRIVER"], DeviceFault, Cancelled)


def a_device_fails(life: Life) -> None:
    at = life.choose.randint(1, 30 * life.stages)
    life.fault.arm(at, sticky=True, status="DEVICE_FAULT")
    seen = life.run(DeviceFault, Cancelled)
    if life.fault.calls >= at:
        seen = seen or life.run(DeviceFault, Cancelled)  # giving memory back may fail unheard; the next call does not
        assert any(isinstance(error, DeviceFault) for error in seen), f"seed {life.seed}: {seen}"
        life.over = True
        for act in (lambda: life.executor.submit(life.input(0)), lambda: next(life.executor.map([life.input(0)]))):
            try:
                act()
            except DeviceFault:
                continue
            raise AssertionError(f"seed {life.seed}: submit() after the device has failed")


def a_stage_raises(life: Life) -> None:
    error = life.choose.choice([ValueError("bad"), Boom(), SystemExit(3), MemoryError(), GeneratorExit()])
    count = life.choose.randint(2, 5)
    first = next(life.keys) + 1
    life.keys = itertools.count(first)
    bad, stage = first + life.choose.randrange(count), life.choose.randrange(life.stages)
    life.plans[stage, bad] = error
    tickets = [life.executor.submit(life.input(first + n)) for n in range(count)]
    life.keys = itertools.count(first + count)
    order = list(range(count))
    if life.choose.random() < 0.5:
        life.choose.shuffle(order)
        order.remove(bad - first)  # or the microbatches after it would not be cancelled any more when they are asked
        order.append(bad - first)
    for n in order:
        key = first + n
        try:
            life.check(tickets[n].result(), key)
            assert key < bad, f"seed {life.seed}: microbatch {n} has a result, {bad - first} failed"
        except StageError as caught:
            assert key == bad and caught.stage == stage and caught.__cause__ is error, f"seed {life.seed}: {caught}"
            assert caught.microbatch == tickets[n].index
            caught.with_traceback(None)
        except Cancelled as caught:
            assert key > bad, f"seed {life.seed}: {caught}"
            caught.with_traceback(None)


def ctrl_c_hits_a_stage(life: Life) -> None:
    """It reaches whoever waits at that moment, or the ticket."""
    first = next(life.keys) + 1
    life.keys = itertools.count(first)
    life.plans[life.choose.randrange(life.stages), first + 1] = KeyboardInterrupt()
    seen = life.run(StageInterrupted, Cancelled, count=3)
    assert any(isinstance(error, StageInterrupted) for error in seen), f"seed {life.seed}: {seen}"


def some_are_cancelled(life: Life) -> None:
    keys = [next(life.keys) for _ in range(4)]
    tickets = [life.executor.submit(life.input(key)) for key in keys]
    gone = {n for n in range(4) if life.choose.random() < 0.5 and tickets[n].cancel()}
    for n, ticket in enumerate(tickets):
        try:
            life.check(ticket.result(), keys[n])
            assert n not in gone, f"seed {life.seed}"
        except Cancelled as caught:
            assert n in gone, f"seed {life.seed}"
            caught.with_traceback(None)


def patience_ends(life: Life) -> None:
    keys = [next(life.keys) for _ in range(3)]
    tickets = [life.executor.submit(life.input(key)) for key in keys]
    for ticket, key in zip(tickets, keys, strict=True):
        with contextlib.suppress(TimeoutError):
            life.check(ticket.result(timeout=life.choose.choice([0, 1e-5, 1e-3])), key)
        life.check(ticket.result(), key)


def tickets_are_dropped(life: Life) -> None:
    """A generator is left half way, tickets are never asked, one of them fails."""
    first = next(life.keys) + 1
    life.keys = itertools.count(first + 6)
    results = life.executor.map(life.input(first + n) for n in range(4))
    life.check(next(results), first)
    del results
    if life.choose.random() < 0.5:
        life.plans[life.choose.randrange(life.stages), first + 4] = ValueError("bad")
    for n in (4, 5):
        life.executor.submit(life.input(first + n))


def tickets_go_round(life: Life) -> None:
    """Chained, while a call fails."""
    status = life.choose.choice(["DRIVER", "NO_DEVICE_MEMORY"])
    key = next(life.keys)
    seen: list[BaseException] = []
    times = 1
    life.fault.arm(life.choose.randint(1, 60 * life.stages), status=status)
    with life.seeing(seen, BY_STATUS[status], Cancelled):
        ticket = life.executor.submit(life.input(key))
        for _ in range(3):
            ticket = life.executor.submit(ticket)
            times += 1
        life.check(ticket.result(), key, times)
    del ticket


def it_is_closed_in_flight(life: Life) -> None:
    keys = [next(life.keys) for _ in range(4)]
    tickets = [life.executor.submit(life.input(key)) for key in keys]
    if life.choose.random() < 0.3:
        life.fault.arm(life.choose.randint(1, 60), status="DRIVER", sticky=life.choose.random() < 0.5)
    life.executor.close()
    life.over = True
    for ticket in tickets:
        try:
            ticket.result()
        except Closed:
            continue
        raise AssertionError(f"seed {life.seed}: a result after close()")


def stage_and_driver_fail(life: Life) -> None:
    first = next(life.keys) + 1
    life.keys = itertools.count(first)
    life.plans[life.choose.randrange(life.stages), first + life.choose.randrange(3)] = ValueError("bad")
    life.fault.arm(life.choose.randint(1, 20 * life.stages))
    seen = life.run(StageError, BY_STATUS["DRIVER"], Cancelled, count=3)
    assert any(not isinstance(error, Cancelled) for error in seen), f"seed {life.seed}: {seen}"


KINDS = (
    *([a_call_fails] * 8),
    *([a_stage_raises] * 4),
    stage_and_driver_fail,
    stage_and_driver_fail,
    ctrl_c_hits_a_stage,
    some_are_cancelled,
    patience_ends,
    tickets_are_dropped,
    tickets_go_round,
    tickets_go_round,
    all_calls_fail,
    a_device_fails,
    it_is_closed_in_flight,
)


FOR_GRAPHS = tuple(
    kind for kind in KINDS if kind not in (a_stage_raises, stage_and_driver_fail, ctrl_c_hits_a_stage)
)  # Python does not run in the others


def live(seed: int, rounds: int = ROUNDS) -> Counter[str]:
    """A life; what was injected, by kind. Raises AssertionError, or Error, with the seed."""

    def hangs(*_: object) -> None:
        raise AssertionError(f"seed {seed} hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        life = Life(seed)
        life.live(rounds)
    except Error as error:
        error.add_note(f"seed {seed}")
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return life.counts
