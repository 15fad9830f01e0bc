"""Torch functions and modules as stages of CUDA and HIP devices.

A stage runs with torch's current device and stream set to its own. Its input lies in one of our slots, so it is good
until the stage returns; its outputs lie in memory of torch's allocator, on the stage's stream. We hold them until that
stream waits for whoever reads them, so the allocator cannot hand the memory out too early, and no record_stream is
needed.

Outputs are passed on without a copy if nobody else refers to their memory. Otherwise (an input returned, a view of a
cache, the static output of a captured graph) they are cloned first, in stream order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from pyxdev._native import Array, Runtime, Stream
from pyxdev._pipeline import Source, TorchStage, Views
from pyxdev.adapters.activation import Activation, Layout, Layouts, Spec, Value, build
from pyxdev.adapters.arrays import ArrayAdapter
from pyxdev.adapters.interface import has_interface
from pyxdev.errors import InvalidArgument

if TYPE_CHECKING:
    from pyxdev.executor.results import Fetch
    from pyxdev.executor.slots import Slot
    from pyxdev.executor.stages import BoundStage

_ARRAYS = (np.ndarray, Array)


class TorchAdapter(TorchStage, ArrayAdapter):
    """See the module's docstring. Inputs may be tensors and other arrays anywhere; results are the caller's own tensors
    on the last stage's device, ordered on his current stream."""

    name = "torch"
    uncapturable = "" if hasattr(torch.cuda, "use_mem_pool") else "this torch has no memory pools; 2.5 and later have"

    def __init__(self, layouts: Layouts) -> None:
        ArrayAdapter.__init__(self, layouts)
        TorchStage.__init__(self, torch, layouts, self._streams)

    # ---- arrays ----

    def is_other_array(self, leaf: Any) -> bool:
        return isinstance(leaf, _ARRAYS) or has_interface(leaf)

    def other_spec(self, leaf: Any) -> Spec:
        spec = ArrayAdapter.spec(self, leaf)
        if not hasattr(torch, spec.dtype):
            raise InvalidArgument(f"torch has no dtype for an array of {spec.dtype}")
        return spec

    def other_source(self, runtime: Runtime, leaf: Any) -> Source | None:
        return ArrayAdapter.source(self, runtime, leaf)

    def describe(self, tensor: Any) -> Spec:
        """The Spec of a tensor of a kind that was not seen before."""
        return Spec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.numel() * tensor.itemsize)

    def device(self, leaf: Any) -> int:
        return self.device_of(leaf) if isinstance(leaf, torch.Tensor) else super().device(leaf)

    def write(self, leaf: Any, memory: Any) -> None:
        if not isinstance(leaf, torch.Tensor):
            super().write(leaf, memory)
        elif leaf.numel():
            torch.from_numpy(memory).view(leaf.dtype).view(leaf.shape).copy_(leaf.detach())

    def dense(self, tensor: Any) -> Any:
        """The same, its values in memory one after the other."""
        with torch.cuda.device(tensor.device):
            return tensor.detach().resolve_conj().resolve_neg().contiguous()

    # ---- the stage ----

    def queue(self, stage: BoundStage, turn: int, slot: Slot, incoming: Value) -> Activation:
        return self.call(stage, slot.views[incoming.layout], incoming)

    def memory(self, stage: BoundStage, slot: Slot, incoming: Value) -> AbstractContextManager[Any]:
        if incoming.layout not in slot.views:
            self.make_views(stage, slot, incoming)
        return self._pooled(stage)

    @contextmanager
    def _pooled(self, stage: BoundStage) -> Iterator[Any]:
        """Memory of a pool of torch's allocator. Each graph has one of its own: in a pool that they shared, what one
        has freed would become an output of the next, and be written again by the first while it is being read."""
        with self._current(stage):
            pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(pool, device=torch.device("cuda", stage.device)):
                yield pool

    @contextmanager
    def _current(self, stage: BoundStage) -> Iterator[None]:
        before = self.enter(stage)
        try:
            yield
        finally:
            self.leave(before)

    def open_stream(self, stage: BoundStage) -> tuple[int, int, int]:
        """The stage's stream as torch knows it."""
        external: Any = torch.cuda.ExternalStream
        made = external(stage.stream.handle, device=stage.device)
        return made.stream_id, made.device_index, made.device_type

    def watched(self, stage: BoundStage, x: Any) -> Any:
        """Calls the stage; torch warns or raises where the host waits for the device."""
        before = torch.cuda.get_sync_debug_mode()
        try:
            torch.cuda.set_sync_debug_mode(stage.sync_check)  # which warns that it is a prototype; that may be an error
            return stage.fn(x)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def make_views(self, stage: BoundStage, slot: Slot, incoming: Value) -> Views:
        with self._current(stage):
            views = slot.views[incoming.layout] = self._views(stage, slot.address, slot.buffer, incoming.layout)
        return views

    def _views(self, stage: BoundStage, address: int, owner: Any, layout: Layout) -> Views:
        """The tensors that a layout makes of memory."""
        memory = from_dlpack(Array(stage.runtime, stage.device, address, (layout.nbytes,), "uint8", owner=owner))
        tensors = [
            memory[offset : offset + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape).detach()
            for offset, spec in zip(layout.offsets, layout.specs, strict=True)
        ]
        return self.views(memory, tensors)

    # ---- results ----

    def copied(self, stage: BoundStage, turn: int, outgoing: Activation) -> Activation:
        """To memory of torch's, as outputs of a stage that is no graph: it belongs to the stage's stream."""
        self.loans.settle(stage.stream)
        stream = stage.aside()
        with self._current(stage):
            tensors = self._copies(outgoing, stream)
        return self.outgoing(stage.device, outgoing.value, tensors)

    def result(self, stage: BoundStage, fetch: Fetch, output: Activation, sole: bool) -> Any:
        """The outputs themselves where nobody else can ask for them; otherwise copies, whose memory belongs to the
        caller's stream, as torch's allocator sees it."""
        tensors: list[Any] = output.keep
        if tensors:
            theirs = self.their_stream(stage.runtime, stage.device)
            if not sole or not self.lend(tensors, theirs):
                tensors = self._read_out(stage, output, theirs, partial(self._copies, output, theirs))
        return build(output.layout.structure, iter(tensors), iter(output.value.values()))

    def _copies(self, outgoing: Activation, stream: Stream) -> list[Any]:
        """Of its tensors, by `stream`, in memory of torch's current stream of their device."""
        tensors = zip(outgoing.keep, outgoing.layout.specs, strict=True)
        return [self.copy_of(tensor, spec.nbytes, stream) for tensor, spec in tensors]

    def close(self) -> None:
        for tensor, (stream, device, kind) in self.loans.close():  # the stage's stream will not be there to wait
            tensor.record_stream(torch.cuda.Stream(stream_id=stream, device_index=device, device_type=kind))
        super().close()
