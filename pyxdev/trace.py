"""What devices did, for people: spans, and the JSON that Perfetto and chrome://tracing read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pyxdev._native import HOST, SimDriver


class Span(NamedTuple):
    """What an engine, or the submitting thread, did for a while. Times are nanoseconds of the runtime's clock.

    engine: "compute", "in" or "out" (copies from and to the host) of `device`, "link" from `device` to `peer`, "host";
    in a trace of an executor "stage 1 mlp" instead of "compute".
    operation: in order of submission, 0 for the host. after: the one of another stream that it waited for last, or 0.
    """

    engine: str
    device: int
    peer: int
    operation: int
    after: int
    stream: int
    submitted: int
    start: int
    end: int
    nbytes: int
    label: str

    @property
    def row(self) -> str:
        """The engine's name in a picture: "device 0 compute", "link 0>1", "host"."""
        if self.engine == "host":
            return "host"
        return f"link {self.device}>{self.peer}" if self.engine == "link" else f"device {self.device} {self.engine}"


def spans(driver: SimDriver) -> list[Span]:
    """All that has ended so far, in that order. The machine must have been made with run.trace."""
    return [Span(*fields) for fields in driver.trace()]


def rows(spans: Iterable[Span]) -> list[str]:
    """The rows of a picture: the host, then each device's engines, then its links."""
    order = ("host", "compute", "in", "out", "link")  # and stages as "compute"
    places = {engine: place for place, engine in enumerate(order)}
    found = {(span.device, places.get(span.engine, 1), span.peer, span.row) for span in spans}
    return [row for *_, row in sorted(found)]


def chrome(spans: Sequence[Span]) -> dict[str, Any]:
    """The trace-event format: one process a device, one thread a row, an arrow from each operation to the first one of
    another stream that waited for it."""
    names = rows(spans)
    events: list[dict[str, Any]] = []
    for row in names:
        process = next(span.device for span in spans if span.row == row) + 1
        named = "host" if process == 0 else f"device {process - 1}"
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": named}})
        events.append(
            {"ph": "M", "name": "thread_name", "pid": process, "tid": names.index(row), "args": {"name": row}}
        )
    ends: dict[int, Span] = {span.operation: span for span in spans if span.device != HOST}
    for span in spans:
        place = {"pid": span.device + 1, "tid": names.index(span.row)}
        arguments = {"operation": span.operation, "stream": span.stream, "submitted_us": span.submitted / 1e3}
        if span.nbytes:
            arguments |= {"bytes": span.nbytes, "gb_s": round(span.nbytes / max(1, span.end - span.start), 3)}
        times = {"ts": span.start / 1e3, "dur": (span.end - span.start) / 1e3}
        events.append({"ph": "X", "name": span.label, "cat": span.engine, **place, **times, "args": arguments})
        if span.after in ends:
            before = ends[span.after]
            flow = {"cat": "wait", "name": "wait", "id": f"{span.operation}.{span.row}"}
            begin = {"pid": before.device + 1, "tid": names.index(before.row), "ts": before.end / 1e3}
            events.append({"ph": "s", **flow, **begin})
            events.append({"ph": "f", "bp": "e", **flow, **place, "ts": span.start / 1e3})
    return {"displayTimeUnit": "ns", "traceEvents": events}


def write(path: str | Path, spans: Sequence[Span]) -> None:
    """Writes chrome() of the spans to a file."""
    Path(path).write_text(json.dumps(chrome(spans)) + "\n", "utf-8")
