"""Streams, events and waits between devices."""

import pytest
from hardware import Devices, pattern, same

from pyxdev._native import HOST, Runtime
from pyxdev.errors import InvalidArgument


def test_devices_tell_what_they_are(runtime):
    assert runtime.device_count >= 1
    for device in range(runtime.device_count):
        info = runtime.device_info(device)
        free, total = runtime.memory_info(device)
        assert info.name
        assert info.arch
        assert 0 < free <= total
        assert info.memory == total


def test_an_event_that_was_never_recorded_is_done_and_holds_nothing_up(devices):
    event = devices.event()
    stream = devices.stream()
    assert event.device == HOST
    assert event.done()
    assert event.wait(0)
    stream.wait(event)
    assert stream.synchronize()


def test_an_event_comes_after_all_that_was_queued_before_it(devices):
    for device in devices:
        stream, event = devices.stream(device), devices.event()
        data = pattern(4096, device)
        pinned, target = devices.buffer(HOST, 4096), devices.buffer(device, 4096)
        devices.write(pinned, data)
        devices.busy(stream)
        stream.copy(target.address, pinned.address, 4096, dst_device=device, src_device=HOST)
        stream.copy(pinned.address, target.address, 4096, dst_device=HOST, src_device=device)
        event.record(stream)
        assert event.device == device
        assert event.wait()
        assert event.done()
        same(devices.read(pinned), data)
        assert stream.synchronize()
        assert stream.idle()


def test_a_default_stream_is_that_of_its_device(devices, pyxdev_backend):
    """CUDA has one handle for the default streams of all devices: it stands for that of the device that is current."""
    if pyxdev_backend != "cuda":
        pytest.skip("the handle is CUDA's")
    from cuda.bindings import driver

    handle = driver.cuDeviceGet(0)[1]
    code, context = driver.cuDevicePrimaryCtxRetain(handle)
    assert int(code) == 0
    assert int(driver.cuCtxPushCurrent(context)[0]) == 0
    try:
        for device in devices:
            default_stream(devices, device)
        assert int(driver.cuCtxGetDevice()[1]) == 0  # still the caller's
    finally:
        driver.cuCtxPopCurrent()
        driver.cuDevicePrimaryCtxRelease(handle)


def default_stream(devices, device):
    stream, event = devices.keep(devices.runtime.adopt_stream(device, 1)), devices.event()
    data = pattern(4096, device)
    pinned, target = devices.buffer(HOST, 4096), devices.poisoned(device, 4096)
    devices.write(pinned, data)
    stream.copy(target.address, pinned.address, 4096, dst_device=device, src_device=HOST)
    event.record(stream)
    assert event.device == device
    assert event.wait()
    same(devices.download(target), data)
    devices.stream(device).wait(event)
    stream.wait(event)
    assert stream.synchronize()


def test_a_wait_holds_a_stream_of_any_device(devices):
    """The second device reads host memory that the first one writes late."""
    for src in devices:
        for dst in devices:
            first, second = devices.stream(src), devices.stream(dst)
            data = pattern(4096, src * 100 + dst)
            early, late = devices.upload(src, data), devices.poisoned(dst, 4096)
            middle, event = devices.buffer(HOST, 4096), devices.event()
            devices.busy(first)
            first.copy(middle.address, early.address, 4096, dst_device=HOST, src_device=src)
            event.record(first)
            second.wait(event)
            second.copy(late.address, middle.address, 4096, dst_device=dst, src_device=HOST)
            assert second.synchronize()
            same(devices.download(late), data)


def test_a_wait_means_the_record_that_was_there_and_not_a_later_one(devices):
    first, second = devices.stream(0), devices.stream(devices.count - 1)
    event = devices.event()
    event.record(first)
    second.wait(event)
    devices.busy(first)
    event.record(first)
    assert second.synchronize()
    assert event.wait()


def test_an_event_belongs_to_whoever_recorded_it_last(devices):
    event = devices.event()
    for _ in range(2):
        for device in devices:
            event.record(devices.stream(device))
            assert event.device == device
            assert event.wait()


def test_an_event_that_is_closed_while_a_stream_waits_for_it_still_holds_the_stream(devices):
    first, second = devices.stream(0), devices.stream(devices.count - 1)
    data = pattern(4096)
    source, middle = devices.upload(0, data), devices.buffer(HOST, 4096)
    target = devices.poisoned(second.device, 4096)
    event = devices.runtime.event()
    devices.busy(first)
    first.copy(middle.address, source.address, 4096, dst_device=HOST, src_device=0)
    event.record(first)
    second.wait(event)
    event.close()
    second.copy(target.address, middle.address, 4096, dst_device=second.device, src_device=HOST)
    assert second.synchronize()
    same(devices.download(target), data)


def test_an_event_outlives_the_stream_that_it_was_recorded_on(devices):
    """AMD's runtime takes it for done as soon as that stream is gone."""
    second = devices.stream(devices.count - 1)
    data = pattern(4096)
    source, middle = devices.upload(0, data), devices.buffer(HOST, 4096)
    target = devices.poisoned(second.device, 4096)
    event, first = devices.event(), devices.runtime.stream(0)
    devices.busy(first)
    first.copy(middle.address, source.address, 4096, dst_device=HOST, src_device=0)
    event.record(first)
    first.close()
    second.wait(event)
    second.copy(target.address, middle.address, 4096, dst_device=second.device, src_device=HOST)
    assert second.synchronize()
    same(devices.download(target), data)


def test_time_passes_between_two_events(devices):
    stream = devices.stream()
    begin, end = devices.event(timing=True), devices.event(timing=True)
    begin.record(stream)
    devices.busy(stream)
    end.record(stream)
    assert end.wait()
    assert 0 < end.elapsed_since(begin) < 60
    assert begin.elapsed_since(begin) == 0


def test_times_need_two_recorded_events_with_timing(devices):
    stream = devices.stream()
    plain, timed, fresh = devices.event(), devices.event(timing=True), devices.event(timing=True)
    plain.record(stream)
    timed.record(stream)
    assert stream.synchronize()
    for begin, end in ((plain, timed), (timed, plain), (fresh, timed), (timed, fresh)):
        with pytest.raises(InvalidArgument):
            end.elapsed_since(begin)


def test_the_clock_goes_forward(devices):
    before = devices.runtime.clock()
    stream = devices.stream()
    devices.busy(stream)
    assert stream.synchronize()
    assert devices.runtime.clock() > before


def test_a_wait_with_a_time_out_says_whether_it_came(devices):
    stream, event = devices.stream(), devices.event()
    event.record(stream)
    assert event.wait(timeout=60)
    assert stream.synchronize(timeout=60)
    for wrong in (-1, float("nan")):
        with pytest.raises(InvalidArgument, match="timeout"):
            event.wait(wrong)


def test_fill_writes_its_bytes_and_no_others(devices):
    for device in devices:
        stream, target = devices.stream(device), devices.poisoned(device, 300)
        stream.fill(target.address + 17, 0x3C, 101)
        stream.fill(target.address, 0xFF, 0)
        assert stream.synchronize()
        got = devices.download(target)
        assert set(got[17:118].tolist()) == {0x3C}
        assert set(got[:17].tolist()) == set(got[118:].tolist()) == {0xA5}


def test_waits_done_by_the_host_keep_the_order_too(new_driver):
    with Runtime(new_driver(), force_sync=True) as runtime, Devices(runtime) as devices:
        assert runtime.force_sync
        test_a_wait_holds_a_stream_of_any_device(devices)
