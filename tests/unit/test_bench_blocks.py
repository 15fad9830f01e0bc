"""The torch side of bench/pipeline.py without a GPU: the blocks on the CPU, the ways by hand over streams that run at
once, torch.distributed.pipelining over gloo."""

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the blocks are torch modules")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench import blocks, gpipe, pipeline  # noqa: E402
from bench.ways import Copy  # noqa: E402

SIZE = blocks.Size(1, 8, 32, 2)


class Stream:
    """Runs everything when it is queued. wait_event and record take what torch's do."""

    def __init__(self, device):
        self.device = torch.device(device)

    def wait_event(self, event):
        assert isinstance(event, Event)

    def synchronize(self):
        """Nothing is left to do."""


class Machine:
    device_count = 2


class Event:
    def __init__(self, enable_timing=False):
        self.timing = enable_timing

    def record(self, stream):
        assert isinstance(stream, Stream)

    def synchronize(self):
        """Nothing is left to do."""

    def elapsed_time(self, end):
        assert self.timing and end.timing
        return 1.0  # ms


class Replayed:
    """A graph that runs its stage again, into the same output."""

    def __init__(self, stage, x):
        self.stage, self.x, self.y = stage, x, stage(x)

    def replay(self):
        self.y.copy_(self.stage(self.x))


def capture(stage, x, stream):
    assert isinstance(stream, Stream)
    graph = Replayed(stage, x)
    return graph, graph.y


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Stages this small are slower on several."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def eager(monkeypatch):
    for name, fake in {"Stream": Stream, "Event": Event, "stream": lambda stream: nullcontext()}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(blocks, "gpu", lambda ordinal: torch.device("cpu"))
    monkeypatch.setattr(blocks, "capture", capture)
    monkeypatch.setattr(blocks, "copies", lambda runtime, devices, nbytes: {"direct": Copy(1e-6, 1e-6)})


def test_a_case_of_blocks(eager):
    family = blocks.Blocks(Machine, SIZE, 6)
    by_hand = ("one", "naive", "events", "events-copies", "graphs")
    case = pipeline.Case(family, 50, by_hand.__contains__, budget=0.0, seconds=0.0)
    case.check(6)
    limit = case.measure((1, 5, 9))
    case.stream(limit)
    case.loops((1, 2, 4), limit)
    rows = case.rows
    assert [row["why"] for row in rows if row["case"] == "failed"] == []
    assert {row["way"] for row in rows if row["case"] == "pipeline"} == set(by_hand)
    # The CPU runs the same kernels every time.
    checks = [row for row in rows if row["case"] == "check"]
    assert len(checks) == 5 * (1 + 3) and all(row["error"] == 0 for row in checks)
    assert limit.stages == [1e-3 / max(3, int(5e-3 / (1e-3 / 50)))] * 2
    graphs = {row["s"]: row for row in rows if row["case"] == "loop" and row["way"] == "graphs"}
    assert set(graphs) == {1, 2, 4} and graphs[1]["peer"] in ("naive", "events")
    case.close()
    family.close()


def test_wrong_blocks_are_seen(eager):
    family = blocks.Blocks(Machine, SIZE, 6)
    way = dict(family.ways())["graphs"]()
    way.run(6)
    outputs = way.outputs()
    assert family.error(outputs) == 0 and family.same(outputs, family.wanted)
    assert family.error([*outputs[:4], outputs[5], outputs[4]]) > 10 * family.tolerance
    outputs[3][0, 0, 0] = float("nan")
    assert family.error(outputs) == float("inf") and not family.same(outputs, family.wanted)


def test_sizes_are_those_of_their_names():
    assert list(blocks.SIZES) == list(pipeline.STAGES)
    assert [size.nbytes for size in blocks.SIZES.values()] == [256 << 10, 512 << 10, 3 << 20, 4 << 20]


@pytest.mark.timeout(240)
def test_gpipe_over_gloo():
    """The installed torch still takes what gpipe.py gives it, and its outputs are those of one device."""
    found, why = gpipe.measure({50: tuple(SIZE)}, [1, 3], 0.0, 200.0, backend="gloo")
    assert why == ""
    assert [(case["stage_us"], case["m"], len(case["runs"])) for case in found] == [(50, 1, 3), (50, 3, 3)]
    assert all(case["error"] <= blocks.TOLERANCE for case in found)
    assert all(min(run) > 0 for case in found for run in case["runs"])
