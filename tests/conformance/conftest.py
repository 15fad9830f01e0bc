"""One suite for every driver: `pytest tests/conformance --pyxdev-backend=sim|cuda|hip`.

On simulated devices each test runs for several seeds, which decide when the bytes of a copy really move.
"""

import gc

import pytest
from hardware import Devices

from pyxdev._native import Runtime

SEEDS = 3
# Pairs with peer access both ways, one way and not at all.
MACHINE = {"device": {"count": 4}, "peer": {"groups": [[0, 1, 3]]}, "pair": [{"pairs": [[2, 0]], "capable": True}]}


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        simulated = metafunc.config.getoption("--pyxdev-backend") == "sim"
        metafunc.parametrize("seed", range(SEEDS if simulated else 1))


@pytest.fixture
def new_driver(pyxdev_driver, pyxdev_backend, seed):
    """Makes a driver; on simulated devices of this seed."""
    return maker(pyxdev_driver, pyxdev_backend, seed)


@pytest.fixture
def one_driver(pyxdev_driver, pyxdev_backend):
    """Makes a driver, for tests that try so much that one seed is enough."""
    return maker(pyxdev_driver, pyxdev_backend, 0)


def maker(pyxdev_driver, pyxdev_backend, seed):
    if pyxdev_backend == "sim":
        return lambda: pyxdev_driver(MACHINE | {"run": {"seed": seed, "delay_us": 20}})
    return pyxdev_driver


@pytest.fixture(scope="session", autouse=True)
def contexts(pyxdev_driver, pyxdev_backend):
    """Keeps the vendor's context of every device open: making one takes a GPU a third of a second, and the fault tests
    open hundreds of runtimes."""
    if pyxdev_backend == "sim":
        yield
        return
    with Runtime(pyxdev_driver()) as runtime:
        streams = [runtime.stream(device) for device in range(runtime.device_count)]
        yield
        for stream in streams:
            stream.close()


@pytest.fixture
def runtime(new_driver):
    with Runtime(new_driver()) as runtime:
        yield runtime
        gc.collect()  # a caught exception and the frame that caught it hold each other, and what is in the frame
        left = runtime.live()
        assert not left.any(), f"the test left alive: {left}"


@pytest.fixture
def devices(runtime):
    with Devices(runtime) as devices:
        yield devices
