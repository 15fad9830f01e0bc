"""The process that runs checks: requests as JSON lines on standard input, answers as JSON lines on standard output.

First line in: {"registry", "backend", "machine", "level", "seed", "devices", "patience"}. First line out: what was
opened, or why not. Then a key in, its results out, and {"done": key, "broken": bool}.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any, TextIO

from pyxdev import backends, topology
from pyxdev._native import Runtime
from pyxdev.checks.check import Check, Level, Result, Verdict, unfinished
from pyxdev.checks.kernels import Kernels, open_kernels
from pyxdev.checks.rig import Rig
from pyxdev.errors import Error


def run_check(check: Check, rig: Rig) -> Iterator[Result]:
    """The results of one check; an Error ends it and is its last result."""
    if reason := check.needs(rig.runtime):
        yield check.result(Verdict.WAIVED, None, reason)
        return
    try:
        yield from check.run(rig)
    except Error as failure:
        yield unfinished(check, rig, failure)


def describe(runtime: Runtime) -> dict[str, Any]:
    devices = []
    for device in range(runtime.device_count):
        info = runtime.device_info(device)
        names = ("name", "uuid", "pci", "arch", "memory", "integrated", "copy_engines")
        devices.append({name: getattr(info, name) for name in names})
    return {"backend": runtime.backend, "devices": devices}


class Session:
    """One runtime, its kernels, and the checks asked of it."""

    def __init__(self, runtime: Runtime, order: dict[str, Any]) -> None:
        self.runtime = runtime
        self.runtime.force_sync = False  # the devices are asked, not the host
        self.checks = {check.key: check for check in import_module(order["registry"]).CHECKS}
        self.order = order
        self.kernels: Kernels | None = None

    def answer(self, key: str) -> Iterator[dict[str, Any]]:
        check, broken = self.checks[key], False
        try:
            self.kernels = self.kernels or open_kernels(self.runtime)
        except Error as missing:
            yield check.result(Verdict.INCONCLUSIVE, None, str(missing)).as_dict()
        else:
            options = {name: self.order[name] for name in ("seed", "devices", "patience")}
            try:
                rig = Rig(self.runtime, self.kernels, level=Level(self.order["level"]), **options)
            except Error as failure:
                yield check.result(Verdict.INCONCLUSIVE, None, f"{type(failure).__name__}: {failure}").as_dict()
                broken = True
            else:
                for result in run_check(check, rig):
                    self._share(check, result)
                    yield result.as_dict()
                broken = rig.broken
                if not broken:
                    rig.close()
        yield {"done": key, "broken": broken}

    def _share(self, check: Check, result: Result) -> None:
        """A pair whose direct copies are wrong is not copied directly by anybody on this machine any more."""
        if check.condemns and result.verdict == Verdict.FAIL and result.figures.get("path") == "direct":
            src, dst = map(int, result.pair.split(">"))
            topology.condemn(self.runtime, src, dst, f"pyxdev validate, {check.key}: {result.reason}")


def main(requests: TextIO, answers: TextIO) -> None:
    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    order = json.loads(requests.readline())
    try:
        runtime = backends.open(order["backend"], machine=order["machine"])
    except Error as failure:
        say({"error": type(failure).__name__, "text": str(failure)})
        return
    say(describe(runtime))
    session = Session(runtime, order)
    for line in requests:
        for answer in session.answer(json.loads(line)):
            say(answer)
            if answer.get("broken"):
                os._exit(0)  # nothing of a device that hangs can be closed
    if session.kernels:
        session.kernels.close()
    runtime.close()


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not land between the answers
    main(sys.stdin, channel)
