"""What the checks work with: streams, events and guarded memory, waits that end, and a look at the damage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from pyxdev._native import HOST, Buffer, Event, Link, Runtime, Stream
from pyxdev.checks import pattern
from pyxdev.checks.check import Hung, Level, Pair
from pyxdev.checks.kernels import LATCH_BYTES, REPORT_BYTES, Kernels, memory
from pyxdev.errors import DeviceFault, DriverError, OrderViolation

GUARD = 4096  # bytes on either side of every field
SAMPLE = 4096  # bytes at either end of a field that the host compares itself
LATCHES = 256
LATCH_SECONDS = 0.5  # a closed latch opens by itself after this time
POLLS = 500


@dataclass(frozen=True)
class Field:
    """Device memory with a guard before and after it."""

    device: int
    address: int
    nbytes: int

    def part(self, offset: int, nbytes: int) -> Field:
        """Its neighbours in this field become its guards."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"{offset} + {nbytes} bytes of a field of {self.nbytes}")
        return Field(self.device, self.address + offset, nbytes)


@dataclass(frozen=True)
class Damage:
    """Wrong bytes in a field, 0: not counted. first, last: offsets in it, negative or beyond its end for a guard."""

    name: str
    wrong: int
    first: int
    last: int

    def __str__(self) -> str:
        many = f"{self.wrong} wrong byte{'s' if self.wrong > 1 else ''}" if self.wrong else "wrong bytes"
        return f"{many} from {self.first} to {self.last}: {self.name}"

    @property
    def figures(self) -> dict[str, Any]:
        return {"wrong_bytes": self.wrong, "first_wrong": self.first, "last_wrong": self.last, "kind": self.name}


class Latch:
    """Holds a stream until it is opened, or until its time is over."""

    def __init__(self, rig: Rig, address: int, stream: Stream, seconds: float) -> None:
        self._runtime = rig.runtime
        self._address = address
        self._words = memory(address, LATCH_BYTES).view(np.uint32)
        self._runtime.host_access(address, LATCH_BYTES, write=True)
        self._words[:] = 0
        rig.kernels.spin(stream, address, seconds)

    @property
    def held(self) -> bool:
        """The stream has certainly been held up to now: the kernel has not said that it ended."""
        self._runtime.host_access(self._address + 4, 4, write=False)
        return not self._words[1]

    def open(self) -> None:
        self._runtime.host_access(self._address, 4, write=True)
        self._words[0] = 1


class Rig:
    """Everything opened through it is closed by close(), or at the end of a scope().

    patience: seconds (on the runtime's clock) after which a wait is Hung.
    """

    def __init__(
        self,
        runtime: Runtime,
        kernels: Kernels,
        *,
        level: Level = Level.NORMAL,
        seed: int = 1,
        devices: Sequence[int] | None = None,
        patience: float = 10.0,
    ) -> None:
        self.runtime = runtime
        self.kernels = kernels
        self.level = level
        self.seed = seed
        self.devices = tuple(range(runtime.device_count) if devices is None else devices)
        self.pairs: list[Pair] = [(src, dst) for src in self.devices for dst in self.devices if src != dst]
        self.patience = patience
        self.broken = False  # something hangs or has failed: only a new process can go on
        self._streams: dict[tuple[int, str], Stream] = {}
        self._opened = ExitStack()
        self._iteration = 0
        self._latches = self.buffer(HOST, LATCH_BYTES * LATCHES)
        self._latch = 0
        self._seen = self.buffer(HOST, REPORT_BYTES + 2 * (GUARD + SAMPLE))
        try:
            self._reports = {device: self.buffer(device, REPORT_BYTES) for device in self.devices}
            self._warm_up()
        except BaseException:
            self.close()
            raise

    def _warm_up(self) -> None:
        """Each kernel once: a kernel that is loaded while another one spins may have to wait for it."""
        for device in self.devices:
            with self.scope():
                stream, field = self.stream(device), self.field(device, 8)
                self.delay(stream, 0.0)
                self.fill(stream, field, 0)
                self.count_wrong(stream, field, 0)

    def close(self) -> None:
        self._settle()
        self._opened.close()
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """What is opened inside is closed at the end, once the streams are idle."""
        outer, self._opened = self._opened, ExitStack()
        try:
            yield
        finally:
            try:
                self._settle()
            finally:
                self._opened.close()
                self._opened = outer

    def _settle(self) -> None:
        """Memory must outlive queued work. A device that failed has none; one that hangs is not waited for long."""
        for stream in self._streams.values():
            try:
                if not stream.synchronize(2 * LATCH_SECONDS):
                    return
            except DeviceFault:
                continue

    def forgive(self) -> None:
        """Lets pass what the ordering checker of simulated devices has seen: a control was meant to be out of order."""
        for stream in self._streams.values():
            while True:
                try:
                    self.sync(stream, "a control")
                    break
                except OrderViolation:
                    continue

    def pick(self, *by_level: int) -> int:
        """One of three numbers, for QUICK, NORMAL and FULL."""
        return by_level[self.level]

    def iteration(self) -> int:
        """A new number: data of two iterations is never alike."""
        self._iteration += 1
        return self._iteration

    # -- objects --

    def stream(self, device: int, name: str = "") -> Stream:
        """The stream of this name on the device."""
        if (device, name) not in self._streams:
            self._streams[device, name] = self.runtime.stream(device)
        return self._streams[device, name]

    def adopt(self, device: int, handle: int) -> Stream:
        """Somebody else's stream, until the rig closes."""
        stream = self.runtime.adopt_stream(device, handle)
        self._opened.callback(stream.close)
        return stream

    def event(self, *, timing: bool = False) -> Event:
        event = self.runtime.event(timing=timing)
        self._opened.callback(event.close)
        return event

    def buffer(self, device: int, nbytes: int) -> Buffer:
        buffer = self.runtime.buffer(device, nbytes)
        self._opened.callback(buffer.close)
        return buffer

    def field(self, device: int, nbytes: int) -> Field:
        return Field(device, self.buffer(device, nbytes + 2 * GUARD).address + GUARD, nbytes)

    def link(self, src: int, dst: int, **options: Any) -> Link:
        link = self.runtime.link(src, dst, **options)
        self._opened.callback(link.close)
        return link

    def latch(self, stream: Stream, seconds: float = LATCH_SECONDS) -> Latch:
        """Holds the stream from here on. No more than a few at a time: their words are used in turn."""
        self._latch = (self._latch + 1) % LATCHES
        return Latch(self, self._latches.address + LATCH_BYTES * self._latch, stream, seconds)

    def delay(self, stream: Stream, seconds: float) -> None:
        """Holds the stream for this time."""
        self.latch(stream, seconds)

    def no_direct(self, src: int, dst: int) -> str:
        """Why there is no direct path from src to dst; "" if there is one."""
        if src == dst:
            return ""
        if not self.runtime.peer_capable(src, dst):
            return "peer access is not reported"
        try:
            enabled = self.runtime.peer_enable(src, dst)
        except DriverError as failure:
            return f"peer access is reported, but enabling it is an error: {failure}"
        return "" if enabled else "peer access is reported, but the driver enables no more peers"

    def paths(self, src: int, dst: int) -> list[str]:
        return ["staged"] if self.no_direct(src, dst) else ["direct", "staged"]

    # -- waiting --

    def wait(self, event: Event, what: str) -> None:
        if not event.wait(self.patience):
            raise Hung(f"waited {self.patience:g} s for {what}")

    def sync(self, stream: Stream, what: str) -> None:
        if not stream.synchronize(self.patience):
            raise Hung(f"waited {self.patience:g} s for {what} on device {stream.device}")

    def came_early(self, event: Event, latch: Latch) -> bool:
        """Whether the event came while the latch was closed. Gives a stream that does not wait the time to show it."""
        for _ in range(POLLS):
            if event.done():
                return latch.held
            if not latch.held:
                return False
        return False

    # -- data --

    def fill(self, stream: Stream, field: Field, iteration: int, first: int = 0) -> None:
        """Pattern bytes from `first` on, by a kernel of the stream's device."""
        if field.nbytes:
            self.kernels.fill(stream, field.address, field.nbytes, pattern.key(self.seed, iteration), first)

    def poison(self, stream: Stream, field: Field, iteration: int) -> None:
        """The field and its guards."""
        stream.fill(field.address - GUARD, pattern.poison(iteration), field.nbytes + 2 * GUARD)

    def copy_within(self, stream: Stream, dst: Field, src: Field) -> None:
        stream.copy(dst.address, src.address, src.nbytes, dst_device=dst.device, src_device=src.device)

    def count_wrong(self, stream: Stream, field: Field, iteration: int, first: int = 0) -> tuple[int, int, int]:
        """Wrong bytes of the field, the first and the last, as a kernel of the stream's device sees them."""
        report, seen = self._reports[stream.device].address, self._seen.address
        stream.fill(report, 0, REPORT_BYTES)
        if field.nbytes:
            key = pattern.key(self.seed, iteration)
            self.kernels.check(stream, field.address, field.nbytes, key, first, report)
        stream.copy(seen, report, REPORT_BYTES, dst_device=HOST, src_device=stream.device)
        self.sync(stream, "the check kernel")
        self.runtime.host_access(seen, REPORT_BYTES, write=False)
        wrong, first_wrong, last_wrong = (int(word) for word in memory(seen, REPORT_BYTES).view(np.uint64))
        return wrong, ~first_wrong & pattern.MASK, last_wrong - 1

    def examine(
        self, stream: Stream, field: Field, iteration: int, first: int = 0, *, guards: bool = True
    ) -> Damage | None:
        """Compares the field with its pattern by a kernel of its own device, both its ends and guards by the host too.

        What only one of the two sees is damage as well.
        """
        wrong, low, high = self.count_wrong(stream, field, iteration, first)
        ends = min(SAMPLE, field.nbytes)
        room = self._seen.address + REPORT_BYTES
        begin = self._fetch(stream, field.address - GUARD, GUARD + ends, room)
        end = self._fetch(stream, field.address + field.nbytes - ends, ends + GUARD, room + GUARD + SAMPLE)
        self.sync(stream, "a download")
        self.runtime.host_access(room, 2 * (GUARD + SAMPLE), write=False)
        guarded = self._guard_damage(field, iteration, begin[:GUARD], end[ends:]) if guards else None
        sampled = self._name(begin[GUARD:], first, iteration, field) or self._name(
            end[:ends], first + field.nbytes - ends, iteration, field
        )
        if wrong:
            return Damage(self._name_at(stream, field, low, first, iteration), wrong, low, high)
        if sampled:
            return Damage(f"{sampled}, but only as the host sees it", 0, 0, field.nbytes - 1)
        return guarded

    def download(self, stream: Stream, field: Field) -> pattern.Bytes:
        """The field with its guards, as uint8; a copy in host memory."""
        nbytes = field.nbytes + 2 * GUARD
        with self.scope():
            buffer = self.buffer(HOST, nbytes)
            stream.copy(buffer.address, field.address - GUARD, nbytes, dst_device=HOST, src_device=field.device)
            self.sync(stream, "a download")
            self.runtime.host_access(buffer.address, nbytes, write=False)
            return memory(buffer.address, nbytes).copy()

    def poisoned(self, stream: Stream, field: Field, iteration: int) -> bool:
        """Whether all of the field still holds the poison of this iteration."""
        return bool((self.download(stream, field)[GUARD:-GUARD] == pattern.poison(iteration)).all())

    def _fetch(self, stream: Stream, address: int, nbytes: int, to: int) -> pattern.Bytes:
        """Enqueues a download; the bytes are there after the next sync."""
        if nbytes:
            stream.copy(to, address, nbytes, dst_device=HOST, src_device=stream.device)
        return memory(to, nbytes)

    def _name(self, found: pattern.Bytes, first: int, iteration: int, field: Field) -> str:
        return pattern.name_damage(found, first, self.seed, iteration, first + field.nbytes)

    def _name_at(self, stream: Stream, field: Field, offset: int, first: int, iteration: int) -> str:
        nbytes = min(SAMPLE, field.nbytes - offset)
        to = self._seen.address + REPORT_BYTES
        found = self._fetch(stream, field.address + offset, nbytes, to)
        self.sync(stream, "a look at the damage")
        self.runtime.host_access(to, nbytes, write=False)
        return self._name(found, first + offset, iteration, field) or "wrong only as the device sees it"

    def _guard_damage(self, field: Field, iteration: int, before: pattern.Bytes, after: pattern.Bytes) -> Damage | None:
        wrong = np.flatnonzero(np.concatenate([before, after]) != pattern.poison(iteration))
        if not len(wrong):
            return None
        places = np.where(wrong < GUARD, wrong - GUARD, wrong - GUARD + field.nbytes)
        return Damage("the guard was overwritten", len(wrong), int(places[0]), int(places[-1]))
