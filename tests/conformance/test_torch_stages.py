"""Torch stages on real GPUs: `pytest tests/conformance/test_torch_stages.py --pyxdev-backend=cuda`.

Where there is no GPU, tests/unit/test_executor_torch.py runs the adapter over the memory of simulated devices.
"""

import gc
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from pyxdev import Executor, Stage, adapters
from pyxdev.errors import StageError


@pytest.fixture
def torch(pyxdev_backend):
    if pyxdev_backend == "sim":
        pytest.skip("torch stages run on GPUs; simulated devices have tests of their own")
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    if adapters.torch_is_for(torch) != pyxdev_backend:
        pytest.skip(f"this torch is built for {adapters.torch_is_for(torch)} devices")
    return torch


def blocks(torch, devices, width=256):
    """One module on each device."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(width, width)
            self.norm = torch.nn.LayerNorm(width)

        def forward(self, x):
            return x + torch.relu(self.linear(self.norm(x)))

    torch.manual_seed(1)
    return [Block().to(f"cuda:{device}") for device in devices]


def by_hand(torch, stages, devices, x):
    for stage, device in zip(stages, devices, strict=True):
        x = stage(x.to(f"cuda:{device}"))
    return x


@pytest.mark.parametrize("host_stage", ["1", "auto"])
@pytest.mark.parametrize("depth, in_flight", [(1, 1), (1, 6), (2, 8), ("auto", "auto")])
def test_modules_give_the_bits_of_running_in_order(torch, runtime, seed, host_stage, depth, in_flight):
    devices = [n % runtime.device_count for n in range(3)]
    stages = blocks(torch, devices)
    xs = [torch.randn(200 + n, 256, device="cuda:0") for n in range(12)]
    with torch.no_grad():
        wanted = [by_hand(torch, stages, devices, x) for x in xs]
        options = {"depth": depth, "in_flight": in_flight, "host_stage": host_stage}
        with Executor(devices, stages, runtime=runtime, **options) as pipeline:
            assert {stage.adapter for stage in pipeline.plan().stages} == {"torch"}
            for _ in range(3):
                got = list(pipeline.map(xs))
                assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
            assert got[0].device.index == devices[-1]


def test_the_callers_stream_and_device_stay_and_order_the_data(torch, runtime):
    """Inputs are read after what the caller has queued, results can be used at once on his stream, both may be dropped
    or overwritten right away."""
    devices = [0, runtime.device_count - 1]
    with Executor(devices, [lambda x: x * 2, lambda x: x + 1], runtime=runtime) as pipeline:
        theirs = torch.cuda.Stream(device=devices[-1])
        with torch.cuda.stream(theirs):
            x = torch.empty(1 << 20, device=f"cuda:{devices[-1]}")
            tickets = []
            for n in range(20):
                torch.cuda._sleep(1_000_000)
                x.fill_(n)
                tickets.append(pipeline.submit(x))
                assert torch.cuda.current_stream(devices[-1]) == theirs
            total = 0
            for n, ticket in enumerate(tickets):
                y = ticket.result()
                total = total + (y - (2 * n + 1)).abs().max()
                del y
            assert total.item() == 0
        assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("graph", ["off", "on"])
@pytest.mark.parametrize("own", [False, True])
def test_results_of_map_are_dropped_before_they_are_read(torch, runtime, graph, own):
    """They are the last stage's outputs themselves, whose memory it must not write again before the caller's stream has
    read them; some are kept, one by a view, also when the pipeline is closed."""
    last = runtime.device_count - 1
    xs = [torch.full((1 << 20,), float(n), device="cuda:0") for n in range(60)]
    kept = {}
    with torch.cuda.device(last), torch.cuda.stream(torch.cuda.Stream() if own else torch.cuda.current_stream()):
        total = torch.zeros((), device=f"cuda:{last}")
        with Executor([0, last], [lambda x: x * 2, lambda x: x + 1], runtime=runtime, graph=graph) as pipeline:
            results = pipeline.map(xs)
            for n in range(len(xs)):
                y = next(results)
                torch.cuda._sleep(2_000_000)
                total += (y - (2 * n + 1)).abs().max()
                if n % 7 == 0:
                    kept[n] = y[5:] if n else y
                del y
            results.close()
        others = [torch.full((1 << 20,), -1.0, device=f"cuda:{last}") for _ in range(8)]
        assert total.item() == 0 and all(other[0].item() == -1 for other in others)
        assert all((y == 2 * n + 1).all().item() for n, y in kept.items())


@pytest.mark.parametrize("kind", ["static", "cache", "input", "strided", "inplace"])
def test_outputs_that_others_refer_to(torch, runtime, kind):
    device = f"cuda:{runtime.device_count - 1}"
    static = torch.zeros(300, 400, device="cuda:0")

    def stage(x):
        if kind == "static":
            return torch.add(x, 1, out=static)
        if kind == "cache":
            static.copy_(x).add_(1)
            return static[:, :200]
        if kind == "strided":
            return (x + 1).T
        return x.add_(1) if kind == "inplace" else x

    def last(x):
        assert x.device == torch.device(device) and x.is_contiguous()
        torch.cuda._sleep(200_000)
        return x * 1

    with Executor([0, runtime.device_count - 1], [stage, last], runtime=runtime, in_flight=6, depth=1) as pipeline:
        xs = [torch.full((300, 400), float(n)) for n in range(15)]
        for n, y in enumerate(pipeline.map(xs)):
            assert (y == n + (kind != "input")).all().item(), n


def test_memory_of_torch_stays_bounded(torch, runtime):
    devices = [0, runtime.device_count - 1]
    stages = blocks(torch, devices)
    xs = [torch.randn(2000, 256, device="cuda:0")] * 10
    with torch.no_grad(), Executor(devices, stages, runtime=runtime) as pipeline:
        assert_memory_settles(torch, pipeline, xs, devices)


def assert_memory_settles(torch, pipeline, xs, devices):
    reserved = []
    for _ in range(6):
        for _ in pipeline.map(xs):
            pass
        reserved.append([torch.cuda.memory_reserved(device) for device in devices])
    assert reserved[-1] == reserved[2]


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("graph", ["off", "on"])
def test_token_loops(torch, runtime, sequences, graph):
    devices = list(range(runtime.device_count))
    stages = blocks(torch, devices)
    xs = [torch.randn(8, 256, device="cuda:0") for _ in range(sequences)]
    with torch.no_grad(), Executor(devices, stages, runtime=runtime, graph=graph) as pipeline:
        tickets = [pipeline.submit(x) for x in xs]
        for _ in range(20):
            tickets = [pipeline.submit(ticket) for ticket in tickets]
        for ticket, x in zip(tickets, xs, strict=True):
            for _ in range(21):
                x = by_hand(torch, stages, devices, x)
            assert torch.equal(ticket.result(), x)
        assert all((stage.captured > 0) is (graph == "on") for stage in pipeline.plan().stages)


def test_host_inputs_of_torch_and_numpy(torch, runtime):
    choose = random.Random(1)
    with Executor([0], [lambda x: (x["a"] * x["n"], x["b"])], runtime=runtime) as pipeline:
        for n in range(10):
            size = choose.choice([0, 1, 1000, 100_000])
            a, b = torch.full((size,), 2.0), np.full((size, 2), n, np.int32)
            ticket = pipeline.submit({"a": a, "b": b, "n": n})
            a.zero_()
            b[:] = 0
            x, y = ticket.result()
            assert x.shape == (size,) and (x == 2 * n).all().item() and (y == n).all().item()


def test_errors(torch, runtime):
    def fails(x):
        if x[0].item() == 2:
            raise RuntimeError("here")
        return x + 1

    def keeps(x, kept=[]):  # noqa: B006
        kept.append(x)
        return x + 1

    with Executor([0], [fails], runtime=runtime) as pipeline:
        tickets = [pipeline.submit(torch.full((9,), float(n))) for n in range(4)]
        with pytest.raises(StageError, match="microbatch 2"):
            tickets[2].result()
        assert pipeline.submit(torch.ones(9)).result()[0].item() == 2
        del tickets
    with Executor([0], [keeps], runtime=runtime) as pipeline:
        with pytest.raises(StageError, match="kept a tensor of its input"):
            pipeline.submit(torch.ones(9)).result()
        keeps.__defaults__[0].clear()


# ---- graphs ----


@pytest.mark.parametrize("mode", ["on", "auto"])
@pytest.mark.parametrize("host_stage", ["1", "auto"])
@pytest.mark.parametrize("depth, in_flight", [(1, 1), (2, 8), ("auto", "auto")])
def test_graphs_give_the_bits_of_running_in_order(torch, runtime, mode, host_stage, depth, in_flight):
    devices = [n % runtime.device_count for n in range(3)]
    stages = blocks(torch, devices)
    xs = [torch.randn(200, 256, device="cuda:0") for _ in range(20)]
    options = {"depth": depth, "in_flight": in_flight, "host_stage": host_stage, "graph": mode}
    with torch.no_grad():
        wanted = [by_hand(torch, stages, devices, x) for x in xs]
        with Executor(devices, stages, runtime=runtime, **options) as pipeline:
            for _ in range(3):
                got = list(pipeline.map(xs))
                assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
                tickets = [pipeline.submit(x) for x in xs]
                got = [ticket.result() for ticket in tickets]
                assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
            plan = pipeline.plan()
            assert [stage.captured for stage in plan.stages] == [stage.depth for stage in plan.stages], plan
            del tickets
        assert runtime.live().graphs == 0


def test_results_and_tickets_of_graphs_stay_as_they_are(torch, runtime):
    """Kept ones are neither overwritten by later launches nor by the caller."""
    devices = [0, runtime.device_count - 1]
    with Executor(devices, [lambda x: x * 2, lambda x: (x + 1, 7)], runtime=runtime, graph="on", depth=2) as pipeline:
        xs = [torch.full((1000,), float(n), device="cuda:0") for n in range(20)]
        tickets = [pipeline.submit(x) for x in xs]
        early = tickets[3].result()[0]
        early.fill_(-1)
        for _ in range(3):
            assert [int(y[0][0].item()) for y in pipeline.map(xs)] == [2 * n + 1 for n in range(20)]
        for n, ticket in enumerate(tickets):
            y, constant = ticket.result()
            assert (y == (-1 if n == 3 else 2 * n + 1)).all().item() and constant == 7
        assert all(stage.captured for stage in pipeline.plan().stages)


def pools(torch):
    """Segments of torch's memory that are in pools of graphs."""
    return [one for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) != (0, 0)]


def test_memory_of_graphs_stays_bounded(torch, runtime):
    """And is given back when the executor is closed."""
    devices = [0, runtime.device_count - 1]
    stages = blocks(torch, devices)
    xs = [torch.randn(2000, 256, device="cuda:0")] * 10
    with torch.no_grad():
        with Executor(devices, stages, runtime=runtime, graph="on") as pipeline:
            assert_memory_settles(torch, pipeline, xs, devices)
            assert all(stage.captured for stage in pipeline.plan().stages)
            assert pools(torch)
        del pipeline
    gc.collect()
    torch.cuda.empty_cache()
    assert not pools(torch)


@pytest.mark.parametrize("depth", [2, 4])
def test_scratch_of_one_graph_is_no_output_of_another(torch, runtime, depth):
    """Large outputs that are read for long, through the host, behind stages that free as much as they return."""
    devices = [0, runtime.device_count - 1]

    def chain(x):
        for _ in range(3):
            x = ((x * 2) + 1) * 1
        return x

    with Executor(devices, [chain, lambda x: x * 1], runtime=runtime, graph="on", host_stage="1", depth=depth,
                  in_flight=8) as pipeline:  # fmt: skip
        xs = [torch.full((8 << 20,), float(n), device="cuda:0") for n in range(24)]
        for _ in range(2):
            for n, y in enumerate(pipeline.map(xs)):
                assert (y == 8 * n + 7).all().item(), n
        assert [stage.captured for stage in pipeline.plan().stages] == [depth, depth]


class Odd:
    """A stage that cannot be captured, or that must not be."""

    def __init__(self, torch, kind):
        self.torch, self.kind, self.calls = torch, kind, 0
        self.total = torch.zeros(1, device="cuda:0")

    def __call__(self, x):
        self.calls += 1
        if self.kind == "sync":
            return x * float(x[0].item() >= 0)
        if self.kind == "shape":
            return x[x >= 0]
        if self.kind == "random":
            return x + self.torch.rand_like(x) * 0
        if self.kind == "raises" and self.calls == 3:
            raise RuntimeError("only once")
        if self.kind == "counts":
            return x * 1, self.calls
        return x * 1


@pytest.mark.parametrize("kind", ["sync", "shape", "random", "raises", "counts"])
def test_what_cannot_be_captured_stays_eager_and_torch_goes_on_as_before(torch, runtime, kind, caplog):
    """A capture that failed leaves nothing behind: not in the stream, the allocator, or the random numbers."""
    with Executor([0], [Odd(torch, kind)], runtime=runtime, graph="on", depth=2, in_flight=2) as pipeline:
        xs = [torch.full((1000,), float(n), device="cuda:0") for n in range(12)]
        for _ in range(2):
            for n, y in enumerate(pipeline.map(xs)):
                y = y[0] if kind == "counts" else y
                assert (y == n).all().item() and y.shape == (1000,)
        plan = pipeline.plan().stages[0]
        assert plan.captured == 0 and plan.eager, plan
        assert len([line for line in caplog.messages if "stays eager" in line]) == 1
    torch.manual_seed(3)
    first = torch.rand(5, device="cuda:0")
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(5, device="cuda:0"))
    stream = torch.cuda.Stream()
    block = torch.empty(1 << 20, device="cuda:0")
    block.record_stream(stream)
    del block
    torch.cuda.synchronize()
    graph, static = torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda:0")
    with torch.cuda.graph(graph):
        static.add_(1)
    graph.replay()
    assert static.sum().item() == 4


def test_a_state_and_random_numbers_are_found_out_by_the_trial(torch, runtime, caplog):
    total = torch.zeros(1, device="cuda:0")

    def adds(x):
        return x + total.add_(1)

    def draws(x):
        return x + torch.rand_like(x)

    for stage in (adds, draws):
        caplog.clear()
        with Executor([0], [stage], runtime=runtime, graph="auto") as pipeline:
            for _ in pipeline.map([torch.ones(10, device="cuda:0")] * 10):
                pass
            assert pipeline.plan().stages[0].captured == 0
        assert "stays eager" in caplog.text


def test_a_state_on_the_device_advances_once_a_microbatch(torch, runtime):
    """With "on", which tries nothing."""
    total = torch.zeros(1, device="cuda:0")

    def adds(x):
        return x + total.add_(1)

    with Executor([0], [adds], runtime=runtime, graph="on", depth=3) as pipeline:
        ys = list(pipeline.map([torch.zeros(10, device="cuda:0")] * 20))
        assert [y[0].item() for y in ys] == list(range(1, 21))
        assert pipeline.plan().stages[0].captured


def test_graphs_of_changing_shapes_and_in_place_stages(torch, runtime):
    choose = random.Random(1)
    with Executor([0, runtime.device_count - 1], [lambda x: x.mul_(2), lambda x: x], runtime=runtime, graph="auto",
                  depth=2) as pipeline:  # fmt: skip
        sizes = [choose.choice([10, 1000, 50_000]) for _ in range(60)]
        for size, y in zip(sizes, pipeline.map(torch.arange(size, device="cuda:0") for size in sizes), strict=True):
            assert torch.equal(y.cpu(), torch.arange(size) * 2)
        assert [stage.captured for stage in pipeline.plan().stages] == [6, 6]


def test_a_split_model_and_a_language_model(torch, runtime):
    """The examples, on all GPUs there are."""
    for example, last in [("torch_split.py", "largest difference: 0.0"), ("causal_lm.py", "model: True")]:
        if example == "causal_lm.py":
            pytest.importorskip("transformers")
        command = [sys.executable, Path(__file__).parents[2] / "examples" / example]
        path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.rstrip().endswith(last), done.stdout


def test_what_makes_the_host_wait_is_found(torch, runtime):
    def waits(x):
        return x * x.sum().item()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that it is a prototype
        torch.cuda.set_sync_debug_mode("default")
    x = torch.ones(9, device="cuda:0")
    for fn in (waits, lambda x: x * 2):
        with Executor([0], [Stage(fn, sync_check="error")], runtime=runtime) as pipeline:
            if fn is waits:
                with pytest.raises(StageError, match=r"stage 0.*synchroniz"):
                    pipeline.submit(x).result()
            else:
                assert (pipeline.submit(x).result() == 2).all().item()
    assert torch.cuda.get_sync_debug_mode() == 0
    with Executor([0], [Stage(waits, sync_check="warn")], runtime=runtime) as pipeline:
        with pytest.warns(UserWarning, match="synchroniz"):
            ticket = pipeline.submit(x)
        assert (ticket.result() == 9).all().item()
