"""Stages on bare memory: fn(stage, x) sees pyxdev Arrays and queues its work on stage.stream.

stage.empty(shape, dtype) gives memory for outputs; what a stage returns of it and does not keep is passed on as it is.
Everything else (its input, memory of its own, what it keeps a reference to) is copied first, in stream order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from pyxdev._pipeline import RawStage, Stopped
from pyxdev.adapters.activation import Activation, Layout, Layouts, Value, build
from pyxdev.adapters.arrays import ArrayAdapter

if TYPE_CHECKING:
    from pyxdev.executor.results import Fetch
    from pyxdev.executor.slots import Slot
    from pyxdev.executor.stages import BoundStage
    from pyxdev.executor.tickets import Microbatch


class RawAdapter(ArrayAdapter):
    """See the module's docstring. Inputs may be NumPy arrays too; results are Arrays with memory of their own, which
    are there once their `ready` has come, to be kept until the caller's own work on them is done."""

    name = "raw"
    uncapturable = ""

    def __init__(self, layouts: Layouts) -> None:
        super().__init__(layouts)
        self._raw: RawStage | None = None
        self._likely: Layout | None = None  # of the outputs, as they were last time

    # ---- the stage ----

    def run(self, stage: BoundStage, batch: Microbatch, slot: Slot, incoming: Value) -> Activation:
        raw = self._raw or self._open(stage)
        raw.turn = batch.turn
        arrays: list[Any] = []
        plain: list[Any] = []
        try:
            structure = raw.call(stage.fn, slot, incoming, arrays, plain)
        except BaseException as error:
            stage.report(batch, error)
            raise Stopped from error
        return raw.output(self._layout(structure, arrays), arrays, plain)

    def queue(self, stage: BoundStage, turn: int, slot: Slot, incoming: Value) -> Activation:
        raw = self._raw or self._open(stage)
        raw.turn = turn
        arrays: list[Any] = []
        plain: list[Any] = []
        structure = raw.call(stage.fn, slot, incoming, arrays, plain)
        return raw.output(self._layout(structure, arrays), arrays, plain)

    def memory(self, stage: BoundStage, slot: Slot, incoming: Value) -> AbstractContextManager[Any]:
        return nullcontext()

    def _open(self, stage: BoundStage) -> RawStage:
        self._raw = RawStage(stage.stream, stage.blocks, stage.index)
        return self._raw

    def _layout(self, structure: Any, arrays: list[Any]) -> Layout:
        layout = self._likely
        if layout is None or not layout.fits(structure, arrays):
            layout = self._likely = self._layouts.of(structure, tuple([self.spec(leaf) for leaf in arrays]))
        return layout

    # ---- results ----

    def result(self, stage: BoundStage, fetch: Fetch, output: Activation, sole: bool) -> Any:
        arrays = stage.blocks.give(output, fetch.complete) if sole else None
        if arrays is None:
            arrays, _ = fetch.copies(output, stage.outputs)
        return build(output.layout.structure, iter(arrays), iter(output.value.values()))
