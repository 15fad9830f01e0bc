"""Graphs: what a stream captures, and what its launches do, on every driver."""

import contextlib
import threading

import pytest
from hardware import pattern, same

from pyxdev import Executor
from pyxdev._native import HOST, FaultDriver, Runtime
from pyxdev.errors import DeviceFault, DriverError, Error, InvalidArgument

N = 4096


def capture(stream, queue):
    stream.begin_capture()
    queue()
    return stream.end_capture()


def test_a_capture_queues_nothing_and_a_launch_all_of_it_in_order(devices):
    """Sources are read when the launch runs, not when it was captured."""
    for device in devices:
        stream = devices.stream(device)
        first, second = devices.poisoned(device, N), devices.poisoned(device, N)
        source = devices.upload(device, pattern(N, 1))

        def queue(stream=stream, device=device, first=first, second=second, source=source):
            stream.copy(first.address, source.address, N, dst_device=device, src_device=device)
            stream.copy(second.address, first.address, N, dst_device=device, src_device=device)
            stream.fill(first.address, 7, 16)

        with contextlib.closing(capture(stream, queue)) as graph:
            assert graph.device == device and not graph.closed
            untouched = devices.download(second)
            assert len(set(untouched.tolist())) == 1
            for n in (2, 3, 4):
                data = pattern(N, n)
                fresh = devices.upload(device, data)
                stream.copy(source.address, fresh.address, N, dst_device=device, src_device=device)
                graph.launch(stream)
                assert stream.synchronize()
                same(devices.download(second), data)
                assert devices.download(first)[:16].tolist() == [7] * 16
        assert graph.closed


def test_launches_follow_what_was_queued_before_on_any_stream_of_the_device(devices):
    stream, other = devices.stream(0), devices.stream(0)
    source, target, event = devices.poisoned(0, N), devices.poisoned(0, N), devices.event()
    with contextlib.closing(
        capture(stream, lambda: stream.copy(target.address, source.address, N, dst_device=0, src_device=0))
    ) as graph:
        for byte in range(1, 9):
            devices.busy(stream)
            stream.fill(source.address, byte, N)
            event.record(stream)
            other.wait(event)
            graph.launch(other)
            event.record(other)
            stream.wait(event)  # or the next fill would overtake it
        assert other.synchronize()
        assert set(devices.download(target).tolist()) == {8}
        assert stream.synchronize()


def test_pinned_memory_goes_both_ways(devices):
    stream = devices.stream(0)
    up, down, there = devices.buffer(HOST, N), devices.buffer(HOST, N), devices.poisoned(0, N)

    def queue():
        stream.copy(there.address, up.address, N, dst_device=0, src_device=HOST)
        stream.copy(down.address, there.address, N, dst_device=HOST, src_device=0)

    with contextlib.closing(capture(stream, queue)) as graph:
        for n in range(3):
            devices.write(up, pattern(N, n))
            graph.launch(stream)
            assert stream.synchronize()
            same(devices.read(down), pattern(N, n))


def test_an_empty_capture_is_a_graph_that_does_nothing(devices):
    stream = devices.stream(0)
    with contextlib.closing(capture(stream, lambda: None)) as graph:
        graph.launch(stream)
        assert stream.synchronize()


def test_what_a_capture_forbids_spoils_it_and_nothing_else(devices):
    """The stream works as before, and the next capture of it too."""
    stream, target = devices.stream(0), devices.poisoned(0, N)

    def allowed():
        stream.fill(target.address, 5, N)

    for forbidden in (stream.synchronize, stream.idle, lambda: devices.runtime.buffer(HOST, 1 << 20)):
        stream.begin_capture()
        allowed()
        refused = None
        try:
            made = forbidden()
            if hasattr(made, "close"):
                made.close()
        except Error as error:
            refused = error
        if refused is None:  # this driver allows it
            stream.end_capture().close()
        else:
            with pytest.raises(InvalidArgument):
                stream.end_capture()
        assert stream.synchronize() and stream.idle()
    with contextlib.closing(capture(stream, allowed)) as graph:
        graph.launch(stream)
        assert stream.synchronize()
        assert set(devices.download(target).tolist()) == {5}


def test_an_end_without_a_beginning_and_a_wrong_device_are_refused(devices):
    stream = devices.stream(0)
    with pytest.raises(Error):
        stream.end_capture()
    with contextlib.closing(capture(stream, lambda: None)) as graph:
        if devices.count > 1:
            with pytest.raises(InvalidArgument, match="device 0, the stream of device 1"):
                graph.launch(devices.stream(1))
    with pytest.raises(Error, match="closed"):
        graph.launch(stream)


def test_other_threads_are_not_affected(devices):
    stream, other = devices.stream(0), devices.stream(0)
    target = devices.buffer(0, N)
    done = []

    def elsewhere():
        other.fill(target.address, 1, N)
        done.append(other.synchronize())

    stream.begin_capture()
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    stream.end_capture().close()
    assert done == [True]


def test_a_graph_is_a_child_of_its_runtime(devices):
    stream = devices.stream(0)
    graph = capture(stream, lambda: None)
    assert devices.runtime.live().graphs == 1
    with pytest.raises(Error, match="1 graph"):
        devices.runtime.close()
    graph.close()
    graph.close()
    assert devices.runtime.live().graphs == 0


@pytest.mark.parametrize(
    "sticky, status, raised", [(False, "DRIVER", DriverError), (True, "DEVICE_FAULT", DeviceFault)]
)
def test_every_call_may_fail(new_driver, sticky, status, raised):
    """Call 1, 2, 3 ... of a capture and a launch fails: the error comes out, the capture is over, nothing is left."""
    fault = FaultDriver(new_driver())
    with Runtime(fault) as runtime, contextlib.ExitStack() as stack:
        stream = stack.enter_context(contextlib.closing(runtime.stream(0)))
        buffer = stack.enter_context(contextlib.closing(runtime.buffer(0, N)))
        event = stack.enter_context(contextlib.closing(runtime.event()))
        event.record(stream)

        def attempt():
            stream.begin_capture()
            try:
                stream.fill(buffer.address, 1, N)
            except Error:
                stream.end_capture().close()  # the call after the one that fails
                raise
            with contextlib.closing(stream.end_capture()) as graph:
                graph.launch(stream)
                event.record(stream)
                event.wait()

        for at in range(1, 100):
            fault.arm(at, sticky=sticky, status=status)
            try:
                attempt()
            except raised:
                pass
            else:
                break
            finally:
                fault.arm(0)
            assert stream.synchronize()
            assert runtime.live().graphs == 0
        assert at > 5


# ---- stages of an executor ----


def shifted(stage, x):
    """All but the first 16 bytes move to the front, through a temporary; 16 bytes of 7 come behind."""
    between, y = stage.empty(x.shape, x.dtype), stage.empty(x.shape, x.dtype)
    sizes = {"dst_device": stage.device, "src_device": stage.device}
    stage.stream.copy(between.address, x.address, x.nbytes, **sizes)
    stage.stream.copy(y.address, between.address + 16, x.nbytes - 16, **sizes)
    stage.stream.fill(y.address + x.nbytes - 16, 7, 16)
    return y, 5


def marked(stage, x):
    """Changes its input, and returns that."""
    stage.stream.fill(x[0].address, x[1], 8)
    return x[0]


@pytest.mark.parametrize("mode", ["on", "auto"])
@pytest.mark.parametrize("host_stage", ["1", "auto"])
@pytest.mark.parametrize("depth, in_flight", [(1, 1), (3, 8)])
def test_stages_of_an_executor(runtime, mode, host_stage, depth, in_flight):
    devices = [0, runtime.device_count - 1]
    options = {"depth": depth, "in_flight": in_flight, "host_stage": host_stage, "graph": mode}
    with Executor(devices, [shifted, marked], runtime=runtime, adapter="raw", **options) as pipeline:
        xs = [pattern(N, n) for n in range(20)]
        for _ in range(2):
            tickets = [pipeline.submit(x) for x in xs]
            for x, ticket in zip(xs, tickets, strict=True):
                y = ticket.result().numpy()
                same(y[8:-16], x[24:])
                assert set(y[:8].tolist()) == {5} and set(y[-16:].tolist()) == {7}
            del tickets, ticket
        plan = pipeline.plan().stages
        assert [stage.captured for stage in plan] == [depth, depth], plan
        assert runtime.live().graphs == 2 * depth
