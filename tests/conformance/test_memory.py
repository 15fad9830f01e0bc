"""Buffers, the pinned ring and the throttle."""

import itertools
import threading

import numpy as np
import pytest
from hardware import pattern, same

from pyxdev._native import HOST
from pyxdev.errors import Busy, InvalidArgument, OutOfMemory


def test_memory_is_counted_where_it_lies(devices):
    runtime = devices.runtime
    device, pinned = runtime.buffer(0, 1000), runtime.buffer(HOST, 300)
    live = runtime.live()
    assert (live.buffers, live.device_bytes, live.pinned_bytes) == (2, 1000, 300)
    assert (device.device, device.nbytes, pinned.device, pinned.nbytes) == (0, 1000, HOST, 300)
    assert device.address
    assert pinned.address
    device.close()
    pinned.close()
    assert not runtime.live().any()


def test_nothing_is_allocated_for_no_bytes(devices):
    for device in (HOST, *devices):
        buffer = devices.buffer(device, 0)
        assert (buffer.address, buffer.nbytes, buffer.device) == (0, 0, device)


def test_buffers_of_a_device_do_not_overlap(devices):
    for device in devices:
        buffers = sorted((devices.buffer(device, nbytes) for nbytes in (1, 7, 4096, 1, 65537)), key=lambda b: b.address)
        for before, after in itertools.pairwise(buffers):
            assert before.address + before.nbytes <= after.address


def test_too_much_memory_is_an_error_that_says_how_much(devices):
    for device in (HOST, *devices):
        with pytest.raises(OutOfMemory, match=str(1 << 60)):
            devices.runtime.buffer(device, 1 << 60)
    assert not devices.runtime.live().any()
    assert devices.buffer(0, 1000).nbytes == 1000


@pytest.mark.parametrize("nbytes", [-1, -(1 << 70)])
def test_a_size_below_zero_is_refused(devices, nbytes):
    with pytest.raises(InvalidArgument, match="nbytes"):
        devices.runtime.buffer(0, nbytes)


def test_page_locked_memory_is_open_to_the_host_and_cannot_be_closed_while_it_is_lent(devices):
    pinned = devices.runtime.buffer(HOST, 10)
    view = memoryview(pinned)
    assert (view.nbytes, view.format, view.readonly) == (10, "B", False)
    view[:] = bytes(range(10))
    assert np.frombuffer(pinned, np.uint8).tolist() == list(range(10))
    with pytest.raises(Busy, match="exported"):
        pinned.close()
    view.release()
    pinned.close()
    assert pinned.closed


def test_device_memory_is_open_to_the_host_on_simulated_devices_only(devices, pyxdev_backend):
    buffer = devices.upload(0, pattern(100))
    if pyxdev_backend == "sim":
        with memoryview(buffer) as view:
            same(np.array(view), pattern(100))
    else:
        with pytest.raises(BufferError):
            memoryview(buffer)


# ---- the ring ----


def test_the_host_fills_tiles_again_when_their_uploads_are_done(devices):
    for tiles in (1, 3):
        for device in {0, devices.count - 1}:
            ring, stream = devices.ring(tiles, 1000), devices.stream(device)
            targets = [devices.poisoned(device, 1000) for _ in range(4 * tiles)]
            devices.busy(stream)
            for salt, target in enumerate(targets):
                tile = ring.acquire()
                assert (tile.index, tile.nbytes) == (salt % tiles, 1000)
                fill_tile(devices, tile, pattern(1000, salt))
                stream.copy(target.address, tile.address, 1000, dst_device=device, src_device=HOST)
                ring.submit(tile, stream)
            ring.drain()
            for salt, target in enumerate(targets):
                same(devices.download(target), pattern(1000, salt))


def fill_tile(devices, tile, data):
    devices.runtime.host_access(tile.address, len(data), write=True)
    from ctypes import memmove

    memmove(tile.address, data.tobytes(), len(data))


def test_tiles_pass_between_streams_of_different_devices(devices):
    """Down on one device, up on another, through one tile."""
    src, dst = devices.pairs[0]
    ring = devices.ring(1, 5000)
    down, up, filled = devices.stream(src), devices.stream(dst), devices.event()
    data = [pattern(5000, salt) for salt in range(5)]
    sources = [devices.upload(src, part) for part in data]
    targets = [devices.poisoned(dst, 5000) for _ in data]
    devices.busy(up)
    for source, target in zip(sources, targets, strict=True):
        tile = ring.acquire()
        down.copy(tile.address, source.address, 5000, dst_device=HOST, src_device=src)
        filled.record(down)
        up.wait(filled)
        up.copy(target.address, tile.address, 5000, dst_device=dst, src_device=HOST)
        ring.submit(tile, up)
    ring.drain()
    for part, target in zip(data, targets, strict=True):
        same(devices.download(target), part)


def test_a_ring_gives_no_tile_that_is_held(devices):
    ring, stream = devices.ring(2, 64), devices.stream()
    one, two = ring.acquire(), ring.acquire()
    assert {one.index, two.index} == {0, 1}
    assert ring.acquire(timeout=0) is None
    ring.release(one)
    ring.submit(two, stream)
    with pytest.raises(InvalidArgument, match="not held"):
        ring.submit(two, stream)
    again = ring.acquire(timeout=60)
    assert again is not None
    ring.release(again)


def test_the_tiles_of_a_ring_are_neither_shared_nor_beyond_it(devices):
    ring = devices.ring(3, 100)
    assert (ring.tiles, ring.tile_bytes, devices.runtime.live().pinned_bytes) == (3, 100, 300)
    tiles = [ring.acquire() for _ in range(3)]
    addresses = sorted(tile.address for tile in tiles)
    assert all(after - before >= 100 for before, after in itertools.pairwise(addresses))
    for tile in tiles:
        ring.release(tile)


@pytest.mark.parametrize(("tiles", "tile_bytes"), [(0, 1), (1, 0), (1 << 31, 1 << 40)])
def test_a_ring_needs_tiles_with_bytes(devices, tiles, tile_bytes):
    with pytest.raises(InvalidArgument, match="tiles"):
        devices.runtime.ring(tiles, tile_bytes)


def test_threads_share_a_ring(devices):
    ring = devices.ring(3, 512)
    parts = {salt: pattern(512, salt) for salt in range(24)}
    targets = {salt: devices.poisoned(salt % devices.count, 512) for salt in parts}
    failures = []

    def worker(salts):
        try:
            with devices.own_stream(0) as stream:
                for salt in salts:
                    if salt % devices.count:
                        continue
                    tile = ring.acquire(timeout=60)
                    fill_tile(devices, tile, parts[salt])
                    stream.copy(targets[salt].address, tile.address, 512, dst_device=0, src_device=HOST)
                    ring.submit(tile, stream)
        except BaseException as failure:
            failures.append(failure)
            raise

    threads = [threading.Thread(target=worker, args=(range(first, 24, 4),)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    ring.drain()
    for salt in range(0, 24, devices.count):
        same(devices.download(targets[salt]), parts[salt])


# ---- the throttle ----


def test_a_throttle_admits_up_to_its_limit(devices):
    throttle, stream = devices.throttle(2), devices.stream()
    assert throttle.limit == 2
    assert throttle.admit()
    assert throttle.admit()
    assert throttle.in_flight == 2
    assert not throttle.admit(timeout=0)
    throttle.withdraw()
    assert throttle.in_flight == 1
    assert throttle.admit(timeout=0)
    throttle.retire(stream)
    throttle.retire(stream)
    assert throttle.admit(timeout=60)
    with pytest.raises(InvalidArgument, match="retired"):
        for _ in range(4):
            throttle.retire(stream)
    assert stream.synchronize()
    assert throttle.in_flight == 0
    assert throttle.blocked >= 0


def test_places_are_left_in_order_when_the_streams_get_there(devices):
    """The slots that the host writes are protected by the throttle alone."""
    limit, rounds = 2, 9
    throttle, stream = devices.throttle(limit), devices.stream(devices.count - 1)
    slots = [devices.buffer(HOST, 2000) for _ in range(limit)]
    targets = [devices.poisoned(stream.device, 2000) for _ in range(rounds)]
    devices.busy(stream)
    for index, target in enumerate(targets):
        assert throttle.admit()
        assert throttle.in_flight <= limit
        slot = slots[index % limit]
        devices.write(slot, pattern(2000, index))
        stream.copy(target.address, slot.address, 2000, dst_device=stream.device, src_device=HOST)
        throttle.retire(stream)
    assert stream.synchronize()
    for index, target in enumerate(targets):
        same(devices.download(target), pattern(2000, index))
    assert throttle.in_flight == 0


@pytest.mark.parametrize("limit", [0, (1 << 20) + 1])
def test_a_throttle_needs_a_limit(devices, limit):
    with pytest.raises(InvalidArgument, match="limit"):
        devices.runtime.throttle(limit)
