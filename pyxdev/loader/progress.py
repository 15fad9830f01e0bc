"""How far a load is: what a callback is told, and the bar that is drawn from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID


@dataclass(frozen=True)
class Progress:
    """Bytes so far and in all, together and for each device; seconds since reading began."""

    done: int
    total: int
    seconds: float
    devices: Mapping[int, tuple[int, int]]

    @property
    def rate(self) -> float:
        """Bytes a second so far."""
        return self.done / self.seconds if self.seconds > 0 else 0.0


Callback = Callable[[Progress], object]  # False cancels the load


class Bar:
    """A callback that draws one line for each device: bytes, rate, time left. Draws nothing where standard error is no
    terminal."""

    def __init__(self, console: Console | None = None) -> None:
        import rich.console
        import rich.progress as bars

        console = console or rich.console.Console(stderr=True)
        self._rich = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.DownloadColumn(binary_units=True),
            bars.TransferSpeedColumn(),
            bars.TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks: dict[int, TaskID] = {}

    def __call__(self, progress: Progress) -> None:
        for device, (done, total) in progress.devices.items():
            if device not in self._tasks:
                self._tasks[device] = self._rich.add_task(f"device {device}", total=total)
            self._rich.update(self._tasks[device], completed=done)

    def __enter__(self) -> Self:
        self._rich.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rich.stop()
