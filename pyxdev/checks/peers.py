"""What the driver says about peer access, for each ordered pair."""

from __future__ import annotations

from collections.abc import Iterator

from pyxdev.checks.check import PairCheck, Result, Verdict
from pyxdev.checks.rig import Rig
from pyxdev.errors import NoPeerAccess

STAGED = "copies of this pair are staged"


class PeerAccess(PairCheck):
    key = "peer-access"
    description = "peer access as the driver reports it and as it can be enabled, each direction by itself"
    proves = "where a direct path is offered it can be opened; where it is not, asking for it is an error"

    def run_pair(self, rig: Rig, src: int, dst: int) -> Iterator[Result]:
        pair, back = (src, dst), rig.runtime.peer_capable(dst, src)
        reason = rig.no_direct(src, dst)
        if not reason:
            rig.runtime.peer_enable(src, dst)  # once more: "already enabled" is fine
            with rig.scope():
                rig.link(src, dst, path="direct")
            one_way = "" if back else f"one way only: device {dst} cannot reach device {src}"
            yield self.result(Verdict.PASS, pair, one_way, reported=True, enabled=True, back=back)
            return
        reported = rig.runtime.peer_capable(src, dst)
        figures = {"reported": reported, "enabled": False, "back": back}
        if reported and "error" in reason:
            yield self.result(Verdict.FAIL, pair, reason, STAGED, **figures)
            return
        if back:
            reason += f", although device {dst} can reach device {src}"
        try:
            rig.runtime.link(src, dst, path="direct").close()
        except NoPeerAccess:
            yield self.result(Verdict.WAIVED, pair, reason, STAGED, **figures)
        else:
            yield self.result(
                Verdict.FAIL, pair, f"{reason}, and a direct link could be opened all the same: the driver's own way"
            )
