"""What the conformance tests share: bytes that tell their place, and the devices under test with ways to use them.

Nothing here knows how a device works. Data goes in and comes out through page-locked memory, so the suite runs
unchanged on real devices.
"""

import contextlib

import numpy as np

from pyxdev._native import HOST, Link, Stream
from pyxdev.errors import Error

POISON = 0xA5
GUARD = 64  # poisoned bytes on both sides of what a test writes


def pattern(nbytes, salt=0):
    """Bytes that tell their position and salt."""
    at = np.arange(nbytes, dtype=np.uint64) + np.uint64(salt * 1_000_003 + 1)
    return (at * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(56)).astype(np.uint8)


class Devices:
    """A runtime, and short ways to make objects (closed at the end) and to move bytes in and out."""

    def __init__(self, runtime):
        self.runtime = runtime
        self.count = runtime.device_count
        self.things = []

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        """Waits for what is queued, so that no memory goes before its last use; then closes everything."""
        for thing in self.things:
            if not thing.closed:
                if isinstance(thing, Link):
                    thing.close()
                elif isinstance(thing, Stream):
                    with contextlib.suppress(Error):
                        thing.synchronize()
        while self.things:
            self.things.pop().close()

    def __iter__(self):
        return iter(range(self.count))

    @property
    def pairs(self):
        """Every ordered pair of different devices; one device stands for both ends where there is only one."""
        return [(src, dst) for src in self for dst in self if src != dst] or [(0, 0)]

    def paths(self, src, dst):
        """The ways that copies from src to dst can go."""
        return ["direct", "staged"] if src == dst or self.runtime.peer_enable(src, dst) else ["staged"]

    def keep(self, thing):
        self.things.append(thing)
        return thing

    def stream(self, device=0):
        return self.keep(self.runtime.stream(device))

    def event(self, **options):
        return self.keep(self.runtime.event(**options))

    def buffer(self, device, nbytes):
        return self.keep(self.runtime.buffer(device, nbytes))

    def link(self, src, dst, **options):
        return self.keep(self.runtime.link(src, dst, **options))

    def ring(self, tiles, tile_bytes):
        return self.keep(self.runtime.ring(tiles, tile_bytes))

    def throttle(self, limit):
        return self.keep(self.runtime.throttle(limit))

    def write(self, pinned, data, at=0):
        """The host writes page-locked memory."""
        self.runtime.host_access(pinned.address + at, len(data), write=True)
        with memoryview(pinned) as view:
            view[at : at + len(data)] = memoryview(data)

    def read(self, pinned):
        """A copy of page-locked memory."""
        self.runtime.host_access(pinned.address, pinned.nbytes, write=False)
        with memoryview(pinned) as view:
            return np.array(view, dtype=np.uint8)

    def upload(self, device, data):
        """A new buffer of a device with these bytes."""
        buffer = self.buffer(device, len(data))
        if len(data):
            with self.runtime_pinned(len(data)) as pinned, self.own_stream(device) as stream:
                self.write(pinned, data)
                stream.copy(buffer.address, pinned.address, len(data), dst_device=device, src_device=HOST)
                assert stream.synchronize()
        return buffer

    def poisoned(self, device, nbytes):
        """A new buffer of a device, filled so that bytes nobody wrote are seen."""
        return self.upload(device, np.full(nbytes, POISON, np.uint8))

    def download(self, buffer):
        """The bytes of a device's buffer, as the device has them now."""
        if not buffer.nbytes:
            return np.empty(0, np.uint8)
        with self.runtime_pinned(buffer.nbytes) as pinned, self.own_stream(buffer.device) as stream:
            self.write(pinned, np.full(buffer.nbytes, POISON ^ 0xFF, np.uint8))
            stream.copy(pinned.address, buffer.address, buffer.nbytes, dst_device=HOST, src_device=buffer.device)
            assert stream.synchronize()
            return self.read(pinned)

    def runtime_pinned(self, nbytes):
        return contextlib.closing(self.runtime.buffer(HOST, nbytes))

    def own_stream(self, device):
        return contextlib.closing(self.runtime.stream(device))

    def busy(self, stream):
        """Queues work that takes the device a while: longer than the host takes to queue the next few calls."""
        scratch = self.buffer(stream.device, 4 << 20)
        for _ in range(16):
            stream.fill(scratch.address, 0, scratch.nbytes)


def same(got, wanted):
    """Equal bytes; says where they first differ."""
    assert len(got) == len(wanted)
    wrong = np.flatnonzero(np.asarray(got) != np.asarray(wanted))
    assert not len(wrong), f"{len(wrong)} of {len(got)} bytes differ, the first at {wrong[0]}"
    return True
