"""When nothing moves, whoever waits is told the microbatch, the stage and the event that is waited for."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest
from executor_cases import machine

from pyxdev.errors import Closed, InvalidArgument
from pyxdev.executor import Executor, Stage

NAMES = ["embed", "attention", "mlp", "head"]


def faulty(kind: str, src: Any, dst: Any, first: int) -> dict[str, Any]:
    return machine(4) | {"fault": [{"kind": kind, "from": src, "to": dst, "first": first, "count": 1}]}


def stage(name: str, **more: Any) -> Stage:
    return Stage(lambda x: x[0] if isinstance(x, tuple) else x, name=name, out=lambda x: x, **more)


def stalls(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "no progress" in record.getMessage()]


def four(at: dict[str, Any], **options: Any) -> Executor:
    stages = [stage(name) for name in NAMES]
    return Executor(range(4), stages, machine=at, host_stage="0", **options)


@pytest.mark.parametrize(
    "index, in_flight, depth",
    [*((index, "auto", "auto") for index in range(4)), (1, 3, 8), (1, 16, 1), (1, 1, 1)],
)
def test_a_hung_kernel(caplog: pytest.LogCaptureFixture, index: int, in_flight: Any, depth: Any) -> None:
    name = NAMES[index]
    with four(faulty("hang_kernel", index, index, 8), in_flight=in_flight, depth=depth) as executor:
        tickets = [executor.submit(np.full(10, n)) for n in range(7)]
        for ticket in tickets:
            ticket.result()
        place = rf"microbatch 7 is at work in stage {index} \({name}, device {index}\); waited for: `free`, the end"
        ticket = executor.submit(np.full(10, 7))
        assert executor.stats().in_flight == 1
        with pytest.raises(TimeoutError, match=f"microbatch 7 is not through after 3 s; {place}"):
            ticket.result(timeout=3)
        assert not stalls(caplog)
        with pytest.raises(TimeoutError):
            ticket.result(timeout=40)
        (told,) = stalls(caplog)  # once, though the stall went on
        matches(place + r".*; no progress for 10\.?\d* s", told)
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            executor.close()
        matches(rf"device {index} is still busy 30 s after close\(\), memory is freed; {place}", caplog.text)
        with pytest.raises(Closed):
            ticket.result()


def matches(pattern: str, text: str) -> None:
    assert re.search(pattern, text), text


def test_a_hung_copy_of_a_hop(caplog: pytest.LogCaptureFixture) -> None:
    with four(faulty("hang_copy", 1, 2, 8)) as executor:
        tickets = [executor.submit(np.full(10, n)) for n in range(8)]
        place = r"microbatch 7 waits in stage 2 \(mlp, device 2\) for `arrived` of the hop 1->2"
        with pytest.raises(TimeoutError, match="not through after 60 s; " + place):
            tickets[7].result(timeout=60)
        (told,) = stalls(caplog)
        matches(place + r"; no progress for 10\.?\d* s", told)


def test_a_hung_upload_and_a_hung_join(caplog: pytest.LogCaptureFixture) -> None:
    with four(faulty("hang_copy", "host", 0, 3)) as executor:
        tickets = [executor.submit(np.full(10, n)) for n in range(5)]
        with pytest.raises(
            TimeoutError, match=r"microbatch 2 waits in stage 0 \(embed, device 0\) for .* of its input"
        ):
            tickets[4].result(timeout=1)
    stages = [stage("a"), stage("b"), stage("join", inputs=("a", "b"))]
    with Executor(range(3), stages, machine=faulty("hang_copy", 0, 2, 3), host_stage="0") as executor:
        tickets = [executor.submit(np.full(10, n)) for n in range(5)]
        with pytest.raises(TimeoutError, match=r"microbatch 2 waits in stage 2 .* of the hop 0->2 and 1->2"):
            tickets[4].result(timeout=1)


@pytest.mark.parametrize("staged", ["0", "1"])
def test_whoever_waits_for_a_place_in_flight_is_told(caplog: pytest.LogCaptureFixture, staged: str) -> None:
    """The bound is reached, and the slots of the stage that hangs serve later microbatches already."""
    at = faulty("hang_kernel", 1, 1, 4)
    with Executor(range(3), [stage("a"), stage("b"), stage("c")], machine=at, host_stage=staged, depth=2) as executor:
        for n in range(9):
            executor.submit(np.full(10, n))

        class Enough(Exception):
            pass

        class Stop(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                raise Enough(record.getMessage())

        log, handler = logging.getLogger("pyxdev"), Stop(logging.WARNING)
        log.addHandler(handler)
        try:
            with pytest.raises(Enough, match=r"microbatch 3 is at work in stage 1 \(b, device 1\)"):
                executor.submit(np.full(10, 9))
        finally:
            log.removeHandler(handler)


def test_who_polls_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    with four(faulty("hang_kernel", 3, 3, 1), watchdog=0.5) as executor:
        ticket = executor.submit(np.zeros(10))
        driver: Any = executor.runtime.driver
        for _ in range(40):
            assert not ticket.done()
            driver.pass_time(0.1)
        (told,) = stalls(caplog)
        matches(r"microbatch 0 is at work in stage 3", told)


def test_what_is_slow_but_moves_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    slow = Stage(lambda x: x, cost=4.5, out=lambda x: x)
    with Executor([0, 1], [slow, slow], machine=machine(2)) as executor:
        assert len(list(executor.map([np.zeros(3)] * 10))) == 10
        assert executor.runtime.clock() > 40
    assert not stalls(caplog)


def test_two_stalls_are_two_reports_and_none_can_be_chosen(caplog: pytest.LogCaptureFixture) -> None:
    slow = Stage(lambda x: x, cost=lambda x: 20.0 if x == 0 else 0.0, out=lambda x: x)
    for watchdog, reports in ((5.0, 2), (None, 0), (50, 0)):
        with Executor([0], [slow], machine=machine(1), watchdog=watchdog) as executor:
            assert list(executor.map([0, 1, 0])) == [0, 1, 0]
        assert len(stalls(caplog)) == reports
        caplog.clear()


@pytest.mark.parametrize("wrong", [0, -1, True, "10", float("nan")])
def test_wrong_seconds(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"watchdog is .*; seconds above 0 are allowed, or None"):
        Executor([0], [lambda x: x], machine=machine(1), watchdog=wrong)
