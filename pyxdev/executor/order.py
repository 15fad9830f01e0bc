"""One submitter at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from pyxdev.errors import InvalidArgument

T = TypeVar("T")


class Order:
    """A lock that knows its owner: a stage that submits to its own executor would wait for its own end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0

    def run(self, act: Callable[[], T]) -> T:
        """Calls act, one thread at a time. Raises InvalidArgument for a thread that is inside already."""
        if self._owner == threading.get_ident():
            raise InvalidArgument("a stage cannot submit to its own executor, or close it")
        with self._lock:  # the lock itself, no __enter__ of ours: Ctrl-C could leave it taken
            try:
                self._owner = threading.get_ident()
                return act()
            finally:
                self._owner = 0
