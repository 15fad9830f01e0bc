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

import numpy as np
from numpy.typing import NDArray

from pyxdev.errors import InvalidArgument
from pyxdev.loader.header import Column, Tensors, number_after, shown

# "blk.3.attn_q.weight", "model.layers.3.mlp.up_proj.weight", "transformer.h.3.ln_1.weight", "encoder.layer.3.x.bias"
_LAYER = ("blk", "layer", "layers", "h", "block", "blocks")
# What comes after the last layer, outside of all layers.
_AFTER = re.compile(
    r"(?:^|\.)(?:output|output_norm|lm_head|embed_out|norm|norm_f|ln_f|final_norm|final_layer_?norm|classifier|score|"
    r"pooler|cls)(?:\.|$)"
)


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
    number = number_after(name, _LAYER)
    return None if number < 0 else number


def runs(count: int, ends: Sequence[Fraction]) -> list[int]:
    """A device for each of `count` layers: device d ends at the layer nearest to the end of its share; with more
    devices than layers some get none."""
    limits = [_nearest(count, end) for end in ends]
    return [bisect_right(limits, layer) for layer in range(count)]


def by_layers(tensors: Tensors, devices: int, tensor_split: Sequence[float] | None = None) -> Column:
    """A device for each tensor: layers stay whole and in order, so each device gets a run of them in proportion.

    What is outside of the layers goes to the first device with a share (embeddings and the like) or, by its name, to
    the last one (final norm, output). A file without layers is cut into runs by bytes, in the order given.
    """
    ends = shares(devices, tensor_split)
    if devices == 1:
        return np.zeros(len(tensors), np.int64)
    layers = tensors.numbers(_LAYER)
    inside = layers >= 0
    if not inside.any():
        return _by_bytes(tensors.nbytes, ends)
    numbers = _distinct(layers[inside])
    device = np.array(runs(len(numbers), ends), np.int64)
    placed = np.full(len(tensors), device[0])
    placed[inside] = device[np.searchsorted(numbers, layers[inside])]
    for number in np.flatnonzero(~inside).tolist():
        if _AFTER.search(tensors[number].name):
            placed[number] = device[-1]
    return placed


def _distinct(values: Column) -> Column:
    """In order, as of np.unique(), which imports numpy.ma: that takes as long as reading a GiB."""
    ordered: Column = np.sort(values)
    first: Column = ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]
    return first


def by_function(tensors: Tensors, devices: Sequence[int], place: Callable[[str], int]) -> Column:
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
    return np.array(placed, np.int64)


def by_rows(tensors: Tensors, devices: int, tensor_split: Sequence[float] | None = None) -> NDArray[np.int64]:
    """Parts of every matrix, as six rows of an array: the tensor, the device, the offset in the tensor, bytes, and the
    first and the last but one of its rows, 0 and -1 for a part that is all of the tensor.

    Each device gets a run of the rows (the first dimension) in proportion, so blocks, which lie along the last
    dimension, stay whole. Vectors and scalars go to the first device with a share, as does what has no rows of whole
    bytes.
    """
    ends = shares(devices, tensor_split)
    rows, nbytes, count = tensors.rows, tensors.nbytes, len(tensors)
    split = (nbytes > 0) & (rows > 0) & (nbytes % np.maximum(rows, 1) == 0)
    width = np.where(split, nbytes // np.maximum(rows, 1), 0)
    # A device's run of rows ends at the nearest row to the end of its share. Whole tensors have one part: all bytes.
    extents = np.where(split, rows, 0)
    different = _distinct(extents)
    end = np.array([[_nearest(extent, share) for extent in different.tolist()] for share in ends], np.int64)
    end = end[:, np.searchsorted(different, extents)]
    begin = np.concatenate([np.zeros((1, count), np.int64), end[:-1]])
    parts = np.empty((6, devices, count), np.int64)
    parts[0], parts[1] = np.arange(count), np.arange(devices)[:, None]
    parts[2:] = begin * width, (end - begin) * width, begin, end
    kept = end > begin
    first = bisect_right(ends, 0)
    kept[first] |= ~split
    parts[3, first, ~split], parts[5, first, ~split] = nbytes[~split], -1
    return parts.transpose(0, 2, 1)[:, kept.T]


def _nearest(count: int, share: Fraction) -> int:
    """That share of a count, rounded to a whole number, halves up."""
    numerator, denominator = share.numerator, share.denominator  # Fractions themselves take ten times as long
    return (2 * count * numerator + denominator) // (2 * denominator)


def _by_bytes(nbytes: Column, ends: list[Fraction]) -> Column:
    """Each tensor goes where its start lies on the line of all bytes."""
    total = int(nbytes.sum()) or 1
    limits = [math.ceil(end * total) for end in ends]
    placed = np.searchsorted(limits, np.cumsum(nbytes) - nbytes, side="right")
    return np.minimum(placed, bisect_left(ends, 1))
