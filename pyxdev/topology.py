"""Which way a copy between two devices takes: per ordered pair what was reported, verified, measured, chosen, and why.

Nothing is tried before a pair is asked for. The answers are kept on the runtime, so that everybody who uses it sees the
same ones, and on disk (verdicts.py), so that the next process finds them; `topology(runtime)` gives them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from pyxdev import probe, verdicts
from pyxdev._native import Runtime
from pyxdev.errors import DeviceFault, DriverError, Error, NoPeerAccess
from pyxdev.probe import Speed, Verdict, Waits
from pyxdev.settings import HostStage, Mode

log = logging.getLogger("pyxdev")

Peer = Literal["yes", "no", "not enabled"]  # "not enabled": reported, but the driver's limit is reached, or it refuses
Path = Literal["direct", "staged", "by_size"]

WORTH = 0.95  # of the staged rate: direct copies need no memory of the host, so they may be that much slower


@dataclass(frozen=True)
class Found:
    """What trying a pair has shown."""

    verdict: Verdict = "not tried"
    why: str = ""  # of the verdict
    waits: Waits = "not tried"
    speeds: tuple[Speed, ...] = ()
    leg: float = 0.0  # bytes/s of the slower leg of staged copies; 0.0: not measured


@dataclass(frozen=True)
class Pair:
    """What is known of copies from device src to device dst. direct_from, direct_to: as Runtime.link() takes them."""

    src: int
    dst: int
    mode: Mode  # asked for by the setting host_stage
    peer: Peer
    verdict: Verdict
    path: Path
    why: str
    direct_from: int = 0
    direct_to: int = 0
    waits: Waits = "not tried"
    speeds: tuple[Speed, ...] = ()
    leg: float = 0.0

    def link_options(self) -> dict[str, Any]:
        """For Runtime.link()."""
        options: dict[str, Any] = {"path": self.path, "rate": self.leg}
        if self.path == "by_size":
            options |= {"direct_from": self.direct_from, "direct_to": self.direct_to}
        return options


def topology(runtime: Runtime) -> dict[tuple[int, int, Mode], Pair]:
    """The choices made so far on this runtime, by (src, dst, mode)."""
    known: dict[tuple[int, int, Mode], Pair] | None = getattr(runtime, "topology", None)
    if known is None:
        known = runtime.topology = {}
    return known


def choose(runtime: Runtime, src: int, dst: int, host_stage: HostStage, *, fresh: bool = False) -> Pair:
    """The path of copies from device src to device dst; the first call for a pair decides, and says so in one log line.

    fresh: tries the pair again, whatever is known. Where the devices' own waits do not work, the runtime is told to let
    the host wait from now on. Raises NoPeerAccess, naming the pair, where direct copies are asked for and there is no
    peer access.
    """
    mode = host_stage.mode(src, dst)
    known = topology(runtime)
    pair = known.get((src, dst, mode))
    if pair is None or fresh:
        pair = _decide(runtime, src, dst, mode, fresh)
        known[src, dst, mode] = pair
        log.info(
            "copies from device %d to device %d: %s; host_stage %s (%s), peer access %s, %s: %s%s",
            src, dst, pair.path, host_stage, mode, pair.peer, pair.verdict, pair.why, _fastest(pair.speeds),
        )  # fmt: skip
        _heed_waits(runtime, pair)
    return pair


def _decide(runtime: Runtime, src: int, dst: int, mode: Mode, fresh: bool) -> Pair:
    if src == dst:
        return Pair(src, dst, mode, "yes", "not tried", "direct", "one device copies within itself")
    peer, reason = peer_access(runtime, src, dst, enable=mode != "staged")
    if mode == "direct" and peer != "yes":
        raise NoPeerAccess(
            f"direct copies from device {src} to device {dst} are asked for (host_stage 0), but there is no peer "
            f"access: {reason}; allowed: auto or 1 (staged)",
            status="NO_PEER",
            operation="choose",
        )
    # HIP drivers have been seen to hang or to lose the device on peer access: there it is tried on request only.
    try_direct = mode == "auto" and peer == "yes" and (runtime.backend != "hip" or fresh)
    found = _find_out(runtime, src, dst, direct=try_direct, measure=mode == "auto" or fresh, fresh=fresh)
    pair = Pair(
        src, dst, mode, peer, found.verdict, "staged", reason, waits=found.waits, speeds=found.speeds, leg=found.leg
    )
    if mode == "direct":
        return replace(pair, path="direct", why="asked for")
    if mode == "staged":
        return replace(pair, why="asked for")
    if peer != "yes":
        return pair
    if found.verdict == "not tried":
        return replace(pair, why="peer access on HIP is used once it has been verified (pyxdev devices --measure)")
    if found.verdict != "verified":
        return replace(pair, why=found.why)
    path, direct_from, direct_to = crossover(found.speeds)
    why = f"{found.why}, {_compare(path, direct_from, direct_to)}" if found.speeds else found.why
    return replace(pair, path=path, why=why, direct_from=direct_from, direct_to=direct_to)


def peer_access(runtime: Runtime, src: int, dst: int, *, enable: bool = True) -> tuple[Peer, str]:
    """Whether src can write to the memory of dst, and if not, why. Enables the access where it is reported."""
    if not runtime.peer_capable(src, dst):
        return "no", "the driver reports no peer access"
    if not enable:
        return "yes", ""
    try:
        enabled = runtime.peer_enable(src, dst)
    except DriverError as error:
        return "not enabled", f"enabling peer access failed: {error}"
    return ("yes", "") if enabled else ("not enabled", "the driver's limit of peers is reached")


# ---- finding out -----------------------------------------------------------------------------------------------------


def _find_out(runtime: Runtime, src: int, dst: int, *, direct: bool, measure: bool, fresh: bool) -> Found:
    """What is known of the pair from before, and the rest by trying."""
    key, file, name = verdicts.machine(runtime), verdicts.path(), f"{src}>{dst}"
    entry = None if fresh else verdicts.load(key, file).get(name)
    known = Found() if entry is None else _from_entry(entry)
    found = known
    if direct and found.verdict == "not tried":
        verdict, why = probe.verify(runtime, src, dst)
        found = replace(found, verdict=verdict, why=why, speeds=())
    if found.waits == "not tried" and not runtime.force_sync:
        found = replace(found, waits=_or(probe.waits, "inconclusive", runtime, src, dst))
    if not found.leg:
        found = replace(found, leg=_or(probe.leg, 0.0, runtime, src, dst))
    if measure and not found.speeds:
        fast = found.verdict == "verified"
        found = replace(found, speeds=_or(probe.speeds, (), runtime, src, dst, direct=fast))
    if found != known:
        verdicts.store(key, file, name, asdict(found))
    return found


def condemn(runtime: Runtime, src: int, dst: int, why: str) -> None:
    """Direct copies from src to dst have been seen to go wrong: from now on, auto stages them on this machine."""
    key, file, name = verdicts.machine(runtime), verdicts.path(), f"{src}>{dst}"
    entry = verdicts.load(key, file).get(name)
    found = Found() if entry is None else _from_entry(entry)
    verdicts.store(key, file, name, asdict(replace(found, verdict="wrong data", why=why, speeds=())))


def _or(ask: Any, unknown: Any, runtime: Runtime, src: int, dst: int, **options: Any) -> Any:
    """What the probe says; `unknown` where it cannot end: a pair can be used without. A device fault is raised."""
    try:
        return ask(runtime, src, dst, **options)
    except DeviceFault:
        raise
    except Error as error:
        log.info("devices %d and %d: %s could not be tried: %s", src, dst, ask.__name__, error)
        return unknown


def _from_entry(entry: verdicts.Entry) -> Found:
    try:
        speeds = tuple(Speed(int(s["nbytes"]), float(s["direct"]), float(s["staged"])) for s in entry["speeds"])
        return Found(entry["verdict"], str(entry["why"]), entry["waits"], speeds, float(entry["leg"]))
    except (KeyError, TypeError, ValueError) as error:
        log.info("an entry of %s is not used: %r", verdicts.path(), error)
        return Found()


def _heed_waits(runtime: Runtime, pair: Pair) -> None:
    if pair.waits == "do not work" and not runtime.force_sync:
        runtime.force_sync = True
        log.warning(
            "streams of device %d do not wait for events of device %d: the host waits between devices from now on, "
            "which costs speed (PYXDEV_FORCE_XDEV_SYNC)",
            pair.dst, pair.src,
        )  # fmt: skip
    elif pair.waits != "not tried":
        log.info("waits of device %d for device %d: %s", pair.dst, pair.src, pair.waits)


# ---- choosing --------------------------------------------------------------------------------------------------------


def crossover(speeds: Sequence[Speed]) -> tuple[Path, int, int]:
    """(path, direct_from, direct_to): direct where it is the faster one, over one range of sizes.

    Between two measured sizes the change is put at their geometric mean. Without measurements: direct.
    """
    wins = [speed.direct >= WORTH * speed.staged for speed in speeds]
    if all(wins):
        return "direct", 0, 0
    if not any(wins):
        return "staged", 0, 0
    first = wins.index(True)
    last = first
    while last + 1 < len(wins) and wins[last + 1]:
        last += 1
    edges = [math.isqrt(low.nbytes * high.nbytes) for low, high in pairwise(speeds)]
    direct_from = edges[first - 1] if first else 0
    direct_to = edges[last] if last + 1 < len(wins) else 0
    return "by_size", direct_from, direct_to


def rate(pair: Pair, nbytes: int) -> float:
    """GB/s of the pair's path as measured for the size nearest to nbytes; 0.0: not measured."""
    direct = pair.path == "direct" or (
        pair.path == "by_size" and pair.direct_from <= nbytes and (not pair.direct_to or nbytes < pair.direct_to)
    )
    found = [(speed.nbytes, speed.direct if direct else speed.staged) for speed in pair.speeds]
    found = [(size, gb_s) for size, gb_s in found if gb_s]
    if found:
        return min(found, key=lambda one: abs(math.log(one[0] / max(1, nbytes))))[1]
    return 0.0 if direct else pair.leg / 1e9


def _fastest(speeds: Sequence[Speed]) -> str:
    if not speeds:
        return ""
    last = speeds[-1]
    direct = f"direct {last.direct:.3g}, " if last.direct else ""
    return f" ({direct}staged {last.staged:.3g} GB/s for {last.nbytes} bytes)"


def _compare(path: Path, direct_from: int, direct_to: int) -> str:
    if path == "direct":
        return "faster than staged ones"
    if path == "staged":
        return "slower than staged ones"
    begin = f" from {direct_from}" if direct_from else ""
    end = f" below {direct_to}" if direct_to else ""
    return f"faster than staged ones{begin}{end} bytes"
