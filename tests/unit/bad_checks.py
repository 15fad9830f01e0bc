"""Checks that end badly, for the runner."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

from pyxdev.checks import Check, Result, Verdict
from pyxdev.checks.rig import Rig


class _Bad(Check):
    description = "ends badly"
    proves = "nothing"


class Good(_Bad):
    key = "good"

    def run(self, rig: Rig) -> Iterator[Result]:
        os.write(1, b"noise of a library\n")
        yield self.result(Verdict.PASS, (0, 1), process=os.getpid())


class Crash(_Bad):
    key = "crash"

    def run(self, rig: Rig) -> Iterator[Result]:
        yield self.result(Verdict.PASS, 0)
        os.kill(os.getpid(), signal.SIGSEGV)


class Bug(_Bad):
    key = "bug"

    def run(self, rig: Rig) -> Iterator[Result]:
        raise KeyError("nobody expected this")
        yield


class Hang(_Bad):
    key = "hang"
    deadline = 0.5

    def run(self, rig: Rig) -> Iterator[Result]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(60)
        yield


CHECKS = (Good(), Crash(), Bug(), Hang())
