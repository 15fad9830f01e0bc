"""Arrays of other libraries, by what they say of themselves: __cuda_array_interface__ for memory, shape and stream,
__dlpack_device__ for the device, which the former leaves out.

https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, version 3
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pyxdev._native import HOST, Runtime, Stream
from pyxdev.adapters.activation import Spec
from pyxdev.errors import InvalidArgument

LEGACY_STREAM = 1  # the handle that stands for the default stream, whose own is 0
_ON_A_DEVICE = (2, 10, 13)  # DLPack's CUDA, ROCm, CUDA managed


class Described(NamedTuple):
    """Where an array is and what it looks like."""

    spec: Spec
    address: int
    dense: bool  # C order without gaps
    stream: int  # the handle of the stream that its data is ordered by


def has_interface(leaf: Any) -> bool:
    """Whether this is an array of a library that shares device memory; it may still be one in host memory."""
    return hasattr(type(leaf), "__cuda_array_interface__")


def device_of(leaf: Any) -> int:
    """The ordinal of an array's device, or HOST."""
    tell = getattr(leaf, "__dlpack_device__", None)
    if tell is None:  # numba's
        return int(leaf.gpu_data.context.device.id)
    kind, ordinal = tell()
    return int(ordinal) if kind in _ON_A_DEVICE else HOST


def describe(leaf: Any) -> Described:
    """An array that has the interface. Raises InvalidArgument for one that refuses, or has a dtype of its own."""
    try:
        interface = leaf.__cuda_array_interface__
    except (AttributeError, RuntimeError, TypeError) as error:
        raise InvalidArgument(f"this {kind_of(leaf)} does not share its memory: {error}") from error
    dtype = np.dtype(interface["typestr"])
    strides = interface.get("strides")
    stream = interface["stream"] if "stream" in interface else _current_stream(leaf)
    return described(leaf, interface["data"][0], interface["shape"], dtype, strides, stream or LEGACY_STREAM)


def described(
    leaf: Any, address: int, shape: Sequence[int], dtype: np.dtype[Any], strides: Sequence[int] | None, stream: int
) -> Described:
    """The same from its parts. strides: in bytes; None: C order."""
    if dtype.kind not in "biufcV" or not dtype.isnative or dtype.names or dtype.name.startswith("void"):
        raise InvalidArgument(f"a {kind_of(leaf)} of dtype {dtype} cannot be used; numbers and bools can")
    dense, step = True, dtype.itemsize
    if strides is not None:
        for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
            dense = dense and (stride == step or extent == 1)
            step *= extent
    spec = Spec(tuple(shape), dtype.name, math.prod(shape) * dtype.itemsize)
    return Described(spec, address, dense or not spec.nbytes, stream)


def _current_stream(leaf: Any) -> int:
    """For torch, whose interface says nothing of streams. JAX's waits until the data is there."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(leaf, torch.Tensor):
        return int(torch.cuda.current_stream(leaf.device).cuda_stream)
    return LEGACY_STREAM


def kind_of(leaf: Any) -> str:
    """The name of its type, for messages."""
    return f"{type(leaf).__module__.partition('.')[0]}.{type(leaf).__qualname__}"


class Streams:
    """Streams of other libraries, adopted when first met."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Stream] = {}

    def of(self, runtime: Runtime, device: int, handle: int) -> Stream:
        """The stream with this handle; 0 and 1 are the default stream."""
        key = device, handle or LEGACY_STREAM
        stream = self._known.get(key)
        if stream is None:
            stream = self._known[key] = runtime.adopt_stream(*key)
        return stream

    def close(self) -> None:
        for stream in self._known.values():
            stream.close()
        self._known.clear()
