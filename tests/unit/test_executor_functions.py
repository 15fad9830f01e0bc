"""C functions as stages, on simulated devices: made by ctypes, cffi and numba, given by address, right and wrong."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executor_cases import machine

from pyxdev import CFunction
from pyxdev.errors import FunctionFailed, InvalidArgument, StageError
from pyxdev.executor import Executor, Stage

SIZE = 1000  # float64 of an array
DECLARATION = "int (void *, void *const *, const uint64_t *, void *const *, void *)"


def doubles(address: int, nbytes: int = 8 * SIZE) -> Any:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.float64)


def by_ctypes() -> Any:
    @CFunction.TYPE
    def twice(stream: Any, inputs: Any, sizes: Any, outputs: Any, user: Any) -> int:
        assert stream is None
        doubles(outputs[0])[:] = doubles(inputs[0], sizes[0]) * 2
        return 0

    return twice


def by_cffi() -> Any:
    cffi = pytest.importorskip("cffi")
    ffi = cffi.FFI()

    @ffi.callback(DECLARATION)
    def twice(stream: Any, inputs: Any, sizes: Any, outputs: Any, user: Any) -> int:
        x = np.frombuffer(ffi.buffer(inputs[0], sizes[0]), np.float64)
        np.frombuffer(ffi.buffer(outputs[0], sizes[0]), np.float64)[:] = x * 2
        return 0

    return twice


def by_numba() -> Any:
    numba = pytest.importorskip("numba")
    types = numba.types
    pointers, sizes = types.CPointer(types.voidptr), types.CPointer(types.uint64)

    @numba.cfunc(types.intc(types.voidptr, pointers, sizes, pointers, types.voidptr))
    def twice(stream, inputs, sizes, outputs, user):
        n = sizes[0] // 8
        x, y = numba.carray(inputs[0], n, numba.float64), numba.carray(outputs[0], n, numba.float64)
        for i in range(n):
            y[i] = 2 * x[i]
        return 0

    return twice


def by_address() -> Any:
    function = by_ctypes()
    made = CFunction(ctypes.cast(function, ctypes.c_void_p).value, name="twice")
    made.function = function
    return made


def like(x: Any) -> Any:
    return x


@pytest.mark.parametrize("make", [by_ctypes, by_cffi, by_numba, by_address])
@pytest.mark.parametrize("host_stage", ["0", "1"])
def test_right_bits(make: Callable[[], Any], host_stage: str) -> None:
    """Between NumPy stages; the stage alone keeps the function."""
    stages = [lambda x: x + 1, Stage(make(), out=like, cost=1e-4), lambda x: x - 3]
    gc.collect()
    for seed in range(4):
        xs = [np.full(SIZE, n, np.float64) for n in range(8)]
        with Executor([0, 1, 0], stages, host_stage=host_stage, depth=2, machine=machine(2, seed)) as pipe:
            assert [stage.adapter for stage in pipe.plan().stages] == ["numpy", "c", "numpy"]
            for x, y in zip(xs, pipe.map(xs), strict=True):
                assert (y == (x + 1) * 2 - 3).all(), f"seed {seed}"


def test_it_is_given_all_arrays_their_sizes_and_the_user_pointer() -> None:
    seen: list[tuple[list[int], int]] = []

    @CFunction.TYPE
    def swap(stream: Any, inputs: Any, sizes: Any, outputs: Any, user: Any) -> int:
        seen.append(([sizes[0], sizes[1], sizes[2]], user))
        doubles(outputs[0], sizes[1])[:] = doubles(inputs[1], sizes[1])
        doubles(outputs[1], sizes[0])[:] = doubles(inputs[0], sizes[0])
        return 0

    def out(x: Any) -> Any:
        return {"first": x["b"], "k": x["k"] + 1, "second": x["a"]}

    x = {"a": np.arange(40.0), "b": np.arange(7.0), "empty": np.empty(0), "k": 5}
    with Executor([0], [Stage(CFunction(swap, user=1 << 40), out=out)], machine=machine(1)) as pipe:
        for k in (5, 6, 5):
            y = pipe.submit({**x, "k": k}).result()
            assert (y["first"].numpy() == x["b"]).all() and (y["second"].numpy() == x["a"]).all()
            assert list(y) == ["first", "k", "second"] and y["k"] == k + 1
    assert seen == [([320, 56, 0], 1 << 40)] * 3


def test_plain_values_of_a_stage_that_runs_later() -> None:
    """They are waited for, where `out` wants to know them."""
    stages = [lambda x: (x * 2, 5), Stage(by_ctypes(), out=lambda x: (x[0], x[1] + 1)), lambda x: (x[0] + 1, x[1])]
    with Executor([0, 1, 0], stages, machine=machine(2)) as pipe:
        for n in range(3):
            y = pipe.submit(np.full(SIZE, n, np.float64)).result()
            assert (y[0] == 4 * n + 1).all() and y[1] == 6


def test_a_token_loop() -> None:
    stages = [Stage(by_ctypes(), out=like, cost=1e-4), Stage(by_ctypes(), out=np.empty(SIZE), cost=1e-4)]
    with Executor([0, 1], stages, host_stage="0", machine=machine(2)) as pipe:
        tickets = [pipe.submit(np.full(SIZE, n, np.float64)) for n in range(3)]
        for _ in range(4):
            tickets = [pipe.submit(ticket) for ticket in tickets]
        for n, ticket in enumerate(tickets):
            assert (ticket.result().numpy() == n * 4**5).all()


def test_a_code_fails_the_stage() -> None:
    calls: list[float] = []

    @CFunction.TYPE
    def picky(stream: Any, inputs: Any, sizes: Any, outputs: Any, user: Any) -> int:
        value = float(doubles(inputs[0])[0])
        calls.append(value)
        doubles(outputs[0])[:] = value
        return -7 if value == 2 else 0

    stages = [lambda x: x, Stage(picky, out=like, name="picky"), Stage(by_ctypes(), out=like)]
    with Executor([0, 1, 0], stages, machine=machine(2)) as pipe:
        tickets = [pipe.submit(np.full(SIZE, n, np.float64)) for n in range(4)]
        assert (tickets[1].result().numpy() == 2).all()
        with pytest.raises(StageError, match=r"stage 1 \(picky\), microbatch 2: FunctionFailed: returned -7") as caught:
            tickets[2].result()
        cause = caught.value.__cause__
        assert isinstance(cause, FunctionFailed) and (caught.value.code, caught.value.stage, cause.code) == (-7, 1, -7)
        assert calls == [0, 1, 2]  # the one after it was cancelled
        assert (pipe.submit(np.full(SIZE, 9, np.float64)).result().numpy() == 18).all()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"out": lambda x: x["no"]}, "TypeError"),
        ({"out": lambda x: 1 / 0}, "ZeroDivisionError"),
        ({"out": like, "cost": lambda x: 1 / 0}, "ZeroDivisionError"),
        ({"out": np.empty(3, object)}, "object"),
    ],
)
def test_what_is_declared_wrongly_fails_the_stage(changes: dict[str, Any], message: str) -> None:
    with (
        Executor([0], [Stage(by_ctypes(), **changes)], machine=machine(1)) as pipe,
        pytest.raises(StageError, match=message),
    ):
        pipe.submit(np.ones(SIZE)).result()


@pytest.mark.parametrize("function", [0, -1, 1 << 64, True, None, "no", 1.5, CFunction.TYPE()])
def test_no_function(function: Any) -> None:
    with pytest.raises(InvalidArgument, match="function is"):
        CFunction(function)


def test_arguments_are_checked() -> None:
    for user in (-1, 1 << 64, None, True, 1.5):
        with pytest.raises(InvalidArgument, match="user is"):
            CFunction(4096, user=user)
    with pytest.raises(InvalidArgument, match=r"C function, which needs out="):
        Executor([0], [by_ctypes()], machine=machine(1))
    with pytest.raises(InvalidArgument, match=r"adapter is 'raw'; a C function has its own"):
        Stage(by_ctypes(), out=like, adapter="raw")
    with pytest.raises(InvalidArgument, match=r"a callable or a CFunction is allowed"):
        Stage(4096, out=like)
    assert repr(CFunction(4096)) == "<pyxdev.CFunction 0x1000>" and Stage(by_ctypes(), out=like).label


BLOCKING = """
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

int wait_for_go(void *stream, void *const *inputs, const uint64_t *sizes, void *const *outputs, void *user)
{
    atomic_int *flags = user; /* here, go */
    atomic_store(&flags[0], 1);
    for (int i = 0; i < 30000; i++) {
        if (atomic_load(&flags[1]))
            return 0;
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return 1;
}
"""


def test_it_runs_without_the_gil(tmp_path: Path) -> None:
    """A function of a library that waits for a thread of Python."""
    (tmp_path / "blocking.c").write_text(BLOCKING)
    command = [
        "cc",
        "-std=c11",
        "-D_GNU_SOURCE",
        "-shared",
        "-fPIC",
        "-o",
        tmp_path / "blocking.so",
        tmp_path / "blocking.c",
    ]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(tmp_path / "blocking.so"))
    flags = (ctypes.c_int * 2)()
    function = CFunction(library.wait_for_go, user=ctypes.addressof(flags))
    assert function.name == "wait_for_go"
    with Executor([0], [Stage(function, out=like)], machine=machine(1)) as pipe:
        ticket = pipe.submit(np.ones(4))
        got: list[Any] = []
        waiter = threading.Thread(target=lambda: got.append(ticket.result()))
        waiter.start()
        while not flags[0]:
            waiter.join(0.001)
        flags[1] = 1
        waiter.join()
        assert len(got) == 1
