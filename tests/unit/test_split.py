"""Layers over devices: which go where, what cannot be split, and whole models that give what they gave before."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executor_cases import machine
from hypothesis import given
from hypothesis import strategies as st

import pyxdev
from pyxdev import Executor, split
from pyxdev.errors import InvalidArgument
from pyxdev.loader.header import Tensor, Tensors
from pyxdev.loader.placement import by_layers

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def layers(count: int) -> list[Any]:
    return [lambda x, n=n: x * 3 + n for n in range(count)]


def counts(stages: list[pyxdev.Stage]) -> list[tuple[int | None, int]]:
    return [(stage.device, len(stage.fn.layers)) for stage in stages]  # type: ignore[attr-defined]


def test_shares() -> None:
    assert counts(split(layers(8), [0, 1])) == [(0, 4), (1, 4)]
    assert counts(split(layers(8), [3, 1], (3, 1))) == [(3, 6), (1, 2)]
    assert counts(split(layers(7), range(3))) == [(0, 2), (1, 3), (2, 2)]
    assert counts(split(layers(4), [5, 6, 7], (1, 0, 1))) == [(5, 2), (7, 2)]
    assert counts(split(layers(2), range(4))) == [(0, 1), (2, 1)]
    assert [stage.name for stage in split(layers(3), [0, 1])] == ["layers 0-1", "layers 2-2"]


@given(st.integers(1, 60), st.lists(st.floats(0, 100).map(lambda share: round(share, 2)), min_size=1, max_size=8))
def test_the_rule_is_the_loaders(count: int, proportions: list[float]) -> None:
    if not any(proportions):
        return
    tensors = [Tensor(f"blk.{n}.attn.weight", "float32", (4,), 16 * n, 16) for n in range(count)]
    wanted = by_layers(Tensors.listed(tensors), len(proportions), proportions).tolist()
    stages = split(layers(count), range(len(proportions)), proportions)
    assert [stage.device for stage in stages for _ in stage.fn.layers] == wanted  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "given, devices, proportions, message",
    [
        ([], [0], None, "layers is empty"),
        (7, [0], None, "layers is 7; an nn.Sequential or a sequence of callables"),
        ("ab", [0], None, "layers is 'ab'"),
        ([np.abs, 3], [0], None, r"layers\[1\] is 3; a callable"),
        ([np.abs], [], None, r"devices is \[\]"),
        ([np.abs], 2, None, "devices is 2; a sequence of device numbers"),
        ([np.abs], [0, 1], (1, 2, 3), "proportions has 3 shares for 2 devices"),
        ([np.abs], [0, 1], (1, -1), "proportions holds -1"),
        ([np.abs], [0, 1], (0, 0), r"proportions \[0, 0\] leaves every device without"),
    ],
)
def test_what_cannot_be_split(given: Any, devices: Any, proportions: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        split(given, devices, proportions)


def test_functions_run_as_a_pipeline() -> None:
    stages = split(layers(5), [0, 1, 1], (1, 1, 2))
    with Executor([stage.device for stage in stages], stages, machine=machine(2)) as pipe:
        assert {stage.adapter for stage in pipe.plan().stages} == {"numpy"}
        x = np.arange(6)
        wanted = x
        for layer in layers(5):
            wanted = layer(wanted)
        assert all((y == wanted).all() for y in pipe.map([x] * 5))


# ---- torch -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def test_a_sequential_gives_its_own_bits(torch: Any) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(9, 9) if n % 2 else torch.nn.ReLU() for n in range(7)))
    stages = split(model, [0, 1, 2], (1, 2, 1))
    with torch.no_grad(), Executor([stage.device for stage in stages], stages, machine=machine(3)) as pipe:
        assert {stage.adapter for stage in pipe.plan().stages} == {"torch"}
        xs = [torch.randn(4, 9) for _ in range(6)]
        assert all(torch.equal(y, model(x)) for x, y in zip(xs, pipe.map(xs), strict=True))


def test_modules_and_functions_mix(torch: Any) -> None:
    stages = split([torch.nn.Linear(3, 3), lambda x: x * 2, torch.nn.ReLU(), torch.abs], [0, 1])
    with torch.no_grad(), Executor([0, 1], stages, machine=machine(2)) as pipe:
        assert {stage.adapter for stage in pipe.plan().stages} == {"torch"}
        x = torch.randn(2, 3)
        assert torch.equal(pipe.submit(x).result(), torch.abs(torch.relu(stages[0].fn.layers[0](x) * 2)))  # type: ignore[attr-defined]


def test_modules_move_to_their_devices(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[Any, str]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, device: moved.append((self, device)) or self)
    model = [torch.nn.Linear(2, 2) for _ in range(4)]
    split([*model, abs], [2, 5], (2, 3))
    assert moved == list(zip(model, ["cuda:2"] * 2 + ["cuda:5"] * 2, strict=True))


def test_what_two_devices_would_share_is_refused(torch: Any) -> None:
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    second.weight = first.weight
    message = r"weight of layers\[0\] and weight of layers\[1\] are one tensor.* devices 0 and 1"
    with pytest.raises(InvalidArgument, match=message):
        split([first, second], [0, 1])
    with pytest.raises(InvalidArgument, match="are one tensor"):
        split([first, torch.nn.ReLU(), first], [0, 1])
    assert len(split([first, second], [0])) == 1
    with pytest.raises(InvalidArgument, match=r"weight of layers\[1\] is a meta tensor"):
        split([first, torch.nn.Linear(3, 3, device="meta")], [0, 1])


# ---- a causal language model -----------------------------------------------------------------------------------------


@pytest.fixture
def lm(torch: Any) -> Any:
    pytest.importorskip("transformers")
    place = spec_from_file_location("causal_lm", EXAMPLES / "causal_lm.py")
    assert place is not None and place.loader is not None
    module = module_from_spec(place)
    place.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("default")  # of transformers
@pytest.mark.parametrize("devices", [1, 3])
def test_a_causal_lm_gives_the_logits_of_the_whole(lm: Any, torch: Any, devices: int) -> None:
    model = lm.make_model()
    prompts = [torch.randint(500, (1, 4 + 3 * n)) for n in range(4)]

    class Head(lm.Head):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            return {**super().forward(x), "logits": self.logits(x)}

    stages = split([*lm.parts(model)[:-1], Head(model)], range(devices))
    with torch.no_grad(), Executor(range(devices), stages, machine=machine(devices)) as pipe:
        assert {stage.adapter for stage in pipe.plan().stages} == {"torch"}
        tickets = [pipe.submit({"ids": ids, "position": 0, "sequence": n}) for n, ids in enumerate(prompts)]
        for step in range(5):
            for n, ticket in enumerate(tickets):
                y = ticket.result()
                wanted = model(prompts[n]).logits[:, -1:]
                assert (y["logits"] - wanted).abs().max() <= 1e-5, f"sequence {n}, step {step}"
                assert y["position"] == prompts[n].shape[1]
                prompts[n] = torch.cat([prompts[n], y["ids"].clone()], 1)
                del y
            tickets = [pipe.submit(ticket) for ticket in tickets]
        del tickets, ticket


@pytest.mark.parametrize(
    "example, last",
    [
        ("torch_split.py", "largest difference: 0.0"),
        ("causal_lm.py", "4 sequences over 2 devices, the same tokens as of the whole model: True"),
    ],
)
def test_examples_run_as_they_stand(torch: Any, example: str, last: str) -> None:
    if example == "causal_lm.py":
        pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, EXAMPLES / example], capture_output=True, text=True, timeout=100, check=False,
        env={"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith(last)
    lines = [line for line in (EXAMPLES / "torch_split.py").read_text().splitlines() if line]
    assert len(lines) <= 40
