"""bench/pipeline.py: the arithmetic, what becomes of ways that fail, and a whole run on simulated devices.

Times of simulated devices are the same everywhere, so figures can be compared.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench import gpipe, pipeline  # noqa: E402
from bench.bare import Bare  # noqa: E402
from bench.ways import Copy, Limits, Run  # noqa: E402
from pyxdev import backends  # noqa: E402

LIMITS = Limits([100e-6, 80e-6], {"direct": Copy(10e-6, 5e-6), "staged": Copy(30e-6, 120e-6)})


def test_the_bound_is_that_of_the_slowest_stage_or_copy():
    assert LIMITS.pipeline("direct", 1) == pytest.approx(190e-6)
    assert LIMITS.pipeline("direct", 9) == pytest.approx(190e-6 + 8 * 100e-6)
    assert LIMITS.pipeline("staged", 9) == pytest.approx(210e-6 + 8 * 120e-6)
    assert LIMITS.pipeline("none", 2) == pytest.approx(280e-6)


# ---- ways that do what they are told ----


class FakeWay:
    path = "direct"

    def __init__(self, a_batch, outputs="right", fails_at=None):
        self.a_batch, self.result, self.fails_at, self.closed = a_batch, outputs, fails_at, False

    def run(self, m):
        if m == self.fails_at:
            raise RuntimeError(f"no room\nfor {m}")
        return Run(m * self.a_batch, 0.25 * m * self.a_batch)

    stream = run

    def outputs(self):
        return [self.result]

    def close(self):
        self.closed = True


class FakeFamily:
    name, tolerance, alike = "fake", 0.5, (("ours", "events"),)

    def __init__(self, **ways):
        self.made, self.absent = ways, {"later": "not written yet"}

    def ways(self):
        for name, way in self.made.items():
            yield name, lambda way=way: way

    def limits(self):
        return LIMITS

    def error(self, outputs):
        return 0.0 if outputs[0].startswith("right") else 1.0

    def same(self, outputs, others):
        return outputs == others

    def close(self):
        """Nothing is held."""


def run_case(family, microbatches=(1, 8)):
    case = pipeline.Case(family, 100, lambda name: name != "unwanted", budget=0.0, seconds=0.0)
    case.check(4)
    limit = case.measure(microbatches)
    case.stream(limit)
    case.close()
    pipeline.over_peers(case.rows)
    return case.rows


def found(rows, case, way):
    return [row for row in rows if (row["case"], row["way"]) == (case, way)]


def test_ratios_and_host_times():
    rows = run_case(FakeFamily(events=FakeWay(200e-6), ours=FakeWay(125e-6)))
    one, eight = found(rows, "pipeline", "ours")
    assert (one["per_s"], one["limit_per_s"], one["ratio"]) == (8000.0, 5263.2, 1.52)
    assert (eight["ratio"], eight["host_us"], eight["rounds"]) == (0.89, 31.25, 3)
    assert (eight["peer"], eight["over_peer"], eight["extra_us_a_stage"]) == ("events", 1.6, -9.38)
    (stream,) = found(rows, "stream", "ours")
    assert stream["ratio"] == 0.8


class FakeLoops(FakeWay):
    def loop(self, sequences, steps):
        return Run(steps * {1: 190e-6, 2: 210e-6, 4: 420e-6}[sequences], 0.0)


def test_limits_of_token_loops(monkeypatch):
    """Two stages of 100 and 80 us: two sequences could be twice one of 190 us, but for the slower stage."""
    monkeypatch.setattr(FakeFamily, "loop_error", lambda self, outputs, steps: 0.0, raising=False)
    case = pipeline.Case(FakeFamily(ours=FakeLoops(0.0)), 100, lambda name: True, budget=0.0, seconds=0.0)
    case.loops((1, 2, 4), LIMITS)
    loops = {row["s"]: row for row in found(case.rows, "loop", "ours")}
    assert "limit_per_s" not in loops[1] and loops[1]["per_s"] == 5263.2
    assert [(loops[s]["limit_per_s"], loops[s]["ratio"]) for s in (2, 4)] == [(10000.0, 0.9524)] * 2


def test_a_way_that_fails_or_is_wrong_has_no_figures_and_the_others_go_on():
    ways = {
        "events": FakeWay(200e-6),
        "ours": FakeWay(200e-6, outputs="right, other bits"),
        "wrong": FakeWay(10e-6, outputs="left"),
        "breaks": FakeWay(10e-6, fails_at=8),
        "unwanted": FakeWay(10e-6),
    }
    rows = run_case(FakeFamily(**ways))
    assert [row["why"] for row in found(rows, "failed", "breaks")] == ["RuntimeError: no room for 8"]
    assert [row["why"] for row in found(rows, "failed", "wrong")] == ["wrong outputs: 1 off, 0.5 allowed"]
    assert not found(rows, "pipeline", "wrong") and not found(rows, "pipeline", "breaks")
    assert not [row for row in rows if row["way"] == "unwanted"]
    assert len(found(rows, "pipeline", "events")) == 2
    assert [row["right"] for row in found(rows, "check", "ours")] == [True, False]
    assert [ways[name].closed for name in ways] == [True, True, True, True, False]
    text = "\n".join(pipeline.tables(rows))
    assert "fake ours, stages of 100 us: WRONG, other bits than events" in text
    assert "fake later, stages of 100 us: absent, not written yet" in text
    assert "| events | 1.000 / 1.000 | " not in text and "| events | .950 / .556 (50) |" in text


# ---- bare kernels on simulated devices ----


def test_a_whole_run_on_simulated_devices(tmp_path):
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, ROOT / "bench/pipeline.py", "--out", out]
    options = ["--backend", "sim", "--stages", "50,500", "--microbatches", "1,8", "--seconds", "0"]
    printed = subprocess.run([*command, *options], check=True, capture_output=True, text=True).stdout
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(set(row) >= {"bench", "machine", "date", "commit", "case", "family", "stage_us", "way"} for row in rows)
    assert {row["machine"].split()[0] for row in rows} == {"simulated"}
    checks = [row for row in rows if row["case"] == "check"]
    assert len(checks) > 12 and all(row["right"] for row in checks)
    figures = {(row["way"], row["stage_us"], row["m"]): row for row in rows if row["case"] == "pipeline"}
    ways = {"one", "hand", "ours", "ours-deep", "hand-staged", "ours-staged"}
    assert set(figures) == {(way, us, m) for way in ways for us in (50, 500) for m in (1, 8)}
    # No way is faster than the bound, and events by hand come close to it where stages are long; one device alone is
    # at 9/16 of it.
    assert all(0 < row["ratio"] <= 1 for row in figures.values())
    assert figures["hand", 500, 8]["ratio"] > 0.98
    assert figures["one", 500, 8]["ratio"] == pytest.approx(9 / 16, abs=0.01)
    loops = {(row["way"], row["stage_us"], row["s"]): row for row in rows if row["case"] == "loop"}
    assert loops["ours", 500, 2]["ratio"] > 0.94 and loops["ours", 500, 1]["over_peer"] > 0.98
    shown = subprocess.run([*command[:2], "--show", out], check=True, capture_output=True, text=True).stdout
    assert shown == printed and "| hand | " in shown


def test_one_wrong_word_is_seen():
    with backends.open("sim", machine={"device": {"count": 2}}) as runtime:
        bare = Bare(runtime, 5e-6, 4096, 8)
        for name, make in bare.ways():
            way = make()
            way.run(8)
            outputs = way.outputs()
            assert len(outputs) == 8 and bare.error(outputs) == 0, name
            outputs[7][1023] += 1
            assert bare.error(outputs) == 1 / (8 * 1024), name
            outputs = None
            if hasattr(way, "loop"):
                way.loop(2, 3)
                outputs = way.outputs()
                assert len(outputs) == 2 and bare.loop_error(outputs, 3) == 0, name
                assert bare.loop_error(outputs, 2) > 0.99, name
            way.close()
        bare.close()
        assert not runtime.live().any()


def test_one_device_for_both_stages(tmp_path):
    """Simulated devices run one kernel after the other, so nothing is gained there; and nothing is wrong."""
    profile, out = tmp_path / "one.toml", tmp_path / "rows.jsonl"
    profile.write_text("[device]\ncount = 1\n")
    command = [sys.executable, ROOT / "bench/pipeline.py", "--backend", "sim", "--machine", profile, "--out", out]
    command += ["--stages", "50", "--microbatches", "1,8", "--seconds", "0.1"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["way"] for row in rows if row["case"] == "pipeline"} == {"one", "hand", "ours", "ours-deep"}
    assert all(row["ratio"] < 0.6 for row in rows if row["case"] == "stream")


# ---- the two processes of gpipe ----


@pytest.mark.parametrize(
    ("rank0", "deadline", "why"),
    [
        ("sys.exit('no such network')", 30.0, "rank 0 ended with 1; rank 0: no such network"),
        ("time.sleep(60)", 1.0, "not through after 1 s"),
    ],
)
def test_a_rank_that_fails_or_hangs_is_reported_and_both_are_gone(monkeypatch, tmp_path, rank0, deadline, why):
    stub = tmp_path / "rank.py"
    stub.write_text(f"import sys, time\nif sys.argv[1] == '0':\n    {rank0}\ntime.sleep(60)\n")
    monkeypatch.setattr(gpipe, "__file__", str(stub))
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(gpipe.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    begin = time.monotonic()
    assert gpipe.measure({50: (1, 8, 32, 2)}, [1], 1.0, deadline) == ([], why)
    assert time.monotonic() - begin < 30
    assert len(started) == 2 and all(process.returncode is not None for process in started)
