"""Draws the last run in bench/results/pipeline.jsonl and puts its tables into a page.

python bench/plot_pipeline.py docs/pipeline.png docs/executor.md
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bench import pipeline, record

STYLES = {  # way: label, style
    "one": ("one GPU", "k:"),
    "naive": ("naive placement", "C7--"),
    "gpipe": ("torch.distributed.pipelining", "C3--"),
    "events": ("events by hand", "C2--"),
    "events-copies": ("the same, copying inputs and results", "C2:"),
    "hand": ("events by hand", "C2--"),
    "graphs": ("events and graphs by hand", "C4--"),
    "ours": ("pyxdev", "C0-o"),
    "ours-graphs": ("pyxdev with graphs", "C1-o"),
}
MARK = "<!-- pipeline.jsonl -->"


def draw(rows: list[pipeline.Row], path: Path) -> None:
    """Ratio to the bound at the most microbatches, over the length of a stage."""
    rows = [row for row in rows if row["case"] == "pipeline"]
    families = list(dict.fromkeys(row["family"] for row in rows))
    m = max(row["m"] for row in rows)
    figure, panels = plt.subplots(1, len(families), figsize=(6 * len(families), 4.5), sharey=True, squeeze=False)
    for axes, family in zip(panels[0], families, strict=True):
        for way, (label, style) in STYLES.items():
            mine = [row for row in rows if (row["family"], row["way"], row["m"]) == (family, way, m)]
            points = {row["stage_us"]: row["ratio"] for row in mine}
            if points:
                axes.plot(list(points), list(points.values()), style, label=label, markersize=4)
        title = f"{family}, {m} microbatches, 2 devices"
        axes.set(xscale="log", ylim=(0, 1.05), xlabel="us of a stage", ylabel="time of the bound / time", title=title)
        axes.grid(which="both", alpha=0.2)
        axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__)
        return 2
    picture, page = Path(sys.argv[1]), Path(sys.argv[2])
    rows = record.last_run(record.RESULTS / "pipeline.jsonl")
    record.insert(page, MARK, [pipeline.heading(rows[-1]), "", *pipeline.tables(rows)])
    draw(rows, picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
