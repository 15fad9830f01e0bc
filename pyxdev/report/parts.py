"""The parts of a report: each a command in a process of its own, so that one that fails, crashes or hangs is a line in
the report and not its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyxdev
from pyxdev import adapters
from pyxdev.demo.model import model_file
from pyxdev.errors import BackendUnavailable
from pyxdev.report.privacy import Privacy

END_SECONDS = 10.0
LOG_BYTES = 20_000  # of standard error, the last ones
COPY_BENCH = Path(pyxdev.__file__).resolve().parents[1] / "bench" / "copy.py"  # in a checkout


@dataclass(frozen=True)
class Part:
    """shows: for people. command: what Python is given. seconds: after which it is killed. answers: exit codes with
    which it has told what it found. reason: why it is left out, if it is. rows: where it writes them, instead of
    printing them."""

    name: str
    shows: str
    command: Sequence[str]
    seconds: float
    answers: tuple[int, ...] = (0, 1)
    reason: str = ""
    rows: str = ""


@dataclass
class Outcome:
    """state: "ran", "failed" or "left out". files: texts by name."""

    part: Part
    state: str
    why: str = ""
    code: int | None = None
    seconds: float = 0.0
    document: Any = None
    files: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        command = " ".join(["python", *self.part.command]).replace("python -m pyxdev ", "pyxdev ")
        told = {"part": self.part.name, "shows": self.part.shows, "state": self.state, "why": self.why}
        return told | {
            "command": command, "exit_code": self.code, "seconds": round(self.seconds, 1), "files": [*self.files],
        }  # fmt: skip


def first_part(target: Sequence[str]) -> Part:
    """The machine; what it tells decides which parts make sense."""
    shows = "processors, memory, links, versions of drivers and packages, settings"
    return Part("machine", shows, ("-m", "pyxdev.report.machine", *target), 120.0, answers=(0,))


def further_parts(target: Sequence[str], quick: bool, told: Any) -> list[Part]:
    """told: the document of the first part, None where it failed. Without it everything is tried."""
    found = told if isinstance(told, dict) else {}
    backend, count = found.get("backend", ""), len(found.get("devices", ()))
    level, scale = ("--quick", 1.0) if quick else ("--full", 5.0)
    measure = () if quick else ("--measure",)
    pyx = ("-m", "pyxdev")
    return [
        Part(
            "devices", "the devices; for each pair of them peer access, whether waits and direct copies work, rates",
            (*pyx, "devices", "--json", *measure, *target), 120.0 * scale, answers=(0,),
        ),
        Part(
            "validate", "the checks of copies and waits: PASS, FAIL, WAIVED or INCONCLUSIVE, with figures",
            (*pyx, "validate", "--json", level, *target), 300.0 * scale, answers=(0, 1, 3),
        ),
        Part(
            "load", "seconds and bytes of loading a made-up model, by threads and kind of upload, read back each time",
            ("-m", "pyxdev.report.loads", "--mib", "64" if quick else "1024", *target), 60.0 * scale, answers=(0,),
        ),
        Part(
            "pipeline", "tokens a second of a pipeline over more and more devices, and the bound",
            (*pyx, "bench", "pipeline", "--json", *(("--devices", "2") if quick and backend == "sim" else ()), *target),
            120.0 * scale, reason=without_model(backend) if backend != "sim" else "",
        ),
        Part(
            "copy", "copies of 4 KiB to 1 GiB between two devices beside the bare calls of the driver",
            (str(COPY_BENCH), "--backend", backend or "cuda", "--out", "{rows}"), 300.0, rows="copy.jsonl",
            reason=without_copy(backend, count, quick),
        ),
    ]  # fmt: skip


def without_model(backend: str) -> str:
    """Why the demo's model cannot run on GPUs here; empty if it can."""
    for package in ("torch", "gguf", "tokenizers"):
        if find_spec(package) is None:
            return f"it needs {package}, which is not installed"
    try:
        model_file()
    except BackendUnavailable as error:
        return str(error)
    try:
        torch = import_module("torch")
    except (ImportError, OSError) as error:
        return f"torch cannot be imported: {error}"
    built = adapters.torch_is_for(torch)
    return "" if backend in ("", built) else f"torch is built for {built}, the devices are of {backend}"


def without_copy(backend: str, count: int, quick: bool) -> str:
    if quick:
        return "it takes a minute; not with --quick"
    if backend == "sim":
        return "the figures of simulated devices are those of their profile"
    if not COPY_BENCH.exists():
        return "bench/copy.py is in a checkout of pyxdev only"
    return f"it needs two devices, there is {count}" if count == 1 else ""


def run(part: Part, privacy: Privacy) -> Outcome:
    """Raises nothing but what interrupts: a part that fails is an outcome."""
    if part.reason:
        return Outcome(part, "left out", part.reason)
    with tempfile.TemporaryDirectory(prefix="pyxdev-report-") as folder:
        rows = Path(folder, "rows")
        command = [sys.executable, *(str(rows) if one == "{rows}" else one for one in part.command)]
        with open(Path(folder, "out"), "w+b") as out, open(Path(folder, "err"), "w+b") as err:
            begin = time.monotonic()
            code = call(command, out, err, part.seconds)
            outcome = Outcome(part, "ran", code=code, seconds=time.monotonic() - begin)
            out.seek(0)
            err.seek(0)
            answer = rows.read_text() if part.rows and rows.exists() else out.read().decode(errors="replace")
            log = err.read()[-LOG_BYTES:].decode(errors="replace")
    judge(outcome, answer, log, privacy)
    return outcome


def call(command: Sequence[str], out: Any, err: Any, seconds: float) -> int | None:
    """The exit code; None where the time was over and the process and its children were killed."""
    environment = os.environ | {"COLUMNS": "120"}
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
    )
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            child.wait(END_SECONDS)


def judge(outcome: Outcome, answer: str, log: str, privacy: Privacy) -> None:
    """Fills in state, reason and files."""
    part, code = outcome.part, outcome.code
    said = [line for line in log.splitlines() if line.strip()]
    if code is None:
        why = f"no end after {part.seconds:g} s"
    elif code < 0:
        why = f"signal {signal.Signals(-code).name}"
    else:
        why = f"exit code {code}" if code not in part.answers else ""
    try:
        lines = [json.loads(line) for line in answer.splitlines() if line.strip()] if is_rows(answer) else []
        outcome.document = privacy.document(lines or json.loads(answer))
    except json.JSONDecodeError:
        why = why or (f"exit code {code}" if code else "what it printed is not JSON")
        if answer.strip():
            outcome.files[f"{part.name}.txt"] = privacy.text(answer[-LOG_BYTES:])
    else:
        if isinstance(outcome.document, list):
            outcome.files[f"{part.name}.jsonl"] = "".join(json.dumps(row) + "\n" for row in outcome.document)
        else:
            outcome.files[f"{part.name}.json"] = json.dumps(outcome.document, indent=1) + "\n"
    if said:
        outcome.files[f"{part.name}.log"] = privacy.text(log)
    if why:
        outcome.state = "failed"
        outcome.why = privacy.text(": ".join([why, *said[-1:]]))


def is_rows(text: str) -> bool:
    """Whether every line is a JSON object of its own, and there are several."""
    lines = [line for line in text.splitlines() if line.strip()]
    return len(lines) > 1 and all(line.startswith("{") and line.endswith("}") for line in lines)
