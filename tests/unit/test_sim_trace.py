"""Traces of simulated devices: the same bits in every process, and JSON that Perfetto reads."""

import hashlib
import itertools
import json
import os
import subprocess
import sys

from pyxdev import trace
from pyxdev._native import HOST, Runtime
from pyxdev.backends import sim

MIB = 1 << 20


def program(seed=0, jitter=0.0):
    """Uploads, two stages with Python kernels and a staged link between them; returns the spans."""
    machine = {"device": {"count": 2}, "run": {"trace": True, "seed": seed, "jitter": jitter}}
    with Runtime(sim.driver(machine)) as runtime:
        host, source, target = (runtime.buffer(device, MIB) for device in (HOST, 0, 1))
        streams = [runtime.stream(device) for device in (0, 1)]
        ready, arrived, used = (runtime.event() for _ in range(3))
        link = runtime.link(0, 1, path="staged", tile_bytes=MIB // 4)
        for _ in range(3):
            streams[0].copy(source.address, host.address, MIB, dst_device=0, src_device=HOST)
            streams[0].launch(lambda: None, cost=2e-4, label="first")
            ready.record(streams[0])
            link.copy(target.address, source.address, MIB, source_ready=ready, dest_free=used, arrived=arrived)
            streams[0].wait(arrived)
            streams[1].wait(arrived)
            streams[1].launch(lambda: None, cost=3e-4, label="second")
            used.record(streams[1])
        runtime.driver.pass_time(1e-5)
        assert used.wait()
        spans = trace.spans(runtime.driver)
        for thing in (host, source, target, *streams, ready, arrived, used, link):
            thing.close()
    return spans


def digest(spans):
    return hashlib.sha256(json.dumps(spans).encode()).hexdigest()


def test_the_same_in_another_process():
    code = "import test_sim_trace as t; print(t.digest(t.program(5, 0.3)))"
    here = os.path.dirname(__file__)
    for hash_seed in ("1", "2"):
        environ = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join([here, *sys.path])}
        other = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
        assert other.stdout.strip() == digest(program(5, 0.3))
    assert digest(program(6, 0.3)) != digest(program(5, 0.3))


def test_rows_and_spans():
    spans = program()
    assert trace.rows(spans) == [
        "host",
        "device 0 compute",
        "device 0 in",
        "device 0 out",
        "device 1 compute",
        "device 1 in",
    ]
    by_operation = {span.operation: span for span in spans}
    seconds = [span for span in spans if span.label == "second"]
    assert [span.end - span.start for span in seconds] == [300_000] * 3
    for span in seconds:  # each waited for the last tile
        tile = by_operation[span.after]
        assert (tile.row, tile.nbytes) == ("device 1 in", MIB // 4)
        assert tile.end <= span.start
    for row in trace.rows(spans):  # an engine does one thing at a time
        mine = sorted((span.start, span.end) for span in spans if span.row == row)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(mine))


def test_chrome_json(tmp_path):
    spans = program()
    path = tmp_path / "trace.json"
    trace.write(path, spans)
    events = json.loads(path.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(spans)
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {names[event["pid"], event["tid"]] for event in slices} == set(trace.rows(spans))
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert begins
    assert all(begins[key]["ts"] <= ends[key]["ts"] for key in ends)


def test_off_by_default():
    with Runtime(sim.driver()) as runtime:
        stream = runtime.stream(0)
        stream.launch(lambda: None)
        assert stream.synchronize()
        assert trace.spans(runtime.driver) == []
        stream.close()
