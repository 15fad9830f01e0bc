"""The CUDA driver and its resolver, with the real cuda-python between them and a stand-in driver over simulated devices
(tests/fakes/cuda.c). The stand-in is stricter than a real one about contexts and handles."""

from __future__ import annotations

import pytest
from vendor_child import FAKES, build_fakes, run

from pyxdev.backends import cuda


@pytest.fixture(scope="module", autouse=True)
def fakes() -> None:
    build_fakes()


def child(code: str, **variables: str) -> str:
    return run(code, FAKES, **variables)


def test_devices_are_described() -> None:
    child(
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


def test_callers_context_is_left_alone() -> None:
    child(
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
    del os.environ["PYXDEV_FAKE_CUDA_FAIL"]

    # What was made under somebody else's context belongs to our device all the same.
    stream, buffer = runtime.stream(1), runtime.buffer(1, 64)
    driver.cuCtxSetCurrent(0)
    stream.fill(buffer.address, 1, 64)
    assert stream.synchronize(20) and current() == 0
    stream.close(), buffer.close()
""",
        PYXDEV_FAKE_CUDA_DEVICES="3",
    )


def test_unused_devices_get_no_context_and_used_ones_give_theirs_back() -> None:
    child(
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
    child("""
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


def test_rings_are_ordinary_memory() -> None:
    """Registered; allocated where that is refused; given back only when nothing uses them."""
    child("""
from pyxdev.backends import open as open_backend

def mapped(address):
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)

data = pattern(4 << 20)
with open_backend("cuda") as runtime:
    stream = runtime.stream(0)
    target = runtime.buffer(0, len(data))
    places = []
    for nbytes, wish in ((32 << 20, ""), (33 << 20, "cuMemHostRegister=801"), (34 << 20, "")):
        os.environ["PYXDEV_FAKE_CUDA_FAIL"] = wish
        block = runtime.buffer(HOST, nbytes)
        os.environ["PYXDEV_FAKE_CUDA_FAIL"] = ""
        places.append(block.address)
        memoryview(block)[: len(data)] = data
        stream.copy(target.address, block.address, len(data), dst_device=0, src_device=HOST)
        block.close()  # the runtime keeps it, and frees the one before, which waits
        assert [mapped(address) for address in places] == [False] * (len(places) - 1) + [True]
        back = runtime.buffer(HOST, len(data))
        stream.copy(back.address, target.address, len(data), dst_device=HOST, src_device=0)
        stream.synchronize(20)
        assert bytes(memoryview(back)) == data
        back.close()
    os.environ["PYXDEV_FAKE_CUDA_FAIL"] = "cuMemHostAlloc=2"
    raises(errors.OutOfMemory, lambda: runtime.buffer(HOST, 65 << 20), "page-locked", str(65 << 20))
    os.environ["PYXDEV_FAKE_CUDA_FAIL"] = ""
    stream.close()
    target.close()
assert not any(mapped(address) for address in places)
""")


def test_peer_access() -> None:
    child(
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
"""
    )
    child("""
from pyxdev.backends import open
sys.modules["cuda"] = None
raises(errors.BackendUnavailable, lambda: open("cuda"), "cuda-python", "pyxdev[cuda]")
""")
    child(
        """
from pyxdev.backends import open
raises(errors.BackendUnavailable, lambda: open("cuda"), "libcuda.so.1", "CUDA 12.0")
""",
        PYXDEV_FAKE_CUDA_VERSION="11030",
    )
    child(
        """
from pyxdev.backends import open
raises(errors.BackendUnavailable, lambda: open("cuda"), "cuDeviceGetUuid", "11.4", "CUDA 12.0")
""",
        PYXDEV_FAKE_CUDA_MISSING="cuDeviceGetUuid",
    )
    child(
        """
from pyxdev.backends import open
raises(errors.NoDevice, lambda: open("cuda"), "cuInit", "CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES=''")
""",
        PYXDEV_FAKE_CUDA_DEVICES="0",
        CUDA_VISIBLE_DEVICES="",
    )
    child(
        """
from pyxdev.backends import open
raises(errors.NoDevice, lambda: open("cuda"), "CUDA_ERROR_SYSTEM_NOT_READY", "fabric manager")
""",
        PYXDEV_FAKE_CUDA_FAIL="cuInit=802",
    )


def test_auto_takes_cuda_where_it_has_a_device_and_says_so() -> None:
    child("""
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
    child(
        """
from pyxdev._native import cuda_symbols
from pyxdev.backends.cuda import resolve
assert set(resolve()) == {name for name, version, optional in cuda_symbols()}
""",
        CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM="1",
    )


def test_importing_loads_nothing_of_a_vendor() -> None:
    printed = child("""
import pyxdev, pyxdev.backends, pyxdev.backends.cuda, pyxdev.backends.hip
heavy = [name for name in sys.modules if name.split(".")[0] in ("cuda", "hip", "rocm", "torch")]
assert not heavy, heavy
mapped = open("/proc/self/maps").read()
assert "libcuda" not in mapped and "libamdhip" not in mapped
""")
    assert printed == ""


def test_the_list_of_visible_devices_is_shown() -> None:
    assert cuda.map_devices({"CUDA_VISIBLE_DEVICES": "GPU-8932f937, 0,9"}, 2) == [
        "device 0 is GPU-8932f937 of CUDA_VISIBLE_DEVICES",
        "device 1 is 0 of CUDA_VISIBLE_DEVICES",
    ]
    assert cuda.map_devices({}, 2) == []
