"""Stages on bare memory: fn(stage, x) sees pyxdev Arrays and queues its work on stage.stream.

stage.empty(shape, dtype) gives memory for outputs; what a stage made so in this call, returns and does not keep is
passed on as it is. Everything else it returns (its input, memory of its own) is copied first, in stream order.
"""

from __future__ import annotations

from sys import getrefcount
from typing import TYPE_CHECKING, Any

from pyxdev._native import HOST, Array, Lease, Runtime
from pyxdev.adapters.activation import ARRAY, Activation, Layout, Layouts, Spec, Value, build, flatten
from pyxdev.adapters.adapter import Source, Stopped
from pyxdev.errors import InvalidArgument

if TYPE_CHECKING:
    from pyxdev.executor.results import Fetch
    from pyxdev.executor.slots import Slot
    from pyxdev.executor.stages import BoundStage
    from pyxdev.executor.tickets import Microbatch


class RawStage:
    """What a raw stage is given: its device, its stream, and memory in stream order."""

    def __init__(self, stage: BoundStage) -> None:
        self._stage = stage
        self._turn = 0
        self._made: set[Lease] = set()
        self._sizes: dict[tuple[tuple[int, ...], str], int] = {}
        self.device = stage.device
        self.stream = stage.stream
        self.runtime = stage.runtime
        self.index = stage.index

    def begin(self, turn: int) -> None:
        self._turn = turn
        self._made.clear()

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Uninitialised memory, free to be written by the stage's stream. It serves again when nobody refers to it."""
        nbytes = self._sizes.get((shape, dtype))
        if nbytes is None:
            nbytes = self._sizes[shape, dtype] = Array(self.runtime, self.device, 0, shape, dtype).nbytes
        block = self._stage.blocks.take(self._turn, nbytes)
        self._made.add(block)
        return Array(self.runtime, self.device, block.item.address, shape, dtype, owner=block, stream=self.stream)

    def is_ours(self, arrays: list[Any], n: int) -> bool:
        """Whether the memory of this output is from empty(), in this call, and only `arrays` refers to it."""
        thing = arrays[n]
        while isinstance(thing, Array):
            if getrefcount(thing) > 3:  # whoever holds it, the name here, the call
                return False
            thing = thing.owner
        return thing in self._made and getrefcount(thing) <= 4  # and the set

    def end(self) -> None:
        self._made.clear()


class RawAdapter:
    """See the module's docstring. Inputs may be NumPy arrays too; results are Arrays with memory of their own, to be
    kept until the caller's own work on them is done."""

    name = "raw"

    def __init__(self, layouts: Layouts) -> None:
        self._layouts = layouts
        self._raw: RawStage | None = None
        self._likely: Layout | None = None  # of the outputs, as they were last time

    # ---- arrays ----

    def is_array(self, leaf: Any) -> bool:
        return isinstance(leaf, Array) or hasattr(leaf, "__array_interface__")

    def spec(self, leaf: Any) -> Spec:
        if not isinstance(leaf, Array):
            from pyxdev.adapters.numpy import host_spec

            return host_spec(leaf)
        if not leaf.contiguous:
            raise InvalidArgument(f"{leaf!r} has strides {leaf.strides}; only contiguous arrays can be sent")
        return Spec(leaf.shape, leaf.dtype, leaf.nbytes)

    def device(self, leaf: Any) -> int:
        return leaf.device if isinstance(leaf, Array) else HOST

    def write(self, leaf: Any, memory: Any) -> None:
        import numpy as np

        np.copyto(memory.view(leaf.dtype).reshape(leaf.shape), leaf)

    def source(self, runtime: Runtime, leaf: Any) -> Source:
        if leaf.runtime is not runtime:
            raise InvalidArgument(f"{leaf!r} belongs to another runtime")
        return Source(leaf.device, leaf.address, leaf.ready, leaf, None)

    # ---- the stage ----

    def run(self, stage: BoundStage, batch: Microbatch, slot: Slot, incoming: Value) -> Activation:
        raw = self._raw = self._raw or RawStage(stage)
        raw.begin(batch.turn)
        try:
            arrays: list[Any] = []
            plain: list[Any] = []
            # No name here may refer to the outputs when is_ours() counts who does.
            structure = flatten(stage.fn(raw, self._input(stage, slot, incoming)), _is_array, arrays, plain)
            _check(stage, arrays)
        except BaseException as error:
            stage.report(batch, error)
            raise Stopped from error
        layout = self._likely
        if layout is None or not layout.fits(structure, arrays):
            layout = self._likely = self._layouts.of(structure, tuple([self.spec(leaf) for leaf in arrays]))
        owned = [arrays[n] if raw.is_ours(arrays, n) else self._copied(raw, arrays[n]) for n in range(len(arrays))]
        raw.end()
        spans = [
            (offset, leaf.address, leaf.nbytes)
            for offset, leaf in zip(layout.offsets, owned, strict=True)
            if leaf.nbytes
        ]
        return Activation(stage.device, Value(layout, plain, plain), spans, owned)

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

    def _copied(self, raw: RawStage, leaf: Array) -> Array:
        copy = raw.empty((leaf.nbytes,), "uint8")
        if leaf.ready is not None:
            raw.stream.wait(leaf.ready)
        raw.stream.copy(copy.address, leaf.address, leaf.nbytes, dst_device=raw.device, src_device=raw.device)
        return copy

    # ---- results ----

    def result(self, stage: BoundStage, fetch: Fetch, output: Activation) -> Any:
        layout = output.layout
        addresses = dict((offset, address) for offset, address, _ in output.spans)
        arrays = [
            fetch.copy(addresses.get(offset, 0), spec)
            for offset, spec in zip(layout.offsets, layout.specs, strict=True)
        ]
        return build(layout.structure, iter(arrays), iter(output.value.values()))

    def close(self) -> None:
        """Nothing was opened."""


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, Array)


def _check(stage: BoundStage, arrays: list[Any]) -> None:
    for leaf in arrays:
        if leaf.device != stage.device or leaf.runtime is not stage.runtime or not leaf.contiguous:
            raise InvalidArgument(
                f"returned {leaf!r}; contiguous arrays on the stage's own device {stage.device} are allowed"
            )
