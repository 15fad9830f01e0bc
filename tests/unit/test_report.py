"""pyxdev report: one archive, nothing personal in it, and a part that fails is a line of it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from vendor_child import FAKES, ROCM, build_fakes
from vendor_child import run as run_child

from pyxdev import cli
from pyxdev.cli import report as command
from pyxdev.report import machine, parts
from pyxdev.report.parts import Part
from pyxdev.report.privacy import Privacy

KFD = "sys/class/kfd/kfd/topology/nodes"
USER, HOST, HOME = "zaphod", "heartofgold", "/home/zaphod"
SOMEBODY = Privacy((USER,), (f"{HOST}.example.org", HOST), ((HOME, "~"), ("/srv/checkout", "[pyxdev]")))


def say(text: str, *, code: int = 0, out: str = "{}", end: str = "") -> tuple[str, ...]:
    """A command that prints `out`, writes `text` to standard error and ends so."""
    lines = [
        "import os, sys",
        f"print({out!r}, flush=True)",
        f"print({text!r}, file=sys.stderr)",
        end,
        f"sys.exit({code})",
    ]
    return "-c", "\n".join(lines)


def part(*said: str, **options: Any) -> Part:
    return Part("part", "something", said, 20.0, **options)


# ---- the archive ----


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, str]]:
    """(exit code, files) of a quick report on simulated devices, by somebody at home."""
    home = tmp_path_factory.mktemp("zaphod")
    path = home / "report.zip"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("HOME", str(home)), ("LOGNAME", USER), ("USER", USER), ("HOSTNAME", HOST)):
            patch.setenv(name, value)
        patch.setenv("PYXDEV_HOST_STAGE", "1")
        patch.setenv("SECRET_TOKEN", "sesame")
        patch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6")
        patch.setattr(socket, "gethostname", lambda: HOST)
        code = cli.main(["report", "--quick", "--profile", "h200x2", "--out", str(path)])
    return code, unpacked(path)


def unpacked(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as packed:
        return {name: packed.read(name).decode() for name in packed.namelist()}


def test_a_report_of_simulated_devices(made: Any) -> None:
    code, files = made
    assert code == 0
    manifest = json.loads(files["manifest.json"])
    states = {one["part"]: one["state"] for one in manifest["parts"]}
    assert states == {
        "machine": "ran", "devices": "ran", "validate": "ran", "load": "ran", "pipeline": "ran", "copy": "left out",
    }  # fmt: skip
    named = {name for one in manifest["parts"] for name in one["files"]}
    assert {*files} == named | {"README.md", "manifest.json"}
    for name in named:
        assert name in files["README.md"]
    assert (manifest["quick"], manifest["commit"]) == (True, command.commit())
    commands = {one["part"]: one["command"] for one in manifest["parts"]}
    assert commands["validate"] == "pyxdev validate --json --quick --profile h200x2"


def test_what_the_parts_tell(made: Any) -> None:
    files = {name: json.loads(text) for name, text in made[1].items() if name.endswith(".json")}
    told = files["machine.json"]
    assert told["backend"] == "sim" and len(told["devices"]) == 2
    assert told["settings"]["host_stage"] == "1" and told["variables"] == {"PYXDEV_HOST_STAGE": "1"}
    assert told["packages"]["numpy"] and told["system"]["kernel"] == os.uname().release
    assert {pair["path"] for pair in files["devices.json"]["pairs"]} == {"staged"}
    assert len(files["validate.json"]["checks"]) > 20
    loads = files["load.json"]["loads"]
    assert {(one["threads"], one["async_uploads"]) for one in loads} == {
        (1, False), (4, False), (4, True), (8, False), (8, True),
    }  # fmt: skip
    assert all(one["bytes"] == 64 << 20 and one["seconds"] > 0 for one in loads)
    rows = [json.loads(line) for line in made[1]["pipeline.jsonl"].splitlines()]
    assert {row["mode"] for row in rows} == {"blocking", "seed", "pyxdev"}


def test_nothing_in_it_is_personal(made: Any) -> None:
    root = Path(__file__).resolve().parents[2]
    private = [USER, HOST, str(root), "sesame", "SECRET_TOKEN", "8932f937", "/root", os.environ.get("HOME", "/root")]
    for name, text in made[1].items():
        for one in private:
            assert one not in text, (name, one)
        assert '"uuid"' not in text and "SIM-0" not in text, name
        assert not re.search(rf"(?<![A-Za-z0-9]){re.escape(os.uname().nodename)}(?![A-Za-z0-9])", text), name


def test_a_part_that_crashes_is_in_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def further(*_: Any) -> list[Part]:
        crash = part(*say(f"near {HOME}/x on {HOST}", end=f"os.kill(os.getpid(), {signal.SIGSEGV:d})"))
        return [crash, Part("after", "goes on", say("", out='{"a": 1}'), 20.0)]

    monkeypatch.setattr(parts, "further_parts", further)
    monkeypatch.setattr(Privacy, "of_this_machine", lambda: SOMEBODY)
    path = tmp_path / "x.zip"
    assert cli.main(["report", "--backend", "sim", "--json", "--out", str(path)]) == 1
    files = unpacked(path)
    first, crashed, after = json.loads(files["manifest.json"])["parts"]
    assert (first["state"], crashed["state"], after["state"]) == ("ran", "failed", "ran")
    assert crashed["exit_code"] == -signal.SIGSEGV
    assert crashed["why"] == "signal SIGSEGV: near ~/x on [host]"
    assert json.loads(files["after.json"]) == {"a": 1}
    assert "part.log" in files and "SIGSEGV" in files["README.md"]
    answer = json.loads(capsys.readouterr().out)
    assert answer["archive"] == str(path) and len(answer["parts"]) == 3


def test_without_a_machine_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU: what needs one fails by itself, and says so."""
    monkeypatch.setattr(parts, "COPY_BENCH", Path("/nowhere"))
    monkeypatch.setenv("PYXDEV_HIP_LIBRARY", "/nowhere/libamdhip64.so")
    path = tmp_path / "x.zip"
    assert cli.main(["report", "--quick", "--backend", "hip", "--out", str(path)]) == 1
    files = unpacked(path)
    told = {one["part"]: one for one in json.loads(files["manifest.json"])["parts"]}
    assert told["devices"]["state"] == told["validate"]["state"] == told["load"]["state"] == "failed"
    assert "BackendUnavailable" in json.loads(files["machine.json"])["error"]
    assert "/nowhere/libamdhip64.so" in told["devices"]["why"]


def test_an_archive_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there.zip").write_text("precious")
    for path, why in ((tmp_path / "there.zip", "File exists"), (tmp_path / "no" / "x.zip", "No such file")):
        assert cli.main(["report", "--backend", "sim", "--out", str(path)]) == 2
        assert why in capsys.readouterr().err
    assert (tmp_path / "there.zip").read_text() == "precious"


def test_the_commit_is_that_of_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = command.commit()
    assert told == "" or re.fullmatch(r"[0-9a-f]{7,40}\+?", told)
    monkeypatch.setattr(command, "__file__", str(tmp_path / "pyxdev" / "cli" / "report.py"))
    assert command.commit() == ""


def test_an_interrupted_report_leaves_no_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "collect", interrupt)
    assert cli.main(["report", "--backend", "sim", "--out", str(tmp_path / "x.zip")]) == cli.INTERRUPTED
    assert not [*tmp_path.iterdir()]


# ---- one part ----


@pytest.mark.parametrize(
    ("one", "state", "why", "files"),
    [
        (part(*say("", out='{"a": 1}')), "ran", "", {"part.json"}),
        (part(*say("a warning", out='{"a": 1}\n{"a": 2}')), "ran", "", {"part.jsonl", "part.log"}),
        (part(*say("", out='{"a": 1}', code=1)), "ran", "", {"part.json"}),
        (part(*say("no device", out="", code=2)), "failed", "exit code 2: no device", {"part.log"}),
        (part(*say("", out='{"a": 1', code=0)), "failed", "what it printed is not JSON", {"part.txt"}),
        (part(*say("Error: no", out="", code=1)), "failed", "exit code 1: Error: no", {"part.log"}),
        (part(reason="no second device"), "left out", "no second device", set()),
    ],
)
def test_what_a_part_comes_to(one: Part, state: str, why: str, files: set[str]) -> None:
    outcome = parts.run(one, SOMEBODY)
    assert (outcome.state, outcome.why, {*outcome.files}) == (state, why, files)


def ended(stat: Path) -> bool:
    """Whether a process that was killed is gone; it may take its time on a busy machine."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            if stat.read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def test_a_part_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "child.wait()"
    )
    outcome = parts.run(Part("part", "hangs", ("-c", code), 3.0), SOMEBODY)
    assert (outcome.state, outcome.why, outcome.code) == ("failed", "no end after 3 s", None)
    assert ended(Path("/proc", pid.read_text(), "stat"))


def test_rows_come_from_the_file_that_was_asked_for() -> None:
    code = "import sys; print('a table'); open(sys.argv[1], 'w').write('{\"a\": 1}\\n{\"a\": 2}\\n')"
    outcome = parts.run(part("-c", code, "{rows}", rows="copy.jsonl"), SOMEBODY)
    assert (outcome.state, outcome.document) == ("ran", [{"a": 1}, {"a": 2}])


def test_parts_that_make_no_sense_here_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def reasons(told: Any, quick: bool = False) -> dict[str, str]:
        return {one.name: one.reason for one in parts.further_parts([], quick, told)}

    one, two = ({"backend": "hip", "devices": [{}] * count} for count in (1, 2))
    assert "two devices" in reasons(one)["copy"] and not reasons(two)["copy"]
    assert "--quick" in reasons(two, quick=True)["copy"]
    assert "profile" in reasons({"backend": "sim", "devices": [{}] * 4})["copy"]
    monkeypatch.setattr(parts, "COPY_BENCH", Path("/nowhere/copy.py"))
    assert "checkout" in reasons(two)["copy"]
    monkeypatch.setattr(parts, "find_spec", lambda name: None)
    assert reasons(two)["pipeline"] == "it needs torch, which is not installed"
    assert reasons({"backend": "sim", "devices": []})["pipeline"] == ""


def test_torch_of_another_vendor_runs_no_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="which build it is is the question")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    assert parts.without_model("hip") == "torch is built for cuda, the devices are of hip"
    assert parts.without_model("cuda") == ""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(parts, "find_spec", lambda name: True)
    assert parts.without_model("cuda").startswith("torch cannot be imported: ")


# ---- privacy ----


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("/home/zaphod/x.py and /home/zaphod", "~/x.py and ~"),
        ("/home/zaphodium", "/home/zaphodium"),
        ("/srv/checkout/pyxdev/a.py", "[pyxdev]/pyxdev/a.py"),
        ("zaphod@heartofgold: no", "[user]@[host]: no"),
        ("HeartOfGold.example.org said", "[host] said"),
        ("device GPU-8932f937 or MIG-12ab-cd", "device [uuid] or [uuid]"),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "[uuid]"),
        ("boot 6ba7b810-9dad-11d1-80b4-00c04fd430c8.", "boot [uuid]."),
        ("peer 192.168.0.17:80 at 00:1b:44:11:3a:b7", "peer [address]:80 at [address]"),
        ("fe80::1ff:fe23:4567:890a and 2001:db8:0:0:1:0:0:1", "[address] and [address]"),
        ("0000:3b:00.0 at 18:06:41", "0000:3b:00.0 at 18:06:41"),
        ("GPU-accelerated, x::y, 1.2.3", "GPU-accelerated, x::y, 1.2.3"),
        ("/opt/rocm/lib/libamdhip64.so is HIP 7.15", "/opt/rocm/lib/libamdhip64.so is HIP 7.15"),
    ],
)
def test_what_is_taken_out_of_texts(given: str, wanted: str) -> None:
    assert SOMEBODY.text(given) == wanted


def test_what_is_taken_out_of_documents() -> None:
    given = {"uuid": "x", "devices": [{"uuid": "y", "pci": "0000:3b:00.0", "at": HOME}], "packages": {"a": "12.9.10.1"}}
    assert SOMEBODY.document(given) == {
        "devices": [{"pci": "0000:3b:00.0", "at": "~"}],
        "packages": {"a": "12.9.10.1"},
    }


def test_names_come_from_the_machine() -> None:
    found = Privacy.of_this_machine({"HOME": "/home/ford/", "LOGNAME": "ford", "HOSTNAME": "betelgeuse.example.org"})
    assert "ford" in found.users and {"betelgeuse", "betelgeuse.example.org"} <= {*found.hosts}
    assert found.text(f"/home/ford/a {sys.prefix}/lib {os.getcwd()}") == "~/a [python]/lib [pyxdev]"
    assert not {*found.users} & {"root", "hip"}


# ---- the machine ----


@pytest.mark.parametrize(("backend", "runtime"), [("hip", "HIP 7.15"), ("cuda", "CUDA ")])
def test_the_machine_with_gpus(backend: str, runtime: str) -> None:
    """Over the stand-ins for the vendors' libraries."""
    build_fakes()
    asked = ["-m", "pyxdev.report.machine", "--backend", backend]
    told = run_child(
        f"import runpy; sys.argv = {asked[1:]!r}; runpy.run_module({asked[1]!r}, run_name='__main__')", FAKES, ROCM
    )
    found = json.loads(told)
    assert "error" not in found, found
    assert found["backend"] == backend and found["runtime"].startswith(runtime)
    assert [one["pci"] for one in found["devices"]] == ["0000:a0:00.0", "0000:a1:00.0"]
    assert found["settings"]["async_uploads"] == str(backend == "cuda")


def test_what_the_kernel_tells(tmp_path: Path) -> None:
    """As on a machine with two AMD GPUs behind one switch."""
    texts = {
        "etc/os-release": 'NAME=x\nPRETTY_NAME="Some Linux 1"\n',
        "proc/cpuinfo": "processor : 0\nmodel name\t: CPU 9000\nprocessor : 1\nmodel name\t: CPU 9000\n",
        "proc/meminfo": "MemTotal:       1000 kB\n",
        "sys/devices/system/node/node0/cpulist": "0-1\n",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:  500 kB\n",
        f"{KFD}/1/io_links/0/properties": "type 11\nnode_from 1\nnode_to 2\nmax_bandwidth 64000\n",
        f"{KFD}/1/io_links/1/properties": "type 2\nnode_from 1\nnode_to 0\n",
        f"{KFD}/1/properties": "unique_id 1234567890\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine.system(tmp_path) == "Some Linux 1"
    assert machine.processors(tmp_path)["model"] == "CPU 9000"
    assert machine.memory(tmp_path / "proc/meminfo", "MemTotal") == 1000 * 1024
    assert machine.numa(tmp_path) == {"0": {"cpus": "0-1", "memory": 500 * 1024}}
    assert machine.xgmi(tmp_path) == [{"from": 1, "to": 2, "max_mb_s": 64000}]
    devices = tmp_path / "sys/bus/pci/devices"
    devices.mkdir(parents=True)
    (devices / "0000:03:00.0").symlink_to("../../../devices/pci0000:00/0000:00:01.0/0000:02:00.0/0000:03:00.0")
    assert machine.bridges("0000:03:00.0", tmp_path) == ["0000:00:01.0", "0000:02:00.0"]
    assert machine.bridges("", tmp_path) == machine.bridges("0000:04:00.0", tmp_path) == []
    assert machine.xgmi(tmp_path / "nowhere") == [] and machine.numa(tmp_path / "nowhere") == {}
