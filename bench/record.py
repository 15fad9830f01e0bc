"""Rows of the benchmarks: JSON lines in bench/results, each with where, when and of what commit it was measured."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pyxdev._native import Runtime
from pyxdev.checks.sysfs import place
from pyxdev.cli import report

RESULTS = Path(__file__).parent / "results"


def commit() -> str:
    """The short hash of the checkout, "+" after it if files differ; PYXDEV_COMMIT where git cannot tell."""
    if "PYXDEV_COMMIT" in os.environ:
        return os.environ["PYXDEV_COMMIT"]
    return report.commit() or "unknown"


def machine(runtime: Runtime) -> str:
    """ "2x NVIDIA H200, gen5 x16, 32 CPUs"."""
    infos = [runtime.device_info(device) for device in range(runtime.device_count)]
    names = sorted({info.name for info in infos})
    link = place(infos[0].pci).link
    parts = [f"{len(infos)}x {', '.join(names)}", link, f"{os.cpu_count()} CPUs" if runtime.backend != "sim" else ""]
    return ", ".join(part for part in parts if part)


def stamp(bench: str, machine: str) -> dict[str, Any]:
    """What every row of a run begins with."""
    return {"bench": bench, "machine": machine, "date": datetime.date.today().isoformat(), "commit": commit()}


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def last_run(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that came with its last line: one machine, date and commit."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if all(row[key] == rows[-1][key] for key in ("machine", "date", "commit"))]


def insert(page: Path, mark: str, lines: Iterable[str]) -> None:
    """Puts lines between the two marks of a page."""
    parts = page.read_text().split(mark)
    if len(parts) != 3:
        raise SystemExit(f"{page} has {len(parts) - 1} lines {mark}, not two")
    page.write_text(mark.join([parts[0], "\n" + "\n".join(lines) + "\n", parts[2]]))
