"""Every kind of copy through the drivers of real devices, over stand-ins: odd sizes, pitched, between devices."""

from __future__ import annotations

import pytest
from vendor_child import FAKES, ROCM, build_fakes, run


@pytest.fixture(scope="module", autouse=True)
def fakes() -> None:
    build_fakes()


@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_every_kind_of_copy_moves_the_right_bytes(backend: str) -> None:
    run(
        f"BACKEND = {backend!r}"
        """
from pyxdev.backends import open
with open(BACKEND) as runtime:
    n = 70001
    host, back = runtime.buffer(HOST, n), runtime.buffer(HOST, n)
    here, there, other = runtime.buffer(0, n), runtime.buffer(0, n), runtime.buffer(1, n)
    s, t, e = runtime.stream(0), runtime.stream(1), runtime.event()
    want = pattern(n)
    memoryview(host)[:] = want
    assert runtime.peer_enable(0, 1)
    s.copy(here.address, host.address, n, dst_device=0, src_device=HOST)
    s.copy(there.address + 1, here.address + 1, n - 1, dst_device=0, src_device=0)
    s.fill(there.address, want[0], 1)
    e.record(s)
    t.wait(e)
    link = runtime.link(0, 1, path="direct")
    link.copy(other.address, there.address, n, source_ready=e, arrived=e)
    t.wait(e)
    t.copy(back.address, other.address, n, dst_device=HOST, src_device=1)
    assert t.synchronize(20)
    assert bytes(memoryview(back)) == want

    # 50 rows of 301 bytes; pitches 1024, 700, 512 and 301.
    rows, width = 50, 301
    for buffer, stream in ((here, s), (there, s), (other, t)):
        stream.fill(buffer.address, 0xEE, n)
        assert stream.synchronize(20)
    s.copy(here.address, host.address, width, height=rows, dst_pitch=700, src_pitch=1024, dst_device=0, src_device=HOST)
    s.copy(there.address, here.address, width, height=rows, dst_pitch=512, src_pitch=700, dst_device=0, src_device=0)
    e.record(s)
    link.copy(other.address, there.address, width, height=rows, dst_pitch=307, src_pitch=512, source_ready=e, arrived=e)
    t.wait(e)
    t.copy(
        back.address, other.address, width, height=rows, dst_pitch=width, src_pitch=307, dst_device=HOST, src_device=1
    )
    assert t.synchronize(20)
    got = bytes(memoryview(back))
    assert got[: rows * width] == b"".join(want[r * 1024 : r * 1024 + width] for r in range(rows))
    t.copy(back.address, other.address, 307 * rows, dst_device=HOST, src_device=1)
    assert t.synchronize(20)
    assert all(bytes(memoryview(back))[r * 307 + width : (r + 1) * 307] == b"\\xee" * 6 for r in range(rows - 1))
    for thing in (link, s, t, e, host, back, here, there, other):
        thing.close()
""",
        FAKES,
        ROCM,
    )


@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_rows_further_apart_than_the_vendor_takes(backend: str) -> None:
    """No pitch may be above 2^31 - 1; such rows are copied one by one."""
    run(
        f"BACKEND = {backend!r}"
        """
from pyxdev.backends import open
with open(BACKEND) as runtime:
    pitch, width = (1 << 31) + 4096, 1000
    far, s = runtime.buffer(0, pitch + width), runtime.stream(0)
    host, back = runtime.buffer(HOST, 2 * width), runtime.buffer(HOST, 2 * width)
    memoryview(host)[:] = want = pattern(2 * width)
    s.copy(far.address, host.address, width, height=2, dst_pitch=pitch, src_pitch=width, dst_device=0, src_device=HOST)
    s.copy(back.address, far.address, width, height=2, dst_pitch=width, src_pitch=pitch, dst_device=HOST, src_device=0)
    assert s.synchronize(20)
    assert bytes(memoryview(back)) == want
    for thing in (s, far, host, back):
        thing.close()
""",
        FAKES,
        ROCM,
    )
