"""Draws bench/results/copy.jsonl: size against GB/s, for the last run on each machine.

python bench/plot_copy.py docs/copies.png
"""

from __future__ import annotations

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # here, copy.py would hide Python's copy

import json
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bench import record

LINES = {  # case, method: label, style
    ("direct", "cuMemcpyPeerAsync"): ("bare direct copy", "k:"),
    ("direct", "pyxdev"): ("pyxdev, direct", "C0-o"),
    ("direct", "torch"): ("torch copy_", "C2--"),
    ("staged", "pyxdev"): ("pyxdev, staged", "C1-o"),
    ("staged", "driver"): ("the driver's staging", "C3--"),
}


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    rows: list[dict[str, Any]] = [json.loads(line) for line in (record.RESULTS / "copy.jsonl").open()]
    last = rows[-1]
    rows = [row for row in rows if all(row[name] == last[name] for name in ("machine", "commit", "date"))]
    figure, axes = plt.subplots(figsize=(8, 5))
    for (case, method), (label, style) in LINES.items():
        points = {row["bytes"]: row["gb_s"] for row in rows if (row["case"], row["method"]) == (case, method)}
        if points:
            axes.plot(list(points), list(points.values()), style, label=label, markersize=4)
    legs = [row["gb_s"] for row in rows if row["case"] == "limit" and row["method"] in ("down", "up")]
    axes.axhline(min(legs), color="C1", linewidth=0.8, linestyle=":", label="the slower leg alone")
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="GB/s", title=f"one copy at a time, {last['machine']}")
    axes.grid(which="both", alpha=0.2)
    axes.legend()
    figure.tight_layout()
    figure.savefig(sys.argv[1], dpi=120)
    return 0


if __name__ == "__main__":
    sys.exit(main())
