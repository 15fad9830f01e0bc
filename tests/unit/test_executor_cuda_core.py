"""Stages of the real cuda.core, over a stand-in for NVIDIA's driver: what they see, what may be returned and kept.

The stand-in has what pyxdev calls, not what cuda.core's kernels and Buffers need; those are tried on a GPU, in
tests/conformance/test_library_stages.py.
"""

from __future__ import annotations

import pytest
import vendor_child

pytest.importorskip("cuda.core")

SCENE = """
import numpy as np
from cuda.bindings import driver
from cuda.core import Device
from cuda.core.utils import StridedMemoryView
from pyxdev import Array
from pyxdev.backends import open as open_backend
from pyxdev.executor import Executor

def copy(stage, x, y=None):
    y = stage.empty(x.shape, x.dtype) if y is None else y
    stream = runtime.adopt_stream(stage.device, int(stage.stream.handle))
    nbytes = x.dtype.itemsize * int(np.prod(x.shape))
    stream.copy(y.ptr, x.ptr, nbytes, dst_device=stage.device, src_device=stage.device)
    stream.close()
    return y

def host(y):
    assert isinstance(y, StridedMemoryView)
    return y.exporting_obj.numpy()

def pipe(*fns, **options):
    return Executor(range(len(fns)), fns, adapter="cuda.core", runtime=runtime, **options)

def current():
    return int(driver.cuCtxGetCurrent()[1])

runtime = open_backend("cuda")
assert runtime.device_count > 1
XS = [np.full((3, 4), n, np.float32) for n in range(12)]
"""
CLOSED = """
gc.collect()
assert not runtime.live().any(), runtime.live()
runtime.close()
"""


def run(code: str) -> None:
    vendor_child.build_fakes()
    vendor_child.run(SCENE + code + CLOSED, vendor_child.FAKES)


def test_stages_and_what_they_see() -> None:
    run("""
Device(0).set_current()
before, seen = current(), []

def look(stage, x):
    seen.append((stage.device, x["x"].device_id, int(stage.stream.handle), current()))
    return {"x": copy(stage, x["x"]), "n": x["n"] + 1}

with pipe(look, look) as pipeline:
    for n, y in enumerate(pipeline.map([{"x": x, "n": 5} for x in XS])):
        assert (host(y["x"]) == n).all() and y["n"] == 7
        assert current() == before
    streams = [stage.stream.handle for stage in pipeline._line.stages]
    assert {one[:3] for one in seen} == {(n, n, stream) for n, stream in enumerate(streams)}
    assert len({one[3] for one in seen}) == 2
    tickets = [pipeline.submit({"x": XS[3], "n": 0})]
    tickets.append(pipeline.submit(tickets[0]))
    assert tickets[1].result()["n"] == 4 and (host(tickets[1].result()["x"]) == 3).all()
    del y, tickets
""")


def test_what_may_be_returned() -> None:
    run("""
kept = []

def static(stage, x):
    kept[:] = kept or [stage.empty(x.shape, x.dtype)]
    copy(stage, x, kept[0])
    return [kept[0], x, copy(stage, x)]

with pipe(static, lambda stage, x: x, in_flight=4, depth=1) as pipeline:
    for n, y in enumerate(pipeline.map(XS)):
        assert (host(y[0]) == n).all() and (host(y[1]) == n).all()
        assert (host(y[2]) == n).all()
    del y
    kept.clear()
""")


def test_what_may_not_be() -> None:
    run("""
kept = []

def keeps(stage, x):
    kept.append(x)
    return copy(stage, x)

with pipe(keeps) as pipeline:
    raises(errors.StageError, lambda: pipeline.submit(XS[0]).result(), "kept an array of its input")
    kept.clear()

def strided(stage, x):
    y = Array(stage.runtime, stage.device, x.ptr, (2, 2), "float32", strides=(6, 1), owner=x)
    return StridedMemoryView.from_dlpack(y, -1)

with pipe(strided) as pipeline:
    raises(errors.StageError, lambda: pipeline.submit(XS[0]).result(), "gaps or in another order")
""")
