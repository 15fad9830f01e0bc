"""bench/load.py runs as it stands on simulated devices, and its files hold what they say."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from vendor_child import FAKES, build_fakes, run  # noqa: E402

from bench import load as bench_load  # noqa: E402
from bench import load_files, load_tables  # noqa: E402
from pyxdev import backends  # noqa: E402
from pyxdev.loader.files import open_model  # noqa: E402


def test_the_files_hold_what_they_say(tmp_path: Path) -> None:
    for case in load_files.cases(1 << 20, 1 << 19, 100):
        paths = load_files.write(case, tmp_path)
        assert len(paths) == case.files
        with open_model(paths[0].parent if case.files > 1 else paths[0]) as model:
            wanted = dict(load_files.tensor_bytes(case))
            assert {tensor.name for tensor in model.tensors} == wanted.keys()
            for tensor, file in zip(model.tensors, model.file_of, strict=True):
                assert model.files[file].read(tensor.offset, tensor.nbytes) == wanted[tensor.name]


def test_a_wrong_byte_anywhere_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_load, "WINDOW", 10_000)
    given = argparse.Namespace(out=None, quick=True)
    with backends.open("sim", machine={"device": {"count": 2}}) as runtime:
        bench = bench_load.Bench(given, runtime, [0, 1])
        for case in load_files.cases(1 << 20, 1 << 17, 100)[::2]:
            paths = load_files.write(case, tmp_path)
            bench.check(case, paths)
            for path, back in ((paths[0], paths[0].stat().st_size - 20_000), (paths[-1], 1)):
                content = bytearray(path.read_bytes())
                content[-back] ^= 1
                path.write_bytes(content)
                with pytest.raises(SystemExit, match="is wrong"):
                    bench.check(case, paths)
                content[-back] ^= 1
                path.write_bytes(content)


def test_cold_is_cold(tmp_path: Path) -> None:
    path = Path("/var/tmp") / f"pyxdev-{tmp_path.name}"
    path.write_bytes(bytes(1 << 20))
    try:
        load_files.evict([path])
        assert load_files.held_share(path) < 0.02
        load_files.warm([path])
        assert load_files.held_share(path) > 0.98
    finally:
        path.unlink()


def test_it_runs_on_simulated_devices(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    flags = "--backend sim --quick --only many --conditions warm --counts 2 --loaders pyxdev".split()
    command = [sys.executable, ROOT / "bench" / "load.py", *flags, "--folder", tmp_path, "--out", out]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    loads = [row for row in rows if row["method"] == "pyxdev"]
    assert [(row["load"], row["case"].split(" (")[0]) for row in loads] == [
        (turn, case) for case in ("many", "many gguf") for turn in ("first", "second")
    ]
    for row in rows:
        assert row.keys() >= {"bench", "machine", "date", "commit", "case", "method", "figure", "ratio"}
        assert row["bench"] == "load" and row["figure"] > 0


def test_the_plain_loop_runs_over_the_stand_in(tmp_path: Path) -> None:
    build_fakes()
    path = tmp_path / "file"
    path.write_bytes(bytes((3 << 20) + 5))
    out = run(
        f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from bench.load_plain import MIB, Plain, Way, ways

plain = Plain([Path({str(path)!r})] * 2, [0, 1])
for way in (Way(3), Way(2, MIB // 2, 1, own_streams=True, wait="spin"), Way(1, wait="sync", upload=False)):
    assert plain.run(way, 1)["rate"] > 0
plain.close()
print(min(plain.opened.values()) >= 0, all(way.threads * way.depth * way.tile <= 64 * MIB for way in ways(2)))
""",
        FAKES,
        PYXDEV_FAKE_CUDA_DEVICES="2",
    )
    assert "True True" in out


def test_rows_become_tables() -> None:
    stamp = {"bench": "load", "machine": "1x Card", "date": "2026-01-02", "commit": "abc"}
    load = {**stamp, "case": "shards, warm", "unit": "GB/s", "limit_name": "upload", "limit": 50.0}
    rows = [
        {**load, "commit": "older", "method": "pyxdev", "load": "first", "figure": 10.0, "ratio": 0.2},
        {**load, "commit": "older", "method": "gone", "load": "first", "figure": 10.0, "ratio": 0.2},
        {**stamp, "case": "shards, warm", "method": "limit: upload", "figure": 50.0, "ratio": 1.0},
        {**load, "method": "pyxdev", "load": "first", "figure": 40.0, "ratio": 0.8},
        {**load, "method": "pyxdev", "load": "second", "figure": 45.0, "ratio": 0.9},
        {**load, "method": "plain loop: 8 threads", "load": "second", "figure": 1.0, "ratio": 0.1},
        {**stamp, "case": "shards, warm", "method": "other", "load": "first", "figure": None, "absent": "not here"},
        {**load, "method": "pyxdev", "load": "second", "figure": 45.0, "peer": "x", "peer_figure": 30.0, "ratio": 1.5},
    ]
    assert "\n".join(load_tables.tables(rows)).splitlines() == [
        "### 1x Card",
        "",
        "**shards, warm** (2026-01-02, commit abc): limits, GB/s: upload 50.0",
        "",
        "| loader | first load, GB/s | second load, GB/s | second, of the limit |",
        "| --- | --- | --- | --- |",
        "| pyxdev | 40.0 | 45.0 | 0.90 (upload) |",
        "| other | absent |  |  |",
        "| **best against x, second** | | | **1.50** |",
    ]
