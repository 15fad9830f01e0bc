"""Every check can fail: a machine with the flaw it is for gets the right verdict on the right pair, and only there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checked import ask, by_pair, flaw, machine

from pyxdev._native import FlawedDriver
from pyxdev.backends import sim
from pyxdev.checks import CHECKS, Result, Verdict
from pyxdev.checks.data import Large
from pyxdev.checks.rig import Rig
from pyxdev.checks.timing import Bandwidth
from pyxdev.errors import InvalidArgument, SettingError

CHECK = {check.key: check for check in CHECKS}
KIB, MIB = 1 << 10, 1 << 20

# (check, flaw, pairs that fail, words of the reason)
FAILURES: list[tuple[str, dict[str, Any], set[str], str]] = [
    ("first-copy", flaw("drop", 0, 1), {"0>1"}, "never written"),
    ("first-copy", flaw("zero", -1, 0), {"1>0"}, "staged: .*zeros"),
    ("device-data", flaw("drop", 0, -1), {"0"}, "as the host sees it"),
    ("device-data", flaw("zero", -1, 1), {"1"}, "down and up again: .*zeros"),
    ("direct-data", flaw("drop", 0, 1), {"0>1"}, "never written"),
    ("direct-data", flaw("zero", 1, 0), {"1>0"}, "zeros"),
    ("direct-data", flaw("late", 0, 1, at=4 * MIB, after=20), {"0>1"}, "zeros|data of iteration"),
    ("direct-data", flaw("shift", 0, 1, at=1000), {"0>1"}, "data of offset -1000"),
    ("direct-data", flaw("cut", 0, 1, at=MIB), {"0>1"}, "1048576 bytes from .*never written"),
    ("direct-data", flaw("byte", 0, 1, at=70000), {"0>1"}, "4 wrong bytes from 70000"),
    ("direct-data", flaw("overrun", 0, 1), {"0>1"}, "guard"),
    ("staged-data", flaw("drop", -1, 1), {"0>1"}, "never written"),
    ("staged-data", flaw("shift", 0, -1, at=60 * KIB), {"0>1"}, "data of offset -61440"),
    ("staged-data", flaw("no-wait", 1, 0), {"0>1", "1>0"}, "ring of .*wrong byte"),
    ("paths-agree", flaw("drop", 0, 1), {"0>1"}, "direct: .*; right: host, staged"),
    ("paths-agree", flaw("zero", -1, 1), {"0>1"}, "host: .*staged: .*; right: direct"),
    ("pitched-data", flaw("zero", -1, 1), {"0>1"}, "staged, .*row"),
    ("many-small", flaw("late", 0, 1, at=KIB), {"0>1"}, "copies of 1 bytes are wrong"),
    ("many-small", flaw("no-wait", 0, 1), {"0>1"}, "data of iteration|zeros"),
    ("both-ways", flaw("drop", 1, 0), {"0>1"}, "1>0 beside others"),
    ("event-rules", flaw("early", 1, 1), {"0", "1"}, "twice|came early"),
    ("event-order", flaw("no-wait", 0, 1), {"0>1"}, "did not wait .*data of iteration"),
    ("event-order", flaw("no-wait", 1, 1), {"1>1"}, "did not wait"),
    ("event-order", flaw("no-wait", 1, 0, after=5), {"1>0"}, "round 6 of"),
    ("event-order", flaw("early", 0, 0), {"1>0", "0>0"}, "still held"),
    ("event-order", flaw("drop", 0, -1), {"0>1", "0>0", "1>0"}, "the host waiting between the legs"),
    ("event-chain", flaw("no-wait", 0, 1), {""}, "chain: device 1 got|fan-in"),
    ("link-waits", flaw("no-wait", 0, 0), {"0>1", "1>0"}, "source"),
    ("link-waits", flaw("no-wait", 1, 1), {"0>1", "1>0"}, "destination|source"),
    ("link-waits", flaw("no-wait", 0, 1), {"0>1", "1>0"}, "staged: |direct: "),
    ("slot-reuse", flaw("no-wait", 0, 1), {"0>1", "1>0"}, "microbatch 0"),
    ("throttle-load", flaw("drop", 0, 1), {"0>1"}, "microbatch 0"),
    ("throttle-load", flaw("no-wait", 0, 1), {"0>1"}, "microbatch"),
    ("memory-pressure", flaw("zero", -1, 1), {"0", "1"}, "little memory left: .*zeros"),
    ("bandwidth", flaw("drop", 0, 1), {"0>1"}, "never written"),
    ("host-calls", flaw("blocking-copy", 0, 1), {"0>1"}, "direct copy"),
    ("host-calls", flaw("blocking-copy", 0, -1), {"0>1"}, "download, staged copy"),
    ("host-calls", flaw("blocking-wait", 0, 1), {"0>1", "1>0"}, "wait, "),
]

# (check, flaw, pairs without an answer, words of the reason)
NO_ANSWER: list[tuple[str, dict[str, Any], set[str], str]] = [
    ("event-order", flaw("serial", 0, 0), {"0>1", "0>0"}, "leaving the wait out was not seen"),
    ("slot-reuse", flaw("serial", 0, 0), {"1>0"}, "leaving out the wait for a free slot was not seen"),
    ("link-waits", flaw("blocking-copy", 0, 1), {"0>1"}, "the host was held up"),
    ("direct-data", flaw("lost", 0, 1, after=9), {"0>1"}, "the device failed"),
    ("many-small", flaw("lost", 0, -1, after=30), {"0>1"}, "the device failed"),
    ("event-order", flaw("hang", 0, 0, after=9), {"0>1"}, "hung: waited 10 s for "),
    ("slot-reuse", flaw("hang", 1, 1, after=30), {"0>1"}, "hung: "),
    ("throttle-load", flaw("hang", 1, 1, after=5), {"0>1"}, "hung: microbatch . was not admitted|hung: waited"),
    ("event-chain", flaw("hang", 1, 1, after=3), {""}, "hung: "),
]


def test_kinds_of_flaws() -> None:
    """The names of a machine file are those of native/driver.h."""
    header = (Path(__file__).parents[2] / "native" / "driver.h").read_text()
    assert re.findall(r'X\("([a-z-]+)", [A-Z_]+,', header) == [*sim._COPY_FLAWS, *sim._OTHER_FLAWS]
    with pytest.raises(InvalidArgument, match="'tired'"):
        FlawedDriver(sim.driver(), [("tired", 0, 1, 0, 0)])
    with pytest.raises(SettingError, match="tired"):
        sim.driver(machine(flaw("tired")))


def describe(case: tuple[str, dict[str, Any], set[str], str]) -> str:
    key, wrong, _, _ = case
    return f"{key} {' '.join(str(value) for value in wrong.values())}"


@pytest.mark.parametrize("case", FAILURES, ids=describe)
def test_fails_where_the_flaw_is(case: tuple[str, dict[str, Any], set[str], str]) -> None:
    key, wrong, pairs, words = case
    results = ask(CHECK[key], wrong)
    failed = [result for result in results if result.verdict == Verdict.FAIL]
    assert {result.pair for result in failed} == pairs, results
    for result in failed:
        assert result.reason
    assert_words(failed, words)


@pytest.mark.parametrize("case", NO_ANSWER, ids=describe)
def test_no_answer_where_none_can_be_had(case: tuple[str, dict[str, Any], set[str], str]) -> None:
    key, wrong, pairs, words = case
    results = ask(CHECK[key], wrong)
    assert by_pair(results, Verdict.FAIL) == set(), results
    unclear = [result for result in results if result.verdict == Verdict.INCONCLUSIVE]
    assert {result.pair for result in unclear} == pairs, results
    assert_words(unclear, words)


def assert_words(results: list[Result], words: str) -> None:
    assert any(re.search(words, result.reason) for result in results), results


@pytest.mark.parametrize("wrong", ["drop", "zero", "shift", "late"])
def test_a_pair_that_is_wrong_one_way_is_right_the_other(wrong: str) -> None:
    """Field case 2: a probe must name the path and the direction."""
    results = ask(CHECK["direct-data"], flaw(wrong, 0, 1, at=64 * KIB))
    assert by_pair(results, Verdict.FAIL) == {"0>1"}
    assert by_pair(results, Verdict.PASS) == {"1>0"}
    hint = next(result.hint for result in results if result.pair == "0>1")
    assert "0>1=1" in hint
    assert by_pair(ask(CHECK["staged-data"], flaw(wrong, 0, 1, at=64 * KIB)), Verdict.PASS) == {"0>1", "1>0"}


class TestPeers:
    def test_not_reported(self) -> None:
        results = ask(CHECK["peer-access"], peer={"groups": "none"})
        assert by_pair(results, Verdict.WAIVED) == {"0>1", "1>0"}
        assert all("not reported" in result.reason for result in results)

    def test_reported_but_not_enabled(self) -> None:
        results = ask(CHECK["peer-access"], flaw("not-enabled", 0, 1))
        assert by_pair(results, Verdict.WAIVED) == {"0>1"}
        assert "could not be enabled" in results[0].reason
        assert results[0].figures == {"reported": True, "enabled": False, "back": True}
        assert by_pair(ask(CHECK["direct-data"], flaw("not-enabled", 0, 1)), Verdict.WAIVED) == {"0>1"}

    def test_one_way(self) -> None:
        """Field case 3."""
        results = ask(CHECK["peer-access"], peer={"groups": "none", "one_way": [[1, 0]]})
        by_name = {result.pair: result for result in results}
        assert by_name["0>1"].verdict == Verdict.WAIVED
        assert "although device 1 can reach device 0" in by_name["0>1"].reason
        assert by_name["1>0"].verdict == Verdict.PASS
        assert "one way only" in by_name["1>0"].reason

    def test_more_than_the_driver_takes(self) -> None:
        """Field case 6: ten devices, eight peers each."""
        results = ask(CHECK["peer-access"], devices=10, peer={"limit": 8})
        waived = [result for result in results if result.verdict == Verdict.WAIVED]
        assert len(results) == 90
        assert len(waived) == 10
        assert all("limit of peers" in result.reason for result in waived)

    def test_a_driver_that_takes_its_own_way(self) -> None:
        """Field case 4: copies between devices without peer access succeed there; they are never used."""
        options = {"peer": {"groups": "none", "unpeered": "blocks"}}
        assert by_pair(ask(CHECK["peer-access"], **options), Verdict.WAIVED) == {"0>1", "1>0"}
        assert by_pair(ask(CHECK["direct-data"], **options), Verdict.WAIVED) == {"0>1", "1>0"}
        assert by_pair(ask(CHECK["staged-data"], **options), Verdict.PASS) == {"0>1", "1>0"}


class TestSpeed:
    def test_a_slow_link_to_the_host(self) -> None:
        slow = {"devices": [1], "to_device_gb_s": 6, "to_host_gb_s": 25}
        results = ask(CHECK["legs"], devices=3, other=[slow])
        assert by_pair(results, Verdict.INCONCLUSIVE) == {"1"}
        assert "uploads run at 5.9" in next(result.reason for result in results if result.pair == "1")

    def test_direct_slower_than_staged_passes_with_a_remark(self) -> None:
        results = ask(CHECK["bandwidth"], peer={"gb_s": 3})
        assert by_pair(results, Verdict.PASS) == {"0>1", "1>0"}
        assert all("slower than staged" in result.reason for result in results)

    def test_a_pair_slower_than_the_others(self) -> None:
        class Measured(Bandwidth):
            def run_pair(self, rig: Rig, src: int, dst: int) -> Iterator[Result]:
                yield self.result(Verdict.PASS, (src, dst), direct_4MiB_GBps=40.0 if (src, dst) == (2, 0) else 90.0)

        results = ask(Measured(), devices=3)
        assert by_pair(results, Verdict.INCONCLUSIVE) == {"2>0"}
        assert len(by_pair(results, Verdict.PASS)) == 5


class TestLarge:
    class Small(Large):
        BOUNDARIES = (MIB, 2 * MIB)

    def test_sizes_cut_to_fewer_bits(self) -> None:
        results = ask(self.Small(), flaw("cut", 0, 1, at=2 * MIB))
        failed = [result for result in results if result.verdict == Verdict.FAIL]
        assert [(result.pair, result.figures["boundary"]) for result in failed] == [("0>1", 2 * MIB)]
        assert "2097152 bytes" in failed[0].reason

    def test_healthy(self) -> None:
        assert by_pair(ask(self.Small()), Verdict.PASS) == {"0>1", "1>0"}

    def test_no_room(self) -> None:
        results = ask(self.Small(), devices=2, other=[{"devices": [1], "memory_gib": 0.002}])
        assert by_pair(results, Verdict.WAIVED) == {"0>1", "1>0"}
        assert all("device 1 has" in result.reason for result in results if result.verdict == Verdict.WAIVED)
