"""What goes wrong on other people's machines, made to happen on simulated ones; the numbers are those of a collection
of public reports. Where it can, a test shows the trouble first, then that pyxdev does right under it.
"""

import logging

import numpy as np
import pytest

from pyxdev._native import HOST, Runtime
from pyxdev.backends import open as open_backend
from pyxdev.backends import sim
from pyxdev.errors import DeviceFault, InvalidArgument, NoDevice, NoPeerAccess, OutOfMemory
from pyxdev.executor import Executor, Stage

KIB = 1 << 10


def machine(devices=2, *, faults=(), seed=0, peer=None, **sections):
    whole = {"device": {"count": devices}, "run": {"seed": seed, "delay_us": 20.0}, "fault": list(faults), **sections}
    return whole | ({"peer": peer} if peer else {})


def add_one(x):
    return x + 1


def results_of(devices, spec, **options):
    """Twelve microbatches through a stage for each device; right ones are i + the number of stages."""
    stages = [Stage(add_one, cost=5e-5) for _ in devices]
    with Executor(devices, stages, machine=spec, **options) as executor:
        return [int(result[0]) for result in executor.map(np.full(3000, i, np.int64) for i in range(12))]


def right(devices):
    return [i + len(devices) for i in range(12)]


class Pair:
    """Device 0 and 1 of a machine, a source and a destination with different bytes in them."""

    def __init__(self, spec, nbytes=64 * KIB):
        self.runtime = Runtime(sim.driver(spec))
        self.nbytes = nbytes
        self.things = []
        self.buffers = [self.keep(self.runtime.buffer(device, nbytes)) for device in (0, 1)]
        self.event = self.keep(self.runtime.event())
        self.sent = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
        self.view(0)[:] = self.sent
        self.view(1)[:] = 0xA5

    def keep(self, thing):
        self.things.append(thing)
        return thing

    def view(self, device):
        return np.frombuffer(self.buffers[device], np.uint8)

    def copy(self, src, dst, **options):
        link = self.keep(self.runtime.link(src, dst, **options))
        link.copy(self.buffers[dst].address, self.buffers[src].address, self.nbytes, arrived=self.event)
        assert self.event.wait()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for thing in reversed(self.things):
            thing.close()
        self.runtime.close()


# ---- peer access ----


@pytest.mark.parametrize("kind", ["drop", "zero", "mirror", "stale"])
def test_1_peer_access_reported_and_the_bytes_never_arrive(kind, caplog):
    spec = machine(faults=[{"kind": kind, "from": 0, "to": 1}])
    with Pair(spec) as pair:
        pair.copy(0, 1, path="direct")
        assert not np.array_equal(pair.view(1), pair.sent)  # and no error is raised
        pair.copy(0, 1, path="staged")
        assert np.array_equal(pair.view(1), pair.sent)
    with caplog.at_level(logging.INFO, "pyxdev"):
        assert results_of([0, 1], spec) == right([0, 1])
    assert [r.getMessage() for r in caplog.records if "wrong data" in r.getMessage()]


def test_2_only_one_direction_is_bad(caplog):
    spec = machine(faults=[{"kind": "drop", "from": 0, "to": 1}])
    with caplog.at_level(logging.INFO, "pyxdev"):
        assert results_of([0, 1, 0], spec) == right([0, 1, 0])
    lines = " ".join(r.getMessage() for r in caplog.records)
    assert "from device 0 to device 1: staged" in lines
    assert "from device 1 to device 0: direct" in lines


def test_2_no_peer_access_is_not_ok():
    with pytest.raises(NoPeerAccess, match="device 0 to device 1"):
        results_of([0, 1], machine(peer={"groups": "none"}), host_stage="0")


@pytest.mark.parametrize("devices", [[0, 1], [1, 0]])
def test_3_peer_access_one_way(devices):
    spec = machine(peer={"groups": "none"}, pair=[{"pairs": [[1, 0]], "capable": True}])
    with Runtime(sim.driver(spec)) as runtime:
        assert (runtime.peer_capable(0, 1), runtime.peer_capable(1, 0)) == (False, True)
    with Executor(devices, [add_one, add_one], machine=spec) as executor:
        list(executor.map([np.zeros(3, np.int64)]))
        (link,) = executor.plan().links
        assert link.path == ("direct" if devices == [1, 0] else "staged")
    assert results_of(devices, spec) == right(devices)


@pytest.mark.parametrize("seed", range(4))
def test_4_no_peer_access_and_random_delays(seed):
    spec = machine(3, peer={"groups": "none"}, seed=seed)
    spec["run"]["delay_us"] = 300.0
    assert results_of([0, 1, 2], spec) == right([0, 1, 2])


def test_6_more_than_eight_peers(caplog):
    spec = machine(10, peer={"limit": 8})
    with Runtime(sim.driver(spec)) as runtime:
        assert [runtime.peer_enable(0, peer) for peer in range(1, 10)] == [True] * 8 + [False]
    stars = [0 if i % 2 == 0 else i // 2 + 1 for i in range(19)]  # 0, 1, 0, 2, 0, 3 ... from 0 to each other device
    tried = ",".join(["1", *(f"0>{device}=auto" for device in range(1, 10))])
    stages = [add_one for _ in stars]
    with (
        caplog.at_level(logging.INFO, "pyxdev"),
        Executor(stars, stages, machine=spec, host_stage=tried) as executor,
    ):
        (got,) = executor.map([np.zeros(10, np.int64)])
        assert int(got[0]) == len(stars)
        paths = {link.dst: link.path for link in executor.plan().links if link.src == 0}
    assert list(paths.values()) == ["direct"] * 8 + ["staged"]
    lines = [r.getMessage() for r in caplog.records if "limit of peers" in r.getMessage()]
    assert len(lines) == 1


def test_7_already_enabled():
    spec = machine(faults=[{"kind": "already_enabled"}])
    for _ in range(2):
        assert results_of([0, 1], spec, host_stage="0") == right([0, 1])
    with open_backend("sim", machine=spec) as runtime:
        executors = [Executor([0, 1], [add_one, add_one], runtime=runtime, host_stage="0") for _ in range(2)]
        for executor in executors:
            assert int(next(executor.map([np.ones(4, np.int64)]))[0]) == 3
            executor.close()


def test_capable_but_refused(caplog):
    """Not in the collection: the query says yes, enabling fails."""
    spec = machine(faults=[{"kind": "enable_fails", "from": 0, "to": 1}])
    with Runtime(sim.driver(spec)) as runtime, pytest.raises(Exception, match="was refused"):
        runtime.peer_enable(0, 1)


# ---- copies and their order ----


@pytest.mark.parametrize(("src", "dst"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("path", ["direct", "staged"])
def test_10_a_slow_reader_at_the_destination(src, dst, path):
    with Pair(machine()) as pair:
        runtime = pair.runtime
        pair.view(src)[:], pair.view(dst)[:] = 2, 1
        seen = []
        reader = pair.keep(runtime.stream(dst))
        used = pair.keep(runtime.event())
        reader.launch(lambda: seen.append(int(pair.view(dst)[-1])), cost=5e-3)
        used.record(reader)
        link = pair.keep(runtime.link(src, dst, path=path))
        link.copy(pair.buffers[dst].address, pair.buffers[src].address, pair.nbytes, dest_free=used, arrived=pair.event)
        reader.wait(pair.event)
        reader.launch(lambda: seen.append(int(pair.view(dst)[-1])))
        assert reader.synchronize()
        assert seen == [1, 2]


@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_11_a_bounce_buffer_filled_too_early(tiles, seed):
    spec = machine(seed=seed)
    spec["run"]["jitter"] = 5.0
    with Pair(spec, 1024 * KIB) as pair:
        pair.copy(0, 1, path="staged", tile_bytes=4 * KIB, tiles=tiles)
        assert np.array_equal(pair.view(1), pair.sent)


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_12_offsets_beyond_4_gib(path):
    with Runtime(sim.driver(machine())) as runtime:
        source, target = runtime.buffer(0, 6 << 30), runtime.buffer(1, 6 << 30)
        at = (1 << 32) + 5
        np.frombuffer(source, np.uint8)[at : at + 10] = range(1, 11)
        link, arrived = runtime.link(0, 1, path=path, max_bytes=4096), runtime.event()
        link.copy(target.address + at, source.address + at, 10, arrived=arrived)
        assert arrived.wait()
        got = np.frombuffer(target, np.uint8)[at - 1 : at + 11].tolist()
        assert got == [0, *range(1, 11), 0]
        for thing in (link, arrived, source, target):
            thing.close()


def test_12_a_size_cut_at_32_bits_shows():
    spec = machine(faults=[{"kind": "truncate", "from": 0, "to": 1, "value": 32 * KIB}])
    with Pair(spec, 40 * KIB) as pair:
        pair.copy(0, 1, path="direct")
        assert np.array_equal(pair.view(1)[: 8 * KIB], pair.sent[: 8 * KIB])
        assert set(pair.view(1)[8 * KIB :].tolist()) == {0xA5}


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_14_zero_bytes_keep_the_order(path):
    with Pair(machine()) as pair:
        runtime = pair.runtime
        stream, ready = pair.keep(runtime.stream(0)), pair.keep(runtime.event())
        stream.launch(lambda: None, cost=1e-3)
        ready.record(stream)
        link = pair.keep(runtime.link(0, 1, path=path))
        begin = runtime.clock()
        link.copy(0, 0, 0, source_ready=ready, arrived=pair.event)
        assert not pair.event.done()
        assert pair.event.wait()
        assert runtime.clock() - begin > 9e-4


def test_20_an_event_on_streams_of_several_devices():
    with Runtime(sim.driver(machine())) as runtime:
        streams, event = [runtime.stream(device) for device in (0, 1)], runtime.event(timing=True)
        other = runtime.event(timing=True)
        for turn in range(6):
            event.record(streams[turn % 2])
            assert event.wait()
        other.record(streams[0])
        assert other.wait()
        with pytest.raises(InvalidArgument, match="devices 1 and 0"):
            other.elapsed_since(event)
        for thing in (*streams, event, other):
            thing.close()


def ignored_waits(**options):
    spec = machine(faults=[{"kind": "ignore_wait"}])
    return results_of([0, 1], spec, **options)


def test_22_waits_that_do_not_wait():
    assert ignored_waits(host_stage="0", force_sync="1") == right([0, 1])
    assert ignored_waits(host_stage="1", force_sync="1") == right([0, 1])
    with Pair(machine(faults=[{"kind": "ignore_wait"}])) as pair:
        runtime = pair.runtime
        slow, ready = pair.keep(runtime.stream(0)), pair.keep(runtime.event())
        slow.launch(lambda: pair.view(0).fill(9), cost=1e-3)
        ready.record(slow)
        eager = pair.keep(runtime.stream(1))
        eager.wait(ready)
        seen = []
        eager.launch(lambda: seen.append(int(pair.view(0)[0])))
        assert eager.synchronize()
        assert seen != [9]  # only the data tells


def test_24_nothing_piles_up():
    with open_backend("sim", machine=machine()) as runtime:
        before = runtime.live()
        with Executor([0, 1], [add_one, add_one], runtime=runtime) as executor:
            counts = []
            for n, _ in enumerate(executor.map(np.zeros(8, np.int64) for _ in range(2000))):
                if n in (200, 1900):
                    live = runtime.live()
                    counts.append((live.events, live.streams, live.buffers, live.pinned_bytes, live.device_bytes))
            assert counts[0] == counts[1]
        for _ in range(50):
            Executor([0, 1], [add_one, add_one], runtime=runtime).close()
        assert repr(runtime.live()) == repr(before)


@pytest.mark.parametrize("in_flight", [1, 2, 4, 100])
def test_25_inputs_refilled_and_a_stage_without_inputs(in_flight):
    def ignores_its_input(x):
        return {"made": np.full(100, 7, np.int64), "n": x["n"]}

    def joins(x):
        return x["made"] + x["n"]

    spec = machine(3, seed=in_flight)
    spec["run"] |= {"jitter": 3.0, "check": True}
    stages = [lambda x: x, ignores_its_input, joins]
    reused = np.empty(1, np.int64)

    def inputs():
        for i in range(12):
            reused[:] = i
            yield {"n": reused}

    with Executor([0, 1, 2], stages, in_flight=in_flight, machine=spec) as executor:
        assert [int(result[0]) for result in executor.map(inputs())] == [7 + i for i in range(12)]


# ---- memory, devices, faults ----


def test_26_too_deep_for_the_device():
    spec = machine(other=[{"devices": [1], "memory_gib": 1 / 1024}])  # 1 MiB
    x = np.zeros(200 * KIB, np.uint8)
    with (
        pytest.raises(OutOfMemory, match="device 1"),
        Executor([0, 1], [add_one, add_one], depth=8, machine=spec) as executor,
    ):
        list(executor.map([x] * 12))
    for depth in (0, -1, "four"):
        with pytest.raises(InvalidArgument, match="depth"):
            Executor([0, 1], [add_one, add_one], depth=depth, machine=spec)


def test_28_polling_and_a_device_that_fails_meanwhile():
    spec = machine(faults=[{"kind": "lose_device", "from": 1, "first": 3}])
    with Runtime(sim.driver(spec)) as runtime:
        stream, event = runtime.stream(1), runtime.event()
        stream.launch(lambda: None, cost=1.0)
        event.record(stream)
        assert not any(event.done() for _ in range(1000))
        assert event.wait()
        for _ in range(2):
            stream.launch(lambda: None, cost=1e-3)
        event.record(stream)
        with pytest.raises(DeviceFault, match="device 1 has failed"):
            event.wait()
        stream.close()
        event.close()


def test_65_pinned_memory_runs_out():
    spec = machine(host={"pinned_gib": 64 / 1024 / 1024}, peer={"groups": "none"})  # 64 KiB
    with pytest.raises(OutOfMemory, match="page-locked"):
        results_of([0, 1], spec)
    with Runtime(sim.driver(spec)) as runtime:
        with pytest.raises(OutOfMemory, match="page-locked"):
            runtime.buffer(HOST, 65 * KIB)
        assert not runtime.live().any()


def test_78_a_machine_that_is_not_ready():
    driver = sim.driver(machine(faults=[{"kind": "not_ready", "count": 2}]))
    for _ in range(2):
        with pytest.raises(NoDevice, match="not ready"):
            Runtime(driver)
    Runtime(driver).close()


def test_82_a_lost_device_then_everything_is_closed(recwarn):
    spec = machine(faults=[{"kind": "lose_device", "from": 1, "first": 30}])
    with open_backend("sim", machine=spec) as runtime:
        executor = Executor([0, 1], [add_one, add_one], runtime=runtime, host_stage="1")
        with pytest.raises(DeviceFault, match="device 1 has failed"):
            list(executor.map(np.zeros(8, np.int64) for _ in range(20)))
        with pytest.raises(DeviceFault):
            executor.submit(np.zeros(8, np.int64))
        executor.close()
        assert not runtime.live().any()
        with Executor([0], [add_one], runtime=runtime) as alone:
            assert int(next(alone.map([np.ones(4, np.int64)]))[0]) == 2
    assert not recwarn.list
