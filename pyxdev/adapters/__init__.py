"""What a stage sees and returns: NumPy arrays, torch tensors or pyxdev Arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from pyxdev._native import Runtime
from pyxdev.adapters.activation import Activation, Joined, Layout, Layouts, Value
from pyxdev.adapters.adapter import Adapter, Source, Stopped
from pyxdev.errors import InvalidArgument, Unsupported

__all__ = [
    "NAMES", "Activation", "Adapter", "Joined", "Layout", "Layouts", "Source", "Stopped", "Value", "choose", "make",
]  # fmt: skip

NAMES = ("auto", "numpy", "torch", "raw")


def choose(name: str, runtime: Runtime, fns: list[Callable[..., Any]]) -> str:
    """The adapter's name for "auto": "numpy" on simulated devices, else "torch" if it is imported or a stage is one of
    its modules, else "raw".

    Raises InvalidArgument for a name that is none, Unsupported for one that the backend cannot serve.
    """
    if name not in NAMES:
        raise InvalidArgument(f"adapter is {name!r}; allowed: {', '.join(NAMES)}")
    if name == "auto":
        if runtime.backend == "sim":
            return "numpy"
        return "torch" if "torch" in sys.modules or any(_is_torch_module(fn) for fn in fns) else "raw"
    if name == "numpy" and runtime.backend != "sim":
        raise Unsupported(f"the numpy adapter runs on simulated devices only, not on {runtime.backend}")
    if name == "torch" and runtime.backend == "sim":
        raise Unsupported("the torch adapter needs CUDA or HIP devices; simulated ones take numpy or raw")
    return name


def _is_torch_module(fn: object) -> bool:
    return any(base.__module__.partition(".")[0] == "torch" for base in type(fn).__mro__)


def make(name: str, layouts: Layouts) -> Adapter:
    """An adapter for one stage. name: as choose() gives it."""
    if name == "numpy":
        from pyxdev.adapters.numpy import NumpyAdapter

        return NumpyAdapter(layouts)
    if name == "torch":
        from pyxdev.adapters.torch import TorchAdapter

        return TorchAdapter(layouts)
    from pyxdev.adapters.raw import RawAdapter

    return RawAdapter(layouts)
