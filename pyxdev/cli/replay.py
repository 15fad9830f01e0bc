"""The seed's tables, replayed on simulated devices: one prompt, three ways of running it.

The seed is a change to llama.cpp, measured by its author on ten MI50 32 GB (gpt-oss-120B MXFP4, microbatches of 1024
tokens). The workload below is fitted to the tables that came with it; the three ways differ in nothing but who waits
for what.

    blocking  at every hop the submitting thread waits until the source stage has finished: without peer access a copy
              between two devices synchronises its queue on ROCm
    seed      devices wait for each other; one staging buffer a hop, so the source stage waits for the second leg; at
              most four microbatches past the first stage
    pyxdev    the Executor
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pyxdev import backends
from pyxdev._native import HOST, Array, Buffer, Event, Runtime, SimDriver, Stream
from pyxdev.executor import Executor, Stage

SEED_RING = 4  # microbatches that the seed lets into its first stage before the host waits


@dataclass(frozen=True)
class Workload:
    """A prompt as microbatches through the layers of a model.

    first, per_earlier: seconds that all layers take for a microbatch: attention looks back on every earlier one, so the
    cost grows by a constant for each. 1.6 s and 0.076 s make 2.17 s on average over 16, the serial time behind the
    published rates. activation: bytes of one hop: 1024 tokens x 2880 values x 4 bytes.
    """

    layers: int = 36
    tokens: int = 1024
    activation: int = 1024 * 2880 * 4
    first: float = 1.6
    per_earlier: float = 0.076

    def split(self, devices: int) -> list[int]:
        """Layers of each device; where they do not divide evenly, rounded as a running sum."""
        ends = [round(self.layers * (index + 1) / devices) for index in range(devices)]
        return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]

    def cost(self, microbatch: int, layers: int) -> float:
        """Seconds of a stage of so many layers."""
        return (self.first + self.per_earlier * microbatch) * layers / self.layers


def ideal(work: Workload, devices: int, microbatches: int) -> float:
    """Seconds of the best schedule on these stage times: no copy, no host, no limit in flight."""
    free = [0.0] * devices
    for microbatch in range(microbatches):
        arrived = 0.0
        for stage, layers in enumerate(work.split(devices)):
            arrived = free[stage] = max(arrived, free[stage]) + work.cost(microbatch, layers)
    return free[-1]


def serial(work: Workload, microbatches: int) -> float:
    """Seconds of one device with all layers."""
    return sum(work.cost(microbatch, work.layers) for microbatch in range(microbatches))


# ---- the two old ways ------------------------------------------------------------------------------------------------


class _Rig:
    """What the old ways work on: a stream and an activation a device, a staging buffer a hop."""

    def __init__(self, runtime: Runtime, work: Workload, devices: int) -> None:
        self.runtime = runtime
        self.work = work
        self.layers = work.split(devices)
        self.streams = [runtime.stream(device) for device in range(devices)]
        self.activations = [runtime.buffer(device, work.activation) for device in range(devices)]
        self.staging = [runtime.buffer(HOST, work.activation) for _ in range(devices - 1)]
        self.events: list[Event] = []

    def compute(self, stage: int, microbatch: int) -> Event:
        stream, activation = self.streams[stage], self.activations[stage]
        seconds = self.work.cost(microbatch, self.layers[stage])
        stream.launch(_nothing, cost=seconds, writes=[(activation.address, activation.nbytes)])
        return self.mark(stream)

    def leg(self, stream: Stream, dst: Buffer, src: Buffer) -> Event:
        stream.copy(dst.address, src.address, src.nbytes, dst_device=dst.device, src_device=src.device)
        return self.mark(stream)

    def mark(self, stream: Stream) -> Event:
        event = self.runtime.event()
        event.record(stream)
        self.events.append(event)
        return event

    def close(self) -> None:
        for things in (self.events, self.streams, self.activations, self.staging):
            for thing in things:
                thing.close()


def _nothing() -> None:
    pass


def _blocking(rig: _Rig, microbatches: int) -> None:
    for microbatch in range(microbatches):
        for stage, stream in enumerate(rig.streams):
            computed = rig.compute(stage, microbatch)
            if stage + 1 < len(rig.streams):
                computed.wait()
                after = rig.streams[stage + 1]
                after.wait(rig.leg(stream, rig.staging[stage], rig.activations[stage]))
                rig.leg(after, rig.activations[stage + 1], rig.staging[stage])


def _seed(rig: _Rig, microbatches: int) -> None:
    entered: list[Event] = []
    for microbatch in range(microbatches):
        if microbatch >= SEED_RING:
            entered[microbatch - SEED_RING].wait()
        for stage, stream in enumerate(rig.streams):
            computed = rig.compute(stage, microbatch)
            if stage == 0:
                entered.append(computed)
            if stage + 1 < len(rig.streams):
                after = rig.streams[stage + 1]
                after.wait(rig.leg(stream, rig.staging[stage], rig.activations[stage]))
                stream.wait(rig.leg(after, rig.activations[stage + 1], rig.staging[stage]))


def _old_way(run: Callable[[_Rig, int], None]) -> Callable[[Runtime, Workload, int, int], float]:
    def measure(runtime: Runtime, work: Workload, devices: int, microbatches: int) -> float:
        rig = _Rig(runtime, work, devices)
        try:
            begin = runtime.clock()
            run(rig, microbatches)
            rig.mark(rig.streams[-1]).wait()
            return runtime.clock() - begin
        finally:
            rig.close()

    return measure


# ---- pyxdev ----------------------------------------------------------------------------------------------------------


def _pyxdev(runtime: Runtime, work: Workload, devices: int, microbatches: int) -> float:
    layers = work.split(devices)

    def stage_of(index: int) -> Callable[[Any, Any], Any]:
        hands_on = index + 1 < devices  # the last one keeps its logits

        def run(stage: Any, x: tuple[int, Array | None]) -> tuple[int, Array | None]:
            microbatch, _ = x
            out = stage.empty((work.activation,), "uint8") if hands_on else None
            writes = [(out.address, out.nbytes)] if out is not None else []
            stage.stream.launch(_nothing, cost=work.cost(microbatch, layers[index]), writes=writes)
            return microbatch, out

        return run

    stages = [Stage(stage_of(index), adapter="raw") for index in range(devices)]
    with Executor(range(devices), stages, runtime=runtime) as executor:
        begin = runtime.clock()
        for _ in executor.map((microbatch, None) for microbatch in range(microbatches)):
            pass
        return runtime.clock() - begin


MODES: dict[str, Callable[[Runtime, Workload, int, int], float]] = {
    "blocking": _old_way(_blocking),
    "seed": _old_way(_seed),
    "pyxdev": _pyxdev,
}


@dataclass(frozen=True)
class Row:
    """speedup: against one device with all layers; bound: the ideal schedule's."""

    devices: int
    microbatches: int
    mode: str
    tokens_per_s: float
    speedup: float
    bound: float


def replay(
    machine: Any,
    work: Workload,
    devices: Sequence[int],
    microbatches: Sequence[int],
    modes: Sequence[str],
    watch: Callable[[SimDriver], None] | None = None,
) -> list[Row]:
    """Every combination on simulated devices, in simulated time. machine: as pyxdev.open takes it. watch: is shown the
    driver after each run."""
    rows = []
    for count in devices:
        for number in microbatches:
            alone, best = serial(work, number), ideal(work, count, number)
            for mode in modes:
                with backends.open("sim", machine=machine) as runtime:
                    seconds = MODES[mode](runtime, work, count, number)
                    if watch is not None:
                        watch(cast(SimDriver, runtime.driver))
                rows.append(Row(count, number, mode, number * work.tokens / seconds, alone / seconds, alone / best))
    return rows
