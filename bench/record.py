"""Rows of the benchmarks: JSON lines in bench/results, each with where, when and of what commit it was measured."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pyxdev._native import Runtime
from pyxdev.checks.sysfs import place

RESULTS = Path(__file__).parent / "results"


def commit() -> str:
    """The short hash of the checkout, "+" after it if files differ; PYXDEV_COMMIT where git cannot tell."""
    if "PYXDEV_COMMIT" in os.environ:
        return os.environ["PYXDEV_COMMIT"]
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


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
