"""More of what goes wrong on other people's machines: host memory that the copy engines read, uploads that are not
there yet, and Python on threads that hold the driver. The numbers are those of tests/unit/test_sim_cases.py.
"""

import ctypes
import faulthandler
import mmap
import threading

import numpy as np
import pytest
from model_files import packed

from pyxdev._native import Array, FaultDriver, Runtime
from pyxdev.backends import sim
from pyxdev.errors import DriverError, InvalidArgument, OrderViolation
from pyxdev.loader.loader import load

TENSORS = 40


@pytest.fixture
def model(tmp_path):
    """A file of 40 tensors whose bytes tell their place, and those bytes."""
    rng = np.random.default_rng(16)
    values = {f"layers.{n}.w": rng.standard_normal(2000 + 7 * n).astype(np.float32) for n in range(TENSORS)}
    path = tmp_path / "model.safetensors"
    path.write_bytes(packed((name, "F32", value.shape, value.tobytes()) for name, value in values.items()))
    return path, values


def test_16_no_upload_comes_from_a_file_mapping(model):
    """Simulated devices refuse host memory that is not page-locked, so a load that works has staged every byte."""
    path, values = model
    with Runtime(sim.driver({"device": {"count": 2}})) as runtime:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            address = np.frombuffer(mapped, np.uint8).ctypes.data
            stream, target = runtime.stream(0), runtime.buffer(0, 4096)
            with pytest.raises(InvalidArgument, match=r"page-locked|pinned"):
                stream.copy(target.address, address, 4096, dst_device=0, src_device=-1)
            stream.close()
            target.close()
        with load(path, runtime=runtime, threads=3) as weights:
            assert all(np.array_equal(weights[name].numpy(), value) for name, value in values.items())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("async_uploads", [False, True])
def test_17_whatever_is_queued_after_a_load_sees_its_bytes(model, async_uploads, seed):
    """On a stream that waits for nothing, with the ordering checker watching."""
    path, values = model
    machine = {"device": {"count": 2}, "run": {"seed": seed, "delay_us": 200}}
    with Runtime(sim.driver(machine, check=True)) as runtime:
        with load(path, runtime=runtime, async_uploads=async_uploads, threads=2) as weights:
            seen, streams = {}, [runtime.stream(device) for device in range(2)]
            for name, array in weights.items():

                def look(name=name, array=array):
                    memory = (ctypes.c_char * array.nbytes).from_address(array.address)
                    seen[name] = np.frombuffer(memory, np.float32).copy()

                streams[array.device].launch(look, reads=[(array.address, array.nbytes)])
            for stream in streams:
                stream.synchronize()
                stream.close()
            assert runtime.driver.violations() == []
        assert {name: seen[name].tolist() for name in seen} == {name: value.tolist() for name, value in values.items()}


def test_17_an_upload_that_nobody_waited_for_is_seen():
    """The control: the same look, one wait short, is a violation."""
    with Runtime(sim.driver({"device": {"count": 1}}, check=True)) as runtime:
        loading, reading = runtime.stream(0), runtime.stream(0)
        pinned, target = runtime.buffer(-1, 4096), runtime.buffer(0, 4096)
        loading.copy(target.address, pinned.address, 4096, dst_device=0, src_device=-1)
        reading.launch(lambda: None, reads=[(target.address, 4096)])
        with pytest.raises(OrderViolation, match="stream 1 must wait for an event recorded on stream 0"):
            reading.synchronize()
        for thing in (loading, reading, pinned, target):
            thing.close()


def test_27_python_kernels_and_driver_calls_of_four_threads_do_not_lock_each_other_out():
    """Kernels in Python want the GIL while they run; threads that hold it call the driver, allocate and free."""
    counts = [0] * 4
    with Runtime(sim.driver({"device": {"count": 2}})) as runtime:

        def work(index):
            stream, event = runtime.stream(index % 2), runtime.event()
            for _ in range(60):
                with memoryview(bytes(64)):
                    buffer = runtime.buffer(index % 2, 4096)

                def kernel():
                    counts[index] += 1
                    runtime.event().close()  # a call into the driver from inside

                stream.launch(kernel, cost=1e-6)
                stream.fill(buffer.address, index, 4096)
                event.record(stream)
                assert event.wait(60)
                buffer.close()
            stream.close()
            event.close()

        faulthandler.dump_traceback_later(90, exit=True)
        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        faulthandler.cancel_dump_traceback_later()
    assert counts == [60] * 4


@pytest.mark.parametrize("pinned_gib", [1, 0])
def test_an_array_whose_reading_fails_lets_its_copy_end(pinned_gib):
    """Its host memory may be somebody else's at once: a runtime keeps such blocks. The copy takes a second."""
    slow = {"device": {"count": 1, "to_host_gb_s": 2**23 / 1e9}, "host": {"pinned_gib": pinned_gib}}
    failed = []
    for call in range(1, 20):
        fault = FaultDriver(sim.driver(slow))
        with Runtime(fault) as runtime:
            buffer = runtime.buffer(0, 2**23)
            array = Array(runtime, 0, buffer.address, (2**23,), "uint8", owner=buffer)
            begin = runtime.clock()
            fault.arm(call)
            try:
                array.numpy()
            except DriverError as error:
                failed.append(error.operation)
                queued = "copy" in failed and error.operation != "copy"
                assert runtime.clock() - begin >= 0.9 * queued, error
            fault.arm(0)
            del array
            buffer.close()
    assert {"copy", "event_record", "event_wait"} <= set(failed), failed
