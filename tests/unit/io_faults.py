"""Faults in the reader's system calls, on demand: tests/fakes/io.c behind ctypes."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


class _Plan(ctypes.Structure):
    _fields_ = (
        ("direct_only", ctypes.c_int),
        ("code", ctypes.c_int),
        ("sticky", ctypes.c_int),
        ("at", ctypes.c_long),
        ("most", ctypes.c_long),
        ("end", ctypes.c_long),
        ("cached", ctypes.c_long),
        ("nap", ctypes.c_long),
        ("nothing", ctypes.c_int),
    )


class Faults:
    """`address` is what a Reader takes as `calls`. Only one plan is armed at a time."""

    def __init__(self) -> None:
        subprocess.run(["make", "-s", "-C", ROOT / "tests" / "fakes", "../../build/fakes/io.so"], check=True)
        self._library = ctypes.CDLL(str(ROOT / "build" / "fakes" / "io.so"))
        self.address = ctypes.addressof(ctypes.c_char.in_dll(self._library, "io_calls"))

    def arm(
        self,
        *,
        direct_only: bool = False,
        code: int = 0,
        sticky: bool = False,
        at: int = 0,
        most: int = 0,
        end: int = 0,
        cached: int = 100,
        nap: int = 0,
        nothing: bool = False,
    ) -> None:
        """Call `at` from now on (and all after it if sticky) fails with errno `code`. most: bytes a call gives at most.
        end: where the file seems to end. cached: per cent that the page cache claims to hold, -1 for no answer. nap:
        microseconds. nothing: calls succeed and read nothing."""
        self._library.io_arm(ctypes.byref(_Plan(direct_only, code, sticky, at, most, end, cached, nap, nothing)))

    @property
    def count(self) -> int:
        """Calls since arm()."""
        return int(self._library.io_count())
