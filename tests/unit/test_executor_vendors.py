"""Stages of the real cuda.core and numba.cuda, over a stand-in for NVIDIA's driver: what they see, return and keep.

The stand-in has what pyxdev calls, not what kernels and allocations of these libraries need; those are tried on a GPU,
in tests/conformance/test_library_stages.py.
"""

from __future__ import annotations

import pytest
import vendor_child

SCENE = """
import numpy as np
from cuda.bindings import driver
from pyxdev import Array
from pyxdev.backends import open as open_backend
from pyxdev.executor import Executor

def copy(stage, x, y=None):
    y = stage.empty(x.shape, x.dtype) if y is None else y
    nbytes = x.dtype.itemsize * int(np.prod(x.shape))
    stream = runtime.adopt_stream(stage.device, int(stage.stream.handle))
    stream.copy(address(y), address(x), nbytes, dst_device=stage.device, src_device=stage.device)
    stream.close()
    return y

def host(y):
    return owner(y).numpy()

def pipe(*fns, **options):
    return Executor(range(len(fns)), fns, adapter=ADAPTER, runtime=runtime, **options)

def current():
    return int(driver.cuCtxGetCurrent()[1])

runtime = open_backend("cuda")
assert runtime.device_count > 1
XS = [np.full((3, 4), n, np.float32) for n in range(12)]
"""
LIBRARIES = {
    "cuda.core": """
from cuda.core.utils import StridedMemoryView

ADAPTER = "cuda.core"
address = lambda x: x.ptr
owner = lambda x: x.exporting_obj
wrap = lambda x: StridedMemoryView.from_dlpack(x, -1)
""",
    "numba_cuda": """
from numba import cuda

ADAPTER = "numba"
address = lambda x: x.device_ctypes_pointer.value
owner = lambda x: x.gpu_data.owner
wrap = lambda x: cuda.as_cuda_array(x, sync=False)
""",
}
CLOSED = """
gc.collect()
assert not runtime.live().any(), runtime.live()
runtime.close()
"""


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    pytest.importorskip(name)
    return LIBRARIES[name]


def run(library: str, code: str) -> None:
    vendor_child.build_fakes()
    vendor_child.run(library + SCENE + code + CLOSED, vendor_child.FAKES)


def test_stages_and_what_they_see(library: str) -> None:
    run(library, """
driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])
before, seen = current(), []
assert before

def look(stage, x):
    seen.append((stage.device, int(stage.stream.handle), current()))
    return {"x": copy(stage, x["x"]), "n": x["n"] + 1}

with pipe(look, look) as pipeline:
    for n, y in enumerate(pipeline.map([{"x": x, "n": 5} for x in XS])):
        assert type(y["x"]) is type(wrap(owner(y["x"]))) and (host(y["x"]) == n).all() and y["n"] == 7
        assert current() == before
    streams = [stage.stream.handle for stage in pipeline._line.stages]
    assert {one[:2] for one in seen} == set(enumerate(streams))
    assert len({one[2] for one in seen} - {0}) == 2
    driver.cuDevicePrimaryCtxRelease(0)
    tickets = [pipeline.submit({"x": XS[3], "n": 0})]
    tickets.append(pipeline.submit(tickets[0]))
    assert tickets[1].result()["n"] == 4 and (host(tickets[1].result()["x"]) == 3).all()
    del y, tickets
""")  # fmt: skip


def test_what_may_be_returned(library: str) -> None:
    run(library, """
kept = []

def static(stage, x):
    kept[:] = kept or [stage.empty(x.shape, x.dtype)]
    copy(stage, x, kept[0])
    return [kept[0], x, copy(stage, x)]

with pipe(static, lambda stage, x: x, in_flight=4, depth=1) as pipeline:
    for n, y in enumerate(pipeline.map(XS)):
        assert all((host(one) == n).all() for one in y)
    before = pipeline.plan().memory
    for y in pipeline.map(XS):
        pass
    assert pipeline.plan().memory == before
    del y
    kept.clear()
""")  # fmt: skip


def test_what_may_not_be(library: str) -> None:
    run(library, """
kept = []

def keeps(stage, x):
    kept.append(x)
    return copy(stage, x)

with pipe(keeps) as pipeline:
    raises(errors.StageError, lambda: pipeline.submit(XS[0]).result(), "kept an array of its input")
    kept.clear()

def strided(stage, x):
    return wrap(Array(stage.runtime, stage.device, address(x), (2, 2), "float32", strides=(6, 1), owner=x))

with pipe(strided) as pipeline:
    raises(errors.StageError, lambda: pipeline.submit(XS[0]).result(), "gaps or in another order")
""")  # fmt: skip
