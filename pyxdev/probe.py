"""What can only be known by trying it: whether direct copies arrive, whether waits between devices wait, and how fast.

None of this compiles a kernel or takes long: it runs when a pair of devices is first used. `pyxdev validate` asks more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pyxdev._native import HOST, Buffer, Event, Link, Runtime, SimDriver, Stream
from pyxdev.errors import DeviceFault, Error

Verdict = Literal["verified", "wrong data", "inconclusive", "not tried"]
Waits = Literal["work", "do not work", "inconclusive", "not tried"]

# The copies that verify a pair, and the byte that the destination holds before, so that what never arrives cannot look
# right: a few bytes; and more than the largest tile of a staged copy, with an odd end.
VERIFIED = ((4, 0xA5), (4, 0x5A), ((8 << 20) + 4099, 0xA5))
PATIENCE = 10.0  # seconds that one copy may take

SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20)  # measured, in bytes
SIM_SIZES = SIZES[:3]  # simulated time is exact, and the bytes are the host's
REPEATS = 3  # the best counts
SLOW = 0.05  # seconds; larger copies are not measured after one that took longer


@dataclass(frozen=True)
class Speed:
    """GB/s of single copies of so many bytes; 0.0 for a path that was not measured."""

    nbytes: int
    direct: float
    staged: float


class _Tools(ExitStack):
    """Closes what it opened, once nothing uses it any more: a step that failed leaves others running."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self.runtime = runtime
        self._streams: list[Stream] = []

    def __exit__(self, *exc: Any) -> Literal[False]:
        for stream in self._streams:
            _come_to_rest(stream)
        super().__exit__(*exc)
        return False

    def buffer(self, device: int, nbytes: int) -> Buffer:
        buffer = self.runtime.buffer(device, nbytes)
        self.callback(buffer.close)
        return buffer

    def stream(self, device: int) -> Stream:
        stream = self.runtime.stream(device)
        self.callback(stream.close)
        self._streams.append(stream)
        return stream

    def event(self) -> Event:
        event = self.runtime.event()
        self.callback(event.close)
        return event

    def link(self, src: int, dst: int, path: str, max_bytes: int) -> Link:
        link = self.runtime.link(src, dst, path=path, max_bytes=max_bytes)
        self.callback(link.close)
        return link

    def finish(self, stream: Stream) -> None:
        if not stream.synchronize(PATIENCE):
            raise Error(f"work on device {stream.device} took more than {PATIENCE:g} s")

    def write(self, buffer: Buffer, values: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        self.runtime.host_access(buffer.address, len(values), write=True)
        with memoryview(buffer) as view:
            view[: len(values)] = values.data

    def read(self, buffer: Buffer) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        self.runtime.host_access(buffer.address, buffer.nbytes, write=False)
        with memoryview(buffer) as view:
            return np.frombuffer(view, np.uint8).copy()


def _come_to_rest(stream: Stream) -> None:
    """Waits for what is queued, not for ever: what hangs is given up, and what fails twice has stopped.

    A link waits for its own copies when it is closed.
    """
    for _ in range(2):
        try:
            stream.synchronize(PATIENCE)
            return
        except Error:
            continue


# ---- data ------------------------------------------------------------------------------------------------------------


def verify(runtime: Runtime, src: int, dst: int) -> tuple[Verdict, str]:
    """Copies directly from src to dst and looks at the bytes: (verdict, one sentence).

    Anything but the right bytes in time is no proof; a device fault is raised, everything else is an answer.
    """
    try:
        with _Tools(runtime) as tools:
            courier = _Courier(tools, src, dst)
            for nbytes, poison in VERIFIED:
                if wrong := courier.wrong_bytes(nbytes, poison):
                    return "wrong data", f"a direct copy of {nbytes} bytes arrived with {wrong} wrong ones"
    except DeviceFault:
        raise
    except Error as error:
        return "inconclusive", f"a direct copy could not be tried: {error}"
    return "verified", "direct copies arrived as sent"


class _Courier:
    """Direct copies of one pair. The host waits after each step: whether the devices can is another question."""

    def __init__(self, tools: _Tools, src: int, dst: int) -> None:
        self.tools, most = tools, max(nbytes for nbytes, _ in VERIFIED)
        self.source, self.target = tools.buffer(src, most), tools.buffer(dst, most)
        self.host = tools.buffer(HOST, most)
        self.there, self.back = tools.stream(src), tools.stream(dst)
        self.link, self.arrived = tools.link(src, dst, "direct", most), tools.event()

    def wrong_bytes(self, nbytes: int, poison: int) -> int:
        """How many bytes of one copy arrive wrong. Raises Error if a step does not end."""
        words = np.arange(nbytes // 8 + 1, dtype=np.uint64)  # times an odd number: no word is like another one
        sent = (words * np.uint64(0x9E3779B97F4A7C15) + np.uint64(poison)).view(np.uint8)[:nbytes]
        source, target, host = self.source, self.target, self.host
        self.tools.write(host, sent)
        self.there.copy(source.address, host.address, nbytes, dst_device=source.device, src_device=HOST)
        self.back.fill(target.address, poison, nbytes)
        self.tools.finish(self.there)
        self.tools.finish(self.back)
        self.link.copy(target.address, source.address, nbytes, arrived=self.arrived)
        if not self.arrived.wait(PATIENCE):
            raise Error(f"a direct copy of {nbytes} bytes took more than {PATIENCE:g} s")
        self.back.copy(host.address, target.address, nbytes, dst_device=HOST, src_device=target.device)
        self.tools.finish(self.back)
        return int(np.count_nonzero(self.tools.read(host)[:nbytes] != sent))


# ---- waits -----------------------------------------------------------------------------------------------------------

MARK_BYTES = 4096
DELAY_BYTES = 16 << 20  # of each of the downloads that delay the producer
SIM_DELAY_BYTES = 1 << 20
DELAYS = 3
ROUNDS = 3


def waits(runtime: Runtime, src: int, dst: int) -> Waits:
    """Whether a stream of dst that waits for an event of src does wait, seen in data.

    The producer is delayed by large downloads, then sends a mark to page-locked memory; the consumer waits and fetches
    it. Left out on purpose, the wait must be missed; if not, the producer was not slow enough to tell.
    """
    with _Tools(runtime) as tools:
        if isinstance(runtime.driver, SimDriver):  # a race on purpose
            runtime.driver.watch(False)
            tools.callback(runtime.driver.watch, True)
        race = _Race(tools, src, dst)
        if race.mark_arrives(1, wait=False):
            return "inconclusive"
        if all(race.mark_arrives(2 + number, wait=True) for number in range(ROUNDS)):
            return "work"
    return "do not work"


class _Race:
    """A delayed producer, and a consumer that may be faster."""

    def __init__(self, tools: _Tools, src: int, dst: int) -> None:
        self.tools = tools
        self.producer, self.consumer = tools.stream(src), tools.stream(dst)
        delay = SIM_DELAY_BYTES if tools.runtime.backend == "sim" else DELAY_BYTES
        self.slow, self.slow_host = tools.buffer(src, delay), tools.buffer(HOST, delay)
        self.source, self.target = tools.buffer(src, MARK_BYTES), tools.buffer(dst, MARK_BYTES)
        self.between, self.seen = tools.buffer(HOST, MARK_BYTES), tools.buffer(HOST, MARK_BYTES)
        self.ready = tools.event()

    def mark_arrives(self, mark: int, *, wait: bool) -> bool:
        """Sends the mark over; whether all of it was seen. Raises Error if a stream does not end."""
        producer, consumer = self.producer, self.consumer
        self.tools.write(self.between, np.zeros(MARK_BYTES, np.uint8))
        producer.fill(self.source.address, mark, MARK_BYTES)
        self.tools.finish(producer)
        for _ in range(DELAYS):
            self._copy(producer, self.slow_host, self.slow)
        self._copy(producer, self.between, self.source)
        self.ready.record(producer)
        if wait:
            consumer.wait(self.ready)
        self._copy(consumer, self.target, self.between)
        self._copy(consumer, self.seen, self.target)
        self.tools.finish(consumer)
        self.tools.finish(producer)
        return bool((self.tools.read(self.seen) == mark).all())

    def _copy(self, stream: Stream, dst: Buffer, src: Buffer) -> None:
        stream.copy(dst.address, src.address, src.nbytes, dst_device=dst.device, src_device=src.device)


# ---- speed -----------------------------------------------------------------------------------------------------------


def speeds(runtime: Runtime, src: int, dst: int, *, direct: bool) -> tuple[Speed, ...]:
    """Single copies of a few sizes, staged and, if asked for, direct: the best of some, from the call to the end."""
    sizes = SIM_SIZES if runtime.backend == "sim" else SIZES
    with _Tools(runtime) as tools:
        source, target = tools.buffer(src, sizes[-1]), tools.buffer(dst, sizes[-1])
        paths = ("direct", "staged") if direct else ("staged",)
        links = {path: tools.link(src, dst, path, sizes[-1]) for path in paths}
        return tuple(_speeds(tools, links, source, target, sizes))


def _speeds(
    tools: _Tools, links: dict[str, Link], source: Buffer, target: Buffer, sizes: tuple[int, ...]
) -> Iterator[Speed]:
    runtime, arrived = tools.runtime, tools.event()
    for nbytes in sizes:
        seconds = {}
        for path, link in links.items():
            times = []
            for _ in range(1 + REPEATS):
                begin = runtime.clock()
                link.copy(target.address, source.address, nbytes, arrived=arrived)
                if not arrived.wait(PATIENCE):
                    raise Error(f"a {path} copy of {nbytes} bytes took more than {PATIENCE:g} s")
                times.append(runtime.clock() - begin)
            seconds[path] = min(times[1:])
        rates = {path: nbytes / time / 1e9 for path, time in seconds.items()}
        yield Speed(nbytes, round(rates.get("direct", 0.0), 3), round(rates["staged"], 3))
        if max(seconds.values()) > SLOW:
            return


def leg(runtime: Runtime, src: int, dst: int) -> float:
    """Bytes/s of the slower of a download from src and an upload to dst that run at once."""
    nbytes = SIM_DELAY_BYTES if runtime.backend == "sim" else DELAY_BYTES
    with _Tools(runtime) as tools:
        source, target = tools.buffer(src, nbytes), tools.buffer(dst, nbytes)
        down, up = tools.buffer(HOST, nbytes), tools.buffer(HOST, nbytes)
        out, into = tools.stream(src), tools.stream(dst)
        times = []
        for _ in range(1 + REPEATS):
            begin = runtime.clock()
            out.copy(down.address, source.address, nbytes, dst_device=HOST, src_device=src)
            into.copy(target.address, up.address, nbytes, dst_device=dst, src_device=HOST)
            tools.finish(out)
            tools.finish(into)
            times.append(runtime.clock() - begin)
        return nbytes / min(times[1:])
