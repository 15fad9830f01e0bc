"""The seed's tables, replayed: what was published, and how near the Executor comes to the ideal schedule."""

import json

import pytest

from pyxdev import cli
from pyxdev.cli import replay
from pyxdev.cli.replay import Workload, ideal, serial

# Tokens/s at 16 microbatches by devices: the seed's author's figures.
BLOCKING = {2: 890.38, 4: 639.35, 6: 583.18, 8: 549.62, 10: 577.47}
SEED = {2: 907.38, 4: 1409.88, 6: 1799.02, 8: 2223.13, 10: 2465.36}


def test_layers_are_split_as_evenly_as_they_divide():
    work = Workload()
    for devices in range(1, 37):
        layers = work.split(devices)
        assert sum(layers) == 36
        assert max(layers) - min(layers) <= 1


def test_the_ideal_schedule_is_the_known_bound_where_stages_are_equal():
    work = Workload(layers=8, per_earlier=0.0)
    for devices in (1, 2, 4, 8):
        for microbatches in (1, 3, 16):
            bound = microbatches * devices / (microbatches + devices - 1)
            assert serial(work, microbatches) / ideal(work, devices, microbatches) == pytest.approx(bound)


@pytest.mark.parametrize("devices", [2, 6, 10])
def test_the_old_ways_give_the_published_figures_and_pyxdev_the_ideal_schedule(devices):
    rows = {row.mode: row for row in replay.replay("mi50x10", Workload(), [devices], [16], list(replay.MODES))}
    assert rows["blocking"].tokens_per_s == pytest.approx(BLOCKING[devices], rel=0.10)
    assert rows["seed"].tokens_per_s == pytest.approx(SEED[devices], rel=0.15)
    assert rows["pyxdev"].speedup >= 0.95 * rows["pyxdev"].bound
    assert all(row.speedup <= row.bound for row in rows.values())


def test_the_same_run_takes_the_same_simulated_time():
    work = Workload(layers=4, activation=1 << 12)
    runs = [replay.replay("mi50x10", work, [4], [5], list(replay.MODES)) for _ in range(2)]
    assert runs[0] == runs[1]


def test_the_submitting_thread_becomes_the_limit():
    """Short stages on many devices: the ideal schedule is out of reach for one thread."""
    reached = {}
    for seconds in (1e-3, 1e-4):
        work = Workload(layers=32, activation=1 << 12, first=seconds * 32, per_earlier=0.0)
        [row] = replay.replay({"profile": "mi50x10", "device": {"count": 32}}, work, [32], [64], ["pyxdev"])
        reached[seconds] = row.speedup / row.bound
    assert reached[1e-3] > 0.7
    assert reached[1e-4] < 0.5 * reached[1e-3]


def test_the_command_prints_one_object_a_line(capsys):
    arguments = "bench pipeline --backend sim --devices 2 --microbatches 1,2 --mode seed,pyxdev --json"
    assert cli.main(arguments.split()) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["mode"], line["microbatches"]) for line in lines] == [
        ("seed", 1), ("pyxdev", 1), ("seed", 2), ("pyxdev", 2)
    ]  # fmt: skip
    assert all(set(line) == {"devices", "microbatches", "mode", "tokens_per_s", "speedup", "bound"} for line in lines)


def test_the_command_writes_a_trace_and_pictures(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need the extra [plot]")
    trace, picture = tmp_path / "trace.json", tmp_path / "rates.png"
    arguments = f"bench pipeline --backend sim --devices 2 --microbatches 2 --trace {trace} --plot {picture}"
    assert cli.main(arguments.split()) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    rows = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    assert {"device 0 compute", "device 1 compute", "device 0 out", "device 1 in"} <= rows
    for path in (picture, tmp_path / "rates-timeline.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--mode fast", "'fast'"),
        ("--devices 11 --profile mi50x10", "mi50x10 has 10"),
        ("--devices 0", "0"),
        ("--profile nothing", "nothing"),
    ],
)
def test_what_cannot_be_run_is_refused(flags, said, capsys):
    with pytest.raises(SystemExit) if "mode" in flags or "devices 0" in flags else pytest.MonkeyPatch.context():
        assert cli.main(f"bench pipeline --backend sim {flags}".split()) == 2
    assert said in capsys.readouterr().err
