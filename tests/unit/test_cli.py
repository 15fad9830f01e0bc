"""The command `pyxdev`: what it prints where, and its exit codes."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pyxdev import cli
from pyxdev.cli import devices, machine


@pytest.fixture(autouse=True)
def keep_logging() -> Iterator[None]:
    """main() configures the root logger once in a process; here there are many calls of it."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tensors = {f"layers.{n}.weight": np.full((4, 25), n, np.float32) for n in range(6)}
    path = tmp_path / "six.safetensors"
    save_file(tensors, path)
    return path


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of an error: exit code 2, nothing on standard output."""
    try:
        code = cli.main(arguments)
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("pyxdev")
    return captured.err


def answer(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """The one JSON object on standard output."""
    assert cli.main(arguments) == 0
    return json.loads(capsys.readouterr().out)


def test_devices_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["devices", "--json", "--backend", "sim"], capsys)
    assert found["backend"] == "sim"
    assert [device["device"] for device in found["devices"]] == [0, 1, 2, 3]
    assert all(device["memory"] > 0 for device in found["devices"])
    assert [(pair["src"], pair["dst"]) for pair in found["pairs"]] == [
        (src, dst) for src in range(4) for dst in range(4) if src != dst
    ]
    assert {(pair["peer"], pair["verdict"], pair["path"]) for pair in found["pairs"]} == {("yes", "verified", "direct")}


def test_devices_without_peer_access(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    profile = tmp_path / "apart.toml"
    profile.write_text('[device]\ncount = 2\n[peer]\ngroups = "none"\n')
    arguments = ["devices", "--json", "--profile", str(profile)]
    assert {pair["path"] for pair in answer(arguments, capsys)["pairs"]} == {"staged"}
    refusals = answer([*arguments, "-hs", "0"], capsys)["pairs"]
    assert {pair["path"] for pair in refusals} == {"refused"}
    assert "no peer access" in refusals[0]["why"]


def test_tables_are_for_people(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    assert cli.main(["devices", "--backend", "sim"]) == 0
    assert "Simulated device" in capsys.readouterr().out
    assert cli.main(["load", "--backend", "sim", "--devices", "2", str(model)]) == 0
    assert "6 tensors" in capsys.readouterr().out


def test_load_as_json(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    loaded = answer(["load", "--json", "--backend", "sim", "--devices", "3", "-ts", "1,2,3", str(model)], capsys)
    assert [device["bytes"] for device in loaded["devices"]] == [400, 800, 1200]
    assert loaded["tensors"] == 6


def test_load_on_chosen_devices(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    loaded = answer(["load", "--json", "--backend", "sim", "--devices", "3,1", str(model)], capsys)
    assert [(device["device"], device["bytes"]) for device in loaded["devices"]] == [(3, 1200), (1, 1200)]


def test_simulated_devices_are_as_many_as_are_asked_for(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    loaded = answer(["load", "--json", "--backend", "sim", "--devices", "6", str(model)], capsys)
    assert [device["bytes"] for device in loaded["devices"]] == [400] * 6


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["load", "--backend", "sim", "no/such.gguf"], "no/such.gguf: no such file"),
        (["load", "--profile", "default", "--devices", "5", "x"], "5 devices are asked for; there are 4"),
        (["load", "--profile", "default", "--devices", "7,1", "x"], "device 7 is asked for"),
        (["load", "--devices", "1,1", "x"], "names a device twice"),
        (["load", "--devices", "0", "x"], "'0' is not a whole number from 1 up"),
        (["load", "-ts", "a,b", "x"], "'a,b' is not a list of numbers"),
        (["devices", "--backend", "tpu"], "flag --backend is 'tpu'; allowed: auto, cuda, hip or sim"),
        (["devices", "--backend", "sim", "-hs", "2"], "flag --host-stage is '2'"),
        (["devices", "--profile", "nothing"], "profile is 'nothing'"),
        (["devices", "--backend", "hip"], "HIP"),
        (["fly"], "invalid choice: 'fly'"),
        ([], "COMMAND"),
    ],
)  # fmt: skip
def test_errors_are_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert text in refused(arguments, capsys)


def test_a_flag_beats_the_variable(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYXDEV_HOST_STAGE", "1")
    monkeypatch.setenv("PYXDEV_BACKEND", "sim")
    assert {pair["path"] for pair in answer(["devices", "--json"], capsys)["pairs"]} == {"staged"}
    assert {pair["path"] for pair in answer(["devices", "--json", "-hs", "0"], capsys)["pairs"]} == {"direct"}
    monkeypatch.setenv("PYXDEV_HOST_STAGE", "no")
    assert "variable PYXDEV_HOST_STAGE is 'no'" in refused(["devices"], capsys)


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(machine, "open_runtime", interrupted)
    assert cli.main(["devices", "--backend", "sim"]) == 130


def test_mistakes_of_ours_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_device", None)
    with pytest.raises(TypeError):
        cli.main(["devices", "--backend", "sim"])


def test_python_m_pyxdev() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pyxdev", "-v", "devices", "--json", "--backend", "sim"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert json.loads(done.stdout)["backend"] == "sim"
    assert "copies from device 0 to device 1: direct" in done.stderr


def test_devices_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What was found out about each pair, and a path that depends on the size."""
    profile = tmp_path / "narrow.toml"
    profile.write_text('[device]\ncount = 2\n[peer]\ngb_s = 5\n[[fault]]\nkind = "drop"\nfrom = 1\nto = 0\n')
    arguments = ["devices", "--measure", "--profile", str(profile)]
    there, back = answer([*arguments, "--json"], capsys)["pairs"]
    assert (there["path"], there["direct_to"], there["verdict"], there["waits"]) == (
        "by_size", 262144, "verified", "work",
    )  # fmt: skip
    assert [speed["nbytes"] for speed in there["speeds"]] == [4096, 65536, 1048576]
    assert (back["path"], back["verdict"]) == ("staged", "wrong data")
    assert cli.main(arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "262144" in shown
    assert "wrong data" in shown
