"""What the commands print: tables for people, JSON for programs. Both on standard output, nothing else is."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 120  # of output that goes to a file or a pipe


def console() -> Console:
    found = Console(highlight=False, markup=False, emoji=False)
    return found if found.is_terminal else Console(width=WIDTH, highlight=False, markup=False, emoji=False)


def print_json(document: object) -> None:
    """One line, one object."""
    Console(soft_wrap=True, highlight=False, markup=False, emoji=False).print(json.dumps(document))


def print_table(columns: Iterable[str], rows: Iterable[Iterable[Any]], title: str | None = None) -> None:
    """Columns whose name begins with ">" are aligned to the right."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    for row in rows:
        table.add_row(*map(str, row))
    console().print(table)


def size(nbytes: float) -> str:
    """Bytes as people read them: "98.4 MB"."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes:.0f} B"
