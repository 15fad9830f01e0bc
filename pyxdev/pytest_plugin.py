"""A pytest plugin: runs hardware tests on the devices at hand, `pytest --pyxdev-backend=cuda`.

A test that takes the fixture `pyxdev_runtime` gets an open runtime of that backend and fails if it leaves anything
alive; one that takes `pyxdev_driver` gets a function that makes a driver not yet opened, for a FaultDriver or a runtime
of its own. Nothing of pyxdev is imported before a test asks for it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyxdev._native import Driver, Runtime

BACKENDS = ("sim", "cuda", "hip")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("pyxdev").addoption(
        "--pyxdev-backend", choices=BACKENDS, default="sim", help="the devices that hardware tests run on (sim)"
    )


def pytest_report_header(config: pytest.Config) -> str:
    return f"pyxdev backend: {config.getoption('--pyxdev-backend')}"


@pytest.fixture(scope="session")
def pyxdev_backend(request: pytest.FixtureRequest) -> str:
    """The name of the backend under test."""
    name = request.config.getoption("--pyxdev-backend")
    assert isinstance(name, str)
    return name


@pytest.fixture(scope="session")
def pyxdev_driver(pyxdev_backend: str) -> Callable[..., Driver]:
    """Makes a driver of the backend under test; takes what the backend's own driver() takes."""
    make: Callable[..., Driver] = import_module(f"pyxdev.backends.{pyxdev_backend}").driver
    return make


@pytest.fixture
def pyxdev_runtime(pyxdev_driver: Callable[..., Driver]) -> Iterator[Runtime]:
    """An open runtime; after the test nothing of it may be alive."""
    from pyxdev._native import Runtime

    with Runtime(pyxdev_driver()) as runtime:
        yield runtime
        gc.collect()  # a caught exception and the frame that caught it hold each other, and what is in the frame
        left = runtime.live()
        assert not left.any(), f"the test left alive: {left}"
