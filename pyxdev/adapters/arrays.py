"""What an adapter answers about arrays: pyxdev Arrays and those of libraries on devices, NumPy arrays on the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from pyxdev._native import HOST, Array, Runtime, Stream
from pyxdev._pipeline import Source
from pyxdev.adapters.activation import Activation, Layouts, Spec, Value
from pyxdev.adapters.adapter import NEVER
from pyxdev.adapters.interface import Streams, describe, device_of, has_interface, kind_of
from pyxdev.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from pyxdev.executor.slots import Slot
    from pyxdev.executor.stages import BoundStage


class ArrayAdapter:
    """The part of an adapter that no stage matters to."""

    uncapturable = ""

    def __init__(self, layouts: Layouts) -> None:
        self._layouts = layouts
        self._streams = Streams()

    def is_array(self, leaf: Any) -> bool:
        return isinstance(leaf, Array) or hasattr(leaf, "__array_interface__") or has_interface(leaf)

    def spec(self, leaf: Any) -> Spec:
        if isinstance(leaf, Array):
            if not leaf.contiguous:
                raise InvalidArgument(f"{leaf!r} has strides {leaf.strides}; only contiguous arrays can be sent")
            return Spec(leaf.shape, leaf.dtype, leaf.nbytes)
        if self.device(leaf) == HOST:
            return host_spec(_on_host(leaf))
        found = describe(leaf)
        if not found.dense:
            raise InvalidArgument(f"a {kind_of(leaf)} with gaps or in another order cannot be sent; C order can")
        return found.spec

    def device(self, leaf: Any) -> int:
        if isinstance(leaf, Array):
            return leaf.device
        return HOST if hasattr(leaf, "__array_interface__") else device_of(leaf)

    def write(self, leaf: Any, memory: Any) -> None:
        leaf = _on_host(leaf)
        np.copyto(memory.view(leaf.dtype).reshape(leaf.shape), leaf)

    def source(self, runtime: Runtime, leaf: Any) -> Source | None:
        device = self.device(leaf)
        if device == HOST:
            return None
        if isinstance(leaf, Array):
            if leaf.runtime is not runtime:
                raise InvalidArgument(f"{leaf!r} belongs to another runtime")
            return Source(device, leaf.address, leaf.ready, leaf, None)
        found = describe(leaf)
        return Source(device, found.address, None, leaf, self._streams.of(runtime, device, found.stream))

    def queue(self, stage: BoundStage, turn: int, slot: Slot, incoming: Value) -> Activation:
        raise Unsupported(self.uncapturable)

    def memory(self, stage: BoundStage, slot: Slot, incoming: Value) -> AbstractContextManager[Any]:
        raise Unsupported(self.uncapturable)

    def copied(self, stage: BoundStage, turn: int, outgoing: Activation) -> Activation:
        block = stage.blocks.take(turn, outgoing.layout.nbytes)
        spans = [(offset, block.item.address + offset, nbytes) for offset, _, nbytes in outgoing.spans]
        stream = stage.aside()
        for (_, source, nbytes), (_, address, _) in zip(outgoing.spans, spans, strict=True):
            stream.copy(address, source, nbytes, dst_device=stage.device, src_device=stage.device)
        return Activation(stage.device, outgoing.value, spans, block)

    def _read_out(
        self, stage: BoundStage, output: Activation, theirs: Stream, copy: Callable[[], list[Any]]
    ) -> list[Any]:
        """What copy() makes of an output on the caller's stream; the stage leaves the output alone until then."""
        released = stage.outputs.reader()
        try:
            arrays = copy()
            released.record(theirs)
        except BaseException:
            theirs.synchronize()
            raise
        stage.outputs.hold(released, output.keep, NEVER)
        return arrays

    def close(self) -> None:
        self._streams.close()


def _on_host(leaf: Any) -> Any:
    """A NumPy array, or one of a library that is in host memory."""
    if hasattr(leaf, "__array_interface__"):
        return leaf
    try:
        return np.from_dlpack(leaf)
    except (BufferError, RuntimeError, TypeError) as error:
        raise InvalidArgument(f"this {kind_of(leaf)} has nothing that NumPy knows: {error}") from error


def host_spec(leaf: Any) -> Spec:
    """The Spec of a NumPy array. Raises InvalidArgument for one whose values are not in its bytes alone."""
    masked = type(leaf) is not np.ndarray and isinstance(leaf, np.ma.MaskedArray)  # numpy.ma takes long to import
    if leaf.dtype.hasobject or leaf.dtype.names or masked:
        kind = "masked array" if masked else f"array of dtype {leaf.dtype}"
        raise InvalidArgument(f"a {kind} cannot go to a device; plain numbers, bools and fixed-size bytes can")
    return Spec(leaf.shape, dtype_name(leaf.dtype), leaf.nbytes)


def dtype_name(dtype: np.dtype[Any]) -> str:
    """The name that np.dtype() and other libraries know it by."""
    named = dtype.kind in "biufc" or (dtype.kind == "V" and not dtype.name.startswith("void"))  # V: ml_dtypes' floats
    return dtype.name if named and dtype.isnative else dtype.str
