"""Every call of the driver fails once, then for good: an error comes out, and nothing stays behind."""

import contextlib
import gc
import itertools

import numpy as np
import pytest
from hardware import Devices, pattern, same

from pyxdev import Executor
from pyxdev._native import HOST, FaultDriver, Runtime
from pyxdev.errors import BY_STATUS, Error, InvalidArgument

LIMIT = 2000  # more calls than any of the scenes below makes


def scene_objects(runtime):
    with contextlib.ExitStack() as stack:
        for device in range(runtime.device_count):
            runtime.device_info(device)
            runtime.memory_info(device)
            for make in (
                lambda device=device: runtime.stream(device),
                lambda device=device: runtime.buffer(device, 100),
                lambda: runtime.buffer(HOST, 100),
                lambda: runtime.event(timing=True),
            ):
                stack.callback(make().close)
        stack.callback(runtime.ring(3, 100).close)
        stack.callback(runtime.throttle(3).close)
        yield


def scene_events(runtime):
    with Devices(runtime) as devices:
        begin, end = devices.event(timing=True), devices.event(timing=True)
        for device in devices:
            stream, target = devices.stream(device), devices.buffer(device, 100)
            begin.record(stream)
            stream.fill(target.address, 1, 100)
            end.record(stream)
            devices.stream(0).wait(end)
            end.done()
            assert end.wait()
            end.elapsed_since(begin)
            assert stream.synchronize()
            stream.idle()
        yield


def scene_link(runtime):
    with Devices(runtime) as devices:
        src, dst = devices.pairs[0]
        data = pattern(5001)
        for path in devices.paths(src, dst):
            link = devices.link(src, dst, path=path, tile_bytes=1000, tiles=2)
            source, target = devices.upload(src, data), devices.poisoned(dst, len(data))
            free, released, arrived = devices.event(), devices.event(), devices.event()
            free.record(devices.stream(dst))
            for _ in range(2):
                link.copy(target.address, source.address, 5001, dest_free=free, released=released, arrived=arrived)
            link.copy(0, 0, 0, source_ready=arrived, arrived=arrived)
            assert arrived.wait()
            same(devices.download(target), data)
        yield


def scene_ring(runtime):
    with Devices(runtime) as devices:
        ring, stream, target = devices.ring(2, 100), devices.stream(), devices.buffer(0, 100)
        for _ in range(4):
            tile = ring.acquire()
            try:
                stream.copy(target.address, tile.address, 100, dst_device=0, src_device=HOST)
            except Error:
                ring.release(tile)
                raise
            ring.submit(tile, stream)
        ring.drain()
        yield


def scene_throttle(runtime):
    with Devices(runtime) as devices:
        throttle, stream = devices.throttle(2), devices.stream()
        for _ in range(5):
            assert throttle.admit()
            try:
                throttle.retire(stream)
            except Error:
                throttle.withdraw()
                raise
        assert throttle.in_flight <= 2
        yield


def scene_executor(runtime):
    def double(stage, x):
        y = stage.empty(x.shape, x.dtype)
        stage.stream.copy(y.address, x.address, x.nbytes, dst_device=stage.device, src_device=stage.device)
        return y

    devices = [0, runtime.device_count - 1]
    with Executor(devices, [double, double], adapter="raw", runtime=runtime, in_flight=2, host_stage=1) as pipeline:
        tickets = [pipeline.submit(pattern(1000, salt)) for salt in range(3)]
        for salt, ticket in enumerate(tickets):
            same(ticket.result().numpy(), pattern(1000, salt))
        del tickets, ticket
    yield


SCENES = {
    "executor": scene_executor,
    "objects": scene_objects,
    "events": scene_events,
    "link": scene_link,
    "ring": scene_ring,
    "throttle": scene_throttle,
}


def bare(error):
    """The driver's error alone: the frames of the others' tracebacks would hold what they made."""
    while error.__cause__ is not None:
        error = error.__cause__
    return type(error)(str(error), status=error.status, operation=error.operation)


def attempt(new_driver, scene, at, sticky, status):
    """Runs the scene with this call failing. Returns the error, if any, and whether the call was reached."""
    driver = FaultDriver(new_driver())
    driver.arm(at, sticky=sticky, status=status)
    try:
        runtime = Runtime(driver)
    except Error as caught:
        return bare(caught), driver.calls >= at
    error = None
    try:
        for _ in SCENES[scene](runtime):
            pass
    except Error as caught:
        error = bare(caught)
    gc.collect()
    left = runtime.live()
    assert not left.any(), f"call {at} failing ({error}) left {left}"
    reached = driver.calls >= at
    if sticky and reached and status == "DEVICE_FAULT":
        with pytest.raises(Error):
            runtime.memory_info(0)
    driver.arm(0)
    runtime.close()
    return error, reached


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("status", ["DRIVER", "NO_DEVICE_MEMORY"])
def test_each_call_fails_in_turn_and_nothing_stays_behind(one_driver, scene, status):
    fail_each_call(one_driver, scene, sticky=False, status=status)


@pytest.mark.parametrize("scene", SCENES)
def test_every_call_fails_from_one_on_and_nothing_stays_behind(one_driver, scene, pyxdev_backend):
    """A device that has failed. The one that is wrapped goes on in truth and runs copies whose memory is gone by then,
    which only a simulated one that goes with its runtime may do."""
    if pyxdev_backend == "sim":
        fail_each_call(one_driver, scene, sticky=True, status="DEVICE_FAULT")
    else:
        assert attempt(one_driver, scene, 1, sticky=True, status="DEVICE_FAULT")[1]


def fail_each_call(new_driver, scene, sticky, status):
    errors = 0
    gc.collect()
    gc.freeze()  # so that collecting after each attempt looks at little
    for at in itertools.count(1):
        assert at < LIMIT
        error, reached = attempt(new_driver, scene, at, sticky, status)
        if not reached:
            assert error is None, f"no call failed, and yet: {error}"
            break
        errors += error is not None
        if error is not None and "injected" in str(error):
            assert isinstance(error, BY_STATUS[status])
            assert error.status == status
            assert error.operation
    assert errors >= 3, f"only {errors} of {at - 1} failures came out"


def test_after_one_failure_the_runtime_goes_on(new_driver):
    driver = FaultDriver(new_driver())
    with Runtime(driver) as runtime, Devices(runtime) as devices:
        driver.arm(1, status="NO_DEVICE_MEMORY")
        with pytest.raises(MemoryError):
            runtime.buffer(0, 100)
        same(devices.download(devices.upload(0, pattern(100))), pattern(100))


def test_a_copy_that_fails_half_way_leaves_no_event_pending(one_driver):
    """After the error the next copy over the link is right, and nothing waits for the one that failed."""
    for at in itertools.count(1):
        driver = FaultDriver(one_driver())
        with Runtime(driver) as runtime, Devices(runtime) as devices:
            src, dst = devices.pairs[-1]
            link = devices.link(src, dst, tile_bytes=1000, tiles=2)
            source, target = devices.upload(src, pattern(4100)), devices.poisoned(dst, 4100)
            arrived = devices.event()
            driver.arm(at)
            try:
                link.copy(target.address, source.address, 4100, arrived=arrived)
                failed = False
            except Error:
                failed = True
                assert arrived.done()
            driver.arm(0)
            link.copy(target.address, source.address, 4100, arrived=arrived)
            assert arrived.wait()
            same(devices.download(target), pattern(4100))
        if not failed:
            assert at > (5 if src != dst else 1)
            return


def test_a_fault_driver_counts_and_knows_the_statuses(new_driver):
    driver = FaultDriver(new_driver())
    with pytest.raises(InvalidArgument, match="status"):
        driver.arm(1, status="OUT_OF_LUCK")
    with Runtime(driver) as runtime:
        driver.arm(10**9)
        for _ in range(3):
            runtime.memory_info(0)
        assert driver.calls == 3
        assert np.array_equal(runtime.memory_info(0), runtime.memory_info(0))
