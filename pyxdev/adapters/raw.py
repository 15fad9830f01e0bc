"""Stages on bare memory: fn(stage, x) sees pyxdev Arrays and queues its work on stage.stream.

stage.empty(shape, dtype) gives memory for outputs; what a stage returns of it and does not keep is passed on as it is.
Everything else (its input, memory of its own, what it keeps a reference to) is copied first, in stream order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyxdev._native import Array, Lease
from pyxdev.adapters.activation import ARRAY, Activation, Layout, Layouts, Value, build, flatten
from pyxdev.adapters.adapter import Stopped
from pyxdev.adapters.arrays import ArrayAdapter
from pyxdev.errors import InvalidArgument

if TYPE_CHECKING:
    from pyxdev.executor.results import Fetch
    from pyxdev.executor.slots import Slot
    from pyxdev.executor.stages import BoundStage
    from pyxdev.executor.tickets import Microbatch


class RawStage:
    """What a raw stage is given: its device, its stream, and memory in stream order.

    Whose the memory is, leases of leases tell. A block is ours for as long as its lease is alive; what the stage gets
    refers to a second lease, of the first. When nothing of the stage refers to the memory any more, through whatever
    array, view or export, the second one puts the first on the list `dropped`.
    """

    def __init__(self, stage: BoundStage) -> None:
        self._stage = stage
        self._sizes: dict[tuple[tuple[int, ...], str], int] = {}
        self.turn = 0
        self.dropped: list[Lease] = []
        self.device = stage.device
        self.stream = stage.stream
        self.runtime = stage.runtime
        self.index = stage.index

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Uninitialised memory, free to be written by the stage's stream. It serves again when nobody refers to it."""
        nbytes = self._sizes.get((shape, dtype))
        if nbytes is None:
            nbytes = self._sizes[shape, dtype] = Array(self.runtime, self.device, 0, shape, dtype).nbytes
        self.dropped.clear()
        block = self.take(nbytes)
        owner = Lease(block, self.dropped)
        return Array(self.runtime, self.device, block.item.address, shape, dtype, owner=owner, stream=self.stream)

    def take(self, nbytes: int) -> Lease:
        """A block of at least nbytes."""
        return self._stage.blocks.take(self.turn, nbytes)

    def block_of(self, array: Any) -> Lease | None:
        """The block that an array from empty(), or one made from it, lies in."""
        while isinstance(array, Array):
            array = array.owner
        if type(array) is Lease and array.home is self.dropped:
            block: Lease = array.item
            return block
        return None


class RawAdapter(ArrayAdapter):
    """See the module's docstring. Inputs may be NumPy arrays too; results are Arrays with memory of their own, to be
    kept until the caller's own work on them is done."""

    name = "raw"

    def __init__(self, layouts: Layouts) -> None:
        super().__init__(layouts)
        self._raw: RawStage | None = None
        self._likely: Layout | None = None  # of the outputs, as they were last time

    # ---- the stage ----

    def run(self, stage: BoundStage, batch: Microbatch, slot: Slot, incoming: Value) -> Activation:
        raw = self._raw = self._raw or RawStage(stage)
        raw.turn = batch.turn
        arrays: list[Any] = []
        plain: list[Any] = []
        try:
            structure = flatten(stage.fn(raw, self._input(stage, slot, incoming)), _is_array, arrays, plain)
            _check(stage, arrays)
        except BaseException as error:
            stage.report(batch, error)
            raise Stopped from error
        layout = self._likely
        if layout is None or not layout.fits(structure, arrays):
            layout = self._likely = self._layouts.of(structure, tuple([self.spec(leaf) for leaf in arrays]))
        spans, blocks = self._take_over(raw, layout, arrays)
        return Activation(stage.device, Value(layout, plain, plain), spans, blocks)

    def _take_over(
        self, raw: RawStage, layout: Layout, arrays: list[Any]
    ) -> tuple[list[tuple[int, int, int]], list[Lease]]:
        """Spans and blocks of the outputs. Only `arrays` may refer to them on our side; it is emptied."""
        places = [self._place(raw, leaf) for leaf in arrays]
        arrays.clear()
        for n, (block, address) in enumerate(places):
            if block not in raw.dropped:  # the stage keeps it, and may write it while it is still being read
                places[n] = self._copy(raw, address, layout.specs[n].nbytes)
        raw.dropped.clear()
        spans = [
            (offset, address, spec.nbytes)
            for offset, spec, (_, address) in zip(layout.offsets, layout.specs, places, strict=True)
            if spec.nbytes
        ]
        return spans, [block for block, _ in places]

    def _place(self, raw: RawStage, leaf: Array) -> tuple[Lease, int]:
        """The block and the address of an output, or those of a copy where the memory is not from this stage's
        empty()."""
        block = raw.block_of(leaf)
        if block is not None:
            return block, leaf.address
        if leaf.ready is not None:
            raw.stream.wait(leaf.ready)
        place = self._copy(raw, leaf.address, leaf.nbytes)
        raw.dropped.append(place[0])
        return place

    def _copy(self, raw: RawStage, address: int, nbytes: int) -> tuple[Lease, int]:
        block = raw.take(nbytes)
        raw.stream.copy(block.item.address, address, nbytes, dst_device=raw.device, src_device=raw.device)
        return block, block.item.address

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
        addresses = dict((offset, address) for offset, address, _ in output.spans)
        arrays = [
            fetch.copy(addresses.get(offset, 0), spec)
            for offset, spec in zip(layout.offsets, layout.specs, strict=True)
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
