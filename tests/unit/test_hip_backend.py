"""The HIP driver and its resolver: with the real hip-python over a stand-in library (tests/fakes/hip.c, HIP over CUDA
over simulated devices), and with AMD's real library where one is installed, which needs no GPU for that.

What runs over the stand-in says nothing about the timing, ordering or coherence of AMD devices.
"""

from __future__ import annotations

import ctypes.util
import os
import shutil
from pathlib import Path

import pytest
from vendor_child import FAKES, ROCM, build_fakes, run

from pyxdev.backends import hip


@pytest.fixture(scope="module", autouse=True)
def fakes() -> None:
    build_fakes()


def child(code: str, **variables: str) -> str:
    return run(code, FAKES, ROCM, **variables)


def test_devices_are_described() -> None:
    child(
        """
from pyxdev.backends import open
with open("hip") as runtime:
    assert runtime.backend == "hip" and runtime.device_count == 3
    info = runtime.device_info(2)
    assert (info.name, info.arch, info.pci) == ("Stand-in GPU", "sm_90", "0000:a2:00.0")
    assert info.uuid == "GPU-fafafafafafafa02"
    assert info.memory == 8 << 30 and info.copy_engines == 2 and not info.integrated
    assert runtime.memory_info(1) == (8 << 30, 8 << 30)
    assert runtime.settings.async_uploads is False
    raises(errors.InvalidArgument, lambda: runtime.stream(3), "device", "3")
""",
        PYXDEV_FAKE_CUDA_DEVICES="3",
    )


def test_callers_device_and_last_error_are_left_alone() -> None:
    child(
        """
from hip import hip
from pyxdev.backends import open

def device():
    return hip.hipGetDevice()[1]

def last():
    return int(hip.hipPeekAtLastError()[0])

def work(runtime):
    stream, event, buffer, pinned = runtime.stream(1), runtime.event(), runtime.buffer(1, 64), runtime.buffer(HOST, 64)
    stream.fill(buffer.address, 1, 64)
    event.record(stream)
    event.done(), stream.idle()  # not yet is no error
    stream.wait(event)
    assert event.wait(20) and stream.idle()
    assert runtime.peer_enable(1, 0) and runtime.peer_enable(1, 0)
    runtime.device_info(1), runtime.memory_info(1)
    for thing in (stream, event, buffer, pinned):
        thing.close()

with open("hip") as runtime:
    for current in (0, 2):
        hip.hipSetDevice(current)
        work(runtime)
        assert (device(), last()) == (current, 0)

    # Somebody else was first: the library says 704, which is no error of anybody.
    hip.hipSetDevice(0)
    assert int(hip.hipDeviceEnablePeerAccess(1, 0)[0]) == 0
    hip.hipSetDevice(2)
    assert runtime.peer_enable(0, 1) and last() == 0

    buffer, stream = runtime.buffer(1, 64), runtime.stream(1)
    for call, code, kind, act in (
        ("hipMalloc", 2, errors.OutOfMemory, lambda: runtime.buffer(1, 4096)),
        ("hipHostMalloc", 2, errors.OutOfMemory, lambda: runtime.buffer(HOST, 4096)),
        ("hipMemsetD8Async", 1, errors.InvalidArgument, lambda: stream.fill(buffer.address, 0, 64)),
        ("hipMemsetD8Async", 400, errors.InvalidArgument, lambda: stream.fill(buffer.address, 0, 64)),
        ("hipMemsetD8Async", 700, errors.DeviceFault, lambda: stream.fill(buffer.address, 0, 64)),
        ("hipMemsetD8Async", 719, errors.DeviceFault, lambda: stream.fill(buffer.address, 0, 64)),
        ("hipMemsetD8Async", 801, errors.Unsupported, lambda: stream.fill(buffer.address, 0, 64)),
        ("hipMemsetD8Async", 999, errors.DriverError, lambda: stream.fill(buffer.address, 0, 64)),
    ):
        os.environ["PYXDEV_FAKE_HIP_FAIL"] = f"{call}={code}"
        error = raises(kind, act)
        assert error.code == code and (device(), last()) == (2, 0), (call, code, last())
    del os.environ["PYXDEV_FAKE_HIP_FAIL"]
    buffer.close(), stream.close()
""",
        PYXDEV_FAKE_CUDA_DEVICES="3",
    )


def test_somebody_elses_error_stays() -> None:
    child("""
from hip import hip
from pyxdev.backends import open

with open("hip") as runtime:
    assert int(hip.hipSetDevice(99)[0]) == 101
    runtime.device_info(0), runtime.memory_info(0)
    runtime.buffer(HOST, 64).close()
    runtime.stream(0).close()
    assert int(hip.hipPeekAtLastError()[0]) == 101
""")


def test_unused_devices_are_not_touched() -> None:
    child("""
from hip import hip
from pyxdev.backends import open

with open("hip") as runtime:
    stream, pinned = runtime.stream(1), runtime.buffer(HOST, 64)
    assert [hip.hipDevicePrimaryCtxGetState(device)[2] for device in range(2)] == [0, 1]
    stream.close(), pinned.close()
""")


def test_peer_copies_only_between_peers() -> None:
    child(
        """
from pyxdev.backends import open

with open("hip") as runtime:
    assert runtime.peer_capable(0, 1) and not runtime.peer_capable(1, 0)
    assert not runtime.peer_enable(1, 0)
    raises(errors.NoPeerAccess, lambda: runtime.link(1, 0, path="direct"))
    here, there, stream = runtime.buffer(0, 64), runtime.buffer(1, 64), runtime.stream(0)
    with_link = runtime.link(0, 1, path="direct")
    with_link.copy(there.address, here.address, 64)
    for thing in (with_link, here, there, stream):
        thing.close()
""",
        PYXDEV_FAKE_CUDA_PEERS="0>1",
    )


def test_what_is_missing_is_named() -> None:
    child(
        """
from pyxdev.backends import open
raises(errors.NoDevice, lambda: open("hip"), "hipErrorNoDevice", "amdgpu", "HIP_VISIBLE_DEVICES='-1'", "leaves none")
import ctypes
assert ctypes.CDLL("libamdhip64.so").hipPeekAtLastError() == 0
""",
        PYXDEV_FAKE_CUDA_DEVICES="0",
        HIP_VISIBLE_DEVICES="-1",
    )
    child(
        """
from pyxdev.backends import open
raises(errors.BackendUnavailable, lambda: open("hip"), "HIP 5.2", "HIP 5.3 or newer")
""",
        PYXDEV_FAKE_HIP_VERSION="50221153",
    )
    child(
        """
from pyxdev.backends import open
raises(errors.BackendUnavailable, lambda: open("hip"), "/nowhere/libamdhip64.so", "PYXDEV_HIP_LIBRARY", "hip-python")
""",
        PYXDEV_HIP_LIBRARY="/nowhere/libamdhip64.so",
    )
    # libcuda.so.1 is a library, but not of HIP.
    child(
        """
from pyxdev.backends import open
raises(errors.BackendUnavailable, lambda: open("hip"), "libcuda.so.1", "unknown version", "hipMalloc")
""",
        PYXDEV_HIP_LIBRARY=str(FAKES / "libcuda.so.1"),
    )


def test_works_without_hip_python() -> None:
    child("""
sys.modules["rocm"] = sys.modules["hip"] = None
from pyxdev.backends import open
with open("hip") as runtime:
    assert runtime.device_count == 2
""")


def test_a_loaded_copy_comes_first(tmp_path: Path) -> None:
    child(f"""
import ctypes, pathlib, shutil
from pyxdev.backends import hip, open
folder = pathlib.Path({str(tmp_path)!r}, "a folder")
folder.mkdir()
copy = folder / "libamdhip64.so.7"
shutil.copy({str(ROCM / "libamdhip64.so")!r}, copy)
ctypes.CDLL(str(copy))
with open("hip"):
    pass
assert hip.loaded_copies() == [str(copy)]
""")


def test_the_variable_beats_a_loaded_copy(tmp_path: Path) -> None:
    wanted = tmp_path / "mine.so"
    shutil.copy(ROCM / "libamdhip64.so", wanted)
    child(
        f"""
import ctypes
from pyxdev.backends import hip, open
ctypes.CDLL("libamdhip64.so")
library, path = hip._load()
assert path == {str(wanted)!r}
assert ctypes.CDLL(path)._handle == library._handle != ctypes.CDLL("libamdhip64.so")._handle
with open("hip") as runtime:
    assert runtime.device_count == 2
""",
        PYXDEV_HIP_LIBRARY=str(wanted),
    )


def test_kernels_are_not_launched_by_another_library(tmp_path: Path) -> None:
    """hip-python finds its own copy, whose streams are not ours."""
    mine = tmp_path / "libamdhip64.so.7"
    # Under one and the same soname the loader would give both the same copy.
    mine.write_bytes((ROCM / "libamdhip64.so").read_bytes().replace(b"libamdhip64.so\0", b"libamdhip6x.so\0"))
    child(
        f"""
from pyxdev.backends import open
from pyxdev.checks.kernels import open_kernels
with open("hip") as runtime:
    raises(errors.BackendUnavailable, lambda: open_kernels(runtime), {str(mine)!r}, {str(ROCM)!r}, "two HIP libraries")
""",
        PYXDEV_HIP_LIBRARY=str(mine),
        ROCM_PATH=str(ROCM.parent),
    )


def test_devices_shows_what_the_lists_come_to() -> None:
    shown = child(
        """
from pyxdev import cli
assert cli.main(["devices", "--backend", "hip"]) == 0
""",
        PYXDEV_FAKE_CUDA_DEVICES="2",
        XDG_CACHE_HOME=os.environ["XDG_CACHE_HOME"],
        ROCR_VISIBLE_DEVICES="5,3,1",
        HIP_VISIBLE_DEVICES="2,0",
        CUDA_VISIBLE_DEVICES="7",
    )
    assert "ROCR_VISIBLE_DEVICES=5,3,1" in shown
    assert "device 0 is 2 of HIP_VISIBLE_DEVICES, which is 1 of ROCR_VISIBLE_DEVICES" in shown
    assert "device 1 is 0 of HIP_VISIBLE_DEVICES, which is 5 of ROCR_VISIBLE_DEVICES" in shown
    assert "of CUDA_VISIBLE_DEVICES" not in shown


def test_auto_prefers_cuda_and_takes_hip_without_it() -> None:
    child("""
from pyxdev.backends import open
with open() as runtime:
    assert runtime.backend == "cuda"
""")
    child("""
sys.modules["cuda"] = None
from pyxdev.backends import open
records = []
class Keep(logging.Handler):
    def emit(self, record):
        records.append(record.getMessage())
logging.getLogger("pyxdev").addHandler(Keep())
logging.getLogger("pyxdev").setLevel("INFO")
with open() as runtime:
    assert runtime.backend == "hip"
assert any("auto takes hip" in text and "cuda-python" in text for text in records), records
""")


def test_lists_of_visible_devices_are_shown_as_they_stack() -> None:
    stacked = hip.hidden({"ROCR_VISIBLE_DEVICES": "0,3,4,7", "HIP_VISIBLE_DEVICES": "0, 1"})
    assert "ROCR_VISIBLE_DEVICES='0,3,4,7'" in stacked
    assert "device 1 is 1 of HIP_VISIBLE_DEVICES, which is 3 of ROCR_VISIBLE_DEVICES" in stacked
    assert hip.map_devices({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}) == [
        "device 0 is 1 of HIP_VISIBLE_DEVICES, beyond the 1 of ROCR_VISIBLE_DEVICES"
    ]
    assert hip.map_devices({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "3"}) == [
        "HIP_VISIBLE_DEVICES is empty, which hides nothing",
        "device 0 is 3 of CUDA_VISIBLE_DEVICES",
    ]
    assert hip.map_devices({"HIP_VISIBLE_DEVICES": "-1"}) == ["HIP_VISIBLE_DEVICES leaves none"]
    assert hip.map_devices({"ROCR_VISIBLE_DEVICES": ""}) == ["ROCR_VISIBLE_DEVICES leaves none"]
    assert hip.map_devices({"CUDA_VISIBLE_DEVICES": "2,-1,1"}) == ["device 0 is 2 of CUDA_VISIBLE_DEVICES"]
    assert hip.map_devices({"HIP_VISIBLE_DEVICES": "2,2,0"}, 2) == [
        "device 0 is 2 of HIP_VISIBLE_DEVICES",
        "device 1 is 0 of HIP_VISIBLE_DEVICES",
    ]
    assert hip.map_devices({"HIP_VISIBLE_DEVICES": "4,5,6"}, 1) == ["device 0 is 4 of HIP_VISIBLE_DEVICES"]
    assert hip.map_devices({"ROCR_VISIBLE_DEVICES": "GPU-0123456789abcdef"}) == [
        "device 0 is GPU-0123456789abcdef of ROCR_VISIBLE_DEVICES"
    ]
    assert hip.hidden({}) == "" and hip.map_devices({}) == []


def test_the_name_of_the_architecture_is_where_hip_python_has_it() -> None:
    """native/hip_api.h gives its place in hipDeviceProp_t by number; hip-python's own type knows it by name."""
    child("""
import ctypes
from hip import hip
properties = hip.hipDeviceProp_t()
ctypes.memset(int(properties), 0, properties.c_sizeof())
ctypes.memmove(int(properties) + 1160, b"gfx90a:sramecc+:xnack-", 22)
name = properties.gcnArchName
name = name.decode() if isinstance(name, bytes) else name  # hip-python 6 and 7
assert name == "gfx90a:sramecc+:xnack-", name
""")


REAL = ctypes.util.find_library("amdhip64")


needs_real = pytest.mark.skipif(
    REAL is None, reason="AMD's HIP library is not installed: apt-get install libamdhip64-dev"
)


@needs_real
def test_hip_python_finds_the_real_library_and_no_gpu() -> None:
    run("""
from hip import hip as api
from pyxdev import backends
from pyxdev.backends import hip
code, count = api.hipGetDeviceCount()
assert (int(code), count) == (100, 0), (code, count)
(copy,) = hip.loaded_copies()
library, path = hip._load()
assert path == copy and library.hipGetDeviceCount  # the copy that hip-python has loaded, and no other
assert hip._version(library) == tuple(divmod(int(api.hipRuntimeGetVersion()[1]) // 100_000, 100))
assert hip.loaded_copies() == [copy]
""")


@needs_real
def test_the_real_library_without_a_gpu() -> None:
    """Debian's HIP 5.2 is below our minimum, by one function. The rest of it is bound here nevertheless. Without a GPU
    its hipPeekAtLastError answers 101 from the start, so no error left behind means: the same as in a fresh process."""
    run(f"""
import ctypes
from pyxdev import _native
from pyxdev.backends import hip, open

library = ctypes.CDLL({REAL!r})
last = library.hipPeekAtLastError
fresh = last()
assert fresh in (0, 100, 101)
version = hip._version(library)
assert version and last() == fresh

present, missing = {{}}, []
for name, _, optional in _native.hip_symbols():
    if hasattr(library, name):
        present[name] = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    elif not optional:
        missing.append(name)
if version < hip.OLDEST:
    assert missing == ["hipLaunchHostFunc"], missing
    known = f"HIP {{version[0]}}.{{version[1]}}"
    raises(errors.BackendUnavailable, lambda: open("hip"), known, "hipLaunchHostFunc", "5.3")
    present["hipLaunchHostFunc"] = present["hipStreamQuery"]  # never called
else:
    assert not missing
assert last() == fresh

error = raises(errors.NoDevice, lambda: Runtime(_native.hip_driver(present)), "hipGetDeviceCount", "hipErrorNoDevice")
assert error.code == 100
assert last() == fresh
""")
