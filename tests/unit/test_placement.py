"""Placement by layers, by rows, by function and by bytes."""

from __future__ import annotations

import math
import subprocess
import sys
from bisect import bisect_right
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyxdev.errors import InvalidArgument
from pyxdev.loader import placement
from pyxdev.loader.header import Tensor, Tensors
from pyxdev.loader.placement import by_function, layer_of, shares


def tensor(name: str, nbytes: int = 4) -> Tensor:
    return Tensor(name, "F32", (nbytes // 4,), 0, nbytes)


def by_layers(tensors: list[Tensor], devices: int, split: Any = None) -> list[int]:
    return placement.by_layers(Tensors.listed(tensors), devices, split).tolist()


def llama(layers: int) -> list[Tensor]:
    """Names as llama.cpp writes them, output first."""
    names = ["output.weight", "token_embd.weight"]
    names += [f"blk.{layer}.{part}.weight" for layer in range(layers) for part in ("attn_norm", "attn_q", "ffn_down")]
    return [tensor(name) for name in [*names, "output_norm.weight"]]


def layer_devices(tensors: list[Tensor], placed: list[int]) -> list[int]:
    found: dict[int, set[int]] = {}
    for one, device in zip(tensors, placed, strict=True):
        layer = layer_of(one.name)
        if layer is not None:
            found.setdefault(layer, set()).add(device)
    assert all(len(devices) == 1 for devices in found.values()), "a layer was torn apart"
    return [found[layer].pop() for layer in sorted(found)]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("blk.0.attn_q.weight", 0),
        ("model.layers.31.mlp.up_proj.weight", 31),
        ("layers.5.attention.wq.weight", 5),
        ("transformer.h.7.ln_1.bias", 7),
        ("h.2.mlp.c_fc.weight", 2),
        ("encoder.layer.4.output.dense.weight", 4),
        ("model.layers.3.block_sparse_moe.experts.9.w1.weight", 3),
        ("token_embd.weight", None),
        ("output.weight", None),
        ("player.3.x", None),
        ("blk.x.y", None),
        ("layers.99999999999999999999.x", None),
        ("h.layers.2", 2),
        ("h.2x.layer.0.blk.1", 0),
        ("blk.\u0663.w", None),
        ("blk..3", None),
    ],
)
def test_layer_of(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer


@pytest.mark.parametrize(
    ("layers", "devices", "split", "wanted"),
    [
        (4, 1, None, [0, 0, 0, 0]),
        (4, 2, None, [0, 0, 1, 1]),
        (5, 2, None, [0, 0, 0, 1, 1]),
        (30, 4, None, [0] * 8 + [1] * 7 + [2] * 8 + [3] * 7),
        (4, 2, (3, 1), [0, 0, 0, 1]),
        (4, 2, (0, 1), [1, 1, 1, 1]),
        (4, 2, (1, 0), [0, 0, 0, 0]),
        (4, 3, (1, 0, 1), [0, 0, 2, 2]),
        (2, 3, None, [0, 2]),
        (10, 3, (0.5, 0.25, 0.25), [0] * 5 + [1] * 3 + [2] * 2),
    ],
)
def test_layers_in_proportion(layers: int, devices: int, split: tuple[float, ...] | None, wanted: list[int]) -> None:
    tensors = llama(layers)
    placed = by_layers(tensors, devices, split)
    assert layer_devices(tensors, placed) == wanted
    by_name = {one.name: device for one, device in zip(tensors, placed, strict=True)}
    assert by_name["token_embd.weight"] == wanted[0]
    assert by_name["output.weight"] == by_name["output_norm.weight"] == wanted[-1]


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("model.norm.weight", True),
        ("lm_head.weight", True),
        ("transformer.ln_f.bias", True),
        ("pooler.dense.weight", True),
        ("model.embed_tokens.weight", False),
        ("embeddings.LayerNorm.weight", False),
        ("token_embd_norm.weight", False),
        ("rope_freqs.weight", False),
    ],
)
def test_outside_of_the_layers(name: str, last: bool) -> None:
    placed = by_layers([tensor(name), tensor("layers.0.w"), tensor("layers.1.w")], 2)
    assert placed == [int(last), 0, 1]


def test_layer_numbers_may_have_holes() -> None:
    assert by_layers([tensor(f"h.{layer}.w") for layer in (7, 3, 100, 900000000)], 2) == [0, 0, 1, 1]


def test_without_layers_by_bytes() -> None:
    assert by_layers([tensor(f"t{number}", 400) for number in range(4)], 2) == [0, 0, 1, 1]
    assert by_layers([tensor("big", 4000), tensor("small", 4)], 2) == [0, 1]
    assert by_layers([tensor("only")], 3) == [0]
    assert by_layers([tensor("a"), tensor("none", 0)], 3, (1, 1, 0)) == [0, 1]
    assert by_layers([tensor("none", 0)], 2, (0, 1)) == [1]
    assert by_layers([], 2) == []


@given(
    st.integers(0, 40),
    st.lists(st.integers(0, 5) | st.floats(0, 100), min_size=1, max_size=12).filter(lambda split: sum(split) > 0),
)
def test_every_split_keeps_order_and_proportion(layers: int, split: list[float]) -> None:
    tensors = llama(layers) if layers else [tensor(f"t{number}", 4 * number) for number in range(30)]
    placed = by_layers(tensors, len(split), split)
    assert all(split[device] > 0 for device in placed), "a device without a share got something"
    if not layers:
        return
    devices = layer_devices(tensors, placed)
    assert all(before <= after for before, after in pairwise(devices))
    for device, share in enumerate(split):
        assert abs(devices.count(device) - layers * share / math.fsum(split)) < 1 + 1e-9


@pytest.mark.parametrize("split", [(1,), (1, 1, 1), (0, 0), (1, -1), (1, math.nan), (1, math.inf), (1, "1"), (1, True)])
def test_a_split_that_says_nothing(split: Any) -> None:
    with pytest.raises(InvalidArgument, match="tensor_split"):
        by_layers(llama(2), 2, split)


def test_no_devices() -> None:
    with pytest.raises(InvalidArgument, match="0 devices"):
        by_layers(llama(2), 0)


def test_by_function() -> None:
    tensors = Tensors.listed([tensor("a"), tensor("b")])
    assert by_function(tensors, [3, 1], {"a": 1, "b": 3}.__getitem__).tolist() == [1, 0]
    wrong: Any
    for wrong in (0, 2, "1", None):
        with pytest.raises(InvalidArgument, match=r"a.*one of the devices \[3, 1\]"):
            by_function(tensors, [3, 1], dict.fromkeys("ab", wrong).__getitem__)


def rows_of(tensors: list[Tensor], split: list[float]) -> list[list[int]]:
    """What by_rows must give, one tensor after the other."""
    ends, parts = shares(len(split), split), []
    for number, one in enumerate(tensors):
        rows = one.shape[0] if len(one.shape) > 1 else 0
        if not one.nbytes or not rows or one.nbytes % rows:
            parts.append([number, bisect_right(ends, 0), 0, one.nbytes, 0, -1])
            continue
        width, begin = one.nbytes // rows, 0
        for device, share in enumerate(ends):
            end = math.floor(rows * share + Fraction(1, 2))
            if end > begin:
                parts.append([number, device, begin * width, (end - begin) * width, begin, end])
            begin = end
    return parts


SHAPES = st.lists(st.integers(0, 9) | st.integers(2**60, 2**62), max_size=3)


@given(
    st.lists(st.tuples(SHAPES, st.integers(0, 100) | st.integers(2**61, 2**62)), max_size=20),
    st.lists(st.integers(0, 3) | st.floats(0, 1), min_size=1, max_size=6).filter(any),
)
def test_rows(shapes: list[tuple[list[int], int]], split: list[float]) -> None:
    tensors = [Tensor(f"t{n}", "F4", tuple(shape), 0, nbytes) for n, (shape, nbytes) in enumerate(shapes)]
    tensors.append(Tensor("matrix", "F4", (2**61, 2), 0, 2**61))
    parts = placement.by_rows(Tensors.listed(tensors), len(split), split)
    assert parts.T.tolist() == rows_of(tensors, split)


def test_nothing_is_imported_to_place_tensors() -> None:
    """numpy.ma, which np.unique() imports, would make a process's first load of a small model twice as long."""
    code = """
import sys
from pyxdev.loader.header import Tensor, Tensors
from pyxdev.loader.placement import by_layers, by_rows
tensors = Tensors.listed([Tensor(f"layers.{n}.weight", "F4", (4, 4), 64 * n, 64) for n in range(6)])
before = set(sys.modules)
assert by_layers(tensors, 2).tolist() == [0, 0, 0, 1, 1, 1] and len(by_rows(tensors, 2).T) == 12
assert set(sys.modules) == before, set(sys.modules) - before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@given(st.lists(st.integers(-3, 5)))
def test_distinct(values: list[int]) -> None:
    assert placement._distinct(np.array(values, np.int64)).tolist() == sorted(set(values))
