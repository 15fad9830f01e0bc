"""Stages that read several earlier ones, or skip some: the results of running in order, whatever the pipeline."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from executor_cases import machine, same

from pyxdev.backends import open as open_backend
from pyxdev.errors import InvalidArgument, StageError
from pyxdev.executor import Executor, Stage

SEEDS = range(40)


class Mix:
    """Returns a value of arrays and plain ones that depends on every part of x, and on what came before."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls = 0

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        arrays: list[Any] = []
        plain: list[int] = []
        gather(x, arrays, plain)
        total = sum((float(a.sum()) for a in arrays), self.number) % 1009
        rows = max([len(a) for a in arrays], default=self.number % 3)
        y = np.full((rows, 3 + self.number), total + self.calls, np.float32)
        return {"y": y[:, ::2], "n": sum(plain) + self.number + self.calls, "rest": [y[:1].astype(np.float16)]}


def gather(x: Any, arrays: list[Any], plain: list[int]) -> None:
    if isinstance(x, np.ndarray):
        arrays.append(x)
    elif isinstance(x, tuple | list | dict):
        for part in x.values() if isinstance(x, dict) else x:
            gather(part, arrays, plain)
    else:
        plain.append(x)


def by_hand(fns: list[Any], inputs: list[Any], xs: list[Any]) -> list[Any]:
    results = []
    for x in xs:
        outputs = [fns[0](x)]
        for n, fn in enumerate(fns[1:], 1):
            read = inputs[n]
            if read is None:
                outputs.append(fn(outputs[-1]))
            elif isinstance(read, int):
                outputs.append(fn(outputs[read]))
            else:
                outputs.append(fn(tuple(outputs[one] for one in read)))
        results.append(outputs[-1])
    return results


def random_graph(choose: random.Random) -> list[Any]:
    """What each stage reads; every output but the last has a reader."""
    count = choose.randint(2, 7)
    inputs: list[Any] = [None]
    for n in range(1, count):
        earlier = list(range(n))
        many = [choose.choice(earlier) for _ in range(choose.choice([0, 1, 2, 2, 3]))]
        inputs.append(choose.choice([None, choose.choice(earlier), many, many]))
    for n in range(count - 1):
        if not any(n in reads(inputs, m) for m in range(n + 1, count)):
            inputs[-1] = [*reads(inputs, count - 1), n]
    return inputs


def reads(inputs: list[Any], n: int) -> list[int]:
    read = inputs[n]
    return [n - 1] if read is None else [read] if isinstance(read, int) else list(read)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_graphs_give_the_bits_of_running_in_order(seed: int) -> None:
    choose = random.Random(seed)
    inputs = random_graph(choose)
    count = len(inputs)
    devices = [choose.randrange(4) for _ in range(choose.randint(1, min(4, count)))]
    costs = [choose.choice([0.0, choose.random() * 1e-3]) for _ in inputs]
    stages = [Stage(Mix(n), cost=cost, inputs=read) for n, (cost, read) in enumerate(zip(costs, inputs, strict=True))]
    shapes = [(choose.choice([0, 1, 40]), choose.choice([1, 900])) for _ in range(2)]
    xs = [(np.full(choose.choice(shapes), k, np.float32), k) for k in range(choose.choice([1, 4, 14]))]
    options: dict[str, Any] = {
        "in_flight": choose.choice(["auto", 1, 2, 9]),
        "depth": choose.choice(["auto", 1, 2]),
        "host_stage": choose.choice(["0", "1"]),
    }
    with Executor(devices, stages, machine=machine(4, seed), **options) as executor:
        results = list(executor.map(xs))
        assert executor.stats().in_flight == 0
    wanted = by_hand([Mix(n) for n in range(count)], inputs, xs)
    for got, right in zip(results, wanted, strict=True):
        assert same(got, {**right, "y": np.ascontiguousarray(right["y"])}), f"seed {seed}: {inputs}"


def test_stages_are_named() -> None:
    stages = [
        Stage(lambda x: x + 1, name="embed"),
        lambda x: x * 2,
        Stage(lambda x: x[0] - x[1], name="join", inputs=("embed", -1)),
        Stage(lambda x: x * 10, inputs="join"),
        Stage(lambda x: (x[0], *x[1:]), inputs=["join", 3, "embed"]),
    ]
    with Executor([0, 1, 2], stages, machine=machine(3)) as executor:
        assert [stage.inputs for stage in executor.plan().stages] == [(), (0,), (0, 1), (2,), (2, 3, 0)]
        y = executor.submit(np.arange(3.0)).result()
    assert same(y, tuple(np.arange(3.0) * k + m for k, m in ((-1, -1), (-10, -10), (1, 1))))


def test_only_the_links_that_are_read_are_opened() -> None:
    stages = [lambda x: x, Stage(lambda x: x), Stage(lambda x: x[0] + x[1], inputs=(0, 1))]
    with Executor([2, 1, 0], stages, machine=machine(3)) as executor:
        assert [(link.src, link.dst) for link in executor.plan().links] == [(2, 1), (2, 0), (1, 0)]
        assert executor.submit(np.ones(3)).result()[0] == 2


@pytest.mark.parametrize(
    "inputs, message",
    [
        ([0], r"inputs of stage 0 \(a\) is 0; the first stage gets what is submitted"),
        ([None, 1], r"inputs of stage 1 has 1, .*allowed: -1 to 0, a"),
        ([None, -2], "inputs of stage 1 has -2"),
        ([None, True], "inputs of stage 1 has True"),
        ([None, "c"], "inputs of stage 1 has 'c', which none of the stages before it"),
        ([None, None, ["b", 0.5]], "inputs of stage 2 has 0.5"),
        ([None, None, {0, 1}], r"inputs of stage 2 is \{0, 1\}"),
        ([None, None, "a"], r"nothing reads the output of stage 1 \(b\)"),
        ([None, ()], r"nothing reads the output of stage 0 \(a\)"),
    ],
)
def test_wrong_inputs_each_have_their_message(inputs: list[Any], message: str) -> None:
    stages = [Stage(lambda x: x, name=name, inputs=read) for name, read in zip("abc", inputs, strict=False)]
    with pytest.raises(InvalidArgument, match=message):
        Executor([0], stages, machine=machine(1))


def test_a_name_that_two_stages_have_is_refused() -> None:
    stages = [Stage(lambda x: x, name="a"), Stage(lambda x: x, name="a"), Stage(lambda x: x, inputs="a")]
    with pytest.raises(InvalidArgument, match="has 'a', which several of the stages before it have"):
        Executor([0], stages, machine=machine(1))


def test_tickets_of_a_graph_are_inputs() -> None:
    stages = [lambda x: x + 1, lambda x: x * 2, Stage(lambda x: x[0] + x[1], inputs=(0, -1))]
    with Executor([0, 1, 2], stages, machine=machine(3)) as executor:
        tickets = [executor.submit(np.full(50, k)) for k in range(3)]
        for _ in range(3):
            tickets = [executor.submit(ticket) for ticket in tickets]
        wanted = [float(k) for k in range(3)]
        for _ in range(4):
            wanted = [(k + 1) * 3 for k in wanted]
        assert [ticket.result()[0] for ticket in tickets] == wanted


@pytest.mark.parametrize("seed", range(8))
def test_a_branch_that_raises_while_the_other_is_busy(seed: int) -> None:
    """What the other branch still reads must not be given away, though the microbatch is over; the checker watches."""
    nbytes = 20000

    class Branch:
        def __init__(self, cost: float, bad: range) -> None:
            self.cost, self.bad, self.calls = cost, bad, 0

        def __call__(self, stage: Any, x: Any) -> Any:
            y = stage.empty((nbytes,), "uint8")
            stage.stream.launch(lambda: None, cost=self.cost)
            for part in x if isinstance(x, tuple) else (x,):
                stage.stream.copy(y.address, part.address, nbytes, dst_device=stage.device, src_device=stage.device)
            self.calls += 1
            if self.calls in self.bad:
                raise LookupError("here")
            return y

    never = range(0)
    fns = [Branch(0, never), Branch(5e-3, never), Branch(0, range(4, 20)), Branch(0, never)]
    stages = [Stage(fn, inputs=read) for fn, read in zip(fns, (None, 0, 0, (1, 2)), strict=True)]
    xs = [np.full(nbytes, k, np.uint8) for k in range(30)]
    with open_backend("sim", machine=machine(4, seed)) as runtime:
        with Executor(
            range(4), stages, adapter="raw", runtime=runtime, in_flight=1, depth=1, host_stage="0"
        ) as executor:
            for n, x in enumerate(xs):
                ticket = executor.submit(x)
                if n + 1 in fns[2].bad:
                    with pytest.raises(StageError, match=f"stage 2 .* microbatch {n}"):
                        ticket.result()
                else:
                    assert same(ticket.result().numpy(), x)
        del ticket
        assert not runtime.live().any()


def test_a_long_skip_does_not_hold_the_pipeline_up() -> None:
    """Ten stages of 1 ms, the last of which reads the first: still a microbatch every millisecond."""
    stages: list[Any] = [Stage(lambda x: x, cost=1e-3, out=lambda x: x) for _ in range(9)]
    stages.append(Stage(lambda x: x[0] + x[1], cost=1e-3, out=lambda x: x[0], inputs=(0, -1)))
    quiet = {"device": {"count": 10}}
    with Executor(range(10), stages, machine=quiet, host_stage="0") as executor:
        list(executor.map([np.zeros(10)] * 20))
        begin = executor.runtime.clock()
        assert len(list(executor.map([np.zeros(10)] * 100))) == 100
        took = executor.runtime.clock() - begin
        assert executor.plan().stages[9].depth == 11 - 1
    assert took < 1.1 * 109e-3


def test_nothing_of_a_graph_is_allocated_after_warm_up() -> None:
    stages = [Stage(Mix(0)), Stage(Mix(1)), Stage(Mix(2), inputs=(0, 1)), Stage(Mix(3), inputs=(0, 2))]
    with Executor([0, 1, 2], stages, machine=machine(3)) as executor:
        for n, _ in enumerate(executor.map([(np.full((40, 10), n), n) for n in range(60)])):
            if n == 25:
                warm = executor.runtime.live()
        after = executor.runtime.live()
        plan = executor.plan()
        assert sum(plan.memory.values()) == after.device_bytes
    for name in ("buffers", "events", "device_bytes", "pinned_bytes", "streams", "links"):
        assert getattr(after, name) == getattr(warm, name), name
