"""Closing, leaking, using after close, forking, and two runtimes side by side."""

import gc
import itertools
import subprocess
import sys
import warnings

import pytest
from hardware import Devices, pattern, same

from pyxdev._native import HOST, Runtime
from pyxdev.errors import Busy, Closed, InvalidArgument


def all_kinds(runtime):
    return {
        "stream": runtime.stream(0),
        "event": runtime.event(),
        "buffer": runtime.buffer(0, 100),
        "link": runtime.link(0, runtime.device_count - 1, tile_bytes=4096),
        "ring": runtime.ring(2, 100),
        "throttle": runtime.throttle(2),
    }


def test_objects_close_once_and_again(runtime):
    things = all_kinds(runtime)
    live = runtime.live()
    assert (live.streams >= 1, live.events >= 1, live.buffers >= 1) == (True, True, True)
    assert (live.links, live.rings >= 1, live.throttles) == (1, True, 1)
    for thing in things.values():
        assert not thing.closed
        thing.close()
        assert thing.closed
        thing.close()


USES = {
    "stream": [
        lambda stream: stream.handle,
        lambda stream: stream.idle(),
        lambda stream: stream.synchronize(),
        lambda stream: stream.fill(0, 0, 0),
        lambda stream: stream.copy(0, 0, 0, dst_device=0, src_device=0),
        lambda stream: stream.wait(stream.runtime.event()),
    ],
    "event": [lambda event: event.done(), lambda event: event.wait(), lambda event: event.device],
    "buffer": [
        lambda buffer: buffer.address,
        lambda buffer: buffer.nbytes,
        lambda buffer: buffer.device,
        lambda buffer: memoryview(buffer),
    ],
    "link": [
        lambda link: link.copy(0, 0, 0),
        lambda link: link.path(1),
        lambda link: link.tile(1),
        lambda link: link.pinned_bytes,
    ],
    "ring": [
        lambda ring: ring.acquire(),
        lambda ring: ring.drain(),
        lambda ring: ring.tiles,
        lambda ring: ring.tile_bytes,
    ],
    "throttle": [
        lambda throttle: throttle.admit(),
        lambda throttle: throttle.withdraw(),
        lambda throttle: throttle.in_flight,
        lambda throttle: throttle.blocked,
    ],
}


def test_every_use_after_close_says_so(runtime):
    for kind, thing in all_kinds(runtime).items():
        thing.close()
        for use in USES[kind]:
            with pytest.raises(Closed, match=kind):
                use(thing)


def test_closed_objects_as_arguments_say_so(devices):
    stream, event, ring, throttle = devices.stream(), devices.event(), devices.ring(1, 8), devices.throttle(1)
    gone_stream, gone_event = devices.runtime.stream(0), devices.runtime.event()
    gone_stream.close()
    gone_event.close()
    tile = ring.acquire()
    throttle.admit()
    for use in (
        lambda: stream.wait(gone_event),
        lambda: event.record(gone_stream),
        lambda: gone_event.record(stream),
        lambda: ring.submit(tile, gone_stream),
        lambda: throttle.retire(gone_stream),
        lambda: devices.link(0, 0).copy(0, 0, 0, source_ready=gone_event),
    ):
        with pytest.raises(Closed):
            use()
    ring.release(tile)


def test_a_closed_runtime_says_so(pyxdev_driver):
    runtime = Runtime(pyxdev_driver())
    runtime.close()
    runtime.close()
    assert runtime.closed
    for use in (
        lambda: runtime.stream(0),
        lambda: runtime.event(),
        lambda: runtime.buffer(0, 1),
        lambda: runtime.link(0, 0),
        lambda: runtime.ring(1, 1),
        lambda: runtime.throttle(1),
        lambda: runtime.device_count,
        lambda: runtime.device_info(0),
        lambda: runtime.memory_info(0),
        lambda: runtime.peer_capable(0, 0),
        lambda: runtime.peer_enable(0, 0),
        lambda: runtime.clock(),
        lambda: runtime.live(),
        lambda: runtime.__enter__(),
    ):
        with pytest.raises(Closed, match="runtime"):
            use()


def test_a_runtime_with_live_children_stays_open_and_names_them(pyxdev_driver):
    with Runtime(pyxdev_driver()) as runtime:
        children = [runtime.stream(0), runtime.buffer(0, 10), runtime.buffer(HOST, 10)]
        with pytest.raises(Busy, match=r"1 stream.*2 buffers"):
            runtime.close()
        assert not runtime.closed
        assert children[0].synchronize()
        for child in children:
            child.close()


def test_objects_may_go_in_any_order(pyxdev_driver):
    """A child holds its runtime, so collection never takes the parent first; what was leaked says so."""
    for order in itertools.permutations(("runtime", "stream", "event", "buffer")):
        runtime = Runtime(pyxdev_driver())
        things = {"runtime": runtime} | {
            kind: thing for kind, thing in all_kinds(runtime).items() if kind in order or thing.close()
        }
        things["event"].record(things["stream"])
        del runtime
        leaked = []
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            # The recorder of pytest would keep what was leaked.
            warnings.showwarning = lambda message, *rest: leaked.append(str(message))  # noqa: B023
            for kind in order:
                del things[kind]
        assert len(leaked) == 3, leaked
        assert all(any(kind in text for text in leaked) for kind in ("Runtime", "Stream", "Buffer"))


def test_a_managed_buffer_is_collected_without_a_word(runtime):
    buffer = runtime.buffer(0, 1000, managed=True)
    assert runtime.live().device_bytes == 1000
    del buffer
    gc.collect()
    assert not runtime.live().any()


def test_a_driver_serves_one_runtime(pyxdev_driver):
    driver = pyxdev_driver()
    with Runtime(driver), pytest.raises(InvalidArgument, match="driver"):
        Runtime(driver)


def test_an_unused_driver_needs_no_closing(pyxdev_driver):
    for _ in range(3):
        pyxdev_driver()
    gc.collect()


def test_two_runtimes_live_side_by_side_and_do_not_mix(pyxdev_driver):
    with Runtime(pyxdev_driver()) as one, Runtime(pyxdev_driver()) as two, Devices(one) as here, Devices(two) as there:
        same(here.download(here.upload(0, pattern(500, 1))), pattern(500, 1))
        same(there.download(there.upload(0, pattern(500, 2))), pattern(500, 2))
        ring, throttle = here.ring(1, 8), here.throttle(1)
        tile = ring.acquire()
        throttle.admit()
        for use in (
            lambda: here.stream().wait(there.event()),
            lambda: here.event().record(there.stream()),
            lambda: here.link(0, 0).copy(0, 0, 0, source_ready=there.event()),
            lambda: ring.submit(tile, there.stream()),
            lambda: throttle.retire(there.stream()),
        ):
            with pytest.raises(InvalidArgument, match="runtime"):
                use()
        ring.release(tile)


def test_devices_that_are_not_there_are_refused(devices):
    runtime, count = devices.runtime, devices.count
    for device in (count, -1, -2, 10**6, 2**31 - 1):
        for use in (
            lambda device=device: runtime.stream(device),
            lambda device=device: runtime.device_info(device),
            lambda device=device: runtime.memory_info(device),
            lambda device=device: runtime.peer_capable(device, 0),
            lambda device=device: runtime.peer_enable(0, device),
        ):
            with pytest.raises(InvalidArgument, match=str(device)):
                use()
        if device != HOST:
            with pytest.raises(InvalidArgument, match=str(device)):
                runtime.buffer(device, 10)


# ---- in processes of their own ----

PRELUDE = """
import gc, os, sys
from importlib import import_module
from pyxdev import errors
from pyxdev._native import HOST, Runtime
runtime = Runtime(import_module("pyxdev.backends." + sys.argv[1]).driver())
stream, event, buffer = runtime.stream(0), runtime.event(), runtime.buffer(0, 1000)
pinned, link = runtime.buffer(HOST, 1000), runtime.link(0, runtime.device_count - 1, tile_bytes=4096)
ring, throttle = runtime.ring(2, 100), runtime.throttle(2)
children = [stream, event, buffer, pinned, link, ring, throttle]
stream.fill(buffer.address, 7, 1000)
event.record(stream)
event.wait()
"""

FORK = """
def use_in_child():
    uses = [
        lambda: runtime.stream(0), lambda: runtime.event(), lambda: runtime.buffer(0, 1), lambda: runtime.ring(1, 1),
        lambda: runtime.link(0, 0), lambda: runtime.throttle(1), lambda: runtime.device_info(0),
        lambda: runtime.memory_info(0), lambda: runtime.peer_enable(0, 0), lambda: stream.fill(buffer.address, 0, 10),
        lambda: stream.idle(), lambda: stream.synchronize(), lambda: stream.wait(event), lambda: event.record(stream),
        lambda: event.done(), lambda: event.wait(), lambda: ring.acquire(),
        lambda: ring.drain(), lambda: throttle.admit(), lambda: throttle.retire(stream), lambda: throttle.in_flight,
        lambda: link.copy(0, 0, 0),
    ]
    for number, use in enumerate(uses):
        try:
            use()
        except errors.Forked as error:
            if "spawn" in str(error):
                continue
            return f"use {number} does not say what to do: {error}"
        except BaseException as error:
            return f"use {number}: {error!r}"
        return f"use {number} went through"
    for child in children:
        child.close()
    runtime.close()
    return ""

read, write = os.pipe()
child = os.fork()
if not child:
    os.write(write, use_in_child().encode())
    os._exit(0)
os.close(write)
said = os.read(read, 10000).decode()
assert os.waitpid(child, 0)[1] == 0, "the child died"
assert said == "", said

# A child that does nothing and ends in the ordinary way must not touch the parent's devices either.
child = os.fork()
if not child:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0, "the second child died"

# The parent goes on.
assert stream.synchronize()
stream.copy(pinned.address, buffer.address, 1000, dst_device=HOST, src_device=0)
assert stream.synchronize()
assert bytes(pinned) == bytes([7]) * 1000
for child in children:
    child.close()
assert not runtime.live().any()
runtime.close()
"""

CLEAN = """
for child in children:
    child.close()
runtime.close()
"""


def run_program(backend, text, *options):
    command = [sys.executable, *options, "-c", PRELUDE + text, backend]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_after_a_fork_the_child_is_told_and_the_parent_goes_on(pyxdev_backend):
    done = run_program(pyxdev_backend, FORK, "-W", "ignore::DeprecationWarning", "-W", "ignore::ResourceWarning")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_program_that_closes_ends_with_nothing_on_stderr(pyxdev_backend):
    done = run_program(pyxdev_backend, CLEAN, "-X", "dev", "-W", "error")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


@pytest.mark.parametrize("text", ["", "children.append(children)\n", "raise SystemExit(0)\n"])
def test_a_program_that_leaks_is_told_what_and_ends_well(pyxdev_backend, text):
    done = run_program(pyxdev_backend, text, "-W", "always::ResourceWarning")
    assert done.returncode == 0, done.stderr
    assert "ResourceWarning: unclosed <pyxdev." in done.stderr
    assert "Traceback" not in done.stderr
    silent = run_program(pyxdev_backend, text)
    assert (silent.returncode, silent.stderr) == (0, "")


def test_what_outlives_the_warnings_is_closed_without_a_word(pyxdev_backend):
    done = run_program(pyxdev_backend, "sys.keep = children\n", "-W", "always::ResourceWarning")
    assert (done.returncode, done.stderr) == (0, "")
