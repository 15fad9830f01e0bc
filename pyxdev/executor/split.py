"""A list of layers as stages on several devices."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pyxdev.errors import InvalidArgument
from pyxdev.executor.plan import Stage
from pyxdev.loader.placement import runs, shares


def split(
    layers: Iterable[Callable[..., Any]],
    devices: Sequence[int],
    proportions: Sequence[float] | None = None,
) -> list[Stage]:
    """Stages for an Executor: each device gets a run of the layers, whose outputs are each other's inputs.

    layers: an nn.Sequential, an nn.ModuleList, or any iterable of callables.
    proportions: a share for each device, as the loader's tensor_split: (3, 1) is three quarters of the layers and one.
        None: equal shares. It is layers that are counted and not their bytes, so that the same split brings weights
        to where their stage is.

    Modules of torch are themselves moved to the device with that number, if torch sees GPUs; otherwise they stay where
    they are, for simulated devices have their memory on the host. A device whose share is less than half a layer gets
    no stage; so open the executor with `[stage.device for stage in stages]`.

    Raises InvalidArgument for no layers, for what is no layer, for shares that say nothing, and for layers on different
    devices that are one module or have a parameter in common.
    """
    if not isinstance(layers, Iterable) or isinstance(layers, str | bytes | dict):
        raise InvalidArgument(f"layers is {layers!r}; an nn.Sequential or a sequence of callables is allowed")
    listed = list(layers)
    if not listed:
        raise InvalidArgument("layers is empty; at least one layer is needed")
    for n, layer in enumerate(listed):
        if not callable(layer):
            raise InvalidArgument(f"layers[{n}] is {layer!r}; a callable is allowed")
    if not isinstance(devices, Sequence) or isinstance(devices, str | bytes) or not devices:
        raise InvalidArgument(f"devices is {devices!r}; a sequence of device numbers is allowed, such as [0, 1]")
    placed = [devices[index] for index in runs(len(listed), shares(len(devices), proportions, "proportions"))]
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        _check_parts(torch, listed, placed)
    bounds = [n for n in range(len(listed)) if n == 0 or placed[n] != placed[n - 1]]
    return [
        _stage(torch, listed[begin:end], placed[begin], f"layers {begin}-{end - 1}")
        for begin, end in zip(bounds, [*bounds[1:], len(listed)], strict=True)
    ]


def _check_parts(torch: Any, layers: list[Any], placed: list[int]) -> None:
    """Nothing can be on two devices."""
    seen: dict[int, tuple[int, str]] = {}
    for n, layer in enumerate(layers):
        if not isinstance(layer, torch.nn.Module):
            continue
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
            if tensor.is_meta:
                raise InvalidArgument(f"{name} of layers[{n}] is a meta tensor, which has no values; load it first")
            before, called = seen.setdefault(id(tensor), (n, name))
            if placed[before] != placed[n]:
                raise InvalidArgument(
                    f"{called} of layers[{before}] and {name} of layers[{n}] are one tensor, which cannot be on "
                    f"devices {placed[before]} and {placed[n]}; copy one of them"
                )


def _stage(torch: Any, layers: list[Any], device: int, name: str) -> Stage:
    modules = [layer for layer in layers if torch is not None and isinstance(layer, torch.nn.Module)]
    if modules and torch.cuda.is_available():
        for module in modules:
            module.to(f"cuda:{device}")
    whole = len(modules) == len(layers)
    return Stage(torch.nn.Sequential(*layers) if whole else Chain(layers), device=device, name=name)


class Chain:
    """Layers that need not be modules, one after the other."""

    def __init__(self, layers: list[Callable[[Any], Any]]) -> None:
        self.layers = layers
        self.__wrapped__ = layers[0]  # which tells the adapter

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x
