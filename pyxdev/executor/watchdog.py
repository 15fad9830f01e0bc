"""Where the oldest microbatch is when nothing moves: the stage, and the event that is waited for."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from pyxdev._native import Throttle
from pyxdev.errors import Error
from pyxdev.executor.stages import BoundStage

log = logging.getLogger("pyxdev")

GLANCE = 0.25  # seconds after which a blocked thread looks whether something moves, and whether the executor was closed


class Watchdog:
    """Whoever waits or asks looks, a few times a second. It has no thread: where nobody waits, nobody is held up.

    indices: the numbers of the microbatches in flight, by turn. admitted, queued: how many turns have begun, and how
    many of them are on all streams.
    """

    def __init__(self, stages: Sequence[BoundStage], throttle: Throttle, seconds: float) -> None:
        self.indices = [0] * throttle.limit
        self.admitted = self.queued = 0
        self._stages = stages
        self._throttle = throttle
        self._seconds = seconds
        self._place: tuple[int, int, str] | None = None
        self._since = self._next = 0.0
        self._told = False

    def look(self, now: float) -> None:
        """Logs, once for each stall, where the oldest microbatch is if it has been there for `seconds`."""
        if now < self._next:
            return
        self._next = now + GLANCE
        place = self._find()
        if place != self._place:
            self._place, self._since, self._told = place, now, False
        elif place is not None and not self._told and now - self._since >= self._seconds:
            self._told = True
            log.warning("%s; no progress for %.3g s", self._tell(place), now - self._since)

    def where(self) -> str:
        """The same in words, now; empty if nothing is on its way."""
        try:
            place = self._find()
        except Error as error:
            return f"where it is cannot be known: {error}"
        return self._tell(place) if place is not None else ""

    def _find(self) -> tuple[int, int, str] | None:
        """The turn of the oldest microbatch in flight, the first stage that is not through with it (-1: it has not been
        queued yet), and the event of that stage which is still to come."""
        turn = self.admitted - self._throttle.in_flight
        if turn >= self.queued:
            return None if turn == self.admitted else (turn, -1, "")
        for stage in self._stages[:-1]:
            if not stage.ends[turn % len(stage.ends)].done():
                break
        else:
            stage = self._stages[-1]
        arrived = stage.slots.arrivals[turn % len(stage.slots.arrivals)].done()
        return turn, stage.index, "free" if arrived else "arrived"

    def _tell(self, place: tuple[int, int, str]) -> str:
        turn, index, event = place
        microbatch = f"microbatch {self.indices[turn % len(self.indices)]}"
        if index < 0:
            return f"{microbatch} is still being submitted: a stage's function has not returned"
        stage = self._stages[index]
        named = f"stage {index} ({stage.name}, device {stage.device})"
        if event == "free":
            return f"{microbatch} is at work in {named}; waited for: `free`, the end of what the stage has queued"
        hops = [f"{source}->{index}" for source in stage.inputs]
        return f"{microbatch} waits in {named} for `arrived` of " + (
            f"the hop {' and '.join(hops)}" if hops else "its input"
        )
