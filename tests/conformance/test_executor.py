"""Pipelines on every driver: raw stages that are made of fills and copies, so that they need no kernel."""

import itertools
import os
import random

import numpy as np
import pytest
from hardware import pattern, same

from pyxdev import Array, Executor, Stage
from pyxdev.errors import Cancelled, NoPeerAccess, StageError

MEBIBYTE = 1 << 20


class Turn:
    """Drops the first byte of x and puts a value at its end; slowly, for seeds that ask for it."""

    def __init__(self, value, scratch=0):
        self.value, self.scratch = value, scratch

    def queue(self, stage, x):
        y = stage.empty(x.shape, x.dtype)
        if self.scratch:
            slow = stage.empty((self.scratch,), "uint8")
            for _ in range(4):
                stage.stream.fill(slow.address, self.value, slow.nbytes)
        copy(stage, y.address, x.address + 1, x.nbytes - 1)
        stage.stream.fill(y.address + x.nbytes - 1, self.value, 1)
        return y

    def __call__(self, stage, x):
        return self.queue(stage, x)

    def by_hand(self, x):
        return np.append(x[1:], np.uint8(self.value))


class Remember(Turn):
    """Puts half of the input before in front: state that every microbatch changes."""

    memory = None

    def __call__(self, stage, x):
        if self.memory is None:
            self.memory = stage.empty(x.shape, x.dtype)
            stage.stream.fill(self.memory.address, 0, x.nbytes)
        y = self.queue(stage, x)
        half = x.nbytes // 2
        copy(stage, y.address, self.memory.address, half)
        copy(stage, self.memory.address, x.address, x.nbytes)
        return y

    def __init__(self, *values):
        super().__init__(*values)
        self.before = None

    def by_hand(self, x):
        before = np.zeros_like(x) if self.before is None else self.before
        self.before = x
        return np.concatenate([before[: len(x) // 2], super().by_hand(x)[len(x) // 2 :]])


class GiveBack(Turn):
    """Returns its input."""

    def __call__(self, stage, x):
        return x

    def by_hand(self, x):
        return x


def copy(stage, to, of, nbytes):
    stage.stream.copy(to, of, nbytes, dst_device=stage.device, src_device=stage.device)


def in_order(stages, xs):
    for x in xs:
        for stage in stages:
            x = stage.by_hand(x)
        yield x


@pytest.mark.parametrize("host_stage", ["0", "1", "auto"])
@pytest.mark.parametrize("depth, in_flight", [(1, 1), (1, 6), (3, 9), ("auto", "auto")])
def test_pipelines_give_the_bytes_of_running_in_order(runtime, seed, host_stage, depth, in_flight):
    choose = random.Random(seed)
    nbytes = choose.choice([3000, MEBIBYTE + 13])
    kinds = [choose.choice([Turn, Turn, Remember, GiveBack]) for _ in range(4)]
    slow = [choose.choice([0, 4 * MEBIBYTE]) for _ in kinds]
    stages = [kind(10 + n, scratch) for n, (kind, scratch) in enumerate(zip(kinds, slow, strict=True))]
    devices = [choose.randrange(runtime.device_count) for _ in stages]
    xs = [pattern(nbytes, n) for n in range(10)]
    try:
        pipeline = Executor(
            devices, stages, adapter="raw", runtime=runtime, depth=depth, in_flight=in_flight, host_stage=host_stage
        )
    except NoPeerAccess:
        assert host_stage == "0"
        assert any(not runtime.peer_capable(a, b) for a, b in itertools.pairwise(devices) if a != b)
        return
    with pipeline:
        for got, wanted in zip(pipeline.map(xs), in_order(stages, xs), strict=True):
            same(got.numpy(), wanted)


def test_tickets_go_round_without_the_host(runtime):
    devices = list(range(min(4, runtime.device_count)))
    stages = [Turn(n, MEBIBYTE) for n in devices]
    xs = [pattern(100_000, n) for n in range(3)]
    with Executor(devices, stages, adapter="raw", runtime=runtime, host_stage="auto") as pipeline:
        tickets = [pipeline.submit(x) for x in xs]
        for _ in range(5):
            tickets = [pipeline.submit(ticket) for ticket in tickets]
        for ticket, x in zip(tickets, xs, strict=True):
            for _ in range(6):
                x = next(in_order(stages, [x]))
            same(ticket.result().numpy(), x)


def test_values_of_several_arrays_and_of_changing_size(runtime):
    def swap(stage, x):
        y = stage.empty(x["b"].shape, x["b"].dtype)
        copy(stage, y.address, x["b"].address, y.nbytes)
        return {"a": y, "b": x["a"], "n": x["n"] + 1}

    devices = [0, runtime.device_count - 1, 0]
    xs = [
        {"a": pattern(n, 1), "b": pattern(3 * n + 1, 2), "n": n} for n in (0, 1, 255, 256, 257, 70_000, 5, 300_000, 0)
    ]
    with Executor(devices, [swap] * 3, adapter="raw", runtime=runtime, depth=2) as pipeline:
        for y, x in zip(pipeline.map(xs), xs, strict=True):
            same(y["a"].numpy(), x["b"])
            same(y["b"].numpy(), x["a"])
            assert y["n"] == x["n"] + 3


def test_arrays_of_any_device_are_inputs(devices):
    runtime = devices.runtime
    with Executor([0], [Turn(7)], adapter="raw", runtime=runtime) as pipeline:
        for device in devices:
            data = pattern(5000, device)
            buffer = devices.upload(device, data)
            x = Array(runtime, device, buffer.address, (5000,), "uint8", owner=buffer)
            same(pipeline.submit(x).result().numpy(), Turn(7).by_hand(data))


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("microbatch", [0, 3, 5])
def test_a_stage_that_raises(runtime, stage, microbatch):
    class Fails(Turn):
        calls = 0

        def __call__(self, at, x):
            y = self.queue(at, x)  # some work is queued before it fails
            self.calls += 1
            if self.calls == microbatch + 1:
                raise LookupError("here")
            return y

    stages = [Turn(1), Turn(2)]
    stages[stage] = Fails(3, MEBIBYTE)
    xs = [pattern(2000, n) for n in range(6)]
    with Executor([0, runtime.device_count - 1], stages, adapter="raw", runtime=runtime) as pipeline:
        tickets = [pipeline.submit(x) for x in xs]
        wanted = list(in_order(stages, xs))
        for n, ticket in enumerate(tickets):
            if n < microbatch:
                same(ticket.result().numpy(), wanted[n])
            elif n > microbatch:
                with pytest.raises(Cancelled):
                    ticket.result()
        with pytest.raises(StageError) as caught:
            tickets[microbatch].result()
        assert (caught.value.stage, caught.value.microbatch) == (stage, microbatch)
        assert isinstance(caught.value.__cause__, LookupError)
        del caught
        for y, right in zip(pipeline.map(xs), wanted, strict=True):
            same(y.numpy(), right)


def test_nothing_is_allocated_after_warm_up(runtime):
    devices = [0, runtime.device_count - 1]
    with Executor(devices, [Turn(1), Turn(2)], adapter="raw", runtime=runtime) as pipeline:
        seen = []
        for n, _ in enumerate(pipeline.map([pattern(9000, n) for n in range(50)])):
            if n in (25, 49):
                seen.append(runtime.live())
        for name in ("buffers", "events", "device_bytes", "pinned_bytes"):
            assert getattr(seen[0], name) == getattr(seen[1], name), name


class Both(Turn):
    """Puts the first halves of two inputs together."""

    def __call__(self, stage, x):
        first, second = x
        y = stage.empty(first.shape, first.dtype)
        half = first.nbytes // 2
        copy(stage, y.address, first.address, half)
        copy(stage, y.address + half, second.address, first.nbytes - half)
        return y


@pytest.mark.parametrize("host_stage", ["1", "auto"])
def test_stages_that_skip_and_join(runtime, host_stage):
    devices = [n % runtime.device_count for n in range(4)]
    stages = [
        Stage(Turn(1, MEBIBYTE)), Stage(Turn(2), inputs=0), Stage(Turn(3, MEBIBYTE), inputs=0),
        Stage(Both(0), inputs=(1, 2)),
    ]  # fmt: skip
    xs = [pattern(70_001, n) for n in range(12)]
    with Executor(devices, stages, adapter="raw", runtime=runtime, host_stage=host_stage, depth=2) as pipeline:
        for y, x in zip(pipeline.map(xs), xs, strict=True):
            first = Turn(1).by_hand(x)
            left, right = Turn(2).by_hand(first), Turn(3).by_hand(first)
            same(y.numpy(), np.concatenate([left[: len(x) // 2], right[: len(x) - len(x) // 2]]))


def test_a_trace_has_the_times_of_the_devices(runtime):
    """As far as they can be checked on any machine: in order, after their submission, and no clock goes astray. The
    stand-ins' devices have a clock of their own, which tells of their order alone."""
    devices = [0, runtime.device_count - 1]
    stages = [Turn(1, 8 * MEBIBYTE), Turn(2, 8 * MEBIBYTE)]
    xs = [pattern(100_000, n) for n in range(20)]
    with Executor(devices, stages, adapter="raw", runtime=runtime, host_stage="1", in_flight=3) as pipeline:
        list(pipeline.map(xs))
        begin = runtime.clock()
        with pipeline.trace() as trace:
            for y, wanted in zip(pipeline.map(xs), in_order(stages, xs), strict=True):
                same(y.numpy(), wanted)
        took = runtime.clock() - begin
        sums = pipeline.stats().traced
    alone = "PYXDEV_FAKE_CUDA_DEVICES" in os.environ and runtime.backend != "sim"
    off = 1000 if alone else 1e-3  # seconds that a clock may be off
    assert all(abs(drift) < off for drift in trace.drift.values())
    for n in range(2):
        works = [span for span in trace.spans if span.engine == f"stage {n} Turn"]
        assert [span.label for span in works] == [f"microbatch {20 + k}" for k in range(20)]
        assert all(a.end <= b.start + 1000 for a, b in itertools.pairwise(works))  # one stream
        assert all(span.start >= span.submitted - 1e9 * off for span in works)
    copies = [span for span in trace.spans if span.engine == "link"]
    assert len(copies) == 20 and all(span.nbytes == 100_000 // 256 * 256 + 256 for span in copies)
    firsts = [span for span in trace.spans if span.engine == "stage 0 Turn"]
    assert all(copy.end >= first.end - 1e9 * off for copy, first in zip(copies, firsts, strict=True))
    assert all(span.end >= span.start for span in trace.spans)
    assert 0 < sums.seconds <= took + off
    assert all(0 < share <= 1.001 for share in (*sums.stages, *sums.devices.values()))
    assert 0 <= sums.bubble < 1 and 0 <= sums.hidden <= 1.001
