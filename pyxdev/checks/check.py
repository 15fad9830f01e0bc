"""What a check is and what it answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pyxdev.errors import DeviceFault, Error

if TYPE_CHECKING:
    from pyxdev._native import Runtime
    from pyxdev.checks.rig import Rig

Pair = tuple[int, int]


SEE_ORDER = "see event-order: if it fails too, the waits of the driver do not wait"


class Level(IntEnum):
    """How much is checked; a check runs at its own level and above."""

    QUICK = 0
    NORMAL = 1
    FULL = 2


class Verdict(StrEnum):
    PASS = "PASS"
    FAIL = "FAIL"  # wrong data, wrong order, or another promise of the check broken
    WAIVED = "WAIVED"  # cannot be asked of this machine; the reason says why
    INCONCLUSIVE = "INCONCLUSIVE"  # no answer: hung, crashed, too slow to trust, or a control that showed nothing


@dataclass(frozen=True)
class Result:
    """One verdict. pair: "0>1" (from, to), "0" (one device) or "" (all). figures: name -> number or text."""

    key: str
    verdict: Verdict
    pair: str = ""
    reason: str = ""
    hint: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return cls(**{**values, "verdict": Verdict(values["verdict"])})


class Hung(Error):
    """Something did not happen within the rig's patience; the message says what."""


class Unclear(Error):
    """What was seen allows no verdict; the message says why."""


class Check:
    """One question to the machine. Subclasses set the class attributes and write run().

    key: what -k matches. description, proves, requires: what it does, what a PASS means, and what the machine must have
    to be asked, for --list; needs() looks whether it has.
    """

    key: ClassVar[str]
    description: ClassVar[str]
    proves: ClassVar[str]
    requires: ClassVar[str] = "one device"
    condemns: ClassVar[bool] = False  # a FAIL whose figures say path "direct" means that the pair must be staged
    level: ClassVar[Level] = Level.QUICK
    deadline: ClassVar[float] = 60.0  # seconds; longer at level FULL and for many devices

    def needs(self, runtime: Runtime) -> str | None:
        """Why this machine cannot be asked, or None."""
        return None

    def run(self, rig: Rig) -> Iterator[Result]:
        raise NotImplementedError

    def result(
        self, verdict: Verdict, pair: Pair | int | None = None, reason: str = "", hint: str = "", **figures: Any
    ) -> Result:
        name = "" if pair is None else str(pair) if isinstance(pair, int) else f"{pair[0]}>{pair[1]}"
        return Result(self.key, verdict, name, reason, hint, figures)

    def too_few(self) -> Result:
        """There are more devices, but one alone is asked."""
        return self.result(Verdict.WAIVED, None, "only one device is asked")


class PairCheck(Check):
    """A check that asks every ordered pair of different devices in turn.

    alone: where there is one device only, it is asked as both ends.
    """

    requires = "two devices"
    alone: ClassVar[bool] = False

    def needs(self, runtime: Runtime) -> str | None:
        return None if runtime.device_count > 1 or self.alone else "there is only one device"

    def pairs(self, rig: Rig) -> list[Pair]:
        if self.alone and len(rig.devices) == 1:
            return [(rig.devices[0], rig.devices[0])]
        return rig.pairs

    def run(self, rig: Rig) -> Iterator[Result]:
        pairs = self.pairs(rig)
        if not pairs:
            yield self.too_few()
        for pair in pairs:
            try:
                yield from self.run_pair(rig, *pair)
            except Error as failure:
                yield unfinished(self, rig, failure, pair)
                if rig.broken:
                    return

    def run_pair(self, rig: Rig, src: int, dst: int) -> Iterator[Result]:
        raise NotImplementedError


def unfinished(check: Check, rig: Rig, failure: Error, pair: Pair | None = None) -> Result:
    """The result of a check that an error ended; marks the rig as broken if nothing more can be asked of it."""
    if isinstance(failure, Hung):
        rig.broken = True
        reason, hint = f"hung: {failure}", "look for driver messages (dmesg); the device may need a reset"
    elif isinstance(failure, DeviceFault):
        rig.broken = True
        reason, hint = f"the device failed: {failure}", "look for driver messages (dmesg)"
    elif isinstance(failure, Unclear):
        reason, hint = str(failure), ""
    else:
        reason, hint = f"{type(failure).__name__}: {failure}", ""
    return check.result(Verdict.INCONCLUSIVE, pair, reason, hint)
