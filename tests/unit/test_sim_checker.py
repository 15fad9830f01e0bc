"""The ordering checker over whole pipelines: silent on everything that pyxdev does, and not silent when a wait is gone.

tests/c/test_sim_races.c has each kind of violation, tests/c/test_sim_random.c ten thousand pipelines in C.
"""

import random

import numpy as np
import pytest
from executor_cases import machine, random_case, same

from pyxdev._native import HOST, Runtime
from pyxdev.backends import sim
from pyxdev.errors import Cancelled, InvalidArgument, OrderViolation, SettingError, StageError
from pyxdev.executor import Executor, Stage


def checked(devices, seed=0, **run):
    whole = machine(devices, seed)
    whole["run"] |= {"check": True, **run}
    return whole


def run_case(seed):
    """A random pipeline with chained tickets and now and then a stage that fails; every violation, in words."""
    case = random_case(seed)
    choose = random.Random(seed)
    fails = choose.random() < 0.2
    microbatches = []

    def sometimes(x):
        microbatches.append(0)
        if fails and len(microbatches) == 3:
            raise ValueError("a stage that fails")
        return x

    stages = [*case.stages(), Stage(sometimes)]
    devices = max(case.devices) + 1
    executor = Executor(case.devices, stages, machine=checked(devices, seed), **case.options)
    driver = executor._runtime.driver
    with executor:
        tickets = []
        chained = False
        try:
            for x in case.copies():
                chains = bool(tickets) and choose.random() < 0.3
                tickets.append(executor.submit(tickets[-1] if chains else x))
                chained = chained or chains
            results = [ticket.result() for ticket in tickets]
        except (StageError, Cancelled):
            assert fails, f"seed {seed}"
        else:
            assert chained or all(map(same, results, case.in_order())), f"seed {seed}"
        return driver.violations()


@pytest.mark.filterwarnings("ignore:overflow")  # chained microbatches grow
@pytest.mark.parametrize("block", range(5))
def test_random_pipelines_are_in_order(block):
    for seed in range(100 + block * 12, 112 + block * 12):
        assert run_case(seed) == [], f"seed {seed}"


def double(x):
    return x * 2


def test_a_gate_left_open_is_a_violation():
    """Without the destination-free wait the next microbatch may overwrite what a stage still reads."""
    slow = Stage(double, cost=1e-3)
    with (
        pytest.raises(OrderViolation, match=r"writes bytes .* reads, in no order: stream \d+ must wait for an event"),
        Executor([0, 1], [double, slow], depth=1, gate="0", host_stage="1", machine=checked(2)) as executor,
    ):
        list(executor.map(np.full(5000, i, np.float32) for i in range(6)))
    with Executor([0, 1], [double, slow], depth=1, host_stage="1", machine=checked(2)) as executor:
        results = list(executor.map(np.full(5000, i, np.float32) for i in range(6)))
    assert [result[0] for result in results] == [4 * i for i in range(6)]


# ---- your own streams ----


def two_streams(with_wait):
    """A producer and a consumer on two devices, as a user would write them."""
    with Runtime(sim.driver({"device": {"count": 2}}, check=True)) as runtime:
        near, far = runtime.stream(0), runtime.stream(1)
        data, tile, copy = runtime.buffer(0, 4096), runtime.buffer(HOST, 4096), runtime.buffer(1, 4096)
        ready, done = runtime.event(), runtime.event()
        try:
            near.launch(lambda: None, label="produce", writes=[(data.address, 4096)])
            near.copy(tile.address, data.address, 4096, dst_device=HOST, src_device=0)
            ready.record(near)
            if with_wait:
                far.wait(ready)
            far.copy(copy.address, tile.address, 4096, dst_device=1, src_device=HOST)
            far.launch(lambda: None, label="consume", reads=[(copy.address, 4096)])
            done.record(far)
            done.wait()
        finally:
            for thing in (near, far, ready, done):
                thing.close()
            for thing in (data, tile, copy):
                thing.close()


def test_your_own_streams():
    two_streams(True)
    with pytest.raises(OrderViolation) as caught:
        two_streams(False)
    assert str(caught.value) == (
        "order: copy host>1 (operation 4, stream 1 of device 1) reads bytes 0 to 4096 of allocation 1 on page-locked "
        "memory, which copy 0>host (operation 2, stream 0 of device 0) writes, in no order: "
        "stream 1 must wait for an event recorded on stream 0 after operation 2"
    )


def test_a_race_on_purpose():
    with Runtime(sim.driver(check=True)) as runtime:
        streams = [runtime.stream(0) for _ in range(2)]
        buffer = runtime.buffer(0, 64)
        runtime.driver.watch(False)
        for stream in streams:
            stream.fill(buffer.address, 1, 64)
        runtime.driver.watch(True)
        assert runtime.driver.violations() == []
        streams[0].fill(buffer.address, 1, 64)  # after those, so this one is seen
        with pytest.raises(OrderViolation, match=r"fill .* stream 0 .* fill .* stream 1"):
            streams[0].synchronize()
        for thing in (*streams, buffer):
            thing.close()


def test_kernels_that_name_wrong_ranges():
    with Runtime(sim.driver(check=True)) as runtime:
        stream = runtime.stream(0)
        buffer = runtime.buffer(0, 64)
        with pytest.raises(InvalidArgument, match="65 bytes at 0x"):
            stream.launch(lambda: None, writes=[(buffer.address, 65)])
        stream.close()
        buffer.close()


# ---- switching it on ----


def is_on(driver):
    with Runtime(driver) as runtime:
        streams = [runtime.stream(0) for _ in range(2)]
        buffer = runtime.buffer(0, 64)
        for stream in streams:
            stream.fill(buffer.address, 1, 64)
        found = runtime.driver.violations()
        for thing in (*streams, buffer):
            thing.close()
    return bool(found)


def test_off_by_default_on_by_variable_or_option(monkeypatch):
    monkeypatch.delenv("PYXDEV_SIM_CHECK", raising=False)
    assert not is_on(sim.driver())
    assert is_on(sim.driver({"run": {"check": True}}))
    assert is_on(sim.driver(check=True))
    monkeypatch.setenv("PYXDEV_SIM_CHECK", "1")
    assert is_on(sim.driver())
    assert not is_on(sim.driver({"run": {"check": False}}))
    monkeypatch.setenv("PYXDEV_SIM_CHECK", "yes")
    with pytest.raises(SettingError, match="PYXDEV_SIM_CHECK"):
        sim.driver()
