"""What goes wrong in a stage, in the driver or at the keyboard reaches the caller once, and the executor goes on."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from executor_cases import machine, same

from pyxdev import topology
from pyxdev._native import FaultDriver, Runtime
from pyxdev.backends import sim
from pyxdev.errors import (
    Cancelled,
    Closed,
    DeviceFault,
    DriverError,
    Error,
    InvalidArgument,
    OutOfMemory,
    StageError,
    StageInterrupted,
)
from pyxdev.executor import Executor, Stage
from pyxdev.topology import Pair

COUNT = 7


class Boom(BaseException):
    """Not even an Exception."""


class Failing:
    """Raises for chosen values of x."""

    def __init__(self, *bad: int, error: BaseException | None = None) -> None:
        self.bad = set(bad)
        self.error = error or ValueError("this one is bad")
        self.seen: list[int] = []

    def __call__(self, x: Any) -> Any:
        self.seen.append(int(x[0]))
        if int(x[0]) in self.bad:
            self.bad.discard(int(x[0]))
            raise self.error
        return x


def inputs(count: int = COUNT) -> list[Any]:
    return [np.full(1000, n, np.float32) for n in range(count)]


@pytest.mark.parametrize("microbatch", [0, 3, COUNT - 1])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    "error", [ValueError("bad"), Boom("worse"), SystemExit(3)], ids=lambda error: type(error).__name__
)
def test_a_stage_raises(stage: int, microbatch: int, error: BaseException) -> None:
    fns: list[Any] = [lambda x: x, lambda x: x, lambda x: x]
    fns[stage] = Failing(microbatch, error=error)
    stages = [Stage(fn, cost=1e-3, name=f"s{n}") for n, fn in enumerate(fns)]
    with Executor([0, 1, 2], stages, machine=machine(3, seed=microbatch)) as executor:
        tickets = [executor.submit(x) for x in inputs()]
        for n, ticket in enumerate(tickets[:microbatch]):
            assert ticket.result()[0] == n
        for ticket in tickets[microbatch + 1 :]:
            with pytest.raises(Cancelled, match=f"microbatch {microbatch} failed"):
                ticket.result()
        with pytest.raises(StageError) as caught:
            tickets[microbatch].result()
        assert (caught.value.stage, caught.value.microbatch) == (stage, microbatch)
        assert caught.value.__cause__ is error
        assert f"stage {stage} (s{stage}), microbatch {microbatch}: {type(error).__name__}" in str(caught.value)
        # Delivered: the executor takes new work, and the old tickets keep their verdicts.
        assert [y[0] for y in executor.map(inputs())] == list(range(COUNT))
        with pytest.raises(StageError):
            tickets[microbatch].result()
        assert executor.stats().in_flight == 0


def test_later_stages_do_not_see_what_was_cancelled() -> None:
    last = Failing()
    with Executor([0, 1], [Failing(2), last], machine=machine(2)) as executor:
        tickets = [executor.submit(x) for x in inputs()]
        with pytest.raises(StageError):
            tickets[2].result()
        executor.submit(np.full(1000, 50, np.float32)).result()
    assert last.seen == [0, 1, 50]


def test_until_the_error_is_delivered_new_microbatches_are_cancelled() -> None:
    with Executor([0], [Failing(1)], machine=machine(1)) as executor:
        tickets = [executor.submit(x) for x in inputs(3)]
        with pytest.raises(Cancelled):
            tickets[2].result()
        late = executor.submit(np.zeros(1000, np.float32))
        assert late.done()
        with pytest.raises(Cancelled, match="microbatch 1 failed"):
            late.result()
        with pytest.raises(StageError):
            tickets[1].result()
        assert executor.submit(np.zeros(1000, np.float32)).result()[0] == 0


def test_an_error_that_nobody_can_ask_for_is_forgotten() -> None:
    with Executor([0], [Failing(0)], machine=machine(1)) as executor:
        executor.submit(np.zeros(1000, np.float32))
        gc.collect()
        assert executor.submit(np.ones(1000, np.float32)).result()[0] == 1


def test_map_raises_the_error_in_its_place() -> None:
    with Executor([0, 1], [lambda x: x, Failing(4)], machine=machine(2)) as executor:
        seen = []
        with pytest.raises(StageError, match="microbatch 4"):
            for y in executor.map(inputs()):
                seen.append(int(y[0]))
        assert seen == [0, 1, 2, 3]
        assert len(list(executor.map(inputs()))) == COUNT


def test_two_errors_each_reach_their_ticket() -> None:
    with Executor([0, 1], [Failing(3), Stage(Failing(1), cost=5e-3)], machine=machine(2)) as executor:
        tickets = [executor.submit(x) for x in inputs()]
        with pytest.raises(StageError, match=r"stage 1 .* microbatch 1"):
            tickets[1].result()
        with pytest.raises(Error):
            tickets[3].result()
        assert executor.submit(np.zeros(1000, np.float32)).result()[0] == 0


def test_a_failed_ticket_cannot_be_an_input() -> None:
    with Executor([0], [Failing(0)], machine=machine(1)) as executor:
        ticket = executor.submit(np.zeros(1000, np.float32))
        with pytest.raises(StageError):
            ticket.result()
        for x in (ticket, [ticket]):
            with pytest.raises(Cancelled, match="no result to go on with"):
                executor.submit(x)
        assert executor.stats().in_flight == 0


def test_outputs_that_change_their_shape_need_out() -> None:
    with Executor([0], [lambda x: np.zeros(x)], machine=machine(1)) as executor:
        assert len(executor.submit(3).result()) == 3
        with pytest.raises(StageError, match=r"returned float64\[4\] where float64\[3\] was expected.*needs out="):
            executor.submit(4).result()
        assert len(executor.submit(3).result()) == 3
    with Executor([0], [Stage(lambda x: np.zeros(x), out=lambda x: np.empty(x))], machine=machine(1)) as executor:
        assert [len(y) for y in executor.map([3, 4, 0])] == [3, 4, 0]


@pytest.mark.parametrize("what", ["out", "cost"])
def test_out_and_cost_may_fail_too(what: str) -> None:
    def fail(x: Any) -> Any:
        raise LookupError("no idea")

    with Executor([0], [Stage(lambda x: x, **{what: fail})], machine=machine(1)) as executor:
        with pytest.raises(StageError) as caught:
            executor.submit(np.zeros(3)).result()
        assert isinstance(caught.value.__cause__, LookupError)


def test_a_stage_cannot_use_its_own_executor() -> None:
    own: list[Executor] = []

    def inward(x: Any) -> Any:
        own[0].submit(x)
        return x

    with Executor([0], [inward], machine=machine(1)) as executor:
        own.append(executor)
        ticket = executor.submit(1)
        with pytest.raises(StageError, match="cannot submit to its own executor"):
            ticket.result()


# ---- time ----


def test_result_gives_up_in_time_and_changes_nothing() -> None:
    with Executor([0], [Stage(lambda x: x + 1, cost=2.0, out=lambda x: x)], machine=machine(1)) as executor:
        ticket = executor.submit(np.zeros(3))
        assert not ticket.done()
        with pytest.raises(TimeoutError, match=r"microbatch 0 is not through after 0\.5 s"):
            ticket.result(timeout=0.5)
        with pytest.raises(TimeoutError):
            ticket.result(timeout=0)
        assert ticket.result(timeout=10)[0] == 1
        for wrong in (-1, float("nan")):
            with pytest.raises(InvalidArgument, match="timeout"):
                ticket_of = executor.submit(np.zeros(3))
                ticket_of.result(timeout=wrong)


def test_cancel_gives_the_result_up() -> None:
    seen = Failing()
    with Executor([0], [Stage(seen, cost=1.0, out=lambda x: x)], machine=machine(1)) as executor:
        first, second, third = [executor.submit(x) for x in inputs(3)]
        assert second.cancel()
        with pytest.raises(Cancelled):
            second.result()
        with pytest.raises(Cancelled):
            executor.submit(second)
        assert first.result()[0] == 0 and third.result()[0] == 2
        assert not first.cancel() and not third.cancel()
        assert second.done()
    assert seen.seen == [0, 1, 2]


def test_a_hung_kernel_does_not_hang_the_host() -> None:
    with Executor([0], [Stage(lambda x: x, cost=1e6, out=lambda x: x)], machine=machine(1)) as executor:
        ticket = executor.submit(np.zeros(3))
        with pytest.raises(TimeoutError):
            ticket.result(timeout=1)


# ---- Ctrl-C ----


def interrupt_after(seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    return timer


@pytest.mark.parametrize("seed", range(6))
def test_ctrl_c_anywhere_leaves_a_usable_executor(seed: int) -> None:
    """Interrupts a busy loop at a random moment: in a stage, in submit, in a wait."""

    def busy(x: Any) -> Any:
        end = time.perf_counter() + 0.002
        while time.perf_counter() < end:
            pass
        return x + 1

    with Executor([0, 1], [busy, busy], machine=machine(2, seed)) as executor:
        timer = interrupt_after(0.05 + random.Random(seed).random() * 0.1)
        with pytest.raises(KeyboardInterrupt):
            while True:
                for _ in executor.map(inputs()):
                    pass
        timer.join()
        assert executor.submit(np.zeros(3)).result()[0] == 2
        assert executor.stats().in_flight == 0


@pytest.mark.parametrize("seed", range(4))
def test_ctrl_c_at_every_moment(seed: int) -> None:
    """The same, many times, with a pipeline of nothing but pyxdev's own code."""
    choose = random.Random(seed)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    # Python loses an interrupt that hits a __del__ or a callback of the collector, such as an earlier test's.
    gc.collect()
    gc.disable()
    before = signal.signal(signal.SIGALRM, interrupt)
    done = 0
    try:
        with Executor([0, 1], [lambda x: x, lambda x: x], host_stage="0", machine=machine(2, seed)) as executor:
            first = executor.submit(np.zeros(3))
            executor.submit((first, executor.submit(np.ones(3)))).result()
            for _ in range(60):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 1e-5 + choose.random() ** 3 * 1e-2)
                    tickets = [executor.submit(np.full(3, n)) for n in range(6)]
                    tickets.append(executor.submit((first, tickets[-1])))
                    for ticket in tickets:
                        ticket.result()
                        done += ticket.done()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    pass
                assert executor.submit(np.full(3, 7)).result()[0] == 7
                assert executor.stats().in_flight == 0
            assert not executor._guests
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert done


def test_ctrl_c_in_a_stage_is_both_errors() -> None:
    with Executor([0], [Stage(Failing(1, error=KeyboardInterrupt()), out=lambda x: x)], machine=machine(1)) as executor:
        first = executor.submit(inputs()[0])
        second = executor.submit(inputs()[1])
        assert first.result()[0] == 0
        with pytest.raises(StageInterrupted):
            second.result()
        assert executor.submit(inputs()[1]).result()[0] == 1


# ---- memory ----


def small(gib: float) -> dict[str, Any]:
    return machine(1) | {"device": {"count": 2, "memory_gib": gib}}


def test_too_deep_is_an_error_with_the_depth_that_fits() -> None:
    x = np.zeros(100 << 10, np.uint8)
    stages = [Stage(lambda x: x.sum(), out=lambda x: 0)] * 2
    with Executor([0], stages[:1], depth=8, in_flight=8, machine=small(450 / (1 << 20))) as executor:
        tickets = [executor.submit(x) for _ in range(8)]
        with pytest.raises(OutOfMemory, match="8 slots of 102400 bytes are needed, 4 could be had; depth 4 fits"):
            for ticket in tickets:
                ticket.result()
        assert executor.submit(np.ones(3)).result() == 3


def test_automatic_depth_shrinks_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    xs = [np.full(100 << 10, n, np.uint8) for n in range(20)]
    stage = Stage(lambda x: int(x.sum()), out=lambda x: 0)
    with Executor([0], [stage], in_flight=8, machine=small(250 / (1 << 20))) as executor:
        assert list(executor.map(xs)) == [int(x.sum()) for x in xs]
        assert executor.plan().stages[0].depth == 2
    assert "no room for another slot" in caplog.text


# ---- faults of the driver ----


def faulty(seed: int) -> tuple[Runtime, FaultDriver]:
    fault = FaultDriver(sim.driver(machine(3, seed)))
    runtime = Runtime(fault)
    for src, dst in itertools.permutations(range(3), 2):
        for path in ("direct", "staged"):  # as if they had been tried before
            topology.topology(runtime)[src, dst, path] = Pair(src, dst, path, "yes", "verified", path, "")
    return runtime, fault


def test_every_driver_call_fails_once() -> None:
    """Call 1, 2, 3, ... fails, once. Each time: the error or the right result, nothing left alive, and usable after."""
    xs = inputs(4)
    at = 0
    reached = True
    while reached:
        at += 1
        runtime, fault = faulty(at)
        executor = None
        fault.arm(at)
        try:
            with Executor([0, 1], [lambda x: x * 2, lambda x: x + 1], runtime=runtime, host_stage="1") as executor:
                results = list(executor.map(xs))
                reached = fault.calls >= at
            assert all(same(y, x * 2 + 1) for x, y in zip(xs, results, strict=True)), f"call {at}"
        except DriverError:
            assert fault.calls >= at
        finally:
            fault.arm(0)
            assert not runtime.live().any(), f"call {at}: {runtime.live()}"
            runtime.close()
    assert at > 100


@pytest.mark.parametrize("seed", range(20))
def test_after_one_failed_call_it_is_usable_or_says_that_a_device_failed(seed: int) -> None:
    choose = random.Random(seed)
    runtime, fault = faulty(seed)
    fns = [lambda x: x * 2, lambda x: x + 1, lambda x: x - 1]
    with runtime, Executor([0, 1, 2], fns, runtime=runtime, host_stage=choose.choice("01")) as executor:
        assert len(list(executor.map(inputs()))) == COUNT
        for _ in range(10):
            fault.arm(choose.randint(1, 250))
            try:
                assert [y[0] for y in executor.map(inputs())] == [2 * n for n in range(COUNT)]
            except DriverError:
                fault.arm(0)
            except DeviceFault:
                with pytest.raises(DeviceFault):
                    executor.submit(inputs()[0])
                return
            fault.arm(0)
            assert [y[0] for y in executor.map(inputs())] == [2 * n for n in range(COUNT)], f"seed {seed}"
            assert executor.stats().in_flight == 0


@pytest.mark.parametrize("at", [1, 3, 10, 30, 80])
def test_a_device_fault_is_for_good(at: int) -> None:
    runtime, fault = faulty(at)
    with runtime, Executor([0, 1], [lambda x: x, lambda x: x], runtime=runtime, host_stage="0") as executor:
        first = executor.submit(inputs()[0])
        assert first.result()[0] == 0
        fault.arm(at, sticky=True, status="DEVICE_FAULT")
        tickets = []
        with pytest.raises(DeviceFault):
            for x in inputs():
                tickets.append(executor.submit(x))
            for ticket in tickets:
                ticket.result()
        for ticket in tickets:
            assert ticket.done()
            with pytest.raises(DeviceFault):
                ticket.result()
        for _ in range(2):
            with pytest.raises(DeviceFault):
                executor.submit(inputs()[0])
        with pytest.raises(DeviceFault):
            next(executor.map(inputs()))
        assert first.result()[0] == 0  # it had been taken
        executor.close()
        assert not runtime.live().any()
        fault.arm(0)


def test_after_close_everything_says_so() -> None:
    executor = Executor([0], [lambda x: x], machine=machine(1))
    ticket = executor.submit(1)
    taken = executor.submit(2)
    taken.result()
    executor.close()
    executor.close()
    for act in (
        lambda: executor.submit(1),
        ticket.result,
        lambda: executor.map([1]),
        executor.stats,
        executor.__enter__,
    ):
        with pytest.raises(Closed):
            act()
    assert taken.result() == 2 and ticket.done()
    assert "closed" in repr(executor)
    assert executor.plan().in_flight == 2
