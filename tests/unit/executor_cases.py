"""Random pipelines for the executor's tests: stages with every habit that a stage may have, and what they must give."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pyxdev.executor import Stage

Fn = Callable[[Any], Any]


def machine(devices: int, seed: int = 0, **changes: Any) -> dict[str, Any]:
    """Simulated devices on which every operation takes up to 50 us longer and twice its time, seeded; the ordering
    checker watches."""
    run = {"seed": seed, "jitter": 1.0, "delay_us": 50.0, "check": True}
    return {"device": {"count": devices}, "run": run, **changes}


def same(got: Any, wanted: Any) -> bool:
    """Equal to the bit, in structure, types, shapes and values."""
    if isinstance(wanted, np.ndarray):
        return (
            isinstance(got, np.ndarray)
            and (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
            and got.tobytes() == wanted.tobytes()
        )
    if type(got) is not type(wanted):
        return False
    if isinstance(wanted, tuple | list):
        return len(got) == len(wanted) and all(map(same, got, wanted))
    if isinstance(wanted, dict):
        return list(got) == list(wanted) and all(same(got[key], wanted[key]) for key in wanted)
    return bool(got == wanted)


# ---- stages; x is {"a": array, "n": int, "on": bool, "rest": (list of arrays, text)} --------------------------------


def scale(x: Any) -> Any:
    return {**x, "a": x["a"] * np.float32(1.25) + np.float32(x["n"])}


def change_in_place(x: Any) -> Any:
    x["a"] += 1
    x["n"] += 1
    x["rest"][0].append(x["a"][:1])
    return x


def give_back(x: Any) -> Any:
    return x


def narrow(x: Any) -> Any:
    return {**x, "a": x["a"][:, ::2]}  # not contiguous, smaller


def widen(x: Any) -> Any:
    return {**x, "a": np.concatenate([x["a"], x["a"]], axis=1)}


def to_other_types(x: Any) -> Any:
    more = [x["a"].astype(np.float16), np.empty((0, 3), np.int8), np.array(x["n"], np.int64), x["a"].T > 0]
    return {**x, "rest": (x["rest"][0] + more, x["rest"][1] + "!")}


def drop_if_on(x: Any) -> Any:
    return {**x, "rest": ([], "")} if x["on"] else x


class History:
    """Keeps its inputs, as an attention layer keeps keys and values; each output depends on all of them."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, x: Any) -> Any:
        self.seen.append(x["a"])
        total = np.float32(sum(float(a.sum()) for a in self.seen))
        return {**x, "a": x["a"] + total / np.float32(1 + len(self.seen))}


class Static:
    """Writes every output to the same memory, as a captured graph does."""

    def __init__(self) -> None:
        self.out: dict[tuple[int, ...], Any] = {}

    def __call__(self, x: Any) -> Any:
        out = self.out.setdefault(x["a"].shape, np.empty(x["a"].shape, np.float32))
        np.multiply(x["a"], np.float32(0.5), out=out)
        return {**x, "a": out}


HABITS: tuple[Callable[[], Fn], ...] = (
    *((lambda fn=fn: fn) for fn in (scale, change_in_place, give_back, narrow, widen, to_other_types, drop_if_on)),
    History,
    Static,
)


@dataclass
class Case:
    """A random pipeline. fns(): its stages, fresh each time."""

    seed: int
    devices: list[int]
    makers: list[Callable[[], Fn]]
    costs: list[float]
    inputs: list[Any]
    options: dict[str, Any] = field(default_factory=dict)

    def fns(self) -> list[Fn]:
        return [make() for make in self.makers]

    def stages(self) -> list[Stage]:
        return [Stage(fn, cost=cost) for fn, cost in zip(self.fns(), self.costs, strict=True)]

    def in_order(self) -> list[Any]:
        """One microbatch after the other through one stage after the other, each of which owns what it is given."""
        fns = self.fns()
        results = []
        for x in self.inputs:
            for fn in fns:
                x = fn(_copy(x))
            results.append(_copy(x))
        return results

    def copies(self) -> list[Any]:
        return [_copy(x) for x in self.inputs]


def _copy(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return x.copy("C")  # sums of floats depend on how an array lies in memory
    if isinstance(x, tuple | list):
        return type(x)(map(_copy, x))
    return {key: _copy(value) for key, value in x.items()} if isinstance(x, dict) else x


def random_case(seed: int, most_devices: int = 6) -> Case:
    choose = random.Random(seed)
    values = np.random.default_rng(seed)
    stages = choose.randint(1, 7)
    count = choose.randint(1, min(stages, most_devices))
    devices = [choose.randrange(most_devices) for _ in range(count)]
    shapes = [(choose.choice([0, 1, 3, 40]), choose.choice([1, 8, 1000])) for _ in range(choose.randint(1, 2))]
    inputs = [
        {
            "a": values.standard_normal(choose.choice(shapes), np.float32),
            "n": choose.randrange(100),
            "on": choose.random() < 0.3,
            "rest": ([values.integers(0, 9, choose.choice([0, 1, 5000])) for _ in range(choose.randrange(3))], "text"),
        }
        for _ in range(choose.choice([1, 2, 5, 12]))
    ]
    options = {
        "in_flight": choose.choice(["auto", 1, 2, 3, 9]),
        "depth": choose.choice(["auto", 1, 2, 3]),
        "host_stage": choose.choice(["0", "1", "0,0>1=1,1>0=1"]),
        "tile_mb": choose.choice([None, 0.001, 0.01, 0.3]),
    }
    return Case(
        seed,
        devices,
        [choose.choice(HABITS) for _ in range(stages)],
        [choose.choice([0.0, choose.random() * 1e-3]) for _ in range(stages)],
        inputs,
        options,
    )
