"""Stages of array libraries: their arrays over our slots, on our stream.

The library's device and stream are those of the stage while its function runs. Inputs lie in a slot, so they are good
until the function returns. Outputs are passed on without a copy where it is certain that nobody else refers to their
memory: what came from stage.empty(), and what a library can answer for (Library.held). All else is copied first, in
stream order, and then left to the library, whose allocator must free in the order of the stream, or wait.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from pyxdev._native import Array, Event, Lease, Stream
from pyxdev._pipeline import RawStage, Stopped
from pyxdev.adapters.activation import Activation, Layouts, Spec, Value, build, flatten
from pyxdev.adapters.arrays import ArrayAdapter
from pyxdev.adapters.interface import LEGACY_STREAM, Described, describe, device_of, has_interface, kind_of
from pyxdev.errors import InvalidArgument

if TYPE_CHECKING:
    from pyxdev.executor.results import Fetch
    from pyxdev.executor.slots import Slot
    from pyxdev.executor.stages import BoundStage
    from pyxdev.executor.tickets import Microbatch


class Held(NamedTuple):
    """Memory of a library's array: what keeps it alive, and the array that all others over it refer to."""

    memory: Any
    root: weakref.ref[Any]


class Library:
    """What the adapter has to know of one library. One for each stage; made and used inside `current`, but for that.

    takes_stage: the stage is fn(stage, x), for there is no current stream in the library.
    copies_results: results are copies in memory of the library's own; otherwise they are in memory of ours, which
        serves later results once nobody refers to it and the default stream is through with it.
    """

    takes_stage = True
    copies_results = False
    stream: Any  # the stage's, as the library knows it

    def __init__(self, device: int, handle: int) -> None:
        raise NotImplementedError

    def current(self) -> AbstractContextManager[Any]:
        """Makes the stage's device, and stream where there is such a thing, the current ones of the library."""
        raise NotImplementedError

    def wrap(self, array: Array) -> Any:
        """The library's array over memory of ours, which it keeps alive."""
        raise NotImplementedError

    def is_output(self, leaf: Any) -> bool:
        return has_interface(leaf)

    def device_of(self, leaf: Any) -> int:
        return device_of(leaf)

    def describe(self, leaf: Any) -> Described:
        return describe(leaf)

    def dense(self, leaf: Any) -> Any:
        """An output that has gaps or another order, in C order."""
        raise InvalidArgument(f"returned a {kind_of(leaf)} with gaps or in another order; C order is allowed")

    def held(self, leaf: Any) -> Held | None:
        """The memory of an output, if it is the library's own and all arrays over it refer to one of them."""
        return None

    def copy(self, array: Array) -> Any:
        """An array of the library's own memory, and the copy to it queued on the caller's stream. Outside of `current`;
        for libraries with `copies_results`."""
        raise NotImplementedError

    def callers_stream(self) -> int:
        """The handle of the caller's current stream on the stage's device, outside of `current`."""
        return LEGACY_STREAM


class LibraryStage:
    """What a stage is given where the library has no current stream: `stream` is the library's own, and empty() gives
    the library's arrays. As a RawStage it knows what of its memory the stage still refers to."""

    def __init__(self, stage: BoundStage, library: Library) -> None:
        self.memory = RawStage(stage.stream, stage.blocks, stage.index)
        self.made: list[tuple[Lease, int, int]] = []  # blocks of this call: address and bytes
        self._wrap = library.wrap
        self.stream = library.stream
        self.device = stage.device
        self.index = stage.index
        self.runtime = stage.runtime

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Uninitialised memory as the library's array. dtype: a name, or what has one, such as np.float32."""
        name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or dtype.__name__
        array = self.memory.empty(tuple(shape), name)
        owner: Any = array.owner
        self.made.append((owner.item, array.address, array.nbytes))
        return self._wrap(array)

    def block_at(self, address: int) -> Lease | None:
        """The block of this call that an address lies in."""
        for block, begin, nbytes in self.made:
            if begin <= address < begin + max(nbytes, 1):
                return block
        return None

    def keeps(self, owner: Any) -> bool:
        """Whether the stage refers to this memory, now that nothing of ours does."""
        return owner.root() is not None if type(owner) is Held else owner not in self.memory.dropped


class LibraryAdapter(ArrayAdapter):
    """See the module's docstring. Inputs may be arrays of any library, or NumPy's; results are the library's arrays."""

    uncapturable = "memory that a library's allocator gives a capture is not kept for its graph; raw stages can be"

    def __init__(self, name: str, layouts: Layouts, kind: Callable[[int, int], Library]) -> None:
        super().__init__(layouts)
        self.name = name
        self._kind = kind
        self._library: Any = None
        self._given: Any = None
        self._done: Event | None = None

    # ---- the stage ----

    def run(self, stage: BoundStage, batch: Microbatch, slot: Slot, incoming: Value) -> Activation:
        library = self._library = self._library or self._kind(stage.device, stage.stream.handle)
        if not incoming.complete:
            stage.stream.synchronize()
        with library.current():
            given = self._given = self._given or LibraryStage(stage, library)
            given.memory.turn = batch.turn
            given.made.clear()
            inputs: list[Lease] = []  # those of the slot that the stage has let go of
            arrays: list[Any] = []
            plain: list[Any] = []
            try:
                structure = flatten(self._call(stage, given, slot, incoming, inputs), library.is_output, arrays, plain)
                found = [self._describe(stage, arrays, n) for n in range(len(arrays))]
            except BaseException as error:
                stage.report(batch, error)
                raise Stopped from error
            places = self._take_over(given, arrays, found)
        if len(inputs) < len(incoming.layout.specs):
            gc.collect()  # numba's compiler leaves what a kernel is first called with in cycles
        if len(inputs) < len(incoming.layout.specs):
            kept = InvalidArgument("kept an array of its input, whose memory serves the next ones; keep a copy")
            stage.report(batch, kept)
            raise Stopped from kept
        layout = self._layouts.of(structure, tuple([one.spec for one in found]))
        spans = [
            (offset, address, spec.nbytes)
            for offset, spec, (_, address) in zip(layout.offsets, layout.specs, places, strict=True)
            if spec.nbytes
        ]
        return Activation(stage.device, Value(layout, plain, plain), spans, [owner for owner, _ in places])

    def _call(self, stage: BoundStage, given: LibraryStage, slot: Slot, incoming: Value, inputs: list[Lease]) -> Any:
        """New arrays every time: what a stage does to one must not stick, and whether it keeps one must be seen."""
        layout = incoming.layout
        arrays = [
            self._library.wrap(_array(stage, slot.address + offset, spec, Lease(slot.buffer, inputs)))
            for offset, spec in zip(layout.offsets, layout.specs, strict=True)
        ]
        x = build(layout.structure, iter(arrays), iter(incoming.values()))
        return stage.fn(given, x) if self._library.takes_stage else stage.fn(x)

    def _describe(self, stage: BoundStage, arrays: list[Any], n: int) -> Described:
        """Output n, which is made dense."""
        library: Library = self._library
        device = library.device_of(arrays[n])
        if device != stage.device:
            raise InvalidArgument(
                f"returned a {kind_of(arrays[n])} on device {device}; its own device {stage.device} is allowed"
            )
        found = library.describe(arrays[n])
        if not found.dense:
            arrays[n] = library.dense(arrays[n])
            found = library.describe(arrays[n])
        return found

    def _take_over(self, given: LibraryStage, arrays: list[Any], found: list[Described]) -> list[tuple[Any, int]]:
        """What keeps the memory of each output, and its address. Only `arrays` may refer to the outputs on our side; it
        is emptied."""
        memory = given.memory
        places = []
        for n, (spec, address, _, _) in enumerate(found):
            owner = given.block_at(address) or self._library.held(arrays[n])
            if owner is None:
                owner = memory.copy(address, spec.nbytes)
                address = owner.item.address
                memory.dropped.append(owner)
            places.append((owner, address))
        arrays.clear()
        for n, (owner, address) in enumerate(places):
            if given.keeps(owner):  # and may write it while it is still being read
                block = memory.copy(address, found[n].spec.nbytes)
                places[n] = block, block.item.address
        memory.dropped.clear()
        return places

    # ---- results ----

    def result(self, stage: BoundStage, fetch: Fetch, output: Activation, sole: bool) -> Any:
        theirs = self._streams.of(stage.runtime, stage.device, self._library.callers_stream())
        if self._library.copies_results:
            arrays = self._copies(stage, output, theirs)
        else:
            arrays = self._lent(stage, fetch, output, theirs)
        return build(output.layout.structure, iter(arrays), iter(output.value.values()))

    def _copies(self, stage: BoundStage, output: Activation, theirs: Stream) -> list[Any]:
        layout = output.layout
        return self._read_out(
            stage, output, theirs,
            lambda: [
                self._library.copy(_array(stage, output.address(offset), spec, output.keep))
                for offset, spec in zip(layout.offsets, layout.specs, strict=True)
            ],
        )  # fmt: skip

    def _lent(self, stage: BoundStage, fetch: Fetch, output: Activation, theirs: Stream) -> list[Any]:
        done = self._done = self._done or stage.runtime.event()
        done.record(theirs)
        fetch.stream.wait(done)  # the caller may have dropped a result right after queueing work on it
        copies, ready = fetch.copies(output, stage.outputs)
        if ready is not None:
            ready.wait()  # on the host: the library's arrays have no event of ours
        with self._library.current():
            return [self._library.wrap(copy) for copy in copies]

    def close(self) -> None:
        super().close()
        if self._done is not None:
            self._done.close()


def _array(stage: BoundStage, address: int, spec: Spec, owner: Any) -> Array:
    return Array(
        stage.runtime, stage.device, address, spec.shape, spec.dtype, nbytes=spec.nbytes, owner=owner,
        stream=stage.stream,
    )  # fmt: skip
