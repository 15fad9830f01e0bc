"""Raw stages for the tests of graphs: kernels that know addresses alone, as a GPU's do, and what they must give."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pyxdev import Array


class At(NamedTuple):
    """Where an array is."""

    address: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int

    def view(self) -> Any:
        """Memory of a simulated device."""
        memory = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
        return np.frombuffer(memory, self.dtype).reshape(self.shape)


def kernel(stage: Any, f: Callable[..., Any], y: Array, *xs: Array, cost: float = 2e-5) -> None:
    """Queues y = f(*xs). Nothing in it refers to the arrays, only to where they are."""
    out, *given = [At(a.address, a.shape, a.dtype, a.nbytes) for a in (y, *xs)]

    def run() -> None:
        out.view()[...] = f(*[x.view() for x in given])

    reads = [(x.address, x.nbytes) for x in xs]
    stage.stream.launch(run, cost=cost, reads=reads, writes=[(y.address, y.nbytes)])


def copy(stage: Any, y: Array, x: Array) -> None:
    stage.stream.copy(y.address, x.address, x.nbytes, dst_device=stage.device, src_device=stage.device)


class Case:
    """A stage: fn(stage, x) for devices, by_hand(x) for NumPy arrays. x is {"a": array, "n": number}."""

    stateful = False  # more than its input decides what it gives
    calls = 0

    def __call__(self, stage: Any, x: Any) -> Any:
        self.calls += 1
        return self.device(stage, x)

    def device(self, stage: Any, x: Any) -> Any:
        raise NotImplementedError

    def by_hand(self, x: Any) -> Any:
        raise NotImplementedError


class Affine(Case):
    """Two kernels, a temporary between them."""

    def device(self, stage: Any, x: Any) -> Any:
        a, n = x["a"], x["n"]
        between, y = stage.empty(a.shape, a.dtype), stage.empty(a.shape, a.dtype)
        kernel(stage, lambda a: a * np.float32(1.5), between, a)
        kernel(stage, lambda t: t + np.float32(n), y, between)
        return {"a": y, "n": n}

    def by_hand(self, x: Any) -> Any:
        return {"a": x["a"] * np.float32(1.5) + np.float32(x["n"]), "n": x["n"]}


class InPlace(Case):
    """Changes its input and gives it back."""

    def device(self, stage: Any, x: Any) -> Any:
        kernel(stage, lambda a: a + np.float32(1), x["a"], x["a"])
        return x

    def by_hand(self, x: Any) -> Any:
        return {"a": x["a"] + np.float32(1), "n": x["n"]}


class FillAndCopy(Case):
    """No kernel; adds a constant to what goes on and takes one away."""

    def device(self, stage: Any, x: Any) -> Any:
        y = stage.empty(x["a"].shape, x["a"].dtype)
        copy(stage, y, x["a"])
        stage.stream.fill(y.address, 0, 4)
        return {"a": y, "n": 3}

    def by_hand(self, x: Any) -> Any:
        y = x["a"].copy()
        y.reshape(-1)[0] = 0
        return {"a": y, "n": 3}


class Keeps(Case):
    """Keeps its output, and writes the same memory again."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, ...], Array] = {}

    def device(self, stage: Any, x: Any) -> Any:
        a = x["a"]
        if a.shape not in self.kept:
            self.kept[a.shape] = stage.empty(a.shape, a.dtype)
        y = self.kept[a.shape]
        kernel(stage, lambda a: a * np.float32(0.5), y, a)
        return {"a": y, "n": x["n"]}

    def by_hand(self, x: Any) -> Any:
        return {"a": x["a"] * np.float32(0.5), "n": x["n"]}


class Running(Case):
    """Adds up its inputs in memory of its own, as a cache does: each output depends on all inputs before."""

    stateful = True

    def __init__(self) -> None:
        self.total: Array | None = None
        self.sum = np.float32(0)

    def device(self, stage: Any, x: Any) -> Any:
        a = x["a"]
        if self.total is None:
            self.total = stage.empty((1,), "float32")
            stage.stream.fill(self.total.address, 0, 4)
        y = stage.empty(a.shape, a.dtype)
        kernel(stage, lambda t, a: t + a.reshape(-1)[:1], self.total, self.total, a)
        kernel(stage, lambda t, a: a + t, y, self.total, a)
        return {"a": y, "n": x["n"]}

    def by_hand(self, x: Any) -> Any:
        self.sum = self.sum + x["a"].reshape(-1)[0]
        return {"a": x["a"] + self.sum, "n": x["n"]}


PURE: tuple[type[Case], ...] = (Affine, Affine, InPlace, FillAndCopy, Keeps)
ALL: tuple[type[Case], ...] = (*PURE, Running)


class Pipeline:
    """A random one, its inputs and results."""

    def __init__(self, seed: int, kinds: tuple[type[Case], ...]) -> None:
        choose = random.Random(seed)
        values = np.random.default_rng(seed)
        count = choose.randint(1, 4)
        self.stages = [choose.choice(kinds)() for _ in range(count)]
        self.devices = [choose.randrange(3) for _ in range(count)]
        shapes = [(choose.choice([1, 7, 500]), choose.choice([1, 90])) for _ in range(choose.choice([1, 1, 2]))]
        self.xs = [
            {"a": values.standard_normal(choose.choice(shapes), np.float32), "n": 5}
            for _ in range(choose.choice([20, 45]))
        ]
        self.options = {
            "depth": choose.choice(["auto", 1, 2, 3]),
            "in_flight": choose.choice(["auto", 1, 3, 9]),
            "host_stage": choose.choice(["0", "1"]),
            "tile_mb": choose.choice([None, 0.01]),
        }

    def wanted(self) -> list[Any]:
        results = []
        for x in self.xs:
            for stage in self.stages:
                x = stage.by_hand(x)
            results.append(x)
        return results
