"""A progress bar for map()."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any


def with_progress(results: Iterator[Any], inputs: Iterable[Any]) -> Iterator[Any]:
    """The same results, counted on standard error where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("microbatches"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(inputs) if isinstance(inputs, Sized) else None)
        for result in results:
            bar.advance(task)
            yield result
