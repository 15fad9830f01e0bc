"""Traces of executors: measured by events, they say what the simulator says it did."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executor_cases import machine

from pyxdev import trace
from pyxdev._native import HOST
from pyxdev.backends import open as open_backend
from pyxdev.errors import Closed, InvalidArgument, StageError
from pyxdev.executor import Executor, Stage

QUIET = {"device": {"count": 3}, "run": {"trace": True}}
HOP = 2000  # ns that a stream needs to see an event of another device


def stages(*costs: float, **last: Any) -> list[Stage]:
    made = [Stage(lambda x: x, cost=cost, out=lambda x: x, name=f"s{n}") for n, cost in enumerate(costs[:-1])]
    return [*made, Stage(lambda x: x, cost=costs[-1], out=last.pop("out", lambda x: x), name="end", **last)]


@pytest.mark.parametrize("host_stage", ["0", "1"])
@pytest.mark.parametrize("in_flight", [1, 3, "auto"])
def test_times_are_those_of_the_simulator(host_stage: str, in_flight: Any) -> None:
    """Every stage's kernel and every copy, to the hop."""
    x = np.zeros(100_000)
    placed = stages(1e-3, 2e-4, 5e-4)
    with Executor([0, 1, 2], placed, machine=QUIET, host_stage=host_stage, in_flight=in_flight) as executor:
        list(executor.map([x] * 5))
        driver: Any = executor.runtime.driver
        before = len(driver.trace())
        with executor.trace() as traced:
            list(executor.map([x] * 20))
        wanted = trace.spans(driver)[before:]
        assert set(traced.drift) == {0, 1, 2} and all(abs(drift) < 1e-9 for drift in traced.drift.values())
    for n, name in enumerate(["s0", "s1", "end"]):
        kernels = [(span.start, span.end) for span in wanted if span.label == name]
        found = [span for span in traced.spans if span.engine == f"stage {n} {name}"]
        assert [span.label for span in found] == [f"microbatch {5 + k}" for k in range(20)]
        assert len(kernels) == 20
        shift = kernels[0][1] - found[0].end
        for (start, end), span in zip(kernels, found, strict=True):
            assert abs(span.start + shift - start) <= HOP and span.end + shift == end
    for src, dst in ((0, 1), (1, 2)):
        arrivals = sorted(span.end for span in wanted if span.nbytes and _lands(span, dst, host_stage))
        found = [span for span in traced.spans if span.row == f"link {src}>{dst}"]
        shift = arrivals[0] - found[0].end
        assert len(found) == 20 and all(span.nbytes == x.nbytes for span in found)
        assert all(any(abs(span.end + shift - end) <= HOP for end in arrivals) for span in found)
        assert all(a.end <= b.start for a, b in itertools.pairwise(found))


def _lands(span: trace.Span, dst: int, host_stage: str) -> bool:
    return span.engine == "link" and span.peer == dst if host_stage == "0" else span.row == f"device {dst} in"


def test_sums() -> None:
    """Two stages of 1 ms and 0.5 ms; of nothing but them."""
    with Executor([0, 1], stages(1e-3, 5e-4), machine=QUIET, host_stage="0") as executor:
        assert executor.stats().traced is None
        with executor.trace():
            list(executor.map([np.zeros(1000)] * 50))
        sums = executor.stats().traced
        assert sums is not None
        assert sums.seconds == pytest.approx(50.5e-3, rel=0.02)
        assert sums.stages == pytest.approx((0.99, 0.495), abs=0.02)
        assert sums.devices == pytest.approx({0: 0.99, 1: 0.495}, abs=0.02)
        assert sums.bubble == pytest.approx(1 - (0.99 + 0.495) / 2, abs=0.02)
        assert 0 <= sums.hidden < 0.1  # the second stage waits for each of them


def test_hidden_copies_and_stages_that_share_a_device() -> None:
    with Executor([0, 1], stages(5e-4, 1e-3), machine=QUIET, host_stage="0") as executor:
        with executor.trace():
            list(executor.map([np.zeros(100_000)] * 50))
        sums = executor.stats().traced
        assert sums is not None and sums.hidden > 0.9
    with Executor([0], stages(5e-4, 1e-3), machine=QUIET) as executor:
        with executor.trace():
            list(executor.map([np.zeros(1000)] * 20))
        sums = executor.stats().traced
        assert sums is not None and set(sums.devices) == {0} and 0.9 < sums.devices[0] <= 1 and sums.hidden == 1


def test_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    joined = stages(1e-3, 1e-3, 1e-3, inputs=(0, 1), out=lambda x: x)
    with (
        Executor([0, 1, 2], joined, machine=QUIET, host_stage="0") as executor,
        executor.trace(tmp_path / "a.json", str(tmp_path / "a.png")),
    ):
        list(executor.map([np.zeros(100)] * 4))
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert rows == {
        "host", "device 0 in", "device 0 stage 0 s0", "device 1 stage 1 s1", "device 2 stage 2 end",
        "link 0>1", "link 0>2", "link 1>2",
    }  # fmt: skip
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 4 * (3 + 3 + 1 + 3) and all(event["dur"] >= 0 for event in spans)
    assert sum(event["ph"] == "s" for event in events) == 4 * (3 + 3)  # arrows
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    for wrong in ("a.txt", tmp_path / "a"):
        with pytest.raises(InvalidArgument, match=r"names that end in \.json or \.png"), executor.trace(wrong):
            pass


@pytest.mark.parametrize("seed", range(4))
def test_a_trace_changes_no_result_and_leaves_nothing(seed: int) -> None:
    """With failures in it, on disturbed devices, the ordering checker on."""

    def fn(x: Any) -> Any:
        if x[0] == 3:
            raise ValueError("bad")
        return x + 1

    placed = [Stage(fn, cost=1e-4), Stage(fn, cost=2e-4), Stage(lambda x: x[0] + x[1], inputs=(0, 1))]
    with open_backend("sim", machine=machine(2, seed)) as runtime:
        with Executor([0, 1], placed, runtime=runtime, depth=2, in_flight=3) as executor:
            for _ in range(3):
                with executor.trace() as traced:
                    tickets = [executor.submit(np.full(50, n)) for n in range(5)]
                    for n, ticket in enumerate(tickets[:2]):
                        assert (ticket.result() == 2 * n + 3).all()
                    with pytest.raises(StageError):
                        tickets[2].result()  # 2 becomes 3 in the second stage
                    assert next(executor.map([np.full(50, 7)]))[0] == 17
                assert [y[0] for y in executor.map([np.zeros(5)] * 5)] == [3] * 5
                assert {span.label for span in traced.spans} >= {"microbatch " + str(k) for k in (tickets[0].index,)}
        del ticket, tickets
        assert not runtime.live().any()


def test_one_at_a_time_and_only_while_it_is_open() -> None:
    executor = Executor([0], stages(1e-3), machine=QUIET)
    with executor.trace() as traced:
        with pytest.raises(InvalidArgument, match="is on already"), executor.trace():
            pass
        executor.submit(np.zeros(3)).result()
        executor.close()
    assert executor.closed and all(span.device in (0, HOST) for span in traced.spans)
    with pytest.raises(Closed), executor.trace():
        pass
