"""C functions as stages, on every driver: on real devices one that queues the vendor's own copies."""

import ctypes
import subprocess

import numpy as np
import pytest
from hardware import pattern

from pyxdev import CFunction, Executor, Stage, backends
from pyxdev.errors import FunctionFailed, StageError

SOURCE = """
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* user: the vendor's copy within a device; the devices of simulated streams are host memory. */
typedef int (*copy_function)(uint64_t dst, uint64_t src, size_t bytes, void *stream);

static int copy(void *stream, void *dst, void *src, size_t bytes, void *user)
{
    if (stream)
        return ((copy_function)user)((uintptr_t)dst, (uintptr_t)src, bytes, stream);
    memcpy(dst, src, bytes);
    return 0;
}

int swap_halves(void *stream, void *const *inputs, const uint64_t *sizes, void *const *outputs, void *user)
{
    size_t half = sizes[0] / 2;
    char *in = inputs[0], *out = outputs[0];
    int code = copy(stream, out, in + half, half, user);
    return code ? code : copy(stream, out + half, in, half, user);
}

int fail(void *stream, void *const *inputs, const uint64_t *sizes, void *const *outputs, void *user)
{
    int code = swap_halves(stream, inputs, sizes, outputs, user);
    return code ? code : 42;
}
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory, pyxdev_backend):
    """By name, CFunctions."""
    folder = tmp_path_factory.mktemp("functions")
    (folder / "functions.c").write_text(SOURCE)
    library = folder / "functions.so"
    command = ["cc", "-std=c11", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, folder / "functions.c"]
    subprocess.run(command, check=True)
    copy = 0
    if pyxdev_backend != "sim":
        vendor = {"cuda": "cuMemcpyDtoDAsync", "hip": "hipMemcpyDtoDAsync"}[pyxdev_backend]
        copy = getattr(backends, pyxdev_backend).resolve()[vendor]
    loaded = ctypes.CDLL(str(library))
    return {name: CFunction(getattr(loaded, name), user=copy) for name in ("swap_halves", "fail")}


def turn(stage, x):
    """x with its last byte moved to the front."""
    y = stage.empty(x.shape, x.dtype)
    for dst, src, nbytes in ((1, 0, x.nbytes - 1), (0, x.nbytes - 1, 1)):
        stage.stream.copy(y.address + dst, x.address + src, nbytes, dst_device=stage.device, src_device=stage.device)
    return y


def swapped(x):
    return np.roll(x, len(x) // 2)


@pytest.mark.parametrize("host_stage, graph", [("auto", "off"), ("1", "off"), ("auto", "auto")])
def test_right_bits(runtime, functions, host_stage, graph):
    swap = Stage(functions["swap_halves"], out=lambda x: x)
    places = [0, runtime.device_count - 1, 0]
    with Executor(
        places, [swap, turn, swap], adapter="raw", runtime=runtime, host_stage=host_stage, depth=2, graph=graph
    ) as pipe:
        xs = [pattern(nbytes, n) for n, nbytes in enumerate((4096, 100_000, 2, 4096, 1 << 20, 4096, 4096, 4096))]
        for x, y in zip(xs, pipe.map(xs), strict=True):
            assert (y.numpy() == swapped(np.roll(swapped(x), 1))).all()


def test_a_code_fails_the_stage(runtime, functions):
    stages = [Stage(functions["swap_halves"], out=lambda x: x), Stage(functions["fail"], out=lambda x: x)]
    with Executor([0, runtime.device_count - 1], stages, runtime=runtime, adapter="raw") as pipe:
        for _ in range(2):
            with pytest.raises(StageError, match=r"stage 1 \(fail\).*returned 42") as caught:
                pipe.submit(pattern(512)).result()
            assert isinstance(caught.value.__cause__, FunctionFailed) and caught.value.code == 42
