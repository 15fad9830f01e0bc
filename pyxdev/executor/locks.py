"""Who may be in an executor at once."""

from __future__ import annotations

import threading

from pyxdev.errors import InvalidArgument


class Order:
    """One thread at a time, and not from inside of itself: a stage that submits would wait for its own end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            raise InvalidArgument("a stage cannot submit to its own executor, or close it")
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *exc: object) -> None:
        self._owner = 0
        self._lock.release()


class Guests:
    """Any number of threads that wait for results; close() waits until they have left."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1

    def __exit__(self, *exc: object) -> None:
        with self._changed:
            self._count -= 1
            if not self._count:
                self._changed.notify_all()

    def wait_until_gone(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._count)
