"""Stages on bare memory: what they see, what they may return, and the order of it all."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from executor_cases import machine

from pyxdev import Array
from pyxdev._native import FaultDriver, Runtime
from pyxdev.adapters import raw
from pyxdev.backends import open as open_backend
from pyxdev.backends import sim
from pyxdev.errors import DeviceFault, DriverError, InvalidArgument, OrderViolation, StageError
from pyxdev.executor import Executor, Stage


def view(array: Array) -> Any:
    """Memory of a simulated device; for kernels."""
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.address)
    return np.frombuffer(memory, array.dtype).reshape(array.shape)


def fill(array: Array, value: float) -> None:
    view(array)[...] = value


def kernel(stage: Any, y: Array, x: Array, f: Any, cost: float = 5e-4) -> None:
    """Queues y = f(x) on the stage's stream."""

    def run() -> None:
        view(y)[...] = f(view(x))

    stage.stream.launch(run, cost=cost, reads=[(x.address, x.nbytes)], writes=[(y.address, y.nbytes)])


def twice(stage: Any, x: Array) -> Array:
    y = stage.empty(x.shape, x.dtype)
    kernel(stage, y, x, lambda values: values * 2)
    return y


def in_place(stage: Any, x: Array) -> Array:
    kernel(stage, x, x, lambda values: values + 1)
    return x


class Static:
    """Returns the same memory every time."""

    def __init__(self) -> None:
        self.y: Any = None

    def __call__(self, stage: Any, x: Array) -> Array:
        if self.y is None:
            self.y = stage.empty(x.shape, x.dtype)
        kernel(stage, self.y, x, lambda values: values - 3)
        return self.y


class Total:
    """Adds its inputs up in memory of its own, and returns that."""

    def __init__(self) -> None:
        self.sum: Any = None

    def __call__(self, stage: Any, x: Array) -> dict[str, Any]:
        if self.sum is None:
            self.sum = stage.empty(x.shape, x.dtype)
            stage.stream.fill(self.sum.address, 0, self.sum.nbytes)
        kernel(stage, self.sum, x, lambda values: values + view(self.sum))
        return {"sum": self.sum, "x": x, "n": x.shape[0]}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("host_stage", ["0", "1"])
def test_raw_stages_give_the_right_bits(seed: int, depth: int, host_stage: str) -> None:
    fns = [twice, in_place, Static(), Total()]
    xs = [np.full(3000, n, np.float64) for n in range(8)]
    with Executor(
        [0, 1, 0, 1], fns, adapter="raw", depth=depth, host_stage=host_stage, machine=machine(2, seed)
    ) as pipe:
        assert [stage.adapter for stage in pipe.plan().stages] == ["raw"] * 4
        total = np.zeros(3000)
        for x, y in zip(xs, pipe.map(xs), strict=True):
            total = total + (x * 2 + 1 - 3)
            assert (y["sum"].numpy() == total).all() and (y["x"].numpy() == x * 2 - 2).all() and y["n"] == 3000
            assert y["sum"].device == 1


def test_a_stage_knows_where_it_is() -> None:
    def look(stage: Any, x: Array) -> Array:
        assert (stage.device, stage.index, stage.stream.device, x.device) == (1, 1, 1, 1)
        assert stage.runtime is x.runtime and isinstance(x, Array) and x.contiguous
        return x

    with Executor([0, 1], [twice, look], adapter="raw", host_stage="0", machine=machine(2)) as pipe:
        y = pipe.submit(np.ones((2, 3))).result()
        assert y.shape == (2, 3) and y.dtype == "float64" and (y.numpy() == 2).all()


def test_raw_and_numpy_stages_mix() -> None:
    stages = [
        Stage(lambda x: (x + 1, 5)),
        Stage(lambda stage, x: (twice(stage, x[0]), x[1] + 1), adapter="raw"),
        lambda x: x[0] * x[1],
    ]
    with Executor([0, 1, 0], stages, host_stage="0", machine=machine(2)) as pipe:
        xs = [np.full(100, n) for n in range(6)]
        assert [y[0] for y in pipe.map(xs)] == [(n + 1) * 2 * 6 for n in range(6)]


def test_arrays_of_a_device_are_inputs() -> None:
    with Executor([1], [twice], adapter="raw", host_stage="0", machine=machine(2)) as pipe:
        runtime = pipe.runtime
        buffer = runtime.buffer(0, 80)
        stream = runtime.stream(0)
        x = Array(runtime, 0, buffer.address, (10,), "float64", owner=buffer, ready=runtime.event(), stream=stream)
        stream.launch(partial(fill, x, 4), cost=1e-2, writes=[(x.address, x.nbytes)])
        x.ready.record(stream)
        assert (pipe.submit(x).result().numpy() == 8).all()
        x.ready.close()
        stream.close()
        buffer.close()


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda stage, x: Array(stage.runtime, 0, x.address, (1,), "int8"), "its own device|own device"),
        (lambda stage, x: Array(stage.runtime, 1, x.address, (2, 2), "int8", strides=(1, 2)), "contiguous"),
    ],
)
def test_what_a_stage_must_not_return(wrong: Any, message: str) -> None:
    with Executor([1], [wrong], adapter="raw", machine=machine(2)) as pipe:
        with pytest.raises(StageError, match=message) as caught:
            pipe.submit(np.ones(8)).result()
        assert isinstance(caught.value.__cause__, InvalidArgument)


def test_memory_is_used_again() -> None:
    with Executor([0, 1], [twice, twice], adapter="raw", host_stage="0", in_flight=4, machine=machine(2)) as pipe:
        for n, y in enumerate(pipe.map([np.full(1000, n) for n in range(40)])):
            assert y.numpy()[0] == 4 * n
            if n == 20:
                warm = pipe.plan().memory
        assert pipe.plan().memory == warm


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of outputs that were copied."""
    found: list[int] = []

    class Noting(raw.RawStage):
        def copy(self, address: int, nbytes: int) -> Any:
            found.append(address)
            return super().copy(address, nbytes)

    monkeypatch.setattr(raw, "RawStage", Noting)
    return found


def fresh(stage: Any, x: Array) -> Array:
    y = stage.empty(x.shape, x.dtype)
    stage.stream.copy(y.address, x.address, x.nbytes, dst_device=stage.device, src_device=stage.device)
    return y


def part(y: Array) -> Array:
    return Array(y.runtime, y.device, y.address + 1, (y.nbytes - 1,), "uint8", owner=y)


@pytest.mark.parametrize(
    "give",
    [
        lambda y: y,
        lambda y: [y.raw, 1],
        part,
        lambda y: (y, {"again": y, "part": part(y)}),
        lambda y: [y, y.raw, y.raw],
    ],
)
def test_what_only_the_pipeline_refers_to_is_not_copied(copied: list[int], give: Any) -> None:
    with Executor(
        [0, 1], [lambda stage, x: give(fresh(stage, x)), lambda stage, x: 1], adapter="raw", machine=machine(2)
    ) as pipe:
        for n in range(3):
            assert pipe.submit(np.full(10, n, np.uint8)).result() == 1
    assert copied == []


def test_inputs_returned_are_copied(copied: list[int]) -> None:
    with Executor([0], [lambda stage, x: [x, x.raw]], adapter="raw", machine=machine(1)) as pipe:
        for n in range(3):
            assert all((y.numpy() == n).all() for y in pipe.submit(np.full(10, n, np.uint8)).result())
    assert len(copied) == 6


def held_by_a_thread(y: Array) -> Any:
    given, done = threading.Event(), threading.Event()

    def hold(y: Array) -> None:
        given.set()
        done.wait()
        assert y.address

    thread = threading.Thread(target=hold, args=(y,))
    thread.start()
    given.wait()
    return SimpleNamespace(close=lambda: (done.set(), thread.join()))


def caught(y: Array) -> BaseException:
    try:
        raise RuntimeError(y.shape)  # its traceback has this frame, and that has y
    except RuntimeError as error:
        return error


WAYS_TO_KEEP = {
    "array": lambda y: y,
    "bytes": lambda y: y.raw,
    "part": part,
    "owner": lambda y: y.owner,
    "numpy": lambda y: np.asarray(y),
    "view of numpy": lambda y: np.asarray(y)[3:],
    "dlpack": lambda y: y.__dlpack__(),
    "dlpack 1.0": lambda y: y.__dlpack__(max_version=(1, 0)),
    "numpy of dlpack": lambda y: np.from_dlpack(y),
    "closure": lambda y: lambda: y.address,
    "cycle": lambda y: (cycle := [y]).append(cycle) or cycle,
    "generator": lambda y: (lambda g: (next(g), g))(y.address if n else None for n in range(2)),
    "exception": caught,
    "thread": held_by_a_thread,
}


@pytest.mark.parametrize("way", WAYS_TO_KEEP)
def test_what_a_stage_keeps_is_copied(copied: list[int], way: str) -> None:
    """However it keeps it; and once it lets go, the memory is used again."""
    kept: list[Any] = []

    def keeps(stage: Any, x: Array) -> Array:
        y = fresh(stage, x)
        kept.append((WAYS_TO_KEEP[way](y), y.address))
        return y

    with Executor([0], [keeps], adapter="raw", in_flight=1, machine=machine(1)) as pipe:
        for n in range(3):
            assert (pipe.submit(np.full(10, n, np.uint8)).result().numpy() == n).all()
        addresses = [address for _, address in kept]
        assert copied == addresses and len(set(addresses)) == 3
        for thing, _ in kept:
            if way == "thread":
                thing.close()
        thing = None
        kept.clear()
        gc.collect()
        before = pipe.plan().memory
        for n in range(3):
            assert (pipe.submit(np.full(10, n, np.uint8)).result().numpy() == n).all()
            kept.clear() if way != "thread" else kept.pop()[0].close()
            gc.collect()
        assert pipe.plan().memory == before


def test_temporaries_of_a_stage_share_memory() -> None:
    used = set()

    def chain(stage: Any, x: Array) -> Array:
        for _ in range(10):
            x = fresh(stage, x)
            used.add(x.address)
        return x

    with Executor([0, 1], [chain, chain], adapter="raw", host_stage="0", in_flight=4, machine=machine(2)) as pipe:
        for n, y in enumerate(pipe.map([np.full(1000, n) for n in range(12)])):
            assert (y.numpy() == n).all()
    # On each device two at a time, and one for each microbatch in flight; on the last one those of `depth` results that
    # were taken while their copies may be on their way.
    assert len(used) <= 2 * (2 + 4) + 4


def test_an_output_kept_for_one_call_is_passed_on_by_the_next(copied: list[int]) -> None:
    last: list[Array] = []

    def delay(stage: Any, x: Array) -> Array:
        last.append(fresh(stage, x))
        return last.pop(0) if len(last) > 1 else last[0]

    with Executor([0], [delay], adapter="raw", machine=machine(1)) as pipe:
        ys = [y.numpy()[0] for y in pipe.map([np.full(10, n, np.uint8) for n in range(5)])]
        assert ys == [0, 0, 1, 2, 3] and len(copied) == 1
        last.clear()


# ---- results: copies that are on their way when result() returns ----

FAR = 1 << 62  # the call at which a driver that only counts would fail


def parts(stage: Any, x: Array) -> Any:
    return [x, 1, {"again": x}]


@pytest.mark.parametrize("fns, calls", [([twice], 3), ([twice, parts], 4)])
def test_taking_a_finished_result_is_a_question_its_copies_and_a_record(fns: list[Any], calls: int) -> None:
    """The host waits for nothing: that would take it a second."""
    simulated = sim.driver({"device": {"count": 1}, "calls_us": {"sync": 1e6, "query": 1, "copy": 1, "record": 1}})
    driver = FaultDriver(simulated)
    with Runtime(driver) as runtime, Executor([0], fns, adapter="raw", runtime=runtime) as pipe:
        driver.arm(FAR)
        for n in range(4):
            ticket = pipe.submit(np.full(1 << 20, n))
            while not ticket.done():
                simulated.pass_time(1e-3)
            before, begin = driver.calls, runtime.clock()
            result = ticket.result()
            made, took = driver.calls - before, runtime.clock() - begin
            y = result if isinstance(result, Array) else result[0]
            assert took < 1e-4 and not y.ready.done()
            assert y.numpy()[-1] == 2 * n
        assert made == calls
        assert pipe.stats().blocked["result"] == 0
        del y, result, ticket


@pytest.fixture
def lone() -> Iterator[tuple[FaultDriver, Runtime]]:
    """One simulated device, on which copies take long: what does not wait for one comes too early."""
    described = machine(1)
    driver = FaultDriver(sim.driver({**described, "device": {"count": 1, "memory_gb_s": 0.05}}))
    with Runtime(driver) as runtime:
        driver.arm(FAR)
        yield driver, runtime
        driver.arm(0)
        gc.collect()
        assert not runtime.live().any()


def test_a_kernel_of_the_callers_waits_for_ready(lone: tuple[FaultDriver, Runtime]) -> None:
    _, runtime = lone
    with Executor([0], [twice], adapter="raw", runtime=runtime) as pipe, closing(runtime.stream(0)) as mine:
        ticket = pipe.submit(np.arange(1000.0))
        y = ticket.result()
        mine.wait(y.ready)
        kernel(SimpleNamespace(stream=mine), y, y, lambda values: -values)
        mine.synchronize()
        assert (y.numpy() == -2 * np.arange(1000)).all()
        again = pipe.submit(ticket).result()  # the output itself is as it was
        assert (again.numpy() == 4 * np.arange(1000)).all()
        del y, again, ticket


def test_a_kernel_of_the_callers_that_does_not_wait_is_found() -> None:
    with (
        pytest.raises(OrderViolation, match="must wait for an event recorded on stream"),
        Executor([0], [twice], adapter="raw", machine=machine(1)) as pipe,
        closing(pipe.runtime.stream(0)) as mine,
    ):
        y = pipe.submit(np.arange(1000.0)).result()
        kernel(SimpleNamespace(stream=mine), y, y, lambda values: -values)
        mine.synchronize()


def test_results_that_many_threads_take_do_not_share_memory() -> None:
    """Of sizes that the memory of some results fits, and of others does not."""
    wrong: list[object] = []
    with Executor([0], [twice], adapter="raw", in_flight=8, machine=machine(1)) as pipe:

        def work(number: int) -> None:
            for n in range(40):
                size, value = 100 << (number + n) % 4, 100 * number + n
                found = pipe.submit(np.full(size, value, np.float64)).result().numpy()
                if found.shape != (size,) or not (found == 2 * value).all():
                    wrong.append((number, n, found))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong, wrong


@pytest.mark.parametrize("seed", range(6))
def test_results_are_inputs_at_once(seed: int) -> None:
    """Of the same executor and of another, on its own or in parts, while they are on their way."""
    described = machine(2, seed)
    with (
        open_backend("sim", machine={**described, "device": {"count": 2, "memory_gb_s": 0.05}}) as runtime,
        Executor([0, 1], [twice, twice], adapter="raw", runtime=runtime) as one,
        Executor([1, 0], [lambda x: (x[0] + x[1], x[1])] * 2, adapter="numpy", runtime=runtime) as two,
    ):
        for n in range(6):
            y = one.submit(np.full(3000, float(n))).result()
            ys = [one.submit(y), one.submit(y.raw), two.submit((y, np.ones(3000)))]
            again, raw, (sums, _) = [ticket.result() for ticket in ys]
            del y
            assert (again.numpy() == 16 * n).all() and raw.dtype == "uint8" and (sums == 4 * n + 2).all()
        del again, raw, sums, ys


def test_results_dropped_at_once_leave_nothing(lone: tuple[FaultDriver, Runtime]) -> None:
    _, runtime = lone
    with Executor([0], [twice], adapter="raw", runtime=runtime) as pipe:
        for n in range(20):
            pipe.submit(np.full(1000, n)).result()
            if n == 10:
                warm = runtime.live()
        assert (runtime.live().buffers, runtime.live().events) == (warm.buffers, warm.events)
        last = pipe.submit(np.full(1000, 7)).result()
    assert (last.numpy() == 14).all()  # complete, though nobody waited for it before the executor was closed
    assert (runtime.live().buffers, runtime.live().events) == (1, 1)
    del last


def test_what_keeps_the_event_of_a_result_keeps_the_runtime() -> None:
    with Executor([0], [twice], adapter="raw", machine=machine(1)) as pipe:
        ready = pipe.submit(np.ones(3)).result().ready
        runtime = pipe.runtime
    assert ready.done() and not runtime.closed and runtime.live().events == 1
    del ready
    assert not runtime.live().any()
    del runtime, pipe


@pytest.mark.parametrize("at", [2, 3, 4])
def test_a_result_whose_copy_fails_half_way_can_be_taken_again(lone: tuple[FaultDriver, Runtime], at: int) -> None:
    """The first copy, the second and the record; then nothing is on its way any more."""
    driver, runtime = lone
    with Executor([0], [twice, parts], adapter="raw", runtime=runtime) as pipe:
        for n in range(3):
            ticket = pipe.submit(np.full(1000, n))
            while not ticket.done():
                pass
            driver.arm(at)
            with pytest.raises(DriverError):
                ticket.result()
            driver.arm(0)
            y, _, part = ticket.result()
            assert (y.numpy() == 2 * n).all() and (part["again"].numpy() == 2 * n).all()
        del y, part, ticket


def test_a_fault_after_result_is_for_whoever_looks(lone: tuple[FaultDriver, Runtime]) -> None:
    driver, runtime = lone
    pipe = Executor([0], [twice], adapter="raw", runtime=runtime)
    y = pipe.submit(np.ones(1000)).result()
    driver.arm(1, sticky=True, status="DEVICE_FAULT")
    for look in (y.numpy, y.ready.wait, partial(np.asarray, y), *[partial(pipe.submit, y)] * 2):
        with pytest.raises(DeviceFault):
            look()
    driver.arm(0)
    pipe.close()
    del y, look


# ---- map(): the outputs themselves, for nobody else has their tickets ----


@pytest.mark.parametrize("seed", range(4))
def test_map_gives_the_outputs_themselves(seed: int) -> None:
    used: list[int] = []

    def noted(stage: Any, x: Array) -> Array:
        y = fresh(stage, x)
        used.append(y.address)
        return y

    with open_backend("sim", machine=machine(1, seed)) as runtime:
        with Executor([0], [noted], adapter="raw", runtime=runtime, in_flight=3) as pipe:
            kept = list(pipe.map([np.full(1000, n) for n in range(8)]))
            assert [y.address for y in kept] == used and all(y.ready.done() for y in kept)
            with closing(runtime.stream(0)) as mine:
                kernel(SimpleNamespace(stream=mine), kept[3], kept[3], lambda values: -values)  # it is the caller's
                mine.synchronize()
            for n, y in enumerate(pipe.map([np.full(1000, n) for n in range(8)])):
                assert (y.numpy() == n).all()
            cycle: list[Any] = [y]
            cycle.append(cycle)
            del y, cycle
            gc.collect()
            before = pipe.plan().memory
            for n, y in enumerate(pipe.map([np.full(1000, n) for n in range(30)])):
                assert (y.numpy() == n).all()
            assert len(set(used)) <= 8 + 6 and pipe.plan().memory[0] <= before[0] + 8192
            del y
        wanted = [n if n != 3 else -3 for n in range(8)]  # also after the executor is closed
        assert [y.numpy()[-1] for y in kept] == wanted and runtime.live().buffers == 8
        kept.clear()
        gc.collect()
        assert not runtime.live().any()


def test_results_of_map_that_share_memory_are_copies() -> None:
    def pair(stage: Any, x: Array) -> Any:
        y = fresh(stage, x)
        return y, y.raw

    with Executor([0], [pair], adapter="raw", machine=machine(1)) as pipe:
        for n, (y, same) in enumerate(pipe.map([np.full(100, n) for n in range(5)])):
            assert y.address != same.address and (y.numpy() == n).all()
            assert (same.numpy().view(y.dtype) == n).all()
