"""Which device gets which tensor. Pure: imports nothing of ours but header.py and errors.py.

A device is an index into the caller's list here, not an ordinal. `tensor_split` gives every device a share, in
proportion: (3, 1) is three quarters and one quarter; a share of 0 gets nothing; None is equal shares.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from pyxdev.errors import InvalidArgument
from pyxdev.loader.header import Tensor, shown

# "blk.3.attn_q.weight", "model.layers.3.mlp.up_proj.weight", "transformer.h.3.ln_1.weight", "encoder.layer.3.x.bias"
_LAYER = re.compile(r"(?:^|\.)(?:blk|layers?|h|blocks?)\.(\d{1,9})(?:\.|$)")
# What comes after the last layer, outside of all layers.
_AFTER = re.compile(
    r"(?:^|\.)(?:output|output_norm|lm_head|embed_out|norm|norm_f|ln_f|final_norm|final_layer_?norm|classifier|score|"
    r"pooler|cls)(?:\.|$)"
)


class Part(NamedTuple):
    """What one device gets of a tensor: `nbytes` from `offset` on, which are rows begin to end of its first dimension.
    A part that is all of the tensor has rows 0 to -1."""

    tensor: int
    device: int
    offset: int
    nbytes: int
    begin: int
    end: int


def shares(devices: int, tensor_split: Sequence[float] | None, called: str = "tensor_split") -> list[Fraction]:
    """The end of each device's share on a line from 0 to 1. Raises InvalidArgument for a split that says nothing, which
    the caller knows by the name `called`."""
    if devices < 1:
        raise InvalidArgument(f"{devices} devices; at least 1 is wanted")
    split = [1] * devices if tensor_split is None else list(tensor_split)
    if len(split) != devices:
        raise InvalidArgument(f"{called} has {len(split)} shares for {devices} devices: {split}")
    for share in split:
        if isinstance(share, bool) or not isinstance(share, int | float) or not math.isfinite(share) or share < 0:
            raise InvalidArgument(f"{called} holds {share!r}; numbers from 0 up are allowed: {split}")
    total = sum(map(Fraction, split))
    if not total:
        raise InvalidArgument(f"{called} {split} leaves every device without a share")
    ends, reached = [], Fraction(0)
    for share in split:
        reached += Fraction(share)
        ends.append(reached / total)
    return ends


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor belongs to, read off its name; None outside of the layers."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def runs(count: int, ends: Sequence[Fraction]) -> list[int]:
    """A device for each of `count` layers: device d ends at the layer nearest to the end of its share; with more
    devices than layers some get none."""
    limits = [math.floor(count * end + Fraction(1, 2)) for end in ends]
    return [bisect_right(limits, layer) for layer in range(count)]


def by_layers(tensors: Sequence[Tensor], devices: int, tensor_split: Sequence[float] | None = None) -> list[int]:
    """A device for each tensor: layers stay whole and in order, so each device gets a run of them in proportion.

    What is outside of the layers goes to the first device with a share (embeddings and the like) or, by its name, to
    the last one (final norm, output). A file without layers is cut into runs by bytes, in the order given.
    """
    ends = shares(devices, tensor_split)
    if devices == 1:
        return [0] * len(tensors)
    layers = [layer_of(tensor.name) for tensor in tensors]
    numbers = sorted({layer for layer in layers if layer is not None})
    if not numbers:
        return _by_bytes(tensors, ends)
    device = dict(zip(numbers, runs(len(numbers), ends), strict=True))
    first, last = device[numbers[0]], device[numbers[-1]]
    return [
        (last if _AFTER.search(tensor.name) else first) if layer is None else device[layer]
        for tensor, layer in zip(tensors, layers, strict=True)
    ]


def by_function(tensors: Sequence[Tensor], devices: Sequence[int], place: Callable[[str], int]) -> list[int]:
    """A device for each tensor by the caller's function of its name, which returns one of `devices`."""
    index = {device: number for number, device in enumerate(devices)}
    placed = []
    for tensor in tensors:
        device = place(tensor.name)
        if device not in index:
            raise InvalidArgument(
                f"place({shown(tensor.name)!r}) returned {device!r}; one of the devices {list(devices)} is allowed"
            )
        placed.append(index[device])
    return placed


def by_rows(tensors: Sequence[Tensor], devices: int, tensor_split: Sequence[float] | None = None) -> list[Part]:
    """Parts of every matrix: each device gets a run of its rows (its first dimension) in proportion, so blocks, which
    lie along the last dimension, stay whole. Vectors and scalars go to the first device with a share, as does what has
    no rows of whole bytes."""
    ends = shares(devices, tensor_split)
    first = bisect_right(ends, 0)
    parts = []
    for number, tensor in enumerate(tensors):
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 0
        if not tensor.nbytes or not rows or tensor.nbytes % rows:
            parts.append(Part(number, first, 0, tensor.nbytes, 0, -1))
            continue
        row, begin = tensor.nbytes // rows, 0
        for device, share in enumerate(ends):
            end = math.floor(rows * share + Fraction(1, 2))
            if end > begin:
                parts.append(Part(number, device, begin * row, (end - begin) * row, begin, end))
            begin = end
    return parts


def _by_bytes(tensors: Sequence[Tensor], ends: list[Fraction]) -> list[int]:
    """Each tensor goes where its start lies on the line of all bytes."""
    total = sum(tensor.nbytes for tensor in tensors) or 1
    last = bisect_left(ends, 1)
    placed, reached = [], 0
    for tensor in tensors:
        placed.append(min(bisect_right(ends, Fraction(reached, total)), last))
        reached += tensor.nbytes
    return placed
