"""The arrays of raw and NumPy stages: pyxdev Arrays on devices, NumPy arrays on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from pyxdev._native import HOST, Array, Runtime
from pyxdev.adapters.activation import Layouts, Spec
from pyxdev.adapters.adapter import Source
from pyxdev.errors import InvalidArgument


class ArrayAdapter:
    """What an adapter answers about arrays, and nothing about stages."""

    def __init__(self, layouts: Layouts) -> None:
        self._layouts = layouts

    def is_array(self, leaf: Any) -> bool:
        return isinstance(leaf, Array) or hasattr(leaf, "__array_interface__")

    def spec(self, leaf: Any) -> Spec:
        if not isinstance(leaf, Array):
            return host_spec(leaf)
        if not leaf.contiguous:
            raise InvalidArgument(f"{leaf!r} has strides {leaf.strides}; only contiguous arrays can be sent")
        return Spec(leaf.shape, leaf.dtype, leaf.nbytes)

    def device(self, leaf: Any) -> int:
        return leaf.device if isinstance(leaf, Array) else HOST

    def write(self, leaf: Any, memory: Any) -> None:
        np.copyto(memory.view(leaf.dtype).reshape(leaf.shape), leaf)

    def source(self, runtime: Runtime, leaf: Any) -> Source:
        if leaf.runtime is not runtime:
            raise InvalidArgument(f"{leaf!r} belongs to another runtime")
        return Source(leaf.device, leaf.address, leaf.ready, leaf, None)

    def close(self) -> None:
        """Nothing was opened."""


def host_spec(leaf: Any) -> Spec:
    """The Spec of a NumPy array. Raises InvalidArgument for one whose values are not in its bytes alone."""
    if leaf.dtype.hasobject or leaf.dtype.names or isinstance(leaf, np.ma.MaskedArray):
        kind = "masked array" if isinstance(leaf, np.ma.MaskedArray) else f"array of dtype {leaf.dtype}"
        raise InvalidArgument(f"a {kind} cannot go to a device; plain numbers, bools and fixed-size bytes can")
    return Spec(leaf.shape, dtype_name(leaf.dtype), leaf.nbytes)


def dtype_name(dtype: np.dtype[Any]) -> str:
    """The name that np.dtype() and other libraries know it by."""
    named = dtype.kind in "biufc" or (dtype.kind == "V" and not dtype.name.startswith("void"))  # V: ml_dtypes' floats
    return dtype.name if named and dtype.isnative else dtype.str
