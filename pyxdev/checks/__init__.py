"""Hardware validation: does this machine copy right, wait right, and as fast as it should? See docs/copies.md.

CHECKS holds every check, in the order in which they run: first what a fresh process does first, then what later checks
build on.
"""

from __future__ import annotations

from pyxdev.checks.check import Check, Level, Result, Verdict
from pyxdev.checks.data import (
    DeviceData,
    DirectData,
    FirstCopy,
    Large,
    ManySmall,
    PathsAgree,
    PeerKernels,
    Pitched,
    StagedData,
    Together,
)
from pyxdev.checks.order import EventChain, EventOrder, EventRules
from pyxdev.checks.peers import PeerAccess
from pyxdev.checks.pressure import MemoryPressure, ThrottleLoad
from pyxdev.checks.timing import Bandwidth, HostCalls, Latency, Legs
from pyxdev.checks.waits import LinkWaits, SlotReuse

__all__ = ["CHECKS", "Check", "Level", "Result", "Verdict", "select"]

CHECKS: tuple[Check, ...] = (
    FirstCopy(),
    DeviceData(),
    PeerAccess(),
    EventRules(),
    EventOrder(),
    EventChain(),
    DirectData(),
    StagedData(),
    PathsAgree(),
    Pitched(),
    ManySmall(),
    Together(),
    PeerKernels(),
    LinkWaits(),
    SlotReuse(),
    HostCalls(),
    Legs(),
    Latency(),
    Bandwidth(),
    ThrottleLoad(),
    MemoryPressure(),
    Large(),
)


def select(names: list[str], level: Level, checks: tuple[Check, ...] = CHECKS) -> list[Check]:
    """The checks of this level whose key contains one of the names (any level then), or all without names."""
    if names:
        return [check for check in checks if any(name in check.key for name in names)]
    return [check for check in checks if check.level <= level]
