"""Arrays: what they say about themselves, and how other libraries see them."""

import gc
import weakref

import numpy as np
import pytest
from hardware import pattern, same

from pyxdev._native import HOST, Array
from pyxdev.errors import InvalidArgument, Unsupported

DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128".split()
DLPACK_DEVICES = {"sim": 1, "cuda": 2, "hip": 10}


@pytest.fixture
def array(devices):
    """Makes an array of a device from a NumPy array."""

    def make(values, device=0, **options):
        values = np.asarray(values, order="C")
        buffer = devices.upload(device, values.reshape(-1).view(np.uint8))
        return Array(devices.runtime, device, buffer.address, values.shape, values.dtype.name, owner=buffer, **options)

    return make


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_every_type_come_back_as_they_were(devices, array, dtype):
    for device in devices:
        raw = pattern(240, device) & 1 if dtype == "bool" else pattern(240, device)
        values = raw.view(dtype)[:12].reshape(3, 4)
        there = array(values, device)
        assert (there.dtype, there.shape, there.size, there.nbytes) == (dtype, (3, 4), 12, values.nbytes)
        assert (there.device, there.strides, there.contiguous) == (device, (4, 1), True)
        assert there.numpy().dtype == values.dtype
        same(there.numpy().reshape(-1).view(np.uint8), values.reshape(-1).view(np.uint8))
        same(there.raw.numpy(), values.reshape(-1).view(np.uint8))


def test_reading_waits_until_the_data_is_there(devices, array):
    stream, ready = devices.stream(), devices.event()
    values = np.zeros(1000, np.uint8)
    there = array(values, ready=ready)
    devices.busy(stream)
    stream.fill(there.address, 7, 1000)
    ready.record(stream)
    assert there.ready is ready
    assert there.numpy().tolist() == [7] * 1000


def test_empty_and_scalar_arrays(array):
    for shape in ((0,), (3, 0, 2), ()):
        there = array(np.ones(shape, np.float32))
        assert there.shape == shape
        assert there.contiguous
        assert np.array_equal(there.numpy(), np.ones(shape, np.float32))


def test_long_arrays_come_back_by_windows(devices, array):
    """Page-locking as much memory would take longer than the copy."""
    values = pattern((17 << 20) + 5, 3)
    there = array(values)
    before = repr(devices.runtime.live())
    same(there.numpy(), values)
    assert repr(devices.runtime.live()) == before


def test_what_is_not_contiguous_says_so(devices):
    buffer = devices.upload(0, pattern(64))
    there = Array(devices.runtime, 0, buffer.address, (2, 3), "uint8", strides=(1, 2), owner=buffer)
    assert not there.contiguous
    for read in (there.numpy, lambda: there.raw):
        with pytest.raises(InvalidArgument, match="contiguous"):
            read()


def test_types_that_numpy_does_not_have(devices):
    buffer = devices.upload(0, pattern(36))
    there = Array(devices.runtime, 0, buffer.address, (64,), "Q4_1", nbytes=36, owner=buffer)
    assert (there.size, there.nbytes) == (64, 36)
    same(there.raw.numpy(), pattern(36))
    for export in (there.__dlpack__, there.numpy):
        with pytest.raises(BufferError, match="raw"):
            export()
    with pytest.raises(InvalidArgument, match="dtype"):
        Array(devices.runtime, 0, buffer.address, (64,), "Q4_1", owner=buffer)
    half = Array(devices.runtime, 0, buffer.address, (18,), "bfloat16", owner=buffer)
    try:
        import ml_dtypes
    except ImportError:
        with pytest.raises(Unsupported, match="ml_dtypes"):
            half.numpy()
    else:
        assert half.numpy().dtype == ml_dtypes.bfloat16


def test_numpy_reads_simulated_memory_in_place(devices, array, pyxdev_backend):
    there = array(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert there.__dlpack_device__() == (DLPACK_DEVICES[pyxdev_backend], 0)
    if pyxdev_backend != "sim":
        with pytest.raises(AttributeError):
            there.__array_interface__  # noqa: B018
        return
    for view in (np.from_dlpack(there), np.asarray(there)):
        assert np.array_equal(view, [[0, 1, 2], [3, 4, 5]])
        assert view.__array_interface__["data"][0] == there.address
    with pytest.raises(AttributeError):
        there.__cuda_array_interface__  # noqa: B018


def test_the_cuda_array_interface(devices, array, pyxdev_backend):
    if pyxdev_backend == "sim":
        return
    ready = devices.event()
    ready.record(devices.stream())
    there = array(np.arange(6, dtype=np.float32).reshape(2, 3), ready=ready)
    interface = there.__cuda_array_interface__
    assert interface["version"] == 3
    assert interface["shape"] == (2, 3)
    assert interface["typestr"] == "<f4"
    assert interface["data"] == (there.address, False)
    assert interface["strides"] is None
    assert interface["stream"] is None
    stream = devices.stream()
    assert array(np.zeros(3), stream=stream).__cuda_array_interface__["stream"] == stream.handle


@pytest.fixture
def coming(devices, array):
    """An array of sevens that takes its device a while, and what tells that they are there."""
    stream, ready = devices.stream(), devices.event()
    there = array(np.zeros(1000, np.uint8), ready=ready)
    devices.busy(stream)
    stream.fill(there.address, 7, 1000)
    ready.record(stream)
    return there


@pytest.mark.parametrize("which", [None, "default", "own"])
def test_dlpack_makes_the_stream_of_whoever_asks_wait_for_the_data(devices, coming, pyxdev_backend, which):
    own = which == "own" or pyxdev_backend == "sim"  # which has no default stream: the host waits there
    mine = devices.stream() if own else devices.keep(devices.runtime.adopt_stream(0, 1))
    default = 0 if pyxdev_backend == "hip" else 1
    coming.__dlpack__(stream=mine.handle if which == "own" else default if which else None)
    assert read_on(devices, mine, coming) == [7] * 1000


def read_on(devices, stream, array):
    """The bytes of an array as a stream finds them that waits for nothing more."""
    with devices.runtime_pinned(array.nbytes) as pinned:
        stream.copy(pinned.address, array.address, array.nbytes, dst_device=HOST, src_device=array.device)
        stream.synchronize()
        return devices.read(pinned).tolist()


def test_dlpack_waits_for_nothing_where_it_is_told_so(coming, pyxdev_backend):
    coming.__dlpack__(stream=-1)
    assert pyxdev_backend != "sim" or not coming.ready.done()
    assert coming.ready.wait()


def test_interfaces_without_a_stream_wait_for_the_data(devices, coming, pyxdev_backend):
    if pyxdev_backend == "sim":
        assert np.asarray(coming).tolist() == np.from_dlpack(coming).tolist() == [7] * 1000
    else:
        assert coming.__cuda_array_interface__["stream"] is None
        assert read_on(devices, devices.stream(), coming) == [7] * 1000


def test_the_interface_with_a_stream_orders_that_behind_the_data(devices, coming, pyxdev_backend):
    if pyxdev_backend == "sim":
        return
    mine = devices.stream()
    there = Array(devices.runtime, 0, coming.address, (1000,), "uint8", owner=coming, stream=mine)
    assert there.__cuda_array_interface__["stream"] == mine.handle
    assert read_on(devices, mine, coming) == [7] * 1000


def test_an_array_of_the_memory_of_another_is_there_when_that_one_is(devices, coming):
    part = Array(devices.runtime, 0, coming.address + 10, (5,), "uint8", owner=coming)
    assert part.ready is coming.raw.ready is coming.ready
    assert part.numpy().tolist() == [7] * 5
    other = devices.event()
    assert Array(devices.runtime, 0, coming.address, (5,), "uint8", owner=coming, ready=other).ready is other


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_capsule_holds_the_array_until_it_goes(devices, array, version):
    there = array(np.arange(6, dtype=np.int32))
    capsule = there.__dlpack__(max_version=version, stream=-1)
    gone = weakref.ref(there)
    del there
    gc.collect()
    assert gone() is not None
    del capsule
    gc.collect()
    assert gone() is None


def test_exports_that_cannot_be_are_refused(devices, array):
    there = array(np.arange(6, dtype=np.int32))
    for options in ({"dl_device": (77, 0)}, {"copy": True}):
        with pytest.raises(BufferError):
            there.__dlpack__(**options)


def test_a_stream_shows_itself_to_other_libraries_as_what_it_is(devices, pyxdev_backend):
    stream = devices.stream()
    if pyxdev_backend == "cuda":
        assert stream.__cuda_stream__() == (0, stream.handle)
    else:
        with pytest.raises(AttributeError):
            stream.__cuda_stream__()
