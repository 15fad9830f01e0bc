"""The runner contains what hangs and crashes; the command turns results into exit codes, JSON and JUnit."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from bad_checks import CHECKS as BAD
from checked import fault, machine

from pyxdev._native import Runtime
from pyxdev.backends import sim
from pyxdev.checks import CHECKS, Level, Result, Verdict, child, report, select
from pyxdev.checks.kernels import Kernels
from pyxdev.checks.runner import Runner, Target, Unopened
from pyxdev.cli import validate
from pyxdev.errors import BackendUnavailable, DriverError, Error

CHECK = {check.key: check for check in (*CHECKS, *BAD)}


@pytest.fixture(autouse=True)
def children_find_the_bad_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.fixture
def bad() -> Iterator[Runner]:
    runner = Runner(Target("sim", machine(), Level.QUICK, registry="bad_checks"))
    yield runner
    runner.close()


def test_noise_is_no_answer_and_one_process_serves_many_checks(bad: Runner) -> None:
    good, again = bad.run([CHECK["good"], CHECK["good"]])
    assert good.verdict == again.verdict == Verdict.PASS
    assert good.pair == "0>1"
    assert good.figures["process"] == again.figures["process"]
    assert bad.environment["backend"] == "sim"
    assert len(bad.environment["devices"]) == 2


def test_a_crash_is_a_verdict_and_the_next_check_gets_a_new_process(bad: Runner) -> None:
    before, kept, crash, after = bad.run([CHECK["good"], CHECK["crash"], CHECK["good"]])
    assert kept.verdict == Verdict.PASS
    assert crash.key == "crash"
    assert crash.verdict == Verdict.INCONCLUSIVE
    assert crash.reason.startswith("crashed: signal SIGSEGV")
    assert after.verdict == Verdict.PASS
    assert before.figures["process"] != after.figures["process"]


def test_a_bug_in_a_check_is_not_a_pass(bad: Runner) -> None:
    (result,) = bad.run([CHECK["bug"]])
    assert result.verdict == Verdict.INCONCLUSIVE
    assert "nobody expected this" in result.reason


def test_a_hang_is_a_verdict(bad: Runner) -> None:
    hang, after = bad.run([CHECK["hang"], CHECK["good"]])
    assert (hang.verdict, hang.reason) == (Verdict.INCONCLUSIVE, "hung: no end after 0.5 s")
    assert after.verdict == Verdict.PASS


def test_a_device_that_fails_gets_a_new_process() -> None:
    lost = machine(fault("lose_device", 0, first=90))
    runner = Runner(Target("sim", lost, Level.QUICK))
    try:
        results = list(runner.run([CHECK["direct-data"], CHECK["peer-access"]]))
    finally:
        runner.close()
    assert [result.verdict for result in results] == [Verdict.INCONCLUSIVE, Verdict.PASS, Verdict.PASS]


def test_devices_that_are_not_there() -> None:
    with pytest.raises(Unopened) as raised:
        Runner(Target("sim", "no-such-machine")).open()
    assert raised.value.kind == "SettingError"
    assert "no-such-machine" in str(raised.value)


@pytest.mark.parametrize("kind", [BackendUnavailable, DriverError])
def test_without_kernels_nothing_is_proven(monkeypatch: pytest.MonkeyPatch, kind: type[Error]) -> None:
    def none(runtime: Runtime) -> Kernels:
        raise kind("the kernels need NVRTC")

    monkeypatch.setattr(child, "open_kernels", none)
    order = {"registry": "pyxdev.checks", "level": 0, "seed": 1, "devices": None, "patience": 10.0}
    with Runtime(sim.driver(machine())) as runtime:
        result, end = child.Session(runtime, order).answer("legs")
    assert (result["verdict"], result["reason"]) == ("INCONCLUSIVE", "the kernels need NVRTC")
    assert end == {"done": "legs", "broken": False}


def outcome(*verdicts: Verdict) -> int:
    return report.exit_code([Result("key", verdict) for verdict in verdicts])


def test_exit_codes() -> None:
    assert outcome(Verdict.PASS, Verdict.WAIVED) == 0
    assert outcome(Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE) == 1
    assert outcome(Verdict.PASS, Verdict.INCONCLUSIVE) == 3
    assert outcome() == 3  # nothing asked is nothing proven


def test_selection() -> None:
    assert [check.key for check in select(["order"], Level.QUICK)] == ["event-order"]
    assert [check.key for check in select(["large", "legs"], Level.QUICK)] == ["legs", "large"]
    assert "large" not in [check.key for check in select([], Level.NORMAL)]
    assert len(select([], Level.FULL)) == len(CHECKS)


# ---- the command -----------------------------------------------------------------------------------------------------


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    validate.add_arguments(parser)
    return validate.run(parser.parse_args(["--backend", "sim", *arguments]))


def profile(folder: Path, *faults: dict[str, Any]) -> str:
    lines = ["[device]", "count = 2"]
    for one in faults:
        lines += ["[[fault]]", *(f"{name} = {json.dumps(value)}" for name, value in one.items())]
    path = folder / "machine.toml"
    path.write_text("\n".join(lines))
    return str(path)


def test_json_and_junit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    junit = tmp_path / "junit.xml"
    name = profile(tmp_path, fault("drop", 0, 1))
    code = run("--profile", name, "--quick", "-k", "direct", "-k", "large", "--json", "--junit", str(junit))
    document = json.loads(capsys.readouterr().out)
    assert code == document["exit_code"] == 1
    assert document["environment"]["backend"] == "sim"
    verdicts = [(entry["key"], entry["pair"], entry["verdict"]) for entry in document["checks"]]
    assert verdicts == [
        ("direct-data", "0>1", "FAIL"),
        ("direct-data", "1>0", "PASS"),
        ("large", "0>1", "WAIVED"),
        ("large", "1>0", "WAIVED"),
    ]
    assert set(document["checks"][0]) == {"key", "verdict", "pair", "reason", "hint", "figures"}
    suite = ElementTree.parse(junit).getroot()
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "4",
        "failures": "1",
        "errors": "0",
        "skipped": "2",
    }
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert "never written" in str(failure.get("message"))


def test_the_table_names_pair_reason_and_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--profile", profile(tmp_path, fault("ignore_wait", 0, 1)), "--quick", "-k", "event-order") == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "FAIL event-order 0>1" in shown
    assert "did not wait" in shown
    assert "PYXDEV_FORCE_XDEV_SYNC=1" in shown


def test_inconclusive_is_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--profile", profile(tmp_path, fault("hang_kernel", 0, first=9)), "--quick", "-k", "event-order") == 3
    assert "hung" in capsys.readouterr().out


def test_every_check_can_run_out_of_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--profile", profile(tmp_path), "--deadline", "0.0001", "-k", "staged-data") == 3
    assert "no end after 0.0001 s" in " ".join(capsys.readouterr().out.split())


def test_a_healthy_machine_is_0_and_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--profile", profile(tmp_path), "--quick", "--json") == 0
    keys = {entry["key"] for entry in json.loads(capsys.readouterr().out)["checks"]}
    assert keys == {check.key for check in CHECKS if check.level == Level.QUICK}


def test_list_needs_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--list", "--full", "--backend", "cuda") == 0
    shown = capsys.readouterr().out
    assert all(check.key in shown for check in CHECKS)


def test_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-k", "no-such-check") == 2
    assert "event-order" in capsys.readouterr().err
    assert run("--profile", "no-such-machine", "-k", "legs") == 2
    assert run("--profile", profile(tmp_path), "--devices", "0,7", "-k", "legs") == 2
    assert "no device 7" in capsys.readouterr().err


def test_no_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """There is no AMD GPU where this runs, or its library is not there."""
    monkeypatch.setenv("PYXDEV_HIP_LIBRARY", "/nonexistent/libamdhip64.so")
    assert run("--backend", "hip", "-k", "legs") == 4
    assert capsys.readouterr().err
