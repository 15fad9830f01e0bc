"""Stages of transformer blocks in torch, and how people run them over two GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from bench.ways import ByExecutor, Limits, Run, Way, copies, pair
from pyxdev import Executor
from pyxdev._native import Runtime

DEPTH = 4  # slots of a hop
TOLERANCE = 1e-2  # of the norm of the differences over that of the outputs; bfloat16 keeps 8 bits, 2**-8 = 0.4 %
DTYPE = torch.bfloat16


class Size(NamedTuple):
    """A stage of so many blocks; the activations are (1, tokens, width)."""

    blocks: int
    tokens: int
    width: int
    heads: int

    @property
    def nbytes(self) -> int:
        return self.tokens * self.width * DTYPE.itemsize


# By microseconds of a stage on an H200, about.
SIZES = {
    50: Size(1, 64, 2048, 16),
    150: Size(1, 64, 4096, 32),
    500: Size(2, 384, 4096, 32),
    5000: Size(16, 512, 4096, 32),
}


class Block(nn.Module):
    """A transformer block: causal attention and a layer of four times the width."""

    def __init__(self, width: int, heads: int, **options: Any) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width, **options), nn.LayerNorm(width, **options)
        self.qkv, self.out = (nn.Linear(width, n * width, bias=False, **options) for n in (3, 1))
        self.up = nn.Linear(width, 4 * width, bias=False, **options)
        self.down = nn.Linear(4 * width, width, bias=False, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.before(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


def gpu(ordinal: int) -> torch.device:
    return torch.device("cuda", ordinal)


def make_stage(size: Size, index: int, device: torch.device) -> nn.Module:
    """Stage `index`: the same weights on every device of one kind."""
    torch.manual_seed(1000 + index)
    made = [Block(size.width, size.heads, device=device, dtype=DTYPE) for _ in range(size.blocks)]
    return nn.Sequential(*made).requires_grad_(False)


def make_inputs(size: Size, count: int, device: torch.device) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(1, size.tokens, size.width, device=device, dtype=DTYPE) for _ in range(count)]


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the differences over that of what was wanted; inf where anything is not finite."""
    wanted, got = wanted.float(), got.to(wanted.device).float()
    share = float((got - wanted).norm() / wanted.norm())
    return share if share == share else float("inf")


def settle(*devices: torch.device) -> None:
    """Waits for everything on these devices, or on both. A run ends when it is through on the one with the outputs."""
    for device in devices or [gpu(ordinal) for ordinal in range(min(2, torch.cuda.device_count()))]:
        torch.cuda.synchronize(device)


# ---- what people do --------------------------------------------------------------------------------------------------


class Plain:
    """No stream and no event: both stages on device 0, or .to() between the devices."""

    def __init__(self, stages: list[nn.Module], xs: list[torch.Tensor], devices: tuple[int, int]) -> None:
        self.stages, self.xs, self.devices = stages, xs, [gpu(ordinal) for ordinal in devices]
        self.path = "none" if devices[0] == devices[1] else "direct"
        self._outputs: list[torch.Tensor] = []

    def _step(self, x: torch.Tensor) -> torch.Tensor:
        for stage, device in zip(self.stages, self.devices, strict=True):
            x = stage(x.to(device, non_blocking=True))
        return x

    def run(self, m: int) -> Run:
        self._outputs = []
        begin = time.monotonic()
        outputs = [self._step(self.xs[i % len(self.xs)]) for i in range(m)]
        host = time.monotonic() - begin
        settle(self.devices[-1])
        self._outputs = outputs
        return Run(time.monotonic() - begin, host)

    def stream(self, m: int) -> Run:
        self._outputs = []
        begin = time.monotonic()
        for i in range(m):
            self._step(self.xs[i % len(self.xs)])
        host = time.monotonic() - begin
        settle(self.devices[-1])
        return Run(time.monotonic() - begin, host)

    def loop(self, sequences: int, steps: int) -> Run:
        self._outputs = []
        begin = time.monotonic()
        ys = self.xs[:sequences]
        for _ in range(steps):
            for k in range(sequences):
                ys[k] = self._step(ys[k])
        host = time.monotonic() - begin
        settle(self.devices[-1])
        self._outputs = ys
        return Run(time.monotonic() - begin, host)

    def outputs(self) -> list[torch.Tensor]:
        return self._outputs

    def close(self) -> None:
        self._outputs = []


def capture(stage: nn.Module, x: torch.Tensor, stream: Any) -> tuple[Any, torch.Tensor]:
    """A graph of the stage on this input, and its output, which every replay writes again."""
    with torch.cuda.device(x.device):
        with torch.cuda.stream(stream):
            for _ in range(3):
                stage(x)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            y = stage(x)
    return graph, y


class ByHand:
    """A compute stream for each stage, copy streams, a ring of slots, and events between them. With graphs, each stage
    is captured once for each slot; the copies into the first slots and out of the last outputs, which graphs need, run
    on streams of their own too. copies: they are made without graphs, too, so that inputs and results are the caller's
    own, as the executor's are."""

    path = "direct"

    def __init__(
        self,
        stages: list[nn.Module],
        xs: list[torch.Tensor],
        ordinals: tuple[int, int],
        graphs: bool = False,
        copies: bool = False,
    ) -> None:
        self.stages, self.xs, self.graphs, self.copies = stages, xs, graphs, graphs or copies
        self.last = len(stages) - 1
        devices = [gpu(ordinal) for ordinal in ordinals]
        self.compute = [torch.cuda.Stream(device) for device in devices]
        self.into = [torch.cuda.Stream(device) for device in (devices[0], *devices[:-1])]  # where each copy is read
        self.away = torch.cuda.Stream(devices[-1])
        self.slots = [[xs[0].to(device, copy=True) for _ in range(DEPTH)] for device in devices]
        # Of slot k: the input of stage n is there; stage n is through; the last output was copied, away or back.
        self.arrived, self.done = ([[torch.cuda.Event() for _ in range(DEPTH)] for _ in stages] for _ in range(2))
        self.taken = [torch.cuda.Event() for _ in range(DEPTH)]
        self.held: list[list[Any]] = [[None] * DEPTH for _ in stages]  # outputs that a copy may still read
        settle()
        self.replays = [[capture(stage, slot, stream) for slot in slots] for stage, slots, stream in self._each()]
        self._outputs: list[torch.Tensor] = []

    def _each(self) -> Iterator[tuple[nn.Module, list[torch.Tensor], Any]]:
        return zip(self.stages, self.slots, self.compute, strict=True) if self.graphs else iter(())

    def _copy(self, n: int, k: int, x: torch.Tensor, ready: Any, stream: Any, arrived: Any) -> torch.Tensor:
        """Into slot k of stage n."""
        slot = self.slots[n][k]
        if ready is not None:
            stream.wait_event(ready)
        stream.wait_event(self.done[n][k])
        with torch.cuda.stream(stream):
            slot.copy_(x, non_blocking=True)
        arrived.record(stream)
        self.compute[n].wait_event(arrived)
        return slot

    def _stage(self, n: int, k: int, x: torch.Tensor) -> torch.Tensor:
        stream = self.compute[n]
        stream.wait_event(self.arrived[n + 1][k] if n < self.last else self.taken[k])  # the output before has been read
        if self.graphs:
            graph, y = self.replays[n][k]
            with torch.cuda.stream(stream):
                graph.replay()
        else:
            with torch.cuda.stream(stream):
                y = self.stages[n](x)
        self.done[n][k].record(stream)
        self.held[n][k] = y
        return y

    def step(self, k: int, x: torch.Tensor, again: bool = False) -> torch.Tensor:
        """Queues one microbatch through slot k of every stage; the output is there at done[-1][k]. again: x is the
        output of this slot, on the last device."""
        if again:
            x = self._copy(0, k, x, self.done[-1][k], self.away, self.taken[k])
        elif self.copies:
            x = self._copy(0, k, x, None, self.into[0], self.arrived[0][k])
        x = self._stage(0, k, x)
        for n in range(1, len(self.stages)):
            x = self._copy(n, k, x, self.done[n - 1][k], self.into[n], self.arrived[n][k])
            x = self._stage(n, k, x)
        return x

    def _take(self, k: int, y: torch.Tensor) -> torch.Tensor:
        """A copy that the caller may keep: a graph writes to the same place again."""
        if not self.copies:
            return y
        self.away.wait_event(self.done[-1][k])
        with torch.cuda.stream(self.away):
            y = y.clone()
        self.taken[k].record(self.away)
        return y

    def _pipeline(self, m: int, keep: bool) -> Run:
        self._outputs = []
        begin = time.monotonic()
        for i in range(m):
            k = i % DEPTH
            y = self._take(k, self.step(k, self.xs[i % len(self.xs)]))
            if keep:
                self._outputs.append(y)
        host = time.monotonic() - begin
        settle(self.away.device)
        return Run(time.monotonic() - begin, host)

    def run(self, m: int) -> Run:
        return self._pipeline(m, True)

    def stream(self, m: int) -> Run:
        return self._pipeline(m, False)

    def loop(self, sequences: int, steps: int) -> Run:
        begin = time.monotonic()
        ys = [self.step(k, self.xs[k]) for k in range(sequences)]
        for _ in range(steps - 1):
            for k in range(sequences):
                ys[k] = self.step(k, ys[k], again=True)
        host = time.monotonic() - begin
        settle(self.away.device)
        seconds = time.monotonic() - begin
        self._outputs = [y.clone() for y in ys]
        settle()
        return Run(seconds, host)

    def outputs(self) -> list[torch.Tensor]:
        return self._outputs

    def close(self) -> None:
        settle()
        self._outputs, self.held, self.replays = [], [], []


class Alone:
    """One stage on its device and nothing else: a graph of it, again and again."""

    def __init__(self, stage: nn.Module, x: torch.Tensor) -> None:
        self.stream = torch.cuda.Stream(x.device)
        self.x = x
        self.graph, self.y = capture(stage, x, self.stream)
        self.begin, self.end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def seconds(self, least: float = 5e-3) -> float:
        """Of one replay, over so many seconds of them or more."""
        found = 1e-4
        for _ in range(2):  # the first to learn how many it takes
            count = max(3, int(least / found))
            with torch.cuda.stream(self.stream):
                self.begin.record(self.stream)
                for _ in range(count):
                    self.graph.replay()
                self.end.record(self.stream)
            self.end.synchronize()
            found = self.begin.elapsed_time(self.end) / 1e3 / count
        return found


# ---- the family ------------------------------------------------------------------------------------------------------


class Blocks:
    """Two stages of transformer blocks on two devices; on one they share its processors, so only the ways compare."""

    name = "torch"
    tolerance = TOLERANCE
    alike = (("ours", "events"), ("ours-staged", "events"), ("ours-graphs", "graphs"), ("ours-graphs-staged", "graphs"))

    def __init__(self, runtime: Runtime, size: Size, most: int) -> None:
        """most: inputs."""
        self.runtime, self.size, self.devices = runtime, size, pair(runtime)
        torch.cuda.set_device(gpu(0))
        self.stages = [make_stage(size, index, gpu(ordinal)) for index, ordinal in enumerate(self.devices)]
        self.both = [self.stages[0], make_stage(size, 1, gpu(0))]
        self.xs = make_inputs(size, most, gpu(0))
        self.wanted = [self.both[1](self.both[0](x)) for x in self.xs]
        self.absent = {} if len(set(self.devices)) > 1 else {"gpipe": "needs two devices"}
        self._alone: list[Alone] = []
        self._looped: dict[int, list[torch.Tensor]] = {}
        settle()

    def ways(self) -> Iterator[tuple[str, Callable[[], Way]]]:
        yield "one", lambda: Plain(self.both, self.xs, (0, 0))
        yield "naive", lambda: Plain(self.stages, self.xs, self.devices)
        yield "events", lambda: ByHand(self.stages, self.xs, self.devices)
        yield "events-copies", lambda: ByHand(self.stages, self.xs, self.devices, copies=True)
        yield "graphs", lambda: ByHand(self.stages, self.xs, self.devices, graphs=True)
        yield "ours", lambda: self._ours("direct")
        apart = len(set(self.devices)) > 1  # a copy within a device has no legs
        if apart:
            yield "ours-staged", lambda: self._ours("staged")
        yield "ours-graphs", lambda: self._ours("direct", graph="on")
        if apart:
            yield "ours-graphs-staged", lambda: self._ours("staged", graph="on")

    def _ours(self, path: str, **options: Any) -> Way:
        staged = {"direct": 0, "staged": 1}[path]
        executor = Executor(
            self.devices, self.stages, adapter="torch", runtime=self.runtime, host_stage=staged, **options
        )
        return ByExecutor(executor, self.xs, path, partial(settle, gpu(self.devices[-1])))

    def limits(self) -> Limits:
        if not self._alone:
            self._alone = [
                Alone(stage, self.xs[0].to(gpu(n))) for n, stage in zip(self.devices, self.stages, strict=True)
            ]
        return Limits([alone.seconds() for alone in self._alone], copies(self.runtime, self.devices, self.size.nbytes))

    def error(self, outputs: list[torch.Tensor]) -> float:
        """The largest distance of any output from that of one device."""
        return max(distance(got, wanted) for got, wanted in zip(outputs, self.wanted, strict=False))

    def loop_error(self, outputs: list[torch.Tensor], steps: int) -> float:
        if steps not in self._looped:
            ys = self.xs[:DEPTH]
            for _ in range(steps):
                ys = [self.both[1](self.both[0](y)) for y in ys]
            self._looped = {steps: ys}
        return max(distance(got, wanted) for got, wanted in zip(outputs, self._looped[steps], strict=False))

    def same(self, outputs: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(outputs, others, strict=True))

    def close(self) -> None:
        settle()
        self._alone, self._looped, self.wanted, self.xs, self.stages, self.both = [], {}, [], [], [], []
        torch.cuda.empty_cache()
