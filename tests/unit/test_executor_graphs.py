"""Stages as graphs: the same bits as without, the fallbacks and what they say, faults, and what is left behind."""

from __future__ import annotations

import gc
import itertools
import logging
from typing import Any

import numpy as np
import pytest
from executor_cases import machine
from graph_cases import ALL, PURE, Affine, Case, FillAndCopy, InPlace, Keeps, Pipeline, Running, copy, kernel

from pyxdev import topology
from pyxdev._native import FaultDriver, Runtime
from pyxdev.backends import sim
from pyxdev.errors import (
    Cancelled,
    DeviceFault,
    DriverError,
    InvalidArgument,
    OutOfMemory,
    StageError,
    StageInterrupted,
)
from pyxdev.executor import Executor, Stage, graphs
from pyxdev.executor.graphs import LAYOUTS, WARM, Captured
from pyxdev.topology import Pair

SEEDS = range(20)


def pipe(stages: Any, seed: int = 0, devices: Any = None, **options: Any) -> Executor:
    devices = range(len(stages)) if devices is None else devices
    options = {"graph": "on", "adapter": "raw", "host_stage": "0"} | options
    return Executor(devices, stages, machine=machine(max(devices) + 1, seed), **options)


def vectors(count: int, n: int = 5) -> list[Any]:
    return [{"a": np.arange(40, dtype=np.float32) + i, "n": n} for i in range(count)]


def check(got: Any, wanted: Any, what: str) -> None:
    a = got["a"].numpy()
    assert (a.dtype, a.shape) == (wanted["a"].dtype, wanted["a"].shape), what
    assert a.tobytes() == wanted["a"].tobytes() and got["n"] == wanted["n"], what


def run(pipeline: Executor, stages: list[Case], xs: list[Any], what: str = "") -> None:
    for x, y in zip(xs, pipeline.map(xs), strict=True):
        for stage in stages:
            x = stage.by_hand(x)
        check(y, x, what)


def captured(pipeline: Executor) -> list[int]:
    return [stage.captured for stage in pipeline.plan().stages]


# ---- the same bits ----


@pytest.mark.parametrize("mode, kinds", [("on", ALL), ("auto", PURE)])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_pipelines_give_the_bits_of_numpy(mode: str, kinds: Any, seed: int) -> None:
    """With the ordering checker on, and results taken late or early."""
    case = Pipeline(seed, kinds)
    wanted = case.wanted()
    with pipe(case.stages, seed, case.devices, graph=mode, **case.options) as pipeline:
        if seed % 2:
            tickets = [pipeline.submit(x) for x in case.xs]
            got = [ticket.result() for ticket in tickets]
            del tickets
        else:
            got = list(pipeline.map(case.xs))
        for n, (y, right) in enumerate(zip(got, wanted, strict=True)):
            check(y, right, f"seed {seed}, microbatch {n}")
        assert all(captured(pipeline)), pipeline.plan()
        assert not pipeline.runtime.driver.violations()
        for stage in case.stages:
            assert stage.calls < len(case.xs)
        del got, y


@pytest.mark.parametrize("mode", ["on", "auto"])
@pytest.mark.parametrize("depth", [1, 3])
def test_python_runs_until_every_slot_is_captured_and_no_more(mode: str, depth: int) -> None:
    """Twice to warm up, once for each slot; for the trial once more."""
    stages = [Affine(), FillAndCopy()]
    with pipe(stages, depth=depth, graph=mode) as pipeline:
        run(pipeline, stages, vectors(30))
        assert captured(pipeline) == [depth, depth]
        assert [stage.calls for stage in stages] == [WARM + depth + (mode == "auto")] * 2
        assert pipeline.runtime.live().graphs == 2 * depth


def test_a_graph_takes_less_of_the_host() -> None:
    class Many(Case):
        def device(self, stage: Any, x: Any) -> Any:
            y = stage.empty(x["a"].shape, x["a"].dtype)
            copy(stage, y, x["a"])
            for _ in range(60):
                kernel(stage, lambda a: a, y, y, cost=0.0)
            return {"a": y, "n": x["n"]}

        def by_hand(self, x: Any) -> Any:
            return x

    took = {}
    for mode in ("off", "on"):
        with pipe([Many()], graph=mode, in_flight=40) as pipeline:
            run(pipeline, [Many()], vectors(8))
            begin = pipeline.runtime.clock()
            tickets = [pipeline.submit(x) for x in vectors(20)]
            took[mode] = pipeline.runtime.clock() - begin
            del tickets
    assert took["on"] < 0.2 * took["off"]


@pytest.mark.parametrize("seed", range(5))
def test_results_and_tickets_that_are_kept_stay_as_they_are(seed: int) -> None:
    """A ticket's output is not overwritten by later launches, whether it was asked for or not."""
    stages = [Affine(), Affine()]
    with pipe(stages, seed, depth=2, in_flight=3) as pipeline:
        run(pipeline, stages, vectors(20))
        first = pipeline.submit({"a": np.full(40, 1, np.float32), "n": 5})
        asked = pipeline.submit({"a": np.full(40, 2, np.float32), "n": 5})
        early = asked.result()
        run(pipeline, stages, vectors(12))
        again = [pipeline.submit(first) for _ in range(5)]
        for n, (ticket, times) in enumerate([(first, 2), (asked, 2), *((one, 4) for one in again)]):
            x = {"a": np.full(40, 2 if ticket is asked else 1, np.float32), "n": 5}
            for _ in range(times):
                x = Affine().by_hand(x)
            check(ticket.result(), x, f"seed {seed}, {n}")
        check(early, asked.result() and {"a": asked.result()["a"].numpy(), "n": 5}, f"seed {seed}")
        assert not pipeline.runtime.driver.violations()
        del early, first, asked, again, ticket


@pytest.mark.parametrize("mode", ["on", "auto"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_stages_that_skip_branch_and_join_or_read_nothing(mode: str, depth: int) -> None:
    def makes(stage: Any, x: Any) -> Any:
        assert x == ()
        y = stage.empty((40,), "float32")
        kernel(stage, lambda: np.arange(40, dtype=np.float32), y)
        return y

    def joins(stage: Any, x: Any) -> Any:
        a, b, c = x[0]["a"], x[1]["a"], x[2]
        y = stage.empty(a.shape, a.dtype)
        kernel(stage, lambda a, b, c: a + b * c, y, a, b, c)
        return {"a": y, "n": x[0]["n"]}

    first, second = Affine(), InPlace()
    stages = [
        Stage(first, name="first"),
        Stage(makes, name="made", inputs=()),
        Stage(second, inputs="first", name="second"),
        Stage(joins, inputs=("second", "first", "made")),
    ]
    for seed in range(3):
        with pipe(stages, seed, [0, 1, 0, 2], graph=mode, depth=depth, in_flight=5) as pipeline:
            xs = vectors(30)
            for x, y in zip(xs, pipeline.map(xs), strict=True):
                a = first.by_hand(x)
                wanted = second.by_hand(a)["a"] + a["a"] * np.arange(40, dtype=np.float32)
                check(y, {"a": wanted, "n": 5}, f"seed {seed}")
            assert captured(pipeline) == [depth] * 4
            assert first.calls == second.calls == (seed + 1) * (WARM + depth + (mode == "auto"))  # and no more
            assert not pipeline.runtime.driver.violations()


def test_token_loops() -> None:
    stages = [Affine(), InPlace(), Affine()]
    with pipe(stages, depth=2) as pipeline:
        xs = vectors(3)
        tickets = [pipeline.submit(x) for x in xs]
        for _ in range(14):
            tickets = [pipeline.submit(ticket) for ticket in tickets]
        for x, ticket in zip(xs, tickets, strict=True):
            for _ in range(15):
                for stage in stages:
                    x = stage.by_hand(x)
            check(ticket.result(), x, "")
        assert captured(pipeline) == [2, 2, 2]
        del tickets, ticket


def shrunk_ring(seed: int, checked: bool) -> bool:
    """A stage whose slots come round sooner than its outputs are let go, as after memory ran short: right results?"""
    stages = [Affine(), Affine()]
    simulated = machine(2, seed)
    simulated["run"]["check"] = checked
    options = {"depth": 4, "in_flight": 8, "host_stage": "1", "graph": "on", "adapter": "raw", "machine": simulated}
    with Executor([0, 1], [Stage(stages[0]), Stage(stages[1], graph="off")], **options) as pipeline:
        del pipeline._line.first.slots.ring[1:]
        xs = [{"a": np.full(300_000, i, np.float32), "n": 5} for i in range(16)]
        got = [ticket.result()["a"].numpy() for ticket in [pipeline.submit(x) for x in xs]]
        assert captured(pipeline) == [1, 0]
    return all(np.array_equal(y, stages[1].by_hand(stages[0].by_hand(x))["a"]) for x, y in zip(xs, got, strict=True))


def test_a_graph_waits_until_its_outputs_are_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And would overwrite what is still being copied if it did not."""
    assert all(shrunk_ring(seed, True) for seed in range(4))
    monkeypatch.setattr(Captured, "fits", lambda self, incoming: self._free.append(None) is None)
    assert not all(shrunk_ring(seed, False) for seed in range(8))


def test_a_copy_that_fails_leaves_the_end_of_later_microbatches_where_it_belongs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A result has no room; then the stage runs eagerly, for another number, and slowly."""

    def slow(stage: Any, x: Any) -> Any:
        y = stage.empty(x["a"].shape, x["a"].dtype)
        kernel(stage, lambda a: a + np.float32(x["n"]), y, x["a"], cost=1e-2)
        return {"a": y, "n": x["n"]}

    def no_room(stage: Any, turn: int, outgoing: Any) -> Any:
        stage.aside()
        raise OutOfMemory("no room")

    with pipe([slow], depth=1, in_flight=2) as pipeline:
        xs = vectors(4)
        for x in xs:
            check(pipeline.submit(x).result(), {"a": x["a"] + np.float32(5), "n": 5}, "")
        with monkeypatch.context() as patched:
            patched.setattr(pipeline._line.last.adapter, "copied", no_room)
            with pytest.raises(OutOfMemory, match="no room"):
                pipeline.submit(xs[0]).result()
        ticket = pipeline.submit({**xs[1], "n": 77})
        assert not ticket.done()
        check(ticket.result(), {"a": xs[1]["a"] + np.float32(77), "n": 77}, "")
        del ticket


def test_slots_that_grow_are_captured_anew() -> None:
    stages = [Affine(), Affine()]
    sizes = [40, 40, 40, 40, 40, 40, 3000, 3000, 3000, 3000, 3000, 3000, 40, 40, 40, 3000, 3000, 40]
    with pipe(stages, depth=2) as pipeline:
        for _ in range(2):
            run(pipeline, stages, [{"a": np.arange(size, dtype=np.float32), "n": 5} for size in sizes])
        assert captured(pipeline) == [4, 4]  # two slots, two layouts; what was captured over small slots is gone
        run(pipeline, stages, vectors(20))
        assert pipeline.runtime.live().graphs == 8
        calls = stages[0].calls
        run(pipeline, stages, [{"a": np.arange(size, dtype=np.float32), "n": 5} for size in sizes])
        assert stages[0].calls == calls


def test_a_graph_over_memory_that_is_replaced_lives_until_its_microbatches_have_left() -> None:
    stages = [Affine()]
    with pipe(stages, depth=1, in_flight=3) as pipeline:
        run(pipeline, stages, vectors(6))
        tickets = [pipeline.submit(x) for x in vectors(2)]
        tickets += [pipeline.submit({"a": np.arange(4000, dtype=np.float32), "n": 5}) for _ in range(2)]
        assert captured(pipeline) == [0] and pipeline.runtime.live().graphs == 1
        for ticket in tickets:
            ticket.result()
        del tickets, ticket
        tickets = [pipeline.submit(x) for x in vectors(3)]
        assert captured(pipeline) == [1] and pipeline.runtime.live().graphs == 1
        del tickets


def test_the_collector_is_off_during_a_capture_and_then_as_before() -> None:
    """What it freed would spoil the capture, and be lost."""
    found = []

    def looks(stage: Any, x: Any) -> Any:
        found.append(gc.isenabled())
        return Affine()(stage, x)

    with pipe([looks], depth=1) as pipeline:
        for on in (True, False):
            try:
                gc.enable() if on else gc.disable()
                run(pipeline, [Affine()], [{"a": np.arange(9 + on, dtype=np.float32), "n": 5}] * 4)
                assert gc.isenabled() == on
            finally:
                gc.enable()
    assert found == [True] * WARM + [False] * (1 + WARM + 1)


def test_a_trace_shows_graphs_as_the_stages_that_they_are() -> None:
    stages = [Affine(), Affine()]
    with pipe(stages, depth=2) as pipeline:
        with pipeline.trace():
            run(pipeline, stages, vectors(12))
        assert captured(pipeline) == [2, 2] and stages[0].calls == WARM + 2
        traced = pipeline.stats().traced
        assert traced is not None and all(busy > 0 for busy in traced.stages)


# ---- what stays eager ----


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


class Counting(Affine):
    """Gives another number every time."""

    def device(self, stage: Any, x: Any) -> Any:
        return {**super().device(stage, x), "n": self.calls}


class Growing(Affine):
    """Gives something else from its fourth call on."""

    def device(self, stage: Any, x: Any) -> Any:
        y = super().device(stage, x)
        return {**y, "more": y["a"]} if self.calls > WARM else y


class Asking(Affine):
    """Waits for its stream."""

    def device(self, stage: Any, x: Any) -> Any:
        y = super().device(stage, x)
        stage.stream.synchronize()
        return y


class Fails(Affine):
    """Raises while it is captured."""

    at = 0

    def device(self, stage: Any, x: Any) -> Any:
        y = super().device(stage, x)
        if self.calls == self.at:
            raise RuntimeError("not now")
        return y


class Object(Affine):
    def device(self, stage: Any, x: Any) -> Any:
        return {**super().device(stage, x), "n": object()}


class Hungry(Affine):
    """Takes more memory when it is captured."""

    def device(self, stage: Any, x: Any) -> Any:
        kept = [stage.empty((100 * self.calls,), "uint8")]
        return {**super().device(stage, x), "n": len(kept)}


@pytest.mark.parametrize(
    "make, why",
    [
        (Counting, "the plain values that it returns change"),
        (Growing, "its outputs change from"),
        (Asking, "it cannot be captured: InvalidArgument: event_record: not while stream"),
        (Fails, "it cannot be captured: RuntimeError: not now"),
        (Object, "plain values other than"),
        (Hungry, "it takes other memory"),
    ],
)
@pytest.mark.parametrize("mode", ["on", "auto"])
def test_what_cannot_be_captured_stays_eager_and_says_why_once(
    make: Any, why: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    odd = make()
    odd.at = WARM + 1 + (mode == "auto")
    stages: list[Any] = [Stage(odd, name="odd"), Keeps()]
    xs = vectors(14)
    with pipe(stages, graph=mode, depth=2) as pipeline:
        got = [y["a"].numpy() for y in pipeline.map(xs)]
        for x, a in zip(xs, got, strict=True):
            assert np.array_equal(a, Keeps().by_hand(Affine().by_hand(x))["a"])
        plan = pipeline.plan().stages
        del stages
        assert plan[0].captured == 0 and why in plan[0].eager
    told = [line for line in lines(caplog) if "stage 0" in line]
    assert len(told) == 1 and why in told[0] and "stage 0 (odd) stays eager" in told[0]


def test_a_stage_with_a_state_is_found_out_by_the_trial(caplog: pytest.LogCaptureFixture) -> None:
    with pipe([Running()], graph="auto") as pipeline:
        for _ in pipeline.map(vectors(12)):
            pass
        assert captured(pipeline) == [0]
    assert "gives other bits" in lines(caplog)[0] and len(lines(caplog)) == 1


def test_random_numbers_are_found_out_by_the_trial(caplog: pytest.LogCaptureFixture) -> None:
    choose = np.random.default_rng(1)

    def noise(stage: Any, x: Any) -> Any:
        y = stage.empty(x["a"].shape, x["a"].dtype)
        kernel(stage, lambda a: choose.standard_normal(a.shape, np.float32), y, x["a"])
        return {"a": y}

    with pipe([noise], graph="auto") as pipeline:
        for _ in pipeline.map(vectors(12)):
            pass
        assert captured(pipeline) == [0]
    assert "gives other bits" in lines(caplog)[0]


def test_other_plain_inputs_run_eagerly_and_are_right(caplog: pytest.LogCaptureFixture) -> None:
    """Those seen while it warmed up are constants of the graph."""
    stages = [Affine()]
    xs = [{"a": np.arange(9, dtype=np.float32), "n": n} for n in [5, 5, 5, 5, 7, 5, 5.0, 5, True, 5, 5, 5]]
    with pipe(stages, depth=1) as pipeline:
        run(pipeline, stages, xs)
        assert captured(pipeline) == [1] and stages[0].calls == WARM + 1 + 3
    assert not lines(caplog)
    with pipe(stages, depth=1) as pipeline:
        run(pipeline, stages, [{**x, "n": n} for n, x in enumerate(xs)])
        assert captured(pipeline) == [0]
    assert "the plain values that it is given change" in lines(caplog)[0]


def test_numpy_stages_and_too_many_layouts(caplog: pytest.LogCaptureFixture) -> None:
    with pipe([lambda x: x + 1], graph="on", adapter="numpy") as pipeline:
        assert [y[0] for y in pipeline.map([np.full(4, i) for i in range(8)])] == list(range(1, 9))
    assert len(lines(caplog)) == 1 and "nothing to capture" in lines(caplog)[0]
    caplog.clear()
    with pipe([Affine()]) as pipeline:
        sizes = [size for size in range(1, LAYOUTS + 5) for _ in range(3)]
        run(pipeline, [Affine()], [{"a": np.arange(size, dtype=np.float32), "n": 1} for size in sizes])
        assert pipeline.runtime.live().graphs <= LAYOUTS
    assert len(lines(caplog)) == 1 and f"more than {LAYOUTS} layouts" in lines(caplog)[0]


def test_modes_of_the_executor_and_of_its_stages() -> None:
    stages = [Stage(Affine(), graph="off"), Stage(Affine(), graph="auto"), Stage(Affine())]
    with pipe(stages, depth=1) as pipeline:
        run(pipeline, [Affine()] * 3, vectors(9))
        assert [(stage.graph, stage.captured) for stage in pipeline.plan().stages] == [
            ("off", 0), ("auto", 1), ("on", 1),
        ]  # fmt: skip
    with pipe([Affine()], graph="off") as pipeline:
        run(pipeline, [Affine()], vectors(9))
        assert pipeline.runtime.live().graphs == 0
    for wrong in ("yes", None, 1):
        with pytest.raises(InvalidArgument, match=r"graph is .*; allowed: off, auto, on"):
            pipe([Affine()], graph=wrong)
    with pytest.raises(InvalidArgument, match="a stage's graph is 'always'"):
        Stage(Affine(), graph="always")


# ---- errors ----


def test_ctrl_c_while_a_stage_is_captured() -> None:
    class Interrupted(Affine):
        def device(self, stage: Any, x: Any) -> Any:
            if self.calls == WARM + 1:
                raise KeyboardInterrupt
            return super().device(stage, x)

    stages = [Affine(), Interrupted()]
    with pipe(stages, depth=1) as pipeline:
        run(pipeline, stages, vectors(WARM))
        with pytest.raises(StageInterrupted, match="stage 1"):
            pipeline.submit(vectors(1)[0])
        run(pipeline, stages, vectors(10))
        assert captured(pipeline) == [1, 1]


def test_a_stage_that_raises_between_launches() -> None:
    """Only for another layout, which is never captured; those around it are right."""

    class Picky(Affine):
        def device(self, stage: Any, x: Any) -> Any:
            if x["a"].shape[0] == 3:
                raise RuntimeError("three")
            return super().device(stage, x)

    for seed in range(5):
        stages = [Affine(), Picky(), Affine()]
        with pipe(stages, seed, depth=2, in_flight=5) as pipeline:
            run(pipeline, stages, vectors(16))
            for _ in range(3):
                before = [pipeline.submit(x) for x in vectors(4)]
                bad = pipeline.submit({"a": np.zeros(3, np.float32), "n": 5})
                with pytest.raises(StageError, match="three"):
                    bad.result()
                for x, ticket in zip(vectors(4), before, strict=True):
                    for stage in stages:
                        x = stage.by_hand(x)
                    check(ticket.result(), x, f"seed {seed}")
                del before, bad, ticket
                run(pipeline, stages, vectors(5))
            assert not pipeline.runtime.driver.violations()


def faulty(seed: int) -> tuple[Runtime, FaultDriver]:
    fault = FaultDriver(sim.driver(machine(2, seed)))
    runtime = Runtime(fault)
    for src, dst in itertools.permutations(range(2), 2):
        for path in ("direct", "staged"):  # as if they had been tried before
            topology.topology(runtime)[src, dst, path] = Pair(src, dst, path, "yes", "verified", path, "")
    return runtime, fault


def on_runtime(runtime: Runtime, stages: list[Case], mode: str) -> Executor:
    return Executor([0, 1], stages, runtime=runtime, adapter="raw", host_stage="1", depth=1, graph=mode)


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_every_driver_call_fails_once(mode: str) -> None:
    """Call 1, 2, 3 ... from the capture of a stage to its replay fails, once: the right result or the error, usable
    after, and nothing is left alive."""
    at, reached, eager = 0, True, 0
    while reached:
        at += 1
        runtime, fault = faulty(at)
        stages = [Affine(), Keeps()]
        try:
            with on_runtime(runtime, stages, mode) as pipeline:
                run(pipeline, stages, vectors(WARM))
                fault.arm(at)
                tickets = [pipeline.submit(x) for x in vectors(4)]
                for x, ticket in zip(vectors(4), tickets, strict=True):
                    for stage in stages:
                        x = stage.by_hand(x)
                    try:
                        check(ticket.result(), x, f"call {at}")
                    except (DriverError, StageError, Cancelled):
                        assert fault.calls >= at
                reached = fault.calls >= at
                fault.arm(0)
                del tickets, ticket
                run(pipeline, stages, vectors(6))
                eager += 0 in captured(pipeline)
        except DriverError:
            assert fault.calls >= at  # of submit() or close() themselves
        finally:
            fault.arm(0)
            del stages
            assert not runtime.live().any(), f"call {at}: {runtime.live()}"
            runtime.close()
    assert at > 60 and eager >= 4  # some of the calls made the captures


def test_a_device_that_fails_at_any_call_takes_graphs_along() -> None:
    """From call 1, 2, 3 ... on nothing succeeds: results that were there, or the fault; closing frees all."""
    for at in range(1, 110):
        runtime, fault = faulty(at)
        stages = [Affine(), Affine()]
        failed = False
        with on_runtime(runtime, stages, "auto") as pipeline:
            run(pipeline, stages, vectors(WARM))
            fault.arm(at, sticky=True, status="DEVICE_FAULT")
            tickets: list[Any] = []
            ticket = None
            for x in vectors(4):
                try:
                    ticket = pipeline.submit(x)
                    tickets.append((x, ticket))
                    y = ticket.result()
                    check(y, stages[1].by_hand(stages[0].by_hand(x)), f"call {at}")
                    assert not failed, f"call {at}: a result after the fault"
                except (DeviceFault, StageError):
                    failed = True
            del tickets, ticket
            y = None
        del pipeline  # it has the fault, which has the frames that it was raised in
        fault.arm(0)
        gc.collect()
        assert not runtime.live().any(), f"call {at}: {runtime.live()}"
        runtime.close()
        if not failed:
            break
    assert at > 60


def test_a_launch_that_fails_names_stage_and_microbatch() -> None:
    runtime, fault = faulty(1)
    stages = [Affine(), Affine()]
    found = set()
    with on_runtime(runtime, stages, "on") as pipeline:
        run(pipeline, stages, vectors(8))
        for at in range(1, 40):
            fault.arm(at)
            ticket = None
            try:
                ticket = pipeline.submit(vectors(1)[0])
                fault.arm(0)
                ticket.result()
            except (DriverError, StageError) as error:
                if ticket is not None and isinstance(error, DriverError) and error.operation == "graph_launch":
                    found.add((*error.__notes__, ticket.index))
            fault.arm(0)
            ticket = None
            gc.collect()  # the error and what it was raised in hold each other, and outputs of graphs
            run(pipeline, stages, vectors(5))
    assert len(found) == 2
    for n, (note, index) in enumerate(sorted(found)):
        assert note == f"in stage {n} (Affine), microbatch {index}"
    runtime.close()


def test_what_the_trial_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the comparison a graph that draws random numbers would be used."""
    monkeypatch.setattr(graphs.Graphs, "_same", lambda *_: True)
    with pipe([Running()], graph="auto") as pipeline:
        for _ in pipeline.map(vectors(12)):
            pass
        assert captured(pipeline) == [2]
