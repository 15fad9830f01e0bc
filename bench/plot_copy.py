"""Draws bench/results/copy.jsonl: size against GB/s in the last run, and puts its table into a page.

python bench/plot_copy.py docs/copies.png docs/copies.md
"""

from __future__ import annotations

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # here, copy.py would hide Python's copy

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bench import copy, record

LINES = {  # case, method: label, style
    ("direct", "cuMemcpyPeerAsync"): ("bare direct copy", "k:"),
    ("direct", "pyxdev"): ("pyxdev, direct", "C0-o"),
    ("direct", "torch"): ("torch copy_", "C2--"),
    ("staged", "pyxdev"): ("pyxdev, staged", "C1-o"),
    ("staged", "driver"): ("the driver's staging", "C3--"),
}


COLUMNS = [("staged", "pyxdev"), ("staged", "driver"), ("direct", "cuMemcpyPeerAsync"), ("direct", "pyxdev"),
           ("direct", "torch"), ("direct", "cupy")]  # fmt: skip
MARK = "<!-- copy.jsonl -->"


def draw(rows: list[dict[str, Any]], leg: float, path: str) -> None:
    figure, axes = plt.subplots(figsize=(8, 5))
    for (case, method), (label, style) in LINES.items():
        points = {row["bytes"]: row["gb_s"] for row in rows if (row["case"], row["method"]) == (case, method)}
        if points:
            axes.plot(list(points), list(points.values()), style, label=label, markersize=4)
    axes.axhline(leg, color="C1", linewidth=0.8, linestyle=":", label="the slower leg alone")
    title = f"one copy at a time, {rows[0]['machine']}"
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="GB/s", title=title)
    axes.grid(which="both", alpha=0.2)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def table(rows: list[dict[str, Any]], leg: float) -> Iterator[str]:
    """GB/s of single copies, and the shares that the targets speak of."""
    found = {(row["case"], row["method"], row["bytes"]): row for row in rows}
    used = [column for column in COLUMNS if any(key[:2] == column for key in found)]
    first = rows[0]
    yield f"{first['machine']}, {first['date']}, {first['commit']}. GB/s; the slower leg alone: {leg:.1f}."
    yield ""
    yield f"| size | {' | '.join(f'{method}, {case}' for case, method in used)} | ours of the leg | of the driver |"
    yield "| --- " * (len(used) + 3) + "|"
    for nbytes in sorted({row["bytes"] for row in rows if row["case"] == "staged"}):
        cells = [found.get((*column, nbytes), {}).get("gb_s", "") for column in used]
        ours = found["staged", "pyxdev", nbytes]
        cells += [ours["ratio"], ours.get("over_peer", "")]
        yield f"| {copy.size(nbytes)} | {' | '.join(map(str, cells))} |"


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__)
        return 2
    picture, page = sys.argv[1], Path(sys.argv[2])
    rows = record.last_run(record.RESULTS / "copy.jsonl")
    leg = min(row["gb_s"] for row in rows if row["case"] == "limit" and row["method"] in ("down", "up"))
    draw(rows, leg, picture)
    record.insert(page, MARK, table(rows, leg))
    return 0


if __name__ == "__main__":
    sys.exit(main())
