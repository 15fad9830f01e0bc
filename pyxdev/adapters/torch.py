"""Torch functions and modules as stages of CUDA and HIP devices.

A stage runs with torch's current device and stream set to its own. Its input lies in one of our slots, so it is good
until the stage returns; its outputs lie in memory of torch's allocator, on the stage's stream. We hold them until that
stream waits for whoever reads them, so the allocator cannot hand the memory out too early, and no record_stream is
needed.

Outputs are passed on without a copy if nobody else refers to their memory. Otherwise (an input returned, a view of a
cache, the static output of a captured graph) they are cloned first, in stream order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from pyxdev._native import HOST, Array, Runtime, Stream
from pyxdev.adapters.activation import Activation, Layouts, Spec, Value, build, flatten
from pyxdev.adapters.adapter import NEVER, Source, Stopped
from pyxdev.adapters.arrays import ArrayAdapter
from pyxdev.adapters.interface import has_interface
from pyxdev.errors import InvalidArgument

if TYPE_CHECKING:
    from pyxdev.executor.results import Fetch
    from pyxdev.executor.slots import Slot
    from pyxdev.executor.stages import BoundStage
    from pyxdev.executor.tickets import Microbatch

# How many tensors and other objects use a storage, the one asked included.
_uses: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)

# What torch.cuda.current_stream() and set_stream() call. They are for every stage of every microbatch, and the objects
# that torch makes around them take longer. A stream is (id, device, type); a torch without devices has none of these.
_get_stream: Callable[[int], tuple[int, int, int]] = getattr(torch._C, "_cuda_getCurrentStream", None)  # type: ignore[assignment]
_set_stream: Callable[..., None] = getattr(torch._C, "_cuda_setStream", None)  # type: ignore[assignment]
_current_handle: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # type: ignore[assignment]


class TorchAdapter(ArrayAdapter):
    """See the module's docstring. Inputs may be tensors and other arrays anywhere; results are the caller's own tensors
    on the last stage's device, ordered on his current stream."""

    name = "torch"
    uncapturable = "" if hasattr(torch.cuda, "use_mem_pool") else "this torch has no memory pools; 2.5 and later have"

    def __init__(self, layouts: Layouts) -> None:
        super().__init__(layouts)
        self._specs: dict[tuple[Any, Any], Spec] = {}
        self._stream: tuple[int, int, int] | None = None  # torch's view of the stage's stream

    # ---- arrays ----

    def is_array(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor | np.ndarray | Array) or has_interface(leaf)

    def spec(self, leaf: Any) -> Spec:
        if not isinstance(leaf, torch.Tensor):
            spec = super().spec(leaf)
            if not hasattr(torch, spec.dtype):
                raise InvalidArgument(f"torch has no dtype for an array of {spec.dtype}")
            return spec
        key = (leaf.shape, leaf.dtype)
        known = self._specs.get(key)
        if known is None:
            known = Spec(tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."), leaf.numel() * leaf.itemsize)
            self._specs[key] = known
        if leaf.layout is not torch.strided or leaf.is_quantized:
            raise InvalidArgument(f"a tensor of layout {leaf.layout} cannot be sent; strided ones can")
        return known

    def device(self, leaf: Any) -> int:
        if not isinstance(leaf, torch.Tensor):
            return super().device(leaf)
        if leaf.is_cuda:
            return int(leaf.get_device())
        if leaf.device.type != "cpu":
            raise InvalidArgument(f"a tensor on {leaf.device} cannot be sent; cpu and cuda are allowed")
        return HOST

    def write(self, leaf: Any, memory: Any) -> None:
        if not isinstance(leaf, torch.Tensor):
            super().write(leaf, memory)
        elif leaf.numel():
            torch.from_numpy(memory).view(leaf.dtype).view(leaf.shape).copy_(leaf.detach())

    def source(self, runtime: Runtime, leaf: Any) -> Source:
        """In the order of the caller's current stream."""
        if not isinstance(leaf, torch.Tensor):
            return super().source(runtime, leaf)
        device = self.device(leaf)
        if leaf.is_complex() or not leaf.is_contiguous():
            with torch.cuda.device(device):
                leaf = _plain(leaf.detach()).contiguous()
        return Source(device, leaf.data_ptr(), None, leaf.untyped_storage(), self._their_stream(runtime, device))

    def _their_stream(self, runtime: Runtime, device: int) -> Stream:
        return self._streams.of(runtime, device, _current_handle(device))

    # ---- the stage ----

    def run(self, stage: BoundStage, batch: Microbatch, slot: Slot, incoming: Value) -> Activation:
        views = slot.views.get(incoming.layout) or self._make_views(stage, slot, incoming)
        try:
            return self._queue(stage, views, incoming)
        except BaseException as error:
            stage.report(batch, error)
            raise Stopped from error

    def queue(self, stage: BoundStage, turn: int, slot: Slot, incoming: Value) -> Activation:
        return self._queue(stage, slot.views[incoming.layout], incoming)

    def memory(self, stage: BoundStage, slot: Slot, incoming: Value) -> AbstractContextManager[Any]:
        if incoming.layout not in slot.views:
            self._make_views(stage, slot, incoming)
        return self._pooled(stage)

    @contextmanager
    def _pooled(self, stage: BoundStage) -> Iterator[Any]:
        """Memory of a pool of torch's allocator. Each graph has one of its own: in a pool that they shared, what one
        has freed would become an output of the next, and be written again by the first while it is being read."""
        with self._current(stage):
            pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(pool, device=torch.device("cuda", stage.device)):
                yield pool

    def _queue(self, stage: BoundStage, views: Views, incoming: Value) -> Activation:
        arrays: list[Any] = []
        plain: list[Any] = []
        with self._current(stage):
            # Not a name in this frame may refer to the outputs when _own() counts who does.
            structure = flatten(self._call(stage, views, incoming), self._is_tensor, arrays, plain)
            specs = tuple([self._own(stage, arrays, n) for n in range(len(arrays))])
        if views.uses != _count(views.memory):
            raise InvalidArgument("kept a tensor of its input, whose memory serves the next ones; keep a clone()")
        layout = self._layouts.of(structure, specs)
        spans = [
            (layout.offsets[n], arrays[n].data_ptr(), specs[n].nbytes) for n in range(len(arrays)) if specs[n].nbytes
        ]
        return Activation(stage.device, Value(layout, plain, plain), spans, arrays)

    def _is_tensor(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor)

    def _call(self, stage: BoundStage, views: Views, incoming: Value) -> Any:
        # Aliases: what the stage does to shape or flags of a tensor must not stick to the slot's.
        inputs = [view.detach() for view in views.tensors]
        x = build(incoming.layout.structure, iter(inputs), iter(incoming.values()))
        if stage.sync_check is None:
            return stage.fn(x)
        with self._watching(stage.sync_check):
            return stage.fn(x)

    def _watching(self, mode: str) -> AbstractContextManager[None]:
        """torch warns or raises where the host waits for the device."""
        return _sync_debug_mode(mode)

    def _own(self, stage: BoundStage, arrays: list[Any], n: int) -> Spec:
        """Makes output n a dense tensor that only we refer to."""
        arrays[n] = _plain(arrays[n].detach())
        spec = self.spec(arrays[n])
        if self.device(arrays[n]) != stage.device:
            raise InvalidArgument(
                f"returned a tensor on {arrays[n].device}; its own device, number {stage.device}, is allowed"
            )
        if not arrays[n].is_contiguous():
            arrays[n] = arrays[n].contiguous()
        elif _count(arrays[n]) != 1:
            arrays[n] = arrays[n].clone()
        return spec

    def _current(self, stage: BoundStage) -> AbstractContextManager[Any]:
        if self._stream is None:
            external: Any = torch.cuda.ExternalStream
            made = external(stage.stream.handle, device=stage.device)
            self._stream = made.stream_id, made.device_index, made.device_type
        return _Current(self._stream)

    def _make_views(self, stage: BoundStage, slot: Slot, incoming: Value) -> Views:
        layout = incoming.layout
        with self._current(stage):
            memory = Array(stage.runtime, stage.device, slot.address, (layout.nbytes,), "uint8", owner=slot.buffer)
            views = slot.views[layout] = Views(from_dlpack(memory), layout.offsets, layout.specs)
        return views

    # ---- results ----

    def result(self, stage: BoundStage, fetch: Fetch, output: Activation) -> Any:
        """Clones, so that the memory belongs to the caller's stream, as torch's allocator sees it."""
        tensors = [tensor.clone() for tensor in self._tensors(stage, output)]
        if tensors:
            released = stage.outputs.reader()
            try:
                released.record(self._their_stream(stage.runtime, stage.device))
            except BaseException:
                torch.cuda.synchronize(stage.device)
                raise
            stage.outputs.hold(released, output.keep, NEVER)
        return build(output.layout.structure, iter(tensors), iter(output.value.values()))

    def _tensors(self, stage: BoundStage, output: Activation) -> list[Any]:
        if isinstance(output.keep, list):
            return output.keep
        layout = output.layout  # a copy of what a graph has written
        memory = Array(
            stage.runtime, stage.device, output.keep.item.address, (layout.nbytes,), "uint8", owner=output.keep
        )
        return Views(from_dlpack(memory), layout.offsets, layout.specs).tensors


@contextmanager
def _sync_debug_mode(mode: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode(mode)  # which warns once that it is a prototype, and that may be an error
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class _Current:
    """The stream and its device are torch's current ones."""

    __slots__ = ("_before", "_device", "_stream")

    def __init__(self, stream: tuple[int, int, int]) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._device = torch.cuda.current_device()
        self._before = _get_stream(self._stream[1])
        _set_stream(*self._stream)  # and its device

    def __exit__(self, *exc: object) -> None:
        _set_stream(*self._before)
        if self._device != self._stream[1]:
            torch.cuda.set_device(self._device)


class Views:
    """The tensors that a layout makes of a slot's memory, and how many things use that memory then."""

    __slots__ = ("memory", "tensors", "uses")

    def __init__(self, memory: Any, offsets: tuple[int, ...], specs: tuple[Spec, ...]) -> None:
        self.memory = memory
        self.tensors = [
            memory[offset : offset + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape).detach()
            for offset, spec in zip(offsets, specs, strict=True)
        ]
        self.uses = _count(memory)


def _count(tensor: Any) -> int:
    """How many tensors share the memory. 0 where this torch cannot tell."""
    return _uses(tensor.untyped_storage()._cdata) - 1 if _uses is not None else 0


def _plain(tensor: Any) -> Any:
    """Without the lazy conjugation and negation of complex tensors, which copies of bytes would lose."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_complex() else tensor
