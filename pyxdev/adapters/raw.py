"""Stages on bare memory: fn(stage, x) sees pyxdev Arrays and queues its work on stage.stream.

stage.empty(shape, dtype) gives memory for outputs; what a stage returns of it and does not keep is passed on as it is.
Everything else (its input, memory of its own, what it keeps a reference to) is copied first, in stream order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from pyxdev._native import Array
from pyxdev._pipeline import RawStage
from pyxdev.adapters.activation import ARRAY, Activation, Layout, Layouts, Value, build, flatten
from pyxdev.adapters.adapter import Stopped
from pyxdev.adapters.arrays import ArrayAdapter
from pyxdev.errors import InvalidArgument

if TYPE_CHECKING:
    from pyxdev.executor.results import Fetch
    from pyxdev.executor.slots import Slot
    from pyxdev.executor.stages import BoundStage
    from pyxdev.executor.tickets import Microbatch


class RawAdapter(ArrayAdapter):
    """See the module's docstring. Inputs may be NumPy arrays too; results are Arrays with memory of their own, to be
    kept until the caller's own work on them is done."""

    name = "raw"
    uncapturable = ""

    def __init__(self, layouts: Layouts) -> None:
        super().__init__(layouts)
        self._raw: RawStage | None = None
        self._likely: Layout | None = None  # of the outputs, as they were last time

    # ---- the stage ----

    def run(self, stage: BoundStage, batch: Microbatch, slot: Slot, incoming: Value) -> Activation:
        raw = self._at(stage, batch.turn)
        arrays: list[Any] = []
        plain: list[Any] = []
        try:
            structure = self._call(stage, raw, slot, incoming, arrays, plain)
        except BaseException as error:
            stage.report(batch, error)
            raise Stopped from error
        return self._outgoing(stage, raw, structure, arrays, plain)

    def queue(self, stage: BoundStage, turn: int, slot: Slot, incoming: Value) -> Activation:
        raw = self._at(stage, turn)
        arrays: list[Any] = []
        plain: list[Any] = []
        structure = self._call(stage, raw, slot, incoming, arrays, plain)
        return self._outgoing(stage, raw, structure, arrays, plain)

    def memory(self, stage: BoundStage, slot: Slot, incoming: Value) -> AbstractContextManager[Any]:
        return nullcontext()

    def _at(self, stage: BoundStage, turn: int) -> RawStage:
        raw = self._raw = self._raw or RawStage(stage.stream, stage.blocks, stage.index)
        raw.turn = turn
        return raw

    def _call(
        self, stage: BoundStage, raw: RawStage, slot: Slot, incoming: Value, arrays: list[Any], plain: list[Any]
    ) -> Any:
        structure = flatten(stage.fn(raw, self._input(stage, slot, incoming)), _is_array, arrays, plain)
        _check(stage, arrays)
        return structure

    def _outgoing(
        self, stage: BoundStage, raw: RawStage, structure: Any, arrays: list[Any], plain: list[Any]
    ) -> Activation:
        layout = self._likely
        if layout is None or not layout.fits(structure, arrays):
            layout = self._likely = self._layouts.of(structure, tuple([self.spec(leaf) for leaf in arrays]))
        spans, blocks = raw.take_over(layout, arrays)
        return Activation(stage.device, Value(layout, plain, plain), spans, blocks)

    def _input(self, stage: BoundStage, slot: Slot, incoming: Value) -> Any:
        layout = incoming.layout
        views = slot.views.get(layout)
        if views is None:
            views = slot.views[layout] = [
                Array(
                    stage.runtime, stage.device, slot.address + offset, spec.shape, spec.dtype, nbytes=spec.nbytes,
                    owner=slot.buffer, stream=stage.stream,
                )
                for offset, spec in zip(layout.offsets, layout.specs, strict=True)
            ]  # fmt: skip
        if not incoming.complete:
            stage.stream.synchronize()  # plain values of a stage that runs later than it is submitted
        if layout.structure is ARRAY:
            return views[0]
        return build(layout.structure, iter(views), iter(incoming.values()))

    # ---- results ----

    def result(self, stage: BoundStage, fetch: Fetch, output: Activation) -> Any:
        layout = output.layout
        arrays = [
            fetch.copy(output.address(offset), spec) for offset, spec in zip(layout.offsets, layout.specs, strict=True)
        ]
        return build(layout.structure, iter(arrays), iter(output.value.values()))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, Array)


def _check(stage: BoundStage, arrays: list[Any]) -> None:
    for leaf in arrays:
        if leaf.device != stage.device or leaf.runtime is not stage.runtime or not leaf.contiguous:
            raise InvalidArgument(
                f"returned {leaf!r}; contiguous arrays on the stage's own device {stage.device} are allowed"
            )
