"""Copies between devices: every pair, both paths, all sizes around a tile, and the four events of a copy."""

import contextlib
import itertools

import numpy as np
import pytest
from hardware import GUARD, POISON, Devices, pattern, same

from pyxdev._native import Runtime
from pyxdev.errors import InvalidArgument, NoPeerAccess

TILE = 4096
SIZES = [0, 1, TILE - 1, TILE, TILE + 1, 7 * TILE + 3]


def send(devices, link, data, to=0, of=0):
    """Copies data over the link between fresh buffers, at these offsets, and checks it and what lies around it."""
    source = devices.upload(link.src, np.concatenate([pattern(of, 99), data, pattern(GUARD, 98)]))
    target = devices.poisoned(link.dst, to + len(data) + GUARD)
    arrived, released = devices.event(), devices.event()
    link.copy(target.address + to, source.address + of, len(data), arrived=arrived, released=released)
    assert released.wait()
    assert arrived.wait()
    got = devices.download(target)
    same(got[to : to + len(data)], data)
    same(got[:to], np.full(to, POISON, np.uint8))
    same(got[to + len(data) :], np.full(GUARD, POISON, np.uint8))


@pytest.mark.parametrize("tiles", [1, 2, 4])
@pytest.mark.parametrize("nbytes", SIZES)
def test_staged_copies_of_sizes_around_a_tile(devices, nbytes, tiles):
    for src, dst in devices.pairs:
        link = devices.link(src, dst, tile_bytes=TILE, tiles=tiles)
        assert link.path(nbytes) == "staged"  # between streams of one device too
        for to, of in ((0, 0), (1, 0), (0, 3), (7, 5)):
            send(devices, link, pattern(nbytes, src * 16 + dst), to, of)


@pytest.mark.parametrize("nbytes", [*SIZES, (1 << 20) + 5])
def test_direct_copies(devices, nbytes):
    for src, dst in devices.pairs:
        if "direct" not in devices.paths(src, dst):
            with pytest.raises(NoPeerAccess, match=f"from device {src} to device {dst}"):
                devices.runtime.link(src, dst, path="direct")
            continue
        link = devices.link(src, dst, path="direct")
        assert link.pinned_bytes == 0
        assert link.path(nbytes) == "direct"
        send(devices, link, pattern(nbytes, 5), 3, 1)


def test_tiles_fitted_to_the_copy(devices):
    src, dst = devices.pairs[-1]
    link = devices.link(src, dst, max_bytes=6 << 20)
    for nbytes in (1, 5000, (1 << 20) + 1, 6 << 20):
        send(devices, link, pattern(nbytes, 7))


def test_a_copy_larger_than_the_ring_was_made_for_is_right_too(devices):
    src, dst = devices.pairs[0]
    send(devices, devices.link(src, dst, max_bytes=1000), pattern(300_001))


def test_the_path_may_depend_on_the_size(devices):
    for src, dst in devices.pairs:
        if "direct" in devices.paths(src, dst) and src != dst:
            link = devices.link(src, dst, path="by_size", direct_from=5000, tile_bytes=TILE)
            assert [link.path(nbytes) for nbytes in (0, 4999, 5000, 1 << 30)] == ["staged"] * 2 + ["direct"] * 2
            for nbytes in (4999, 5000):
                send(devices, link, pattern(nbytes, 3))


@pytest.mark.parametrize(
    ("width", "height", "dst_gap", "src_gap"),
    [
        (1, 1, 0, 0),
        (1, 300, 3, 2),
        (100, 90, 0, 28),
        (100, 90, 28, 0),
        (TILE - 1, 5, 1, 9),
        (TILE, 5, 0, 9),
        (TILE + 1, 5, 7, 0),
        (3 * TILE + 5, 4, 11, 13),
        (50, 300, 0, 0),
    ],
)
def test_rows(devices, width, height, dst_gap, src_gap):
    dst_pitch, src_pitch = width + dst_gap, width + src_gap
    data = pattern(height * src_pitch, width).reshape(height, src_pitch)
    wanted = np.full((height, dst_pitch), POISON, np.uint8)
    wanted[:, :width] = data[:, :width]
    for src, dst in (devices.pairs[0], devices.pairs[-1]):
        for path in devices.paths(src, dst):
            link = devices.link(src, dst, path=path, tile_bytes=TILE, tiles=2)
            source, target = devices.upload(src, data.reshape(-1)), devices.poisoned(dst, wanted.size)
            arrived = devices.event()
            link.copy(
                target.address,
                source.address,
                width,
                height=height,
                dst_pitch=dst_pitch,
                src_pitch=src_pitch,
                arrived=arrived,
            )
            assert arrived.wait()
            same(devices.download(target), wanted.reshape(-1))


class Hop:
    """A producer on one device, a consumer on the other, and slots between them that are used again and again."""

    def __init__(self, devices, src, dst, nbytes, **options):
        self.link = devices.link(src, dst, **options)
        self.nbytes = nbytes
        self.producer, self.consumer = devices.stream(src), devices.stream(dst)
        self.source = [devices.poisoned(src, nbytes) for _ in range(2)]
        self.dest = [devices.poisoned(dst, nbytes) for _ in range(2)]
        self.ready, self.released, self.arrived, self.free = (
            [devices.event() for _ in range(2)] for _ in ("ready", "released", "arrived", "free")
        )

    def send(self, index, input_, output):
        slot = index % 2
        src, dst = self.link.src, self.link.dst
        source, dest = self.source[slot].address, self.dest[slot].address
        self.producer.wait(self.released[slot])
        self.producer.copy(source, input_.address, self.nbytes, dst_device=src, src_device=src)
        self.ready[slot].record(self.producer)
        self.link.copy(
            dest,
            source,
            self.nbytes,
            source_ready=self.ready[slot],
            dest_free=self.free[slot],
            released=self.released[slot],
            arrived=self.arrived[slot],
        )
        self.consumer.wait(self.arrived[slot])
        self.consumer.copy(output.address, dest, self.nbytes, dst_device=dst, src_device=dst)
        self.free[slot].record(self.consumer)


def run_hops(devices, pairs, paths, nbytes, rounds=9, late="producer", **options):
    """Rounds of microbatches over all pairs at once, interleaved; the host waits at the end only."""
    data = [pattern(nbytes, salt) for salt in range(rounds)]
    hops, inputs, outputs = [], [], []
    for src, dst in pairs:
        for path in paths(src, dst):
            hops.append(Hop(devices, src, dst, nbytes, path=path, **options))
            inputs.append([devices.upload(src, part) for part in data])
            outputs.append([devices.poisoned(dst, nbytes) for _ in data])
    for index in range(rounds):
        for hop, from_, to in zip(hops, inputs, outputs, strict=True):
            if index in (0, rounds // 2):
                devices.busy(hop.producer if late == "producer" else hop.consumer)
            hop.send(index, from_[index], to[index])
    for hop in hops:
        assert hop.consumer.synchronize()
    for received in outputs:
        for index, buffer in enumerate(received):
            same(devices.download(buffer), data[index])


@pytest.mark.parametrize("late", ["producer", "consumer"])
@pytest.mark.parametrize("tiles", [1, 3])
def test_slots_and_tiles_are_used_again_only_when_they_are_free(devices, late, tiles):
    for src, dst in {devices.pairs[0], devices.pairs[-1]}:
        run_hops(devices, [(src, dst)], devices.paths, 10_001, late=late, tile_bytes=3000, tiles=tiles)


def test_both_directions_and_all_pairs_at_once(devices):
    run_hops(devices, devices.pairs, lambda src, dst: ["staged"], 5000, rounds=5, tile_bytes=2048, tiles=2)
    run_hops(devices, devices.pairs, devices.paths, 5000, rounds=5, tile_bytes=2048, tiles=2)


def test_one_device_at_both_ends(devices):
    run_hops(devices, [(0, 0)], devices.paths, 10_001, tile_bytes=3000)


def test_waits_done_by_the_host(new_driver):
    with Runtime(new_driver(), force_sync=True) as runtime, Devices(runtime) as devices:
        run_hops(devices, devices.pairs[:2], devices.paths, 10_001, rounds=5, tile_bytes=3000, tiles=2)


def test_round_all_devices_in_turn(devices):
    """One microbatch after the other passes through every device and comes back to the first."""
    ring = [*devices, 0]
    links = [devices.link(src, dst, tile_bytes=1000) for src, dst in itertools.pairwise(ring)]
    data = [pattern(4001, salt) for salt in range(4)]
    last = []
    for part in data:
        here, ready = devices.upload(0, part), None
        for link in links:
            there, arrived = devices.poisoned(link.dst, len(part)), devices.event()
            link.copy(there.address, here.address, len(part), source_ready=ready, arrived=arrived)
            here, ready = there, arrived
        last.append((here, ready))
    for part, (here, ready) in zip(data, last, strict=True):
        assert ready.wait()
        same(devices.download(here), part)


def test_a_copy_of_nothing_keeps_the_order(devices):
    """The events of an empty copy pass on what came before it."""
    for src, dst in (devices.pairs[0], devices.pairs[-1]):
        for path in devices.paths(src, dst):
            first, second = devices.stream(src), devices.stream(dst)
            source, middle = devices.upload(src, pattern(4096, 1)), devices.buffer(-1, 4096)
            target = devices.poisoned(dst, 4096)
            ready, arrived = devices.event(), devices.event()
            devices.busy(first)
            first.copy(middle.address, source.address, 4096, dst_device=-1, src_device=src)
            ready.record(first)
            devices.link(src, dst, path=path).copy(0, 0, 0, source_ready=ready, arrived=arrived)
            second.wait(arrived)
            second.copy(target.address, middle.address, 4096, dst_device=dst, src_device=-1)
            assert second.synchronize()
            same(devices.download(target), pattern(4096, 1))


def test_one_event_may_stand_for_released_and_arrived(devices):
    for src, dst in (devices.pairs[0], devices.pairs[-1]):
        for path in devices.paths(src, dst):
            link = devices.link(src, dst, path=path, tile_bytes=1000)
            source, target = devices.upload(src, pattern(5000)), devices.poisoned(dst, 5000)
            both = devices.event()
            link.copy(target.address, source.address, 5000, released=both, arrived=both)
            assert both.wait()
            same(devices.download(target), pattern(5000))


def test_a_link_bounds_its_pinned_memory(devices):
    src, dst = devices.pairs[0]
    link = devices.link(src, dst, tile_bytes=TILE, tiles=3)
    before = devices.runtime.live()
    assert link.pinned_bytes == 3 * TILE
    assert before.pinned_bytes == link.pinned_bytes
    send(devices, link, pattern(100_000))
    assert link.pinned_bytes == before.pinned_bytes
    assert devices.runtime.live().pinned_bytes == before.pinned_bytes


def test_what_no_link_can_be_is_refused(devices):
    runtime, count = devices.runtime, devices.count
    for src, dst in ((count, 0), (0, count), (-1, 0), (0, -1), (0, 10**6)):
        with pytest.raises(InvalidArgument, match="device"):
            runtime.link(src, dst)
    for options in ({"path": "fast"}, {"rate": -1.0}, {"rate": float("nan")}):
        with pytest.raises(InvalidArgument):
            runtime.link(0, 0, **options)


def test_copies_that_overlap_on_one_device_are_refused(devices):
    link, buffer = devices.link(0, 0), devices.upload(0, pattern(100))
    with pytest.raises(InvalidArgument, match="overlap"):
        link.copy(buffer.address, buffer.address + 50, 60)
    send(devices, link, pattern(100))


def test_closing_a_link_waits_for_its_copies(devices):
    for src, dst in (devices.pairs[0], devices.pairs[-1]):
        for path in devices.paths(src, dst):
            stream, ready = devices.stream(src), devices.event()
            source, target = devices.upload(src, pattern(20_000)), devices.poisoned(dst, 20_000)
            devices.busy(stream)
            ready.record(stream)
            with contextlib.closing(devices.runtime.link(src, dst, path=path, tile_bytes=TILE, tiles=2)) as link:
                link.copy(target.address, source.address, 20_000, source_ready=ready)
            same(devices.download(target), pattern(20_000))


def test_drain_waits_for_every_copy(devices):
    for src, dst in devices.pairs:
        for path in devices.paths(src, dst):
            link = devices.link(src, dst, path=path, tile_bytes=TILE)
            data = pattern(100 * TILE, 13)
            source, target = devices.upload(src, data), devices.poisoned(dst, len(data))
            arrived, released = devices.event(), devices.event()
            link.copy(target.address, source.address, len(data), arrived=arrived, released=released)
            link.drain()
            assert arrived.done() and released.done()
            same(devices.download(target), data)
            link.drain()
