"""Torch stages on simulated devices: CPU tensors over their memory.

A stage waits for its simulated stream and runs at once, on the host, so it takes no simulated time and nothing of it is
seen by the ordering checker; copies between devices, slots and what is in flight are as on a GPU. It is for trying a
pipeline where there is no GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.dlpack import from_dlpack

from pyxdev._native import Array, Lease, Runtime, Stream
from pyxdev.adapters.activation import Activation, Layouts, Spec, Value
from pyxdev.adapters.arrays import ArrayAdapter
from pyxdev.adapters.torch import TorchAdapter

if TYPE_CHECKING:
    from pyxdev.executor.results import Fetch
    from pyxdev.executor.slots import Slot
    from pyxdev.executor.stages import BoundStage
    from pyxdev.executor.tickets import Microbatch


class SimulatedTorchAdapter(TorchAdapter):
    """See the module's docstring. Modules and what a stage keeps are in host memory; results are CPU tensors."""

    uncapturable = "torch stages of simulated devices run on the host, so there is nothing to capture"

    def __init__(self, layouts: Layouts) -> None:
        super().__init__(layouts)
        self._inside: BoundStage | None = None
        self._turn = 0
        self._results: Stream | None = None

    def device_of(self, tensor: Any) -> int:
        return super().device_of(tensor) if self._inside is None else self._inside.device

    def run(self, stage: BoundStage, batch: Microbatch, slot: Slot, incoming: Value) -> Activation:
        self._turn = batch.turn
        return super().run(stage, batch, slot, incoming)

    def enter(self, stage: BoundStage) -> BoundStage | None:
        stage.stream.synchronize()
        self._inside, outer = stage, self._inside
        return outer

    def leave(self, before: BoundStage | None) -> None:
        self._inside = before

    def watched(self, stage: BoundStage, x: Any) -> Any:
        return stage.fn(x)  # there is nothing that the host could wait for

    def own(self, stage: BoundStage, arrays: list[Any], n: int) -> Spec:
        """Moves output n to memory of the device."""
        spec = super().own(stage, arrays, n)
        block: Lease = stage.blocks.take(self._turn, spec.nbytes)
        memory = Array(stage.runtime, stage.device, block.item.address, (spec.nbytes,), "uint8", owner=block)
        arrays[n] = from_dlpack(memory).view(arrays[n].dtype).view(spec.shape).copy_(arrays[n])
        return spec

    copied = ArrayAdapter.copied

    def lend(self, tensors: list[Any], stream: Stream) -> bool:
        return False

    def result(self, stage: BoundStage, fetch: Fetch, output: Activation, sole: bool) -> Any:
        if not isinstance(output.keep, list):  # of a graph
            tensors = self._views(stage, output.keep.item.address, output.keep, output.layout).tensors
            output = Activation(output.device, output.value, output.spans, tensors)
        return super().result(stage, fetch, output, sole)

    def copy_of(self, tensor: Any, nbytes: int, stream: Stream) -> Any:
        return tensor.clone()  # to host memory, which is none of the simulated device's

    def their_stream(self, runtime: Runtime, device: int) -> Stream:
        if self._results is None:
            self._results = runtime.stream(device)
        return self._results

    def close(self) -> None:
        super().close()
        if self._results is not None:
            self._results.close()
