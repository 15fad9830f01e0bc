"""The rows of bench/load.py as tables of Markdown, for docs/loader.md.

    python bench/load_tables.py            prints them
    python bench/load_tables.py --write    puts them where docs/loader.md has its tables

The newest run of each machine and case counts. Probes of the plain loop are left out.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bench import record

PAGE = Path(__file__).resolve().parents[1] / "docs" / "loader.md"
MARK = "<!-- load.jsonl -->"

Row = dict[str, Any]


def newest(rows: Iterable[Row]) -> list[Row]:
    kept: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        run = kept.setdefault((row["machine"], row["case"]), [])
        if run and (run[0]["date"], run[0]["commit"]) != (row["date"], row["commit"]):
            run.clear()
        run.append(row)
    return [row for run in kept.values() for row in run if not row["method"].startswith("plain loop:")]


def tables(rows: Iterable[Row]) -> Iterator[str]:
    """A heading for each machine, and its cases one after the other."""
    rows = newest(rows)
    for machine in dict.fromkeys(row["machine"] for row in rows):
        mine = [row for row in rows if row["machine"] == machine]
        yield f"### {machine}\n"
        for case in dict.fromkeys(row["case"] for row in mine):
            yield table(case, [row for row in mine if row["case"] == case])


def table(case: str, rows: list[Row]) -> str:
    limits = [row for row in rows if row["method"].startswith("limit: ")]
    loads = [row for row in rows if row not in limits and "peer" not in row]
    named = [f"{row['method'].removeprefix('limit: ')} {row['figure']:.1f}" for row in limits]
    when = f"{rows[0]['date']}, commit {rows[0]['commit']}"
    lines = [f"**{case}** ({when})" + (f": limits, GB/s: {'; '.join(named)}" if named else ""), ""]
    lines += ["| loader | first load, GB/s | second load, GB/s | second, of the limit |", "| --- | --- | --- | --- |"]
    for method in dict.fromkeys(row["method"] for row in loads):
        found = {row.get("load"): row for row in loads if row["method"] == method}
        first, second = ("" if turn not in found else shown(found[turn]) for turn in ("first", "second"))
        last = found.get("second")
        ratio = f"{last['ratio']:.2f} ({last['limit_name']})" if last and last["figure"] is not None else ""
        lines.append(f"| {method} | {first} | {second} | {ratio} |")
    for row in rows:
        if "peer" in row:
            lines.append(f"| **best against {row['peer']}, {row['load']}** | | | **{row['ratio']:.2f}** |")
    return "\n".join(lines) + "\n"


def shown(row: Row) -> str:
    return "absent" if row["figure"] is None else f"{row['figure']:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into docs/loader.md")
    parser.add_argument("rows", nargs="*", type=Path, default=[record.RESULTS / "load.jsonl"], metavar="FILE")
    given = parser.parse_args()
    rows = [json.loads(line) for path in given.rows for line in path.read_text().splitlines()]
    text = "\n".join(tables(rows))
    if not given.write:
        sys.stdout.write(text)
        return
    record.insert(PAGE, MARK, ["", text])


if __name__ == "__main__":
    main()
