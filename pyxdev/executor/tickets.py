"""What becomes of a microbatch: its result, or the first error; and what an error does to the microbatches after it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from pyxdev._pipeline import Epoch, Microbatch
from pyxdev.errors import Error, StageError, StageInterrupted

if TYPE_CHECKING:
    from pyxdev.executor.executor import Executor

__all__ = ["Epoch", "Microbatch", "Ticket", "stage_error"]


def stage_error(stage: int, name: str, microbatch: int, cause: BaseException) -> StageError:
    """The error that a stage's exception becomes. Ctrl-C in a stage stays a KeyboardInterrupt."""
    kind = StageInterrupted if isinstance(cause, KeyboardInterrupt) else StageError
    text = f"stage {stage} ({name}), microbatch {microbatch}: {type(cause).__name__}"
    code = cause.code if isinstance(cause, Error) else 0
    error = kind(f"{text}: {cause}" if str(cause) else text, stage=stage, microbatch=microbatch, code=code)
    error.__cause__ = cause
    return error


class Ticket:
    """The result of one submit(), now or later. Submitted again, it is the next microbatch's input."""

    __slots__ = ("__weakref__", "_batch", "_executor", "_value")

    def __init__(self, executor: Executor, batch: Microbatch) -> None:
        self._executor = executor
        self._batch = batch
        self._value: list[Any] = []  # the result, once somebody asked for it
        batch.ticket = weakref.ref(self)

    @property
    def index(self) -> int:
        """The place in the order of submission, from 0."""
        return self._batch.index

    def done(self) -> bool:
        """Whether result() would return, or raise, at once. Does not block."""
        return self._executor.is_over(self._batch)

    def result(self, timeout: float | None = None) -> Any:
        """The value of the last stage. Waits at most timeout seconds (on the runtime's clock; None: no limit).

        Raises StageError if a stage failed, Cancelled if an earlier microbatch's did or after cancel(), DeviceFault if
        a device failed, Closed after close(), TimeoutError if the time passed first, which changes nothing.
        """
        if not self._value:
            self._value.append(self._executor.result_of(self._batch, timeout))
        return self._value[0]

    def cancel(self) -> bool:
        """Gives the result up, unless it is there already. What has been queued still runs to its end, and so do later
        microbatches; result() raises Cancelled then."""
        if self._value or self.done():
            return False
        self._batch.cancelled = True
        return True

    def __repr__(self) -> str:
        return f"<pyxdev.Ticket {self.index}>"
