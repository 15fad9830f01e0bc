"""The torch adapter, as far as it can be tested without a GPU.

Its stand-in for simulated devices has CPU tensors over their memory: a stage waits for its simulated stream, runs at
once, and its outputs are moved to memory of the simulated device. Who refers to what memory, what is cloned, what is
held and for how long is as on a GPU; streams of torch are not there. Here such a stage can be captured as well: its
graph is a kernel that runs it again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from executor_cases import machine

torch = pytest.importorskip("torch")

from pyxdev import Array  # noqa: E402
from pyxdev._pipeline import Loans, Storages, TorchStage  # noqa: E402
from pyxdev.adapters import torch_simulated  # noqa: E402
from pyxdev.adapters.activation import Layouts, build, flatten  # noqa: E402
from pyxdev.adapters.interface import Streams  # noqa: E402
from pyxdev.adapters.torch import TorchAdapter  # noqa: E402
from pyxdev.backends import open as open_backend  # noqa: E402
from pyxdev.errors import InvalidArgument, StageError  # noqa: E402
from pyxdev.executor import Executor, Stage  # noqa: E402


class Capturable(torch_simulated.SimulatedTorchAdapter):
    """Whose stages can be captured, for tests of that."""

    uncapturable = ""
    captures = False

    @contextmanager
    def _pooled(self, stage: Any) -> Iterator[None]:
        try:
            self.captures = True
            yield
        finally:
            self.captures = False

    def enter(self, stage: Any) -> Any:
        if not self.captures:
            return super().enter(stage)
        self._inside, outer = stage, self._inside
        return outer

    def queue(self, stage: Any, turn: int, slot: Any, incoming: Any) -> Any:
        self._turn = turn
        views = slot.views[incoming.layout]
        before = [tensor.clone() for tensor in views.tensors]
        outgoing = super().queue(stage, turn, slot, incoming)
        for tensor, values in zip(views.tensors, before, strict=True):
            tensor.copy_(values)  # a capture runs nothing
        targets = list(outgoing.keep)

        def again() -> None:
            arrays: list[Any] = []
            inputs = [view.detach() for view in views.tensors]
            x = build(incoming.layout.structure, iter(inputs), iter(incoming.values()))
            flatten(stage.fn(x), torch.is_tensor, arrays, [])
            for target, array in zip(targets, arrays, strict=True):
                target.copy_(array)

        reads, writes = [(slot.address, incoming.layout.nbytes)], [span[1:] for span in outgoing.spans]
        stage.stream.launch(again, cost=2e-5, reads=reads, writes=writes)
        return outgoing


@pytest.fixture(autouse=True)
def clones(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of outputs that were copied because others might refer to their memory."""
    monkeypatch.setattr(torch_simulated, "SimulatedTorchAdapter", Capturable)
    found: list[int] = []
    own = TorchAdapter.own

    def noted(self: TorchAdapter, stage: Any, arrays: list[Any], n: int) -> Any:
        before = arrays[n].data_ptr()
        spec = own(self, stage, arrays, n)
        if arrays[n].data_ptr() != before:
            found.append(before)
        return spec

    monkeypatch.setattr(TorchAdapter, "own", noted)
    return found


def pipe(fns: Any, seed: int = 0, **options: Any) -> Executor:
    return Executor(range(len(fns)), fns, host_stage="0", adapter="torch", machine=machine(len(fns), seed), **options)


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x: Any) -> Any:
        return x + torch.relu(self.linear(self.norm(x)))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_modules_give_the_bits_of_running_in_order(seed: int, depth: int, clones: list[int]) -> None:
    torch.manual_seed(seed)
    blocks = torch.nn.Sequential(Block(64), Block(64), Block(64))
    xs = [torch.randn(5, 64) for _ in range(9)]
    with torch.no_grad(), pipe(blocks, seed, depth=depth) as executor:
        ys = list(executor.map(xs))
        for x, y in zip(xs, ys, strict=True):
            assert torch.equal(y, blocks(x)), f"seed {seed}"
    assert len(clones) == 0


def test_gradients_are_left_behind() -> None:
    blocks = torch.nn.Sequential(Block(8), Block(8))
    with pipe(blocks) as executor:
        y = executor.submit(torch.randn(2, 8, requires_grad=True)).result()
        assert not y.requires_grad
        del y


def test_results_are_the_callers_own() -> None:
    with pipe([lambda x: x + 1]) as executor:
        ticket = executor.submit(torch.zeros(100))
        y = ticket.result()
        y.fill_(9)
        chained = [executor.submit(ticket) for _ in range(8)]
        assert all(torch.equal(other.result(), torch.full((100,), 2.0)) for other in chained)
        assert y[0] == 9


class Cache:
    """Keeps keys and values in one tensor and returns a view of it."""

    def __init__(self) -> None:
        self.memory = torch.zeros(20, 30)
        self.used = 0

    def __call__(self, x: Any) -> Any:
        self.memory[self.used] = x
        self.used += 1
        return self.memory


@pytest.mark.parametrize("seed", range(5))
def test_views_of_a_stages_own_memory_are_cloned(seed: int, clones: list[int]) -> None:
    with pipe([Cache(), lambda m: m.sum(0)], seed, depth=3) as executor:
        xs = [torch.full((30,), float(n + 1)) for n in range(12)]
        for n, y in enumerate(executor.map(xs)):
            assert y[0] == (n + 1) * (n + 2) / 2, f"seed {seed}"
    assert len(clones) == 12


@pytest.mark.parametrize("seed", range(5))
def test_static_outputs_are_cloned(seed: int, clones: list[int]) -> None:
    static = torch.empty(1000)

    def graph(x: Any) -> Any:
        return {"y": torch.mul(x, 2, out=static), "n": 3}

    with pipe([graph, lambda x: x["y"] + x["n"]], seed, depth=3) as executor:
        assert [y[-1].item() for y in executor.map([torch.full((1000,), float(n)) for n in range(12)])] == [
            2 * n + 3 for n in range(12)
        ]
    assert len(clones) == 12


@pytest.mark.parametrize(
    "give_back", [lambda x: x, lambda x: x.mul_(2), lambda x: x[::2], lambda x: x.T, lambda x: [x, x]]
)
def test_inputs_may_be_returned(give_back: Any) -> None:
    x = torch.arange(600.0).reshape(20, 30)
    with pipe([give_back, lambda x: x], depth=1) as executor:
        wanted = give_back(x.clone())
        for _ in range(6):
            got = executor.submit(x).result()
            pairs = zip(got, wanted, strict=True) if isinstance(wanted, list) else [(got, wanted)]
            assert all(torch.equal(a, b) for a, b in pairs)
        del got, pairs


def test_fresh_outputs_and_views_of_them_are_not_cloned(clones: list[int]) -> None:
    def views(x: Any) -> Any:
        y = x + 1
        return y[:5], (x * 2).reshape(-1)

    with torch.no_grad(), pipe([views, lambda x: x[0]]) as executor:
        for _ in range(3):
            executor.submit(torch.ones(10, 4)).result()
    assert len(clones) == 3  # of what the second stage returns: a part of its input


def test_an_input_left_in_a_cycle_is_not_kept() -> None:
    def leaves(x: Any) -> Any:
        cycle = [x[0]]
        cycle.append(cycle)
        return x + 1

    with pipe([leaves]) as executor:
        assert [executor.submit(torch.full((4,), float(n))).result()[0].item() for n in range(6)] == [1, 2, 3, 4, 5, 6]


def test_keeping_an_input_is_an_error() -> None:
    kept: list[Any] = []

    def keep(x: Any) -> Any:
        kept.append(x[0])
        return x + 1

    with pipe([keep]) as executor:
        with pytest.raises(StageError, match=r"kept a tensor of its input.*clone"):
            executor.submit(torch.ones(3, 3)).result()
        kept.clear()


def test_a_stage_may_keep_a_clone() -> None:
    kept: list[Any] = []

    def keep(x: Any) -> Any:
        kept.append(x.clone())
        return torch.stack(kept).sum(0)

    with pipe([keep]) as executor:
        assert [y[0].item() for y in executor.map([torch.full((50,), float(n)) for n in range(8)])] == [
            0, 1, 3, 6, 10, 15, 21, 28,
        ]  # fmt: skip


def test_shape_changes_of_an_input_do_not_stick() -> None:
    def reshape(x: Any) -> Any:
        x.unsqueeze_(0).requires_grad_()
        return x.detach() + 1

    with pipe([reshape], in_flight=1) as executor:
        assert [tuple(y.shape) for y in executor.map([torch.ones(4)] * 6)] == [(1, 4)] * 6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "bool", "int64", "uint8", "complex64"])
def test_every_dtype_arrives(dtype: str) -> None:
    x = torch.arange(0, 12).to(getattr(torch, dtype)).reshape(3, 4)
    with pipe([lambda x: x, lambda x: x]) as executor:
        y = executor.submit({"x": x, "e": torch.empty(0, 3, dtype=x.dtype), "s": x[0, 0]}).result()
        assert y["x"].dtype == x.dtype and torch.equal(y["x"].view(torch.uint8), x.contiguous().view(torch.uint8))
        assert y["e"].shape == (0, 3) and y["s"].shape == ()
        del y


def test_conjugated_tensors_keep_their_values() -> None:
    x = torch.tensor([1 + 2j, 3 - 4j])
    with pipe([lambda x: x.conj(), lambda x: x.conj() + 0]) as executor:
        assert torch.equal(executor.submit(x.conj()).result(), x.conj())


def test_numpy_arrays_and_plain_values_go_in() -> None:
    with pipe([lambda x: (x[0] * x[1], x[2]), lambda x: x[0].to(torch.int64)]) as executor:
        assert executor.submit((np.arange(5), 3, "text")).result().tolist() == [0, 3, 6, 9, 12]
        with pytest.raises(Exception, match="torch has no dtype"):
            executor.submit(np.array(["a"]))


def test_arrays_of_ours_go_in() -> None:
    with pipe([lambda x: x["w"] * x["n"]]) as executor:
        buffer = executor.runtime.buffer(0, 24)
        stream = executor.runtime.stream(0)
        stream.fill(buffer.address, 3, 24)
        ready = executor.runtime.event()
        ready.record(stream)
        w = Array(executor.runtime, 0, buffer.address, (4, 6), "uint8", owner=buffer, ready=ready)
        assert (executor.submit({"w": w, "n": 2}).result() == 6).all()
        for thing in (stream, ready, buffer):
            thing.close()
        del w


def test_host_tensors_may_be_strided_and_changed_after_submit() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    with pipe([lambda x: x + 0]) as executor:
        ticket = executor.submit(x.T)
        x.zero_()
        assert torch.equal(ticket.result(), torch.arange(12.0).reshape(3, 4).T)


def test_an_error_leaves_it_usable() -> None:
    def fail(x: Any) -> Any:
        if x[0] == 2:
            raise RuntimeError("bad")
        return x * 2

    with pipe([lambda x: x, fail, lambda x: x]) as executor:
        tickets = [executor.submit(torch.full((9,), float(n))) for n in range(4)]
        assert tickets[1].result()[0] == 2
        with pytest.raises(StageError, match=r"stage 1 .*microbatch 2"):
            tickets[2].result()
        del tickets
        assert executor.submit(torch.ones(9)).result()[0] == 2


# ---- graphs ----


@pytest.mark.parametrize("mode", ["on", "auto"])
@pytest.mark.parametrize("seed, depth", [(0, 1), (1, 2), (2, 4), (3, 4)])
def test_graphs_give_the_bits_of_running_in_order(mode: str, seed: int, depth: int) -> None:
    torch.manual_seed(seed)
    blocks = torch.nn.Sequential(Block(64), torch.nn.Identity(), Block(64))
    xs = [torch.randn(5, 64) for _ in range(25)]
    with torch.no_grad(), pipe(blocks, seed, depth=depth, graph=mode, in_flight=7) as executor:
        for ys in (list(executor.map(xs)), [ticket.result() for ticket in [executor.submit(x) for x in xs]]):
            for x, y in zip(xs, ys, strict=True):
                assert torch.equal(y, blocks(x)), f"seed {seed}"
        assert [stage.captured for stage in executor.plan().stages] == [depth] * 3
        assert not executor.runtime.driver.violations()
        del ys, y


@pytest.mark.parametrize("seed", range(3))
def test_results_of_graphs_are_the_callers_own(seed: int) -> None:
    with pipe([lambda x: {"y": x * 2, "e": x[:0], "n": 3}], seed, graph="on", depth=2) as executor:
        xs = [torch.full((30,), float(n)) for n in range(12)]
        tickets = [executor.submit(x) for x in xs]
        early = tickets[7].result()
        early["y"].fill_(-1)
        for _ in executor.map(xs):
            pass
        for n, ticket in enumerate(tickets):
            found = ticket.result()
            assert (found["y"] == (-1 if n == 7 else 2 * n)).all() and found["e"].shape == (0,) and found["n"] == 3
        assert executor.plan().stages[0].captured == 2
        del early, found, tickets, ticket


def test_random_tensors_stay_eager(caplog: pytest.LogCaptureFixture) -> None:
    with pipe([lambda x: x + torch.rand(9)], graph="auto") as executor:
        for _ in executor.map([torch.zeros(9)] * 9):
            pass
        assert executor.plan().stages[0].captured == 0
    assert "gives other bits" in caplog.text


def test_an_input_kept_while_it_is_captured_is_found(caplog: pytest.LogCaptureFixture) -> None:
    kept: list[Any] = []
    calls: list[int] = []

    def keep(x: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            kept.append(x)
        return x + 1

    with pipe([keep], graph="on", depth=1) as executor:
        tickets = [executor.submit(torch.full((4,), float(n))) for n in range(3)]
        assert [ticket.result()[0].item() for ticket in tickets[:2]] == [1, 2]
        with pytest.raises(StageError, match="kept a tensor of its input"):  # as it would be without graphs
            tickets[2].result()
        kept.clear()
        del tickets
        assert executor.submit(torch.ones(4)).result()[0] == 2
        assert "kept a tensor of its input" in executor.plan().stages[0].eager
    assert "kept a tensor of its input" in caplog.text


def test_sync_check_is_torchs_mode_around_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(Capturable, "watched", TorchAdapter.watched)
    seen: list[str] = []

    def stage(x: Any) -> Any:
        seen.append(modes[-1])
        if len(seen) == 3:
            raise RuntimeError("here")
        return x + 1

    with pipe([Stage(stage, sync_check="error"), Stage(stage, sync_check="warn"), stage]) as executor:
        with pytest.raises(StageError, match="here"):
            executor.submit(torch.ones(3)).result()
        assert seen == ["error", "warn", "default"] and modes[-1] == "default"


def test_sync_check_elsewhere_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match="sync_check is 'no'; warn, error or None"):
        Stage(abs, sync_check="no")
    with pytest.raises(InvalidArgument, match=r"stage 1 \(abs\) has sync_check and the numpy adapter; torch has it"):
        Executor([0], [abs, Stage(abs, sync_check="warn")], machine=machine(1))
    with pipe([Stage(lambda x: x + 1, sync_check="error")]) as executor:  # nothing to find on simulated devices
        assert executor.submit(torch.ones(3)).result()[0] == 2


def test_graphs_of_changing_shapes_and_in_place_stages() -> None:
    choose = random.Random(1)
    sizes = [choose.choice([10, 1000, 50_000]) for _ in range(60)]
    with pipe([lambda x: x.mul_(2), lambda x: x], graph="auto", depth=2) as executor:
        for size, y in zip(sizes, executor.map(torch.arange(size) for size in sizes), strict=True):
            assert torch.equal(y, torch.arange(size) * 2)
        assert [stage.captured for stage in executor.plan().stages] == [6, 6]
        del y


# ---- results that are outputs themselves, which GPUs have: the part of it that simulated devices can show ----


def open_runtime() -> Any:
    return open_backend("sim", machine=machine(1))


@pytest.mark.parametrize("part", [lambda x: x[1:], lambda x: x.detach()[1:]], ids=["view", "alias"])
def test_memory_of_a_dropped_result_is_the_stages_again_after_the_callers_stream(part: Any) -> None:
    """torch keeps the tensor for its views, but not for others over the same memory."""
    loans = Loans(Storages(torch._C))
    with open_runtime() as runtime:
        stage, caller = runtime.stream(0), runtime.stream(0)
        end = runtime.event()
        tensor = torch.ones(4)
        loans.lend(tensor, caller, (0, 0, 1))
        view = part(tensor)
        caller.launch(lambda: None, cost=2e-3)  # reads it
        for _ in range(3):
            loans.settle(stage)  # it is still the caller's
        del tensor
        loans.settle(stage)  # a view of it is
        end.record(stage)
        assert end.wait() and runtime.clock() < 2e-3
        assert view.tolist() == [1, 1, 1]
        del view
        loans.settle(stage)
        end.record(stage)
        assert end.wait() and runtime.clock() >= 2e-3
        assert loans.close() == []
        for thing in (stage, caller, end):
            thing.close()


def test_many_views_of_results_do_not_keep_the_others() -> None:
    """Few are looked at for a microbatch, and each in its turn."""
    loans = Loans(Storages(torch._C))
    with open_runtime() as runtime:
        stage = runtime.stream(0)
        views = []
        for n in range(200):
            tensor = torch.full((4,), float(n))
            loans.lend(tensor, stage, (0, 0, 1))
            if n % 2:
                views.append(tensor.detach()[:1])
        del tensor
        for _ in range(200):
            loans.settle(stage)
        left = loans.close()
        assert sorted(float(tensor[0]) for tensor, _ in left) == [float(view[0]) for view in views]
        stage.close()


@pytest.mark.parametrize("names", [(), ("_storage_Use_Count",), ("_storage_address",)])
def test_a_torch_that_does_not_count_users(names: tuple[str, ...]) -> None:
    """Then outputs are copied, for 0 is not 1."""
    native = SimpleNamespace(**{name: getattr(torch._C, name) for name in names})
    tensor = torch.ones(3)
    assert Storages(native).users(tensor) == 0
    assert Storages(torch._C).users(tensor) == 1
    other = tensor[1:]
    assert Storages(torch._C).users(tensor) == Storages(torch._C).users(other) == 2


@pytest.mark.parametrize("number, lent", [(0, True), (7, True), (0x55D0, False)])
def test_what_a_stream_of_somebody_else_reads_is_copied(number: int, lent: bool) -> None:
    """It may be destroyed before the results are dropped. torch numbers such streams by their addresses."""
    native = SimpleNamespace(
        _storage_Use_Count=torch._C._storage_Use_Count,
        _storage_address=torch._C._storage_address,
        _cuda_getCurrentStream=lambda device: (number, device, 1),
    )
    fake = SimpleNamespace(Tensor=torch.Tensor, strided=torch.strided, empty_like=torch.empty_like, _C=native)
    stage = TorchStage(fake, Layouts(), Streams())
    with open_runtime() as runtime:
        stream = runtime.stream(0)
        tensor = torch.ones(3)
        assert stage.lend([tensor], stream) is lent
        left = [(tensor.tolist(), theirs) for tensor, theirs in stage.loans.close()]
        assert left == [([1, 1, 1], (number, 0, 1))] * lent
        stream.close()
