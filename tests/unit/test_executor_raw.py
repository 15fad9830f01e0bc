"""Stages on bare memory: what they see, what they may return, and the order of it all."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import numpy as np
import pytest
from executor_cases import machine

from pyxdev import Array
from pyxdev.adapters.raw import RawAdapter
from pyxdev.errors import InvalidArgument, StageError
from pyxdev.executor import Executor, Stage


def view(array: Array) -> Any:
    """Memory of a simulated device; for kernels."""
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.address)
    return np.frombuffer(memory, array.dtype).reshape(array.shape)


def fill(array: Array, value: float) -> None:
    view(array)[...] = value


def kernel(stage: Any, y: Array, x: Array, f: Any, cost: float = 5e-4) -> None:
    """Queues y = f(x) on the stage's stream."""

    def run() -> None:
        view(y)[...] = f(view(x))

    stage.stream.launch(run, cost=cost, reads=[(x.address, x.nbytes)], writes=[(y.address, y.nbytes)])


def twice(stage: Any, x: Array) -> Array:
    y = stage.empty(x.shape, x.dtype)
    kernel(stage, y, x, lambda values: values * 2)
    return y


def in_place(stage: Any, x: Array) -> Array:
    kernel(stage, x, x, lambda values: values + 1)
    return x


class Static:
    """Returns the same memory every time."""

    def __init__(self) -> None:
        self.y: Any = None

    def __call__(self, stage: Any, x: Array) -> Array:
        if self.y is None:
            self.y = stage.empty(x.shape, x.dtype)
        kernel(stage, self.y, x, lambda values: values - 3)
        return self.y


class Total:
    """Adds its inputs up in memory of its own, and returns that."""

    def __init__(self) -> None:
        self.sum: Any = None

    def __call__(self, stage: Any, x: Array) -> dict[str, Any]:
        if self.sum is None:
            self.sum = stage.empty(x.shape, x.dtype)
            stage.stream.fill(self.sum.address, 0, self.sum.nbytes)
        kernel(stage, self.sum, x, lambda values: values + view(self.sum))
        return {"sum": self.sum, "x": x, "n": x.shape[0]}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("host_stage", ["0", "1"])
def test_raw_stages_give_the_right_bits(seed: int, depth: int, host_stage: str) -> None:
    fns = [twice, in_place, Static(), Total()]
    xs = [np.full(3000, n, np.float64) for n in range(8)]
    with Executor(
        [0, 1, 0, 1], fns, adapter="raw", depth=depth, host_stage=host_stage, machine=machine(2, seed)
    ) as pipe:
        assert [stage.adapter for stage in pipe.plan().stages] == ["raw"] * 4
        total = np.zeros(3000)
        for x, y in zip(xs, pipe.map(xs), strict=True):
            total = total + (x * 2 + 1 - 3)
            assert (y["sum"].numpy() == total).all() and (y["x"].numpy() == x * 2 - 2).all() and y["n"] == 3000
            assert y["sum"].device == 1


def test_a_stage_knows_where_it_is() -> None:
    def look(stage: Any, x: Array) -> Array:
        assert (stage.device, stage.index, stage.stream.device, x.device) == (1, 1, 1, 1)
        assert stage.runtime is x.runtime and isinstance(x, Array) and x.contiguous
        return x

    with Executor([0, 1], [twice, look], adapter="raw", host_stage="0", machine=machine(2)) as pipe:
        y = pipe.submit(np.ones((2, 3))).result()
        assert y.shape == (2, 3) and y.dtype == "float64" and (y.numpy() == 2).all()


def test_raw_and_numpy_stages_mix() -> None:
    stages = [
        Stage(lambda x: (x + 1, 5)),
        Stage(lambda stage, x: (twice(stage, x[0]), x[1] + 1), adapter="raw"),
        lambda x: x[0] * x[1],
    ]
    with Executor([0, 1, 0], stages, host_stage="0", machine=machine(2)) as pipe:
        xs = [np.full(100, n) for n in range(6)]
        assert [y[0] for y in pipe.map(xs)] == [(n + 1) * 2 * 6 for n in range(6)]


def test_arrays_of_a_device_are_inputs() -> None:
    with Executor([1], [twice], adapter="raw", host_stage="0", machine=machine(2)) as pipe:
        runtime = pipe.runtime
        buffer = runtime.buffer(0, 80)
        stream = runtime.stream(0)
        x = Array(runtime, 0, buffer.address, (10,), "float64", owner=buffer, ready=runtime.event(), stream=stream)
        stream.launch(partial(fill, x, 4), cost=1e-2, writes=[(x.address, x.nbytes)])
        x.ready.record(stream)
        assert (pipe.submit(x).result().numpy() == 8).all()
        x.ready.close()
        stream.close()
        buffer.close()


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda stage, x: Array(stage.runtime, 0, x.address, (1,), "int8"), "its own device|own device"),
        (lambda stage, x: Array(stage.runtime, 1, x.address, (2, 2), "int8", strides=(1, 2)), "contiguous"),
    ],
)
def test_what_a_stage_must_not_return(wrong: Any, message: str) -> None:
    with Executor([1], [wrong], adapter="raw", machine=machine(2)) as pipe:
        with pytest.raises(StageError, match=message) as caught:
            pipe.submit(np.ones(8)).result()
        assert isinstance(caught.value.__cause__, InvalidArgument)


def test_memory_is_used_again() -> None:
    with Executor([0, 1], [twice, twice], adapter="raw", host_stage="0", in_flight=4, machine=machine(2)) as pipe:
        for n, y in enumerate(pipe.map([np.full(1000, n) for n in range(40)])):
            assert y.numpy()[0] == 4 * n
            if n == 20:
                warm = pipe.plan().memory
        assert pipe.plan().memory == warm


def test_what_only_the_pipeline_refers_to_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Array] = []
    copy = RawAdapter._copied
    monkeypatch.setattr(RawAdapter, "_copied", lambda self, raw, leaf: copied.append(leaf) or copy(self, raw, leaf))

    def fresh(stage: Any, x: Array) -> Any:
        y = stage.empty(x.shape, x.dtype)
        stage.stream.copy(y.address, x.address, x.nbytes, dst_device=stage.device, src_device=stage.device)
        return [y.raw, 1]

    with Executor([0, 1], [fresh, lambda stage, x: x], adapter="raw", host_stage="0", machine=machine(2)) as pipe:
        for n in range(3):
            y = pipe.submit(np.full(10, n, np.uint8)).result()[0]
            assert (y.numpy() == n).all()
    assert len(copied) == 3  # by the second stage, which returns its input
