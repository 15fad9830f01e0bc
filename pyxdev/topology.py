"""Which way a copy between two devices takes: per ordered pair what was reported, verified and chosen, and why.

Nothing is tried before a pair is asked for. The answers are kept on the runtime, so that everybody who uses it sees the
same ones; `topology(runtime)` gives them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pyxdev._native import HOST, Buffer, Runtime
from pyxdev.errors import DeviceFault, Error, NoPeerAccess
from pyxdev.settings import HostStage, Mode

log = logging.getLogger("pyxdev")

Verdict = Literal["verified", "wrong data", "inconclusive", "not tried"]

# Bytes of the copies that verify a pair: a few; and more than the largest tile of a staged copy, with an odd end.
VERIFY_SIZES = (4, (8 << 20) + 4099)
# The destination holds one of these before each round, so that bytes that never arrive cannot look right.
POISONS = (0xA5, 0x5A)
PATIENCE = 10.0  # seconds a verifying copy may take


@dataclass(frozen=True)
class Pair:
    """What is known of copies from device src to device dst."""

    src: int
    dst: int
    mode: Mode  # asked for by the setting host_stage
    peer: Literal["yes", "no", "not enabled"]  # peer access; "not enabled": reported, but the driver's limit is reached
    verdict: Verdict
    path: Literal["direct", "staged"]
    why: str


def topology(runtime: Runtime) -> dict[tuple[int, int, Mode], Pair]:
    """The choices made so far on this runtime, by (src, dst, mode)."""
    known: dict[tuple[int, int, Mode], Pair] | None = getattr(runtime, "topology", None)
    if known is None:
        known = runtime.topology = {}
    return known


def choose(runtime: Runtime, src: int, dst: int, host_stage: HostStage) -> Pair:
    """The path of copies from device src to device dst; the first call for a pair decides, and says so in one log line.

    Raises NoPeerAccess, naming the pair, where direct copies are asked for and there is no peer access.
    """
    mode = host_stage.mode(src, dst)
    known = topology(runtime)
    pair = known.get((src, dst, mode))
    if pair is None:
        pair = _decide(runtime, src, dst, mode)
        known[src, dst, mode] = pair
        log.info(
            "copies from device %d to device %d: %s; host_stage %s (%s), peer access %s, %s: %s",
            src, dst, pair.path, host_stage, mode, pair.peer, pair.verdict, pair.why,
        )  # fmt: skip
    return pair


def _decide(runtime: Runtime, src: int, dst: int, mode: Mode) -> Pair:
    if src == dst:
        return Pair(src, dst, mode, "yes", "not tried", "direct", "one device copies within itself")
    if mode == "staged":
        capable: Literal["yes", "no"] = "yes" if runtime.peer_capable(src, dst) else "no"
        return Pair(src, dst, mode, capable, "not tried", "staged", "asked for")
    peer = peer_access(runtime, src, dst)
    if mode == "direct":
        if peer != "yes":
            reason = "the driver's limit of peers is reached" if peer == "not enabled" else "the driver reports none"
            raise NoPeerAccess(
                f"direct copies from device {src} to device {dst} are asked for (host_stage 0), but there is no peer "
                f"access: {reason}; allowed: auto or 1 (staged)",
                status="NO_PEER",
                operation="choose",
            )
        return Pair(src, dst, mode, peer, "not tried", "direct", "asked for")
    if peer == "no":
        return Pair(src, dst, mode, peer, "not tried", "staged", "no peer access")
    if peer == "not enabled":
        return Pair(src, dst, mode, peer, "not tried", "staged", "the driver's limit of peers is reached")
    if runtime.backend == "hip":
        return Pair(src, dst, mode, peer, "not tried", "staged", "peer access on HIP is used on request only")
    verdict, why = verify(runtime, src, dst)
    return Pair(src, dst, mode, peer, verdict, "direct" if verdict == "verified" else "staged", why)


def peer_access(runtime: Runtime, src: int, dst: int) -> Literal["yes", "no", "not enabled"]:
    """Whether src can write to the memory of dst; enables the access where it is reported."""
    if not runtime.peer_capable(src, dst):
        return "no"
    return "yes" if runtime.peer_enable(src, dst) else "not enabled"


def verify(runtime: Runtime, src: int, dst: int) -> tuple[Verdict, str]:
    """Copies directly from src to dst and looks at the bytes: (verdict, one sentence).

    Anything but the right bytes in time is no proof; a device fault is raised, everything else is an answer.
    """
    try:
        for nbytes in VERIFY_SIZES:
            for poison in POISONS:
                wrong = _wrong_bytes(runtime, src, dst, nbytes, poison)
                if wrong is None:
                    return "inconclusive", f"a direct copy of {nbytes} bytes took more than {PATIENCE:g} s"
                if wrong:
                    return "wrong data", f"a direct copy of {nbytes} bytes arrived with {wrong} wrong ones"
    except DeviceFault:
        raise
    except Error as error:
        return "inconclusive", f"a direct copy could not be tried: {error}"
    return "verified", f"direct copies of {' and '.join(map(str, VERIFY_SIZES))} bytes arrived as sent"


def _wrong_bytes(runtime: Runtime, src: int, dst: int, nbytes: int, poison: int) -> int | None:
    """How many bytes of one direct copy arrived wrong; None if it did not end in time."""
    # Random bytes that repeat with a prime period, so that no two tiles are alike.
    sent = np.resize(np.random.default_rng(poison).integers(0, 256, 65521, np.uint8), nbytes)
    buffers: list[Buffer] = []
    link = runtime.link(src, dst, path="direct")
    there, back = runtime.stream(src), runtime.stream(dst)
    ready, arrived = runtime.event(), runtime.event()
    try:
        for device in (src, dst, HOST, HOST):
            buffers.append(runtime.buffer(device, nbytes))
        source, target, up, down = buffers
        runtime.host_access(up.address, nbytes, write=True)
        with memoryview(up) as view:
            view[:] = sent.data
        there.copy(source.address, up.address, nbytes, dst_device=src, src_device=HOST)
        ready.record(there)
        back.fill(target.address, poison, nbytes)
        arrived.record(back)
        link.copy(target.address, source.address, nbytes, source_ready=ready, dest_free=arrived, arrived=arrived)
        back.wait(arrived)
        back.copy(down.address, target.address, nbytes, dst_device=HOST, src_device=dst)
        if not back.synchronize(PATIENCE):
            return None
        runtime.host_access(down.address, nbytes, write=False)
        with memoryview(down) as view:
            return int(np.count_nonzero(np.frombuffer(view, np.uint8) != sent))
    finally:
        link.close()  # waits for its copies
        for thing in (*buffers, ready, arrived, there, back):
            thing.close()
