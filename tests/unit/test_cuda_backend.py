"""The CUDA driver and its resolver, with the real cuda-python between them and a stand-in driver over simulated devices
(tests/fakes/cuda.c). The stand-in is stricter than a real one about contexts and handles."""

from __future__ import annotations

import pytest
from vendor_child import build_fakes, run


@pytest.fixture(scope="module", autouse=True)
def fakes() -> None:
    build_fakes()


def test_devices_are_described() -> None:
    run(
        """
from pyxdev.backends import open
with open("cuda") as runtime:
    assert runtime.backend == "cuda" and runtime.device_count == 3
    info = runtime.device_info(2)
    assert (info.name, info.arch, info.pci) == ("Stand-in GPU", "sm_90", "0000:a2:00.0")
    assert info.uuid == "GPU-fafafafa-fafa-fafa-fafa-fafafafafa02"
    assert info.memory == 8 << 30 and info.copy_engines == 2 and not info.integrated
    assert runtime.memory_info(1) == (8 << 30, 8 << 30)
    assert runtime.settings.backend == "cuda" and runtime.settings.async_uploads is True
    raises(errors.InvalidArgument, lambda: runtime.stream(3), "device", "3")
""",
        PYXDEV_FAKE_CUDA_DEVICES="3",
    )


def test_every_kind_of_copy_moves_the_right_bytes() -> None:
    run("""
from pyxdev.backends import open
with open("cuda") as runtime:
    n = 70001
    host, back = runtime.buffer(HOST, n), runtime.buffer(HOST, n)
    here, there, other = runtime.buffer(0, n), runtime.buffer(0, n), runtime.buffer(1, n)
    s, t, e = runtime.stream(0), runtime.stream(1), runtime.event()
    want = pattern(n)
    memoryview(host)[:] = want
    assert runtime.peer_enable(0, 1)
    s.copy(here.address, host.address, n, dst_device=0, src_device=HOST)
    s.copy(there.address + 1, here.address + 1, n - 1, dst_device=0, src_device=0)
    s.fill(there.address, want[0], 1)
    e.record(s)
    t.wait(e)
    link = runtime.link(0, 1, path="direct")
    link.copy(other.address, there.address, n, source_ready=e, arrived=e)
    t.wait(e)
    t.copy(back.address, other.address, n, dst_device=HOST, src_device=1)
    assert t.synchronize(20)
    assert bytes(memoryview(back)) == want

    # 50 rows of 301 bytes; pitches 1024, 700, 512 and 301.
    rows, width = 50, 301
    for buffer, stream in ((here, s), (there, s), (other, t)):
        stream.fill(buffer.address, 0xEE, n)
        assert stream.synchronize(20)
    s.copy(here.address, host.address, width, height=rows, dst_pitch=700, src_pitch=1024, dst_device=0, src_device=HOST)
    s.copy(there.address, here.address, width, height=rows, dst_pitch=512, src_pitch=700, dst_device=0, src_device=0)
    e.record(s)
    link.copy(other.address, there.address, width, height=rows, dst_pitch=307, src_pitch=512, source_ready=e, arrived=e)
    t.wait(e)
    t.copy(
        back.address, other.address, width, height=rows, dst_pitch=width, src_pitch=307, dst_device=HOST, src_device=1
    )
    assert t.synchronize(20)
    got = bytes(memoryview(back))
    assert got[: rows * width] == b"".join(want[r * 1024 : r * 1024 + width] for r in range(rows))
    t.copy(back.address, other.address, 307 * rows, dst_device=HOST, src_device=1)
    assert t.synchronize(20)
    assert all(bytes(memoryview(back))[r * 307 + width : (r + 1) * 307] == b"\\xee" * 6 for r in range(rows - 1))
    for thing in (link, s, t, e, host, back, here, there, other):
        thing.close()
""")


def test_callers_context_is_left_alone() -> None:
    run(
        """
from cuda.bindings import driver
from pyxdev.backends import open

def current():
    error, context = driver.cuCtxGetCurrent()
    assert not error
    return int(context)

def work(runtime):
    stream, event, buffer, pinned = runtime.stream(1), runtime.event(), runtime.buffer(1, 64), runtime.buffer(HOST, 64)
    stream.fill(buffer.address, 1, 64)
    event.record(stream)
    stream.wait(event)
    assert event.wait(20) and stream.idle()
    runtime.peer_enable(1, 0)
    runtime.memory_info(1)
    for thing in (stream, event, buffer, pinned):
        thing.close()

with open("cuda") as runtime:
    assert current() == 0
    work(runtime)
    assert current() == 0
    error, mine = driver.cuDevicePrimaryCtxRetain(2)
    driver.cuCtxSetCurrent(mine)
    work(runtime)
    assert current() == int(mine)
    os.environ["PYXDEV_FAKE_CUDA_FAIL"] = "cuMemAlloc=2"
    raises(errors.OutOfMemory, lambda: runtime.buffer(1, 64))
    assert current() == int(mine)
""",
        PYXDEV_FAKE_CUDA_DEVICES="3",
    )


def test_unused_devices_get_no_context_and_used_ones_give_theirs_back() -> None:
    run(
        """
from cuda.bindings import driver
from pyxdev.backends import open

def active():
    return [driver.cuDevicePrimaryCtxGetState(device)[2] for device in range(3)]

with open("cuda") as runtime:
    runtime.device_info(0), runtime.peer_capable(0, 1)
    assert active() == [0, 0, 0]
    stream = runtime.stream(1)
    pinned = runtime.buffer(HOST, 4096)
    assert active() == [0, 1, 0]
    stream.close(), pinned.close()
assert active() == [0, 0, 0]

# Page-locked memory first: in a context that is there already, whoever made it.
driver.cuDevicePrimaryCtxRetain(2)
with open("cuda") as runtime:
    with_pinned = runtime.buffer(HOST, 4096)
    assert active() == [0, 0, 1]
    with_pinned.close()
assert active() == [0, 0, 1]
""",
        PYXDEV_FAKE_CUDA_DEVICES="3",
    )


def test_vendor_errors_become_ours() -> None:
    run("""
from pyxdev.backends import open

def fail(text):
    os.environ["PYXDEV_FAKE_CUDA_FAIL"] = text

with open("cuda") as runtime:
    stream, event, buffer = runtime.stream(0), runtime.event(), runtime.buffer(0, 64)
    event.record(stream)
    fill = lambda: stream.fill(buffer.address, 0, 64)
    for code, kind, word in (
        (1, errors.InvalidArgument, "CUDA_ERROR_INVALID_VALUE"),
        (400, errors.InvalidArgument, "CUDA_ERROR_INVALID_HANDLE"),
        (4, errors.DeviceFault, "unknown error"),
        (700, errors.DeviceFault, "an illegal memory access"),
        (719, errors.DeviceFault, "CUDA_ERROR_LAUNCH_FAILED"),
        (801, errors.Unsupported, "CUDA_ERROR_NOT_SUPPORTED"),
        (201, errors.DriverError, "CUDA_ERROR_INVALID_CONTEXT"),
        (12345, errors.DriverError, "12345"),
    ):
        fail(f"cuMemsetD8Async={code}")
        error = raises(kind, fill, "cuMemsetD8Async", "device 0", word)
        assert error.code == code and error.operation == "fill"
    fail("cuMemAlloc=2")
    raises(errors.OutOfMemory, lambda: runtime.buffer(0, 4096), "device 0", "4096")
    fail("cuMemHostAlloc=2")
    raises(errors.OutOfMemory, lambda: runtime.buffer(HOST, 4096), "page-locked", "4096")
    fail("cuEventQuery=600")
    assert not event.done()
    fail("cuStreamQuery=600")
    assert not stream.idle()
    fail("cuEventQuery=700")
    raises(errors.DeviceFault, lambda: event.wait(5))
    fail("")
    fill()
    assert stream.synchronize(20)
    for thing in (stream, event, buffer):
        thing.close()
""")


def test_peer_access() -> None:
    run(
        """
from cuda.bindings import driver
from pyxdev.backends import open

with open("cuda") as runtime:
    assert runtime.peer_capable(0, 1) and not runtime.peer_capable(1, 0)
    assert not runtime.peer_enable(1, 0)
    assert runtime.peer_enable(0, 1) and runtime.peer_enable(0, 1)
    assert runtime.peer_enable(0, 2)
    assert runtime.peer_capable(0, 3) and not runtime.peer_enable(0, 3)  # the third of two

    # Somebody else was first.
    ours, theirs = driver.cuDevicePrimaryCtxRetain(2)[1], driver.cuDevicePrimaryCtxRetain(0)[1]
    driver.cuCtxSetCurrent(ours)
    assert driver.cuCtxEnablePeerAccess(theirs, 0)[0] == 0
    assert runtime.peer_enable(2, 0)

    raises(errors.NoPeerAccess, lambda: runtime.link(1, 0, path="direct"))
""",
        PYXDEV_FAKE_CUDA_DEVICES="4",
        PYXDEV_FAKE_CUDA_PEERS="0>1,0>2,0>3,2>0",
        PYXDEV_FAKE_CUDA_PEER_LIMIT="2",
    )


def test_what_is_missing_is_named() -> None:
    run(
        """
from pyxdev.backends import open
raises(errors.BackendUnavailable, lambda: open("cuda"), "libcuda.so.1")
""",
        libraries=None,
    )
    run("""
from pyxdev.backends import open
sys.modules["cuda"] = None
raises(errors.BackendUnavailable, lambda: open("cuda"), "cuda-python", "pyxdev[cuda]")
""")
    run(
        """
from pyxdev.backends import open
raises(errors.BackendUnavailable, lambda: open("cuda"), "libcuda.so.1", "CUDA 12.0")
""",
        PYXDEV_FAKE_CUDA_VERSION="11030",
    )
    run(
        """
from pyxdev.backends import open
raises(errors.BackendUnavailable, lambda: open("cuda"), "cuDeviceGetUuid", "11.4", "CUDA 12.0")
""",
        PYXDEV_FAKE_CUDA_MISSING="cuDeviceGetUuid",
    )
    run(
        """
from pyxdev.backends import open
raises(errors.NoDevice, lambda: open("cuda"), "cuInit", "CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES=''")
""",
        PYXDEV_FAKE_CUDA_DEVICES="0",
        CUDA_VISIBLE_DEVICES="",
    )
    run(
        """
from pyxdev.backends import open
raises(errors.NoDevice, lambda: open("cuda"), "CUDA_ERROR_SYSTEM_NOT_READY", "fabric manager")
""",
        PYXDEV_FAKE_CUDA_FAIL="cuInit=802",
    )


def test_auto_takes_cuda_where_it_has_a_device_and_says_so() -> None:
    run("""
from pyxdev.backends import open
records = []
class Keep(logging.Handler):
    def emit(self, record):
        records.append((record.levelname, record.getMessage()))
logging.getLogger("pyxdev").addHandler(Keep())
logging.getLogger("pyxdev").setLevel("INFO")

with open() as runtime:
    assert runtime.backend == "cuda"
assert [level for level, _ in records] == ["INFO", "INFO"] and "Stand-in GPU" in records[1][1]

records.clear()
os.environ["PYXDEV_FAKE_CUDA_FAIL"] = "cuInit=100"
with open("auto") as runtime:
    assert runtime.backend == "sim" and runtime.settings.backend == "sim"
warnings = [text for level, text in records if level == "WARNING"]
assert len(warnings) == 1 and all(word in warnings[0] for word in ("simulated", "CUDA_ERROR_NO_DEVICE", "HIP"))

with open(machine={"device": {"count": 3}}) as runtime:
    assert runtime.backend == "sim" and runtime.device_count == 3
raises(errors.InvalidArgument, lambda: open("cuda", machine="default"), "cuda")
raises(errors.SettingError, lambda: open("metal"), "metal", "cuda")
""")


def test_a_thread_option_of_cuda_python_changes_nothing() -> None:
    run(
        """
from pyxdev._native import cuda_symbols
from pyxdev.backends.cuda import resolve
assert set(resolve()) == {name for name, version, optional in cuda_symbols()}
""",
        CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM="1",
    )


def test_importing_loads_nothing_of_a_vendor() -> None:
    printed = run("""
import pyxdev, pyxdev.backends, pyxdev.backends.cuda, pyxdev.backends.hip
heavy = [name for name in sys.modules if name.split(".")[0] in ("cuda", "hip", "rocm", "torch")]
assert not heavy, heavy
mapped = open("/proc/self/maps").read()
assert "libcuda" not in mapped and "libamdhip" not in mapped
""")
    assert printed == ""
