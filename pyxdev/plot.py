"""Pictures with matplotlib, the extra [plot]: what the engines did, and how a pipeline scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyxdev import trace
from pyxdev.errors import BackendUnavailable


def _figure(width: float, height: float) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise BackendUnavailable("pictures need matplotlib: pip install 'pyxdev[plot]'") from missing
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def timeline(path: str | Path, spans: Sequence[trace.Span], title: str) -> None:
    """One row an engine, one bar an operation; colours tell streams apart. Writes a PNG."""
    names = [row for row in trace.rows(spans) if row != "host"]
    figure, axes = _figure(12, 1.2 + 0.28 * len(names))
    scale, unit = _unit(max((span.end for span in spans), default=0))
    for place, name in enumerate(names):
        here = [span for span in spans if span.row == name]
        axes.broken_barh(
            [(span.start / scale, (span.end - span.start) / scale) for span in here],
            (place - 0.4, 0.8),
            facecolors=[f"C{span.stream % 10}" for span in here],
            edgecolor="white",
            linewidth=0.4,
        )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(f"time, {unit}")
    axes.set_title(title)
    figure.savefig(path, dpi=120)


def _unit(nanoseconds: float) -> tuple[float, str]:
    for scale, unit in ((1e9, "s"), (1e6, "ms")):
        if nanoseconds >= scale:
            return scale, unit
    return 1e3, "us"


def scaling(path: str | Path, curves: Mapping[str, Sequence[tuple[int, float]]], y_label: str, title: str) -> None:
    """A curve a name, of (devices, value). Writes a PNG."""
    figure, axes = _figure(8, 5)
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name, linestyle=":" if name == "bound" else "-")
    axes.set_xlabel("devices")
    axes.set_xticks(sorted({devices for points in curves.values() for devices, _ in points}))
    axes.set_ylim(bottom=0)
    axes.set_ylabel(y_label)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
