"""What an adapter does: it says what an array is, calls the stage's function, and takes its outputs over."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from pyxdev._native import Runtime
from pyxdev._pipeline import Source
from pyxdev.adapters.activation import Activation, Spec, Value

if TYPE_CHECKING:
    from pyxdev.executor.results import Fetch
    from pyxdev.executor.slots import Slot
    from pyxdev.executor.stages import BoundStage
    from pyxdev.executor.tickets import Microbatch


NEVER = 1 << 62  # the turn of a reader that is no microbatch


class Adapter(Protocol):
    """One for each stage."""

    name: str
    uncapturable: str  # why no stage of it can be captured as a graph; "": they can

    def is_array(self, leaf: Any) -> bool:
        """Whether this leaf of an activation is an array; everything else is a plain value."""

    def spec(self, leaf: Any) -> Spec:
        """Shape, dtype and size of an array. Raises InvalidArgument for one that cannot go to a device."""

    def write(self, leaf: Any, memory: Any) -> None:
        """Writes a host array to memory, uint8 of the array's size."""

    def source(self, runtime: Runtime, leaf: Any) -> Source | None:
        """An array on a device, as a copy takes it; None for one on the host."""

    def run(self, stage: BoundStage, batch: Microbatch, slot: Slot, incoming: Value) -> Activation:
        """Queues the stage's function on the stage's stream; its input is in the slot. Raises Stopped after it has told
        the stage of the function's exception."""

    def queue(self, stage: BoundStage, turn: int, slot: Slot, incoming: Value) -> Activation:
        """What run() does for the microbatch of this turn, while the stage's stream captures. Raises what the stage's
        function raises."""

    def memory(self, stage: BoundStage, slot: Slot, incoming: Value) -> AbstractContextManager[Any]:
        """Where the memory of a capture comes from, besides the stage's blocks; gives what keeps it alive. Makes what
        queue() must find ready for this slot."""

    def copied(self, stage: BoundStage, turn: int, outgoing: Activation) -> Activation:
        """A copy of what a graph of the last stage has written, queued on stage.aside()."""

    def result(self, stage: BoundStage, fetch: Fetch, output: Activation, sole: bool) -> Any:
        """The output of the last stage, which is complete, as the caller's own. sole: nobody else can ask for it, or
        pass it on."""

    def close(self) -> None:
        """Gives back what run() and source() opened."""
