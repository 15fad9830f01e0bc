"""Hardware validation as tests: each check of `pyxdev validate` on the devices at hand, `pytest --pyxdev-backend=cuda`.

A check that is waived is shown as skipped with its reason: it depends on the machine. One without an answer fails.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyxdev.checks import CHECKS, Check, Level, Verdict
from pyxdev.checks.runner import Runner, Target


@pytest.fixture(scope="module")
def runner(pyxdev_backend: str) -> Iterator[Runner]:
    machine = {"device": {"count": 2}} if pyxdev_backend == "sim" else None
    runner = Runner(Target(pyxdev_backend, machine, Level.QUICK))
    yield runner
    runner.close()


QUICK = [check for check in CHECKS if check.level == Level.QUICK]


@pytest.mark.parametrize("check", QUICK, ids=lambda check: check.key)
def test_check(runner: Runner, check: Check) -> None:
    results = list(runner.run([check]))
    bad = [result for result in results if result.verdict not in (Verdict.PASS, Verdict.WAIVED)]
    assert not bad, "\n".join(f"{result.verdict} {result.pair}: {result.reason}\n{result.hint}" for result in bad)
    if all(result.verdict == Verdict.WAIVED for result in results):
        pytest.skip("; ".join(sorted({result.reason for result in results})))
