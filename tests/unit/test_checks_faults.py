"""Every check can fail: a machine with the fault it is for gets the right verdict on the right pair, and only there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from checked import ask, by_pair, fault, machine

from pyxdev._native import Runtime, Stream
from pyxdev.backends import sim
from pyxdev.checks import CHECKS, Result, Verdict, pattern
from pyxdev.checks.child import run_check
from pyxdev.checks.data import DataCheck, Large, PeerKernels
from pyxdev.checks.kernels import REPORT_BYTES, HostKernels, memory
from pyxdev.checks.rig import Rig
from pyxdev.checks.timing import Bandwidth

CHECK = {check.key: check for check in CHECKS}
KIB, MIB = 1 << 10, 1 << 20

# (check, fault, pairs that fail, words of the reason)
FAILURES: list[tuple[str, dict[str, Any], set[str], str]] = [
    ("first-copy", fault("drop", 0, 1), {"0>1"}, "never written"),
    ("first-copy", fault("zero", "host", 0), {"1>0"}, "staged: .*zeros"),
    ("device-data", fault("drop", 0, "host"), {"0"}, "as the host sees it"),
    ("device-data", fault("zero", "host", 1), {"1"}, "down and up again: .*zeros"),
    ("direct-data", fault("drop", 0, 1), {"0>1"}, "never written"),
    ("direct-data", fault("mirror", 0, 1), {"0>1"}, "never written"),
    ("direct-data", fault("zero", 1, 0), {"1>0"}, "zeros"),
    ("direct-data", fault("stale", 0, 1, first=20), {"0>1"}, "never written|data of iteration"),
    ("direct-data", fault("alias", 0, 1, value=1000), {"0>1"}, "data of offset -1000"),
    ("direct-data", fault("swap", 0, 1, value=32 * KIB), {"0>1"}, "data of offset .32768"),
    ("direct-data", fault("truncate", 0, 1, value=MIB), {"0>1"}, "1048576 bytes from .*never written"),
    ("direct-data", fault("flip", 0, 1, value=70000), {"0>1"}, "1 wrong byte from 70000"),
    ("direct-data", fault("overrun", 0, 1), {"0>1"}, "guard"),
    ("staged-data", fault("drop", "host", 1), {"0>1"}, "never written"),
    ("staged-data", fault("alias", "host", 1, value=60 * KIB), {"0>1"}, "data of offset -61440"),
    ("staged-data", fault("ignore_wait", 1, 0), {"0>1", "1>0"}, "ring of .*wrong byte"),
    ("paths-agree", fault("drop", 0, 1), {"0>1"}, "direct: .*; right: host, staged"),
    ("paths-agree", fault("zero", "host", 1), {"0>1"}, "host: .*staged: .*; right: direct"),
    ("pitched-data", fault("zero", "host", 1), {"0>1"}, "staged, .*row"),
    ("many-small", fault("stale", 0, 1), {"0>1"}, "copies of 1 bytes are wrong"),
    ("many-small", fault("ignore_wait", 0, 1), {"0>1"}, "data of iteration|zeros"),
    ("both-ways", fault("drop", 1, 0), {"1>0"}, "direct, beside others: .*never written"),
    ("event-rules", fault("early_event", 1), {"0", "1"}, "twice|came early"),
    ("event-order", fault("ignore_wait", 0, 1), {"0>1"}, "did not wait .*data of iteration"),
    ("event-order", fault("ignore_wait", 1, 0, first=6), {"1>0"}, "round 6 of"),
    ("event-order", fault("early_event", 0), {"0>1", "0>0", "1>0"}, "still held|data of iteration"),
    ("event-order", fault("drop", 0, "host"), {"0>1", "0>0", "1>0"}, "the host waiting between the legs"),
    ("event-chain", fault("ignore_wait", 0, 1), {""}, "chain: device 1 got|fan-in"),
    ("link-waits", fault("ignore_wait", 1, 0), {"0>1", "1>0"}, "source|destination"),
    ("link-waits", fault("ignore_wait", 0, 1), {"0>1", "1>0"}, "staged: |direct: "),
    ("slot-reuse", fault("ignore_wait", 0, 1), {"0>1", "1>0"}, "microbatch 0"),
    ("throttle-load", fault("drop", 0, 1), {"0>1"}, "microbatch 0"),
    ("throttle-load", fault("ignore_wait", 0, 1), {"0>1"}, "microbatch"),
    ("memory-pressure", fault("zero", "host", 1), {"0", "1"}, "little memory left: .*zeros"),
    ("bandwidth", fault("drop", 0, 1), {"0>1"}, "never written"),
    ("host-calls", fault("block_copy", 0, 1), {"0>1"}, "direct copy"),
    ("host-calls", fault("block_copy", 0, "host"), {"0>1"}, "download, staged copy"),
    ("host-calls", fault("block_wait", 0, 1), {"0>1", "1>0"}, "wait, "),
]

# (check, fault, pairs without an answer, words of the reason)
NO_ANSWER: list[tuple[str, dict[str, Any], set[str], str]] = [
    ("event-order", fault("slow_kernel", 0, value=0), {"0>1", "0>0"}, "leaving the wait out was not seen"),
    ("slot-reuse", fault("slow_kernel", 1, value=0), {"0>1"}, "leaving out the wait for a free slot was not seen"),
    ("link-waits", fault("block_copy", 0, 1), {"0>1"}, "the host was held up"),
    ("direct-data", fault("lose_device", 0, first=90), {"0>1"}, "the device failed"),
    ("many-small", fault("lose_device", 1, first=90), {"0>1"}, "the device failed"),
    ("event-order", fault("hang_kernel", 0, first=9), {"0>1"}, "hung: waited 10 s for "),
    ("direct-data", fault("hang_copy", 0, 1, first=9), {"0>1"}, "hung: waited 10 s for a direct copy"),
    ("slot-reuse", fault("hang_kernel", 1, first=30), {"0>1"}, "hung: "),
    ("throttle-load", fault("hang_kernel", 1, first=5), {"0>1"}, "hung: microbatch . was not admitted|hung: waited"),
    ("event-chain", fault("hang_kernel", 1, first=5), {""}, "hung: "),
]


def describe(case: tuple[str, dict[str, Any], set[str], str]) -> str:
    key, wrong, _, _ = case
    return f"{key} {' '.join(str(value) for value in wrong.values())}"


@pytest.mark.parametrize("case", FAILURES, ids=describe)
def test_fails_where_the_fault_is(case: tuple[str, dict[str, Any], set[str], str]) -> None:
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


@pytest.mark.parametrize("wrong", ["drop", "zero", "mirror", "swap"])
def test_a_pair_that_is_wrong_one_way_is_right_the_other(wrong: str) -> None:
    """Field case 2: a probe must name the path and the direction."""
    results = ask(CHECK["direct-data"], fault(wrong, 0, 1, value=16 * KIB))
    assert by_pair(results, Verdict.FAIL) == {"0>1"}
    assert by_pair(results, Verdict.PASS) == {"1>0"}
    hint = next(result.hint for result in results if result.pair == "0>1")
    assert "0>1=1" in hint
    assert by_pair(ask(CHECK["staged-data"], fault(wrong, 0, 1, value=16 * KIB)), Verdict.PASS) == {"0>1", "1>0"}


class TestPeers:
    def test_not_reported(self) -> None:
        results = ask(CHECK["peer-access"], peer={"groups": "none"})
        assert by_pair(results, Verdict.WAIVED) == {"0>1", "1>0"}
        assert all("not reported" in result.reason for result in results)

    def test_reported_and_then_refused(self) -> None:
        results = ask(CHECK["peer-access"], fault("enable_fails", 0, 1))
        assert by_pair(results, Verdict.FAIL) == {"0>1"}
        assert "enabling it is an error" in results[0].reason
        assert results[0].figures == {"reported": True, "enabled": False, "back": True}

    def test_enabled_by_somebody_else(self) -> None:
        """Field case 7."""
        already = fault("already_enabled", 0, 1)
        assert by_pair(ask(CHECK["peer-access"], already), Verdict.PASS) == {"0>1", "1>0"}
        assert by_pair(ask(CHECK["direct-data"], already), Verdict.PASS) == {"0>1", "1>0"}

    def test_data_of_a_refused_pair_is_waived(self) -> None:
        assert by_pair(ask(CHECK["direct-data"], fault("enable_fails", 0, 1)), Verdict.WAIVED) == {"0>1"}

    def test_one_way(self) -> None:
        """Field case 3."""
        results = ask(CHECK["peer-access"], peer={"groups": "none"}, pair=[{"pairs": [[1, 0]], "capable": True}])
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
        assert all("no more peers" in result.reason for result in waived)

    def test_a_driver_that_takes_its_own_way(self) -> None:
        """Field case 4: copies between devices without peer access succeed there; they are never used."""
        options = {"peer": {"groups": "none", "unpeered": "blocks"}}
        assert by_pair(ask(CHECK["peer-access"], **options), Verdict.WAIVED) == {"0>1", "1>0"}
        assert by_pair(ask(CHECK["direct-data"], **options), Verdict.WAIVED) == {"0>1", "1>0"}
        assert by_pair(ask(CHECK["staged-data"], **options), Verdict.PASS) == {"0>1", "1>0"}


class Reaching(HostKernels):
    """Simulated kernels that reach the memory of peers, but for the fill or the check of this number, from 1.

    A rig begins with a fill and a check on each device.
    """

    def __init__(self, lost_fill: int = 0, lost_check: int = 0) -> None:
        self.lost_fill, self.lost_check = lost_fill, lost_check
        self.fills = self.checks = 0

    def fill(self, stream: Stream, address: int, nbytes: int, key: int, first: int) -> None:
        self.fills += 1
        if self.fills != self.lost_fill:
            stream.launch(lambda: memory(address, nbytes).__setitem__(slice(None), pattern.make(key, first, nbytes)))

    def check(self, stream: Stream, address: int, nbytes: int, key: int, first: int, report: int) -> None:
        self.checks += 1
        lost = self.checks == self.lost_check

        def run() -> None:
            wrong = np.count_nonzero(memory(address, nbytes) != pattern.make(key, first, nbytes))
            memory(report, REPORT_BYTES).view(np.uint64)[:3] = (nbytes if lost else wrong, ~np.uint64(0), nbytes)

        stream.launch(run)


class TestPeerKernels:
    class Asked(PeerKernels):
        """On simulated devices too."""

        def needs(self, runtime: Runtime) -> str | None:
            return DataCheck.needs(self, runtime)

    def ask(self, kernels: Reaching) -> list[Result]:
        with Runtime(sim.driver(machine())) as runtime, Rig(runtime, kernels) as rig:
            return list(run_check(self.Asked(), rig))

    def test_kernels_that_reach_each_other(self) -> None:
        assert by_pair(self.ask(Reaching()), Verdict.PASS) == {"0>1", "1>0"}

    def test_stores_that_stay_in_a_mirror(self) -> None:
        results = self.ask(Reaching(lost_fill=4))
        assert by_pair(results, Verdict.FAIL) == {"0>1"}
        assert_words(results, "written by a kernel of the other device: .*never written")

    def test_loads_of_something_else(self) -> None:
        results = self.ask(Reaching(lost_check=6))
        assert by_pair(results, Verdict.FAIL) == {"1>0"}
        assert_words(results, "loads: .*read by a kernel of the other device")


def test_every_check_that_can_fail_is_made_to_fail() -> None:
    """legs and latency give figures; what is slow has no verdict but INCONCLUSIVE."""
    apart = {"peer-access", "peer-kernels", "large"}  # TestPeers, TestPeerKernels, TestLarge
    assert {key for key, *_ in FAILURES} | apart == set(CHECK) - {"legs", "latency"}


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
        results = ask(self.Small(), fault("truncate", 0, 1, value=2 * MIB))
        failed = [result for result in results if result.verdict == Verdict.FAIL]
        assert [(result.pair, result.figures["boundary"]) for result in failed] == [("0>1", 2 * MIB)]
        assert "2097152 bytes" in failed[0].reason

    def test_healthy(self) -> None:
        assert by_pair(ask(self.Small()), Verdict.PASS) == {"0>1", "1>0"}

    def test_no_room(self) -> None:
        results = ask(self.Small(), devices=2, other=[{"devices": [1], "memory_gib": 0.002}])
        assert by_pair(results, Verdict.WAIVED) == {"0>1", "1>0"}
        assert all("device 1 has" in result.reason for result in results if result.verdict == Verdict.WAIVED)
