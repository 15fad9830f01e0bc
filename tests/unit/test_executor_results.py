"""The executor gives what the stages give one after the other, to the bit, whatever the pipeline looks like."""

from __future__ import annotations

import gc
import re
from typing import Any, NamedTuple

import numpy as np
import pytest
from executor_cases import Case, History, machine, random_case, same

from pyxdev._native import Runtime
from pyxdev.backends import open as open_backend
from pyxdev.errors import InvalidArgument
from pyxdev.executor import Executor, Stage


def run(case: Case, devices: int = 6) -> tuple[list[Any], Runtime]:
    with Executor(case.devices, case.stages(), machine=machine(devices, case.seed), **case.options) as executor:
        return list(executor.map(case.copies())), executor.runtime


@pytest.mark.parametrize("block", range(10))
def test_random_pipelines_give_the_bits_of_running_in_order(block: int) -> None:
    for seed in range(block * 12, block * 12 + 12):
        case = random_case(seed)
        results, runtime = run(case)
        assert runtime.closed
        for n, (got, wanted) in enumerate(zip(results, case.in_order(), strict=True)):
            assert same(got, wanted), f"seed {seed}, microbatch {n}: {got} instead of {wanted}"


@pytest.mark.parametrize("devices", range(1, 11))
@pytest.mark.parametrize("host_stage", ["0", "1"])
def test_one_to_ten_devices(devices: int, host_stage: str) -> None:
    seed = devices
    stages = [History() for _ in range(devices)]
    case = Case(seed, list(range(devices)), [History] * devices, [2e-4] * devices, random_case(3).inputs[:4])
    case.inputs = [{**case.inputs[0], "a": np.full((3, 50), n, np.float32)} for n in range(2 * devices)]
    assert len(stages) == len(case.makers)
    case.options = {"host_stage": host_stage, "tile_mb": 0.0001}
    results, _ = run(case, devices)
    assert all(map(same, results, case.in_order())), f"seed {seed}"


def test_a_device_may_be_named_twice_and_devices_may_be_fewer_than_stages() -> None:
    x = np.arange(6.0)
    fns = [lambda x: x + 1, lambda x: x * 2, lambda x: x - 3, lambda x: x / 7, lambda x: x**2]
    wanted = (((x + 1) * 2 - 3) / 7) ** 2
    for devices, placed in (
        ([0], [0, 0, 0, 0, 0]),
        ([1, 0], [1, 1, 1, 0, 0]),
        ([0, 1, 0], [0, 0, 1, 1, 0]),
        ([3, 2, 1, 0, 3], [3, 2, 1, 0, 3]),
    ):
        with Executor(devices, fns, machine=machine(4)) as executor:
            assert [stage.device for stage in executor.plan().stages] == placed
            assert same(executor.submit(x).result(), wanted)


def test_a_stage_may_name_its_own_device() -> None:
    stages = [Stage(lambda x: x, device=2), lambda x: x, Stage(lambda x: x, device=1)]
    with Executor([0], stages, machine=machine(3)) as executor:
        assert [stage.device for stage in executor.plan().stages] == [2, 0, 1]


class Pair(NamedTuple):
    first: Any
    second: Any


def test_activations_may_be_anything_nested() -> None:
    x = Pair([np.ones(3), (np.zeros((2, 0)), {"k": np.array(5), 7: None})], {"text": "t", "number": 1.5, "empty": ()})
    with Executor([0, 1], [lambda x: x, lambda x: Pair(x.second, x.first)], machine=machine(2)) as executor:
        assert same(executor.submit(x).result(), Pair(x.second, x.first))


def test_activations_without_arrays() -> None:
    with Executor([0, 1, 2], [lambda n: n + 1, str, lambda t: t + "0"], machine=machine(3)) as executor:
        assert list(executor.map(range(8))) == ["10", "20", "30", "40", "50", "60", "70", "80"]


def test_a_first_stage_that_makes_its_own_input() -> None:
    """Nothing is submitted but the wish for another one."""
    counter = iter(range(100))
    source = Stage(lambda _: np.full(10, next(counter)), out=lambda _: np.empty(10, np.int64), cost=1e-4)
    with Executor([0, 1], [source, lambda x: x * 2], machine=machine(2)) as executor:
        assert [ticket.result()[0] for ticket in [executor.submit(None) for _ in range(5)]] == [0, 2, 4, 6, 8]
        assert [y[-1] for y in executor.map(None for _ in range(5))] == [10, 12, 14, 16, 18]


def test_every_dtype_arrives() -> None:
    kinds = ["bool", "int8", "uint16", "int64", "float16", "float64", "complex64", ">f4", "S5", "U3", "M8[ns]"]
    x = [np.zeros(5, kind) for kind in kinds]
    with Executor([0, 1], [lambda x: x, lambda x: x], machine=machine(2)) as executor:
        assert same(executor.submit(x).result(), x)


@pytest.mark.parametrize(
    "x, message",
    [
        (np.array([None, 1]), "dtype object"),
        (np.zeros(2, [("a", "f4")]), "cannot go to a device"),
        (np.ma.masked_array([1, 2], [True, False]), "masked array"),
        (type("Sub", (list,), {})([1]), "Sub cannot go"),
    ],
)
def test_what_cannot_be_sent_is_refused_and_changes_nothing(x: Any, message: str) -> None:
    with Executor([0], [lambda x: x], machine=machine(1)) as executor:
        with pytest.raises(InvalidArgument, match=message):
            executor.submit({"x": x})
        assert executor.submit(1).index == 0


def test_results_belong_to_the_caller() -> None:
    with Executor([0], [lambda x: x], machine=machine(1)) as executor:
        ticket = executor.submit(np.arange(4))
        first = ticket.result()
        assert ticket.result() is first
        first[:] = 9
        second = executor.submit(np.arange(4)).result()
    assert first.tolist() == [9, 9, 9, 9] and second.tolist() == [0, 1, 2, 3]


def test_an_input_may_be_changed_after_submit() -> None:
    with Executor([0], [Stage(lambda x: x, cost=1e-3)], in_flight=4, machine=machine(1)) as executor:
        x = np.zeros(1000)
        tickets = []
        for n in range(4):
            x[:] = n
            tickets.append(executor.submit(x))
        assert [ticket.result()[-1] for ticket in tickets] == [0, 1, 2, 3]


# ---- tickets as inputs ----


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_chained_tickets(seed: int, devices: int) -> None:
    """Token loops, several at once: each microbatch is an earlier one's output."""
    fns = [lambda x, k=k: (x[0] * 1.5 + k, x[1] + 1) for k in range(devices)]
    starts = [(np.full(300, float(n)), n) for n in range(3)]
    with Executor(
        range(devices), [Stage(fn, cost=1e-4) for fn in fns], depth=2, machine=machine(devices, seed)
    ) as executor:
        tickets = [executor.submit(x) for x in starts]
        for _ in range(6):
            tickets = [executor.submit(ticket) for ticket in tickets]
        results = [ticket.result() for ticket in tickets]
    for got, x in zip(results, starts, strict=True):
        for _ in range(7):
            for fn in fns:
                x = fn(x)
        assert same(got, x), f"seed {seed}"


@pytest.mark.parametrize("seed", range(6))
def test_tickets_among_other_inputs(seed: int) -> None:
    def join(x: Any) -> Any:
        return {"sum": x["a"]["sum"] + x["b"]["sum"] * x["w"], "k": x["a"]["k"] + x["b"]["k"]}

    start = {"a": {"sum": np.ones(400), "k": 1}, "b": {"sum": np.ones(400), "k": 2}, "w": np.full(400, 0.5)}
    with Executor([0, 1], [join, Stage(lambda x: x, cost=1e-4)], machine=machine(2, seed)) as executor:
        a = executor.submit(start)
        b = executor.submit({**start, "w": np.full(400, 2.0)})
        c = executor.submit({"a": a, "b": b, "w": np.full(400, 3.0)})
        d = executor.submit({"a": c, "b": {"sum": np.zeros(400), "k": 5}, "w": np.ones(400)})
        assert same(d.result(), {"sum": np.full(400, 1.5 + 3.0 * 3), "k": 11}), f"seed {seed}"
        assert same(a.result(), {"sum": np.full(400, 1.5), "k": 3})


def test_a_ticket_can_be_submitted_often_and_after_its_result() -> None:
    with Executor([0, 1], [lambda x: x + 1, lambda x: x], machine=machine(2)) as executor:
        first = executor.submit(np.zeros(50))
        seconds = [executor.submit(first) for _ in range(9)]
        assert first.result()[0] == 1
        seconds.append(executor.submit(first))
        del first
        gc.collect()
        assert all(ticket.result()[0] == 2 for ticket in seconds)


def test_a_ticket_of_another_executor_is_refused() -> None:
    fns = [lambda x: x]
    with open_backend("sim") as runtime:
        with Executor([0], fns, runtime=runtime) as one, Executor([0], fns, runtime=runtime) as two:
            ticket = one.submit(1)
            with pytest.raises(InvalidArgument, match="another executor"):
                two.submit([ticket])
        assert not runtime.live().any()


# ---- outputs that are learned, declared, or neither ----


def test_outputs_are_learned_once_for_each_kind_of_input() -> None:
    waits = []
    with Executor([0], [Stage(lambda x: x[0] if x[1] else x, cost=1.0)], in_flight=8, machine=machine(1)) as executor:
        for x in [(np.ones(3), True, 1), (np.ones(3), True, 2), (np.ones(3), False, 3), (np.ones(4), False, 3)] * 2:
            before = executor.runtime.clock()
            executor.submit(x)
            waits.append(executor.runtime.clock() - before > 0.5)
    assert waits == [True, False, True, True] + [False] * 4


def test_declared_outputs_are_not_waited_for() -> None:
    stages = [
        Stage(lambda x: (x[: x.shape[0] // 2], 3), cost=1.0, out=lambda x: (np.empty((x.shape[0] // 2, 2), "f4"), 3)),
        Stage(lambda x: x[0].sum(1), cost=lambda x: x[0].shape[0] * x[1], out=lambda x: np.empty(x[0].shape[0], "f4")),
        Stage(lambda x: x * 2, out=np.empty(4, "f4")),
    ]
    with Executor([0, 1, 2], stages, machine=machine(3)) as executor:
        ticket = executor.submit(np.ones((8, 2), np.float32))
        assert executor.runtime.clock() < 0.5
        assert same(ticket.result(), np.full(4, 4, np.float32))
        assert executor.runtime.clock() > 12


# ---- memory ----


def test_nothing_is_allocated_after_warm_up() -> None:
    case = random_case(5)
    inputs = [{**case.inputs[0], "a": np.full((40, 10), n, np.float32)} for n in range(60)]
    with Executor([0, 1, 2], [History(), History(), History()], machine=machine(3)) as executor:
        for n, _ in enumerate(executor.map(inputs)):
            if n == 20:
                warm = executor.runtime.live()
        after = executor.runtime.live()
    for name in ("buffers", "events", "device_bytes", "pinned_bytes", "streams", "links"):
        assert getattr(after, name) == getattr(warm, name), name


def test_growing_and_shrinking_activations() -> None:
    sizes = [1, 10, 5000, 3, 70000, 0, 70001, 2, 5]
    with Executor([0, 1], [lambda x: x * 2, lambda x: x + 1], depth=2, machine=machine(2)) as executor:
        for _ in range(3):
            inputs = [np.full(size, n, np.float64) for n, size in enumerate(sizes)]
            for x, y in zip(inputs, executor.map(inputs), strict=True):
                assert same(y, x * 2 + 1)
        plan = executor.plan()
        assert plan.memory[0] < 3 * 2 * 70001 * 8 and plan.pinned < 10 * 70001 * 8


def test_plan_tells_links_and_memory() -> None:
    with Executor([0, 1], [lambda x: x, lambda x: x], host_stage="1", tile_mb=0.5, machine=machine(2)) as executor:
        list(executor.map([np.zeros(1000)] * 4))
        plan = executor.plan()
        live = executor.runtime.live()
        assert [(link.src, link.dst, link.path) for link in plan.links] == [(0, 1, "staged")]
        assert plan.links[0].pinned == 4 << 19
        assert plan.pinned == live.pinned_bytes
        assert sum(plan.memory.values()) == live.device_bytes
        assert (plan.in_flight, plan.depth) == (4, 4)


@pytest.mark.parametrize("host_stage, gb_s", [("0", 0), ("1", 25), ("auto", 50)])
def test_plan_tells_rate_and_bytes_of_links(host_stage: str, gb_s: float) -> None:
    """As measured on a machine with links of 50 GB/s, and 25 GB/s to and from the host."""
    stages = [lambda x: (x, x[:10]), lambda x: x, Stage(lambda x: x[0][0], inputs=(0, 1))]
    quiet = {"device": {"count": 2}}
    with Executor([0, 1, 0], stages, host_stage=host_stage, machine=quiet) as executor:
        assert [link.nbytes for link in executor.plan().links] == [0, 0, 0]
        executor.submit(np.zeros(1 << 20, np.uint8)).result()
        links = {(link.src, link.dst): link for link in executor.plan().links}
    sent = (1 << 20) + 256
    assert {way: link.nbytes for way, link in links.items()} == {(0, 1): sent, (0, 0): sent, (1, 0): sent}
    for way in ((0, 1), (1, 0)):
        assert links[way].gb_s == pytest.approx(gb_s, rel=0.5)


CALLS = {"copy": 4, "launch": 8, "record": 1, "wait": 2, "query": 0, "sync": 0, "alloc": 0}


@pytest.mark.parametrize("seconds", [0, 1e-3])
def test_what_submitting_costs(seconds: float) -> None:
    """Four waits, a copy, a launch and two records for every stage but the last, which waits for no reader."""
    simulated = {"device": {"count": 2}, "calls_us": CALLS, "run": {"delay_us": 0}}
    stages = [Stage(lambda x: x, cost=seconds, out=lambda x: x)] * 3
    with Executor([0, 1, 0], stages, host_stage="0", in_flight=6, machine=simulated) as pipe:
        assert pipe.stats().submission == (0, 0, 0) and pipe.stats().limit == ""
        for _ in pipe.map([np.ones(4)] * 20):
            assert seconds == 0 or not pipe.stats().limit
        tickets = [pipe.submit(np.ones(4)) for _ in range(200)]
        stats = pipe.stats()
        assert stats.submission[1:] == pytest.approx([22e-6, 20e-6]) and stats.submission[0] < 22e-6
        assert 0 <= stats.besides < 1e-6
        told = r"the submitting thread is the limit: \d\d\.?\d* us a microbatch, (9\d|100)% of its time"
        assert bool(re.fullmatch(told, stats.limit)) is (seconds == 0), stats.limit
        del tickets
