"""Copies on one stream: host to device, device to host, within a device; sizes, offsets and rows."""

import numpy as np
import pytest
from hardware import GUARD, POISON, pattern, same

from pyxdev._native import HOST
from pyxdev.errors import InvalidArgument

SIZES = [0, 1, 2, 255, 4095, 4096, 4097, 3 * 65536 + 1]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize(("to", "of"), [(0, 0), (1, 0), (0, 3), (7, 5)])
def test_bytes_go_up_across_and_down(devices, nbytes, to, of):
    for device in devices:
        stream, data = devices.stream(device), pattern(of + nbytes, nbytes)
        up, down = devices.buffer(HOST, of + nbytes + 1), devices.buffer(HOST, nbytes + 2 * GUARD)
        devices.write(up, data)
        devices.write(down, np.full(down.nbytes, POISON, np.uint8))
        one, two = devices.poisoned(device, to + nbytes + GUARD), devices.poisoned(device, to + nbytes + GUARD)
        stream.copy(one.address + to, up.address + of, nbytes, dst_device=device, src_device=HOST)
        stream.copy(two.address + to, one.address + to, nbytes, dst_device=device, src_device=device)
        stream.copy(down.address + GUARD, two.address + to, nbytes, dst_device=HOST, src_device=device)
        assert stream.synchronize()
        same(devices.read(down)[GUARD : GUARD + nbytes], data[of:])
        for poisoned in (devices.read(down)[:GUARD], devices.read(down)[GUARD + nbytes :]):
            same(poisoned, np.full(GUARD, POISON, np.uint8))
        for buffer in (one, two):
            got = devices.download(buffer)
            same(got[:to], np.full(to, POISON, np.uint8))
            same(got[to + nbytes :], np.full(GUARD, POISON, np.uint8))


@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 7), (13, 5), (100, 33), (4096, 3)])
@pytest.mark.parametrize(("dst_gap", "src_gap"), [(0, 0), (3, 0), (0, 5), (28, 12)])
def test_rows_go_up_across_and_down(devices, width, height, dst_gap, src_gap):
    stream = devices.stream()
    src_pitch, dst_pitch = width + src_gap, width + dst_gap
    data = pattern(src_pitch * height, width).reshape(height, src_pitch)
    up, down = devices.buffer(HOST, data.size), devices.buffer(HOST, data.size)
    devices.write(up, data.reshape(-1))
    devices.write(down, np.full(data.size, POISON, np.uint8))
    one, two = devices.poisoned(0, dst_pitch * height), devices.poisoned(0, src_pitch * height)

    def copy(dst, src, dst_device, src_device, dst_pitch, src_pitch):
        stream.copy(
            dst.address,
            src.address,
            width,
            height=height,
            dst_pitch=dst_pitch,
            src_pitch=src_pitch,
            dst_device=dst_device,
            src_device=src_device,
        )

    copy(one, up, 0, HOST, dst_pitch, src_pitch)
    copy(two, one, 0, 0, src_pitch, dst_pitch)
    copy(down, two, HOST, 0, src_pitch, src_pitch)
    assert stream.synchronize()
    wanted = np.full((height, dst_pitch), POISON, np.uint8)
    wanted[:, :width] = data[:, :width]
    same(devices.download(one), wanted.reshape(-1))
    wanted = np.full((height, src_pitch), POISON, np.uint8)
    wanted[:, :width] = data[:, :width]
    same(devices.download(two), wanted.reshape(-1))
    same(devices.read(down), wanted.reshape(-1))


def test_ranges_that_overlap_are_refused_and_neighbours_are_not(devices):
    stream, buffer = devices.stream(), devices.upload(0, pattern(1000))
    for dst, src, nbytes in ((0, 0, 10), (0, 9, 10), (9, 0, 10), (0, 499, 500)):
        with pytest.raises(InvalidArgument, match="overlap"):
            stream.copy(buffer.address + dst, buffer.address + src, nbytes, dst_device=0, src_device=0)
    assert stream.synchronize()
    same(devices.download(buffer), pattern(1000))
    stream.copy(buffer.address, buffer.address + 500, 500, dst_device=0, src_device=0)
    assert stream.synchronize()
    same(devices.download(buffer), np.concatenate([pattern(1000)[500:], pattern(1000)[500:]]))


def test_rows_closer_than_their_width_are_refused(devices):
    stream, one, two = devices.stream(), devices.poisoned(0, 100), devices.poisoned(0, 100)
    for pitches in ({"dst_pitch": 9, "src_pitch": 10}, {"dst_pitch": 10, "src_pitch": 9}, {}):
        with pytest.raises(InvalidArgument, match="pitch"):
            stream.copy(one.address, two.address, 10, height=2, dst_device=0, src_device=0, **pitches)


def test_a_stream_copies_for_its_own_device_only(devices):
    stream, buffer, pinned = devices.stream(0), devices.poisoned(0, 16), devices.buffer(HOST, 32)
    for dst_device, src_device in ((devices.count, HOST), (HOST, devices.count), (HOST, HOST), (0, -2), (-2, 0)):
        with pytest.raises(InvalidArgument):
            stream.copy(buffer.address, pinned.address, 16, dst_device=dst_device, src_device=src_device)
