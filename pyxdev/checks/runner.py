"""Runs checks in a child process, each with a deadline: a check that hangs or crashes is a verdict, not the end."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pyxdev.checks.check import Check, Level, Result, Verdict

START_SECONDS = 120.0  # a driver that comes up cold, on a machine with many devices
END_SECONDS = 10.0
FULL_FACTOR = 5
PAIRS = 30  # what the deadlines are made for; more take longer


class Unopened(Exception):
    """The devices could not be opened. `.kind` is the name of the class in pyxdev.errors, "hung" or "crashed"."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class _Late(Exception):
    """No answer by the deadline."""


class _Gone(Exception):
    """The child has ended; the message says how."""


@dataclass(frozen=True)
class Target:
    """What the child opens. registry: the module whose CHECKS are run. devices: None for all."""

    backend: str | None = None
    machine: Mapping[str, Any] | str | None = None
    level: Level = Level.NORMAL
    seed: int = 1
    devices: Sequence[int] | None = None
    patience: float = 10.0
    registry: str = "pyxdev.checks"

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "level": int(self.level)}


@dataclass
class Runner:
    """deadline: seconds for each check instead of its own. environment: what the child opened, once it has."""

    target: Target
    deadline: float | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    _child: Child | None = None

    def open(self) -> None:
        """Starts the child. Raises Unopened."""
        if self._child is None:
            self._child = Child(self.target)
            self.environment = self._child.environment

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def run(self, checks: Sequence[Check]) -> Iterator[Result]:
        """Results in order, as they come."""
        for check in checks:
            yield from self._run(check)

    def _run(self, check: Check) -> Iterator[Result]:
        deadline = self.deadline or 0.0
        try:
            self.open()
            assert self._child is not None
            deadline = self.deadline or self._seconds(check)
            broken = yield from self._child.ask(check.key, deadline)
        except Unopened as failure:
            reason = f"the devices could not be opened again: {failure}"
        except _Late:
            reason = f"hung: no end after {deadline:g} s"
        except _Gone as end:
            reason = f"crashed: {end}"
        else:
            if broken:
                self._give_up()
            return
        self._give_up()
        hint = "look for driver messages (dmesg); the device may need a reset"
        yield check.result(Verdict.INCONCLUSIVE, None, reason, hint)

    def _seconds(self, check: Check) -> float:
        """The check's own deadline, for so many devices."""
        devices = len(self.target.devices or self.environment["devices"])
        factor = FULL_FACTOR if self.target.level == Level.FULL else 1
        return check.deadline * factor * max(1.0, devices * (devices - 1) / PAIRS)

    def _give_up(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


class Child:
    """A process that has opened the target."""

    def __init__(self, target: Target) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by kill)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pyxdev.checks.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
        )
        self._buffer = b""
        try:
            self._say(target.as_dict())
            self.environment = self._hear(time.monotonic() + START_SECONDS)
        except _Late:
            self.kill()
            raise Unopened("hung", f"the driver did not come up within {START_SECONDS:g} s") from None
        except _Gone as end:
            self.kill()
            raise Unopened("crashed", str(end)) from None
        if "error" in self.environment:
            self.kill()
            raise Unopened(self.environment["error"], self.environment["text"])

    def ask(self, key: str, seconds: float) -> Generator[Result, None, bool]:
        """Yields results; returns whether the child is of no more use. Raises _Late and _Gone."""
        deadline = time.monotonic() + seconds
        self._say(key)
        while "done" not in (answer := self._hear(deadline)):
            yield Result.from_dict(answer)
        return bool(answer["broken"])

    def close(self) -> None:
        """Lets the child end by itself, for a while."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """A process stuck in the driver may outlive even this; it is not waited for long."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                pipe.close()

    def _say(self, request: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise _Gone(self._end()) from None

    def _hear(self, deadline: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise _Late
            data = os.read(pipe, 1 << 16)
            if not data:
                raise _Gone(self._end())
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> str:
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "the child closed its output but has not ended"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{how}: {lines[-1]}" if lines else how
