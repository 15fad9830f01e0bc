"""A validator that cries wolf is turned off: on healthy machines every check passes, or is waived with a reason."""

from __future__ import annotations

from typing import Any

import pytest
from checked import ask, by_pair, verdicts

from pyxdev.checks import CHECKS, Check, Level, Verdict

MACHINES: dict[str, dict[str, Any]] = {
    "two with peers": {"devices": 2},
    "two without": {"devices": 2, "peer": {"groups": "none"}},
    "islands": {"devices": 4, "peer": {"groups": [[0, 1], [2, 3]]}},
    "jittery": {"devices": 3, "seed": 5, "jitter": 0.2},
}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.key)
def test_quiet_on_a_healthy_machine(check: Check, machine: str) -> None:
    results = ask(check, **MACHINES[machine])
    assert results
    assert verdicts(results) <= {Verdict.PASS, Verdict.WAIVED}, results
    assert all(result.reason for result in results if result.verdict == Verdict.WAIVED)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.key)
@pytest.mark.parametrize("asked", [None, (1,)], ids=["the only one", "one of two"])
def test_one_device_is_enough_or_the_reason_is_given(check: Check, asked: tuple[int, ...] | None) -> None:
    results = ask(check, devices=2 if asked else 1, asked=asked)
    assert results
    assert verdicts(results) <= {Verdict.PASS, Verdict.WAIVED}, results
    assert all(result.reason for result in results if result.verdict == Verdict.WAIVED)


@pytest.mark.parametrize(
    "check", [check for check in CHECKS if check.level == Level.QUICK], ids=lambda check: check.key
)
def test_pairs_without_peers_are_staged_or_waived(check: Check) -> None:
    """No check takes the driver's own way for a direct one."""
    results = ask(check, peer={"groups": "none"})
    for result in results:
        assert result.figures.get("path") != "direct"
        assert "direct copies" not in result.reason


def test_the_normal_level_is_quiet_too() -> None:
    """Jitter and a little less than all, so that it stays quick."""
    for check in CHECKS:
        if check.key not in ("direct-data", "staged-data"):
            results = ask(check, level=Level.NORMAL, seed=3)
            assert verdicts(results) <= {Verdict.PASS, Verdict.WAIVED}, results


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.key)
def test_no_check_races_with_itself(check: Check) -> None:
    """The ordering checker finds nothing but the waits that controls leave out."""
    results = ask(check, watch=True)
    assert verdicts(results) <= {Verdict.PASS, Verdict.WAIVED}, results


def test_every_check_says_what_it_is() -> None:
    keys = [check.key for check in CHECKS]
    assert len(set(keys)) == len(keys)
    for check in CHECKS:
        assert check.description and check.proves and check.requires
        assert check.deadline > 0


def test_every_ordered_pair_is_asked() -> None:
    direct = next(check for check in CHECKS if check.key == "direct-data")
    wanted = {f"{src}>{dst}" for src in range(3) for dst in range(3) if src != dst}
    assert by_pair(ask(direct, devices=3), Verdict.PASS) == wanted
