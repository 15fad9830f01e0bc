"""pyxdev load: dry runs, verdicts as exit codes, what is printed, and Ctrl-C from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import model_files as mf
import numpy as np
import pytest
from io_faults import Faults
from test_headers import GGUF_REFUSED, SAFETENSORS_REFUSED

from pyxdev import cli
from pyxdev.loader.report import DeviceReport, Report

LAYERS = [(f"layers.{n}.w", "F32", (6, 8), np.full(48, n, np.float32).tobytes()) for n in range(4)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(mf.packed(LAYERS))
    return path


def run(*arguments: object) -> int:
    return cli.main(["load", "--backend", "sim", *map(str, arguments)])


def test_a_dry_run_says_who_gets_what(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--dry-run", "--json", "--devices", "3,1", "-ts", "1,3", model) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True and found["format"] == "safetensors" and found["files"] == [str(model)]
    assert found["tensors"] == [
        {"name": f"layers.{n}.w", "dtype": "F32", "shape": [6, 8], "bytes": 192, "device": 1 if n else 3}
        for n in range(4)
    ]
    assert [(one["device"], one["tensors"], one["bytes"], one["fits"]) for one in found["devices"]] == [
        (3, 1, 256, True),
        (1, 3, 768, True),
    ]


def test_a_dry_run_by_rows(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--dry-run", "--json", "--devices", "3", "-sm", "row", "-ts", "1,0,2", model) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["device"] for one in found["tensors"]] == [[0, 2]] * 4


def test_a_dry_run_as_a_table(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--dry-run", "--devices", "2", model) == 0
    out = capsys.readouterr().out
    assert "layers.3.w" in out and "6 x 8" in out and "192" in out and "yes" in out


def test_what_does_not_fit_is_told_by_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.safetensors"
    model.write_bytes(mf.packed([(f"layers.{n}.w", "U8", (3000,), bytes(3000)) for n in range(2)]))
    profile = tmp_path / "small.toml"
    profile.write_text("[device]\ncount = 2\nmemory_gib = 2e-6\n")
    assert run("--profile", profile, "--dry-run", "--json", model) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False and [one["fits"] for one in found["devices"]] == [False, False]
    assert run("--profile", profile, model) == 2
    assert "bytes wanted" in capsys.readouterr().err


@pytest.mark.parametrize(
    "mode", [["--dry-run", "--json"], ["--json", "-tl", "1"], ["--json", "-tl", "8", "--direct-io", "on"]]
)
def test_the_verdict_is_the_same_in_every_mode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: list[str]
) -> None:
    damaged = {".safetensors": SAFETENSORS_REFUSED, ".gguf": GGUF_REFUSED}
    for suffix, cases in damaged.items():
        for name, (content, words) in cases.items():
            path = tmp_path / f"model{suffix}"
            path.write_bytes(content)
            if content[:4] == b"GGUF" and suffix == ".safetensors":
                continue  # read by what it is, not by its name
            assert run(*mode, path) == 2, name
            captured = capsys.readouterr()
            assert captured.out == "" and captured.err.count("\n") == 1
            assert str(path) in captured.err
            assert all(word in captured.err for word in words), name


def test_a_name_with_control_characters_reaches_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\0b/../\u202e\x1b[31m"
    path = tmp_path / "model.safetensors"
    path.write_bytes(mf.packed([(name, "U8", (1,), b"x")]))
    assert run("--dry-run", path) == 0
    out = capsys.readouterr().out
    assert not any(character in out for character in "\0\u202e\x1b") and "u202e" in out
    assert run("--dry-run", "--json", path) == 0
    out = capsys.readouterr().out
    assert out.rstrip("\n").isprintable() and json.loads(out)["tensors"][0]["name"] == name


def test_a_load_is_verified_and_reported(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json", "--verify", "--devices", "2", model) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verified"] is True and found["bytes"] == 768 and found["tensors"] == 4
    assert found["seconds"] >= found["setup"] > 0 and found["limit"]
    assert run("--verify", "--devices", "2", model) == 0
    out = capsys.readouterr().out
    assert "limited by" in out and "as it was read" in out and "GB/s" in out


def test_what_limited_a_load() -> None:
    def limit(**changed: float) -> str:
        values = {"seconds": 1.0, "setup": 0.0, "reading": 1.0, "waiting": 0.0, "direct": 0} | changed
        device = DeviceReport(0, 100, int(values.pop("direct")), 0.0, 1.0)
        return Report(tensors=1, threads=2, pinned=1, async_uploads=True, devices=(device,), **values).limit

    assert limit() == "copies out of the page cache by 2 threads"
    assert limit(setup=0.6).startswith("set-up")
    assert limit(waiting=2.0).startswith("the devices")
    assert limit(direct=80) == "the disk: direct reads"
    assert [DeviceReport(0, n, d, 0.0, 1.0).source for n, d in ((0, 0), (4, 0), (4, 4), (4, 1))] == [
        "",
        "warm",
        "cold",
        "25% cold",
    ]


CHILD = """
import functools, signal, sys, threading, time
sys.path.insert(0, {folder!r})
from io_faults import Faults
from pyxdev import backends
from pyxdev._native import Reader
from pyxdev.loader import loader
faults = Faults()
faults.arm(nap=20_000)
loader.Reader, loader.TILE_BYTES = functools.partial(Reader, calls=faults.address), 4096
with backends.open("sim") as runtime:
    for times in (1, 2):
        print("loading", flush=True)
        try:
            loader.load({path!r}, runtime=runtime, threads=2)
        except KeyboardInterrupt:
            pass
        else:
            sys.exit("was not interrupted")
        print("interrupted", threading.active_count(), runtime.live().any(), flush=True)
    faults.arm()
    loader.load({path!r}, runtime=runtime).close()
    print("loaded", flush=True)
"""


def test_ctrl_c_from_outside(tmp_path: Path) -> None:
    """Once, then twice in a row: the load ends within a second, no thread is left, the next load works."""
    Faults()  # built before the child needs it
    path = tmp_path / "model.safetensors"
    path.write_bytes(mf.packed([("w", "U8", (2 << 20,), bytes(2 << 20))]))
    code = CHILD.format(folder=str(Path(__file__).parent), path=str(path))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout and child.stderr
    for signals in (1, 2):
        assert child.stdout.readline() == "loading\n", child.stderr.read()
        time.sleep(0.3)  # it takes ten seconds if nobody interrupts it
        begin = time.monotonic()
        for _ in range(signals):
            os.kill(child.pid, signal.SIGINT)
        assert child.stdout.readline() == "interrupted 1 False\n", child.stderr.read()
        assert time.monotonic() - begin < 5
    assert child.stdout.readline() == "loaded\n"
    assert child.wait(30) == 0, child.stderr.read()
    child.stdout.close()
    child.stderr.close()
