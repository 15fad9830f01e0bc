"""How fast, and does any call hold the host up? Speed never makes up for a wrong byte: data.py comes first.

A figure that is much too low is INCONCLUSIVE, not FAIL: the machine is right, but something is in the way. GB/s are
decimal.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from pyxdev._native import HOST, Stream
from pyxdev.checks.check import Check, Level, PairCheck, Result, Verdict
from pyxdev.checks.data import carry, link_way
from pyxdev.checks.rig import Rig
from pyxdev.checks.sysfs import place

KIB, MIB = 1 << 10, 1 << 20
BLOCKED = 0.05  # seconds; a latch holds ten times as long
SLOW = 0.7  # of what the link or the other devices give


def seconds_alone(rig: Rig, once: Callable[[], None], repeats: int) -> float:
    """Median time of once(), which waits for its own end. One warm-up."""
    once()
    times = []
    for _ in range(repeats):
        begin = rig.runtime.clock()
        once()
        times.append(rig.runtime.clock() - begin)
    return statistics.median(times)


def size_name(nbytes: int) -> str:
    return f"{nbytes >> 20}MiB" if nbytes >= MIB else f"{nbytes >> 10}KiB" if nbytes >= KIB else f"{nbytes}B"


class HostCalls(PairCheck):
    key = "host-calls"
    description = "copies, waits and records while the source device is busy"
    proves = "no call that only enqueues makes the submitting thread wait for a device"

    BYTES = 12 * MIB

    def run_pair(self, rig: Rig, src: int, dst: int) -> Iterator[Result]:
        with rig.scope():
            calls = self._calls(rig, src, dst)
            for call in calls.values():  # set-up on first use is not what is asked for
                call()
                rig.sync(rig.stream(src), "a first use")
                rig.sync(rig.stream(dst), "a first use")
            times, blocked = {}, []
            for name, call in calls.items():
                latch = rig.latch(rig.stream(src))
                begin = rig.runtime.clock()
                call()
                times[name] = rig.runtime.clock() - begin
                if times[name] > BLOCKED:
                    blocked.append(name)
                latch.open()
                rig.sync(rig.stream(src), "a stream whose latch is open")
                rig.sync(rig.stream(dst), "a stream that waits")
        figures: dict[str, Any] = {f"{name.replace(' ', '_')}_us": round(time * 1e6, 1) for name, time in times.items()}
        if blocked:
            longest = max(times.values()) * 1e3
            reason = f"the host was held up by: {', '.join(blocked)} (up to {longest:.0f} ms)"
            hint = "one thread then cannot keep several devices busy; try a newer driver"
            yield self.result(Verdict.FAIL, (src, dst), reason, hint, **figures)
        else:
            yield self.result(Verdict.PASS, (src, dst), **figures)

    def _calls(self, rig: Rig, src: int, dst: int) -> dict[str, Callable[[], None]]:
        out, into, event, done = rig.stream(src), rig.stream(dst), rig.event(), rig.event()
        source, target = rig.field(src, self.BYTES), rig.field(dst, self.BYTES)
        between = rig.buffer(HOST, self.BYTES)

        def wait() -> None:
            event.record(out)
            into.wait(event)

        def download() -> None:
            out.copy(between.address, source.address, self.BYTES, dst_device=HOST, src_device=src)

        def copier(path: str) -> Callable[[], None]:
            link = rig.link(src, dst, path=path, max_bytes=self.BYTES)

            def copy() -> None:
                event.record(out)
                link.copy(target.address, source.address, self.BYTES, source_ready=event, arrived=done)
                into.wait(done)

            return copy

        copies = {f"{path} copy": copier(path) for path in rig.paths(src, dst)}
        return {"wait": wait, "download": download, **copies}


class Legs(Check):
    key = "legs"
    description = "downloads and uploads of each device, one by one and all at once; link and NUMA node"
    proves = "each device has its link to itself, as wide and fast as it says"

    def run(self, rig: Rig) -> Iterator[Result]:
        nbytes = rig.pick(16, 64, 256) * MIB if rig.runtime.backend != "sim" else 4 * MIB
        with rig.scope():
            legs = {device: Leg(rig, device, nbytes) for device in rig.devices}
            alone = {device: {up: leg.rate([leg], up) for up in (False, True)} for device, leg in legs.items()}
            all_up = Leg.rate_of(rig, [(leg, True) for leg in legs.values()])
            all_down = Leg.rate_of(rig, [(leg, False) for leg in legs.values()])
        for device in rig.devices:
            yield self._judge(rig, device, alone)
        if len(legs) > 1:
            figures: dict[str, Any] = {"all_down_GBps": round(all_down, 2), "all_up_GBps": round(all_up, 2)}
            yield self.result(Verdict.PASS, None, devices=len(legs), **figures)

    def _judge(self, rig: Rig, device: int, alone: dict[int, dict[bool, float]]) -> Result:
        where = place(rig.runtime.device_info(device).pci)
        figures: dict[str, Any] = {
            "down_GBps": round(alone[device][False], 2),
            "up_GBps": round(alone[device][True], 2),
            "link": where.link,
            "numa_node": where.numa_node,
        }
        for up, name in ((False, "downloads"), (True, "uploads")):
            rate, usual = alone[device][up], statistics.median(rates[up] for rates in alone.values())
            if where.payload and rate < SLOW * where.payload:
                reason = f"{name} run at {rate:.1f} GB/s; a {where.link} link carries {where.payload:.1f}"
                hint = "page-locked memory on another NUMA node, a shared link, or another program at work"
                return self.result(Verdict.INCONCLUSIVE, device, f"slow: {reason}", hint, **figures)
            if rate < SLOW * usual:
                reason = f"{name} run at {rate:.1f} GB/s; the devices here usually reach {usual:.1f}"
                hint = f"a narrower slot or a link trained down ({where.link or 'unknown'}), or another NUMA node"
                return self.result(Verdict.INCONCLUSIVE, device, f"slow: {reason}", hint, **figures)
        return self.result(Verdict.PASS, device, **figures)


class Leg:
    """Page-locked memory and a device."""

    def __init__(self, rig: Rig, device: int, nbytes: int) -> None:
        self.rig, self.nbytes = rig, nbytes
        self.streams = {up: rig.stream(device, "up" if up else "down") for up in (False, True)}
        self.field, self.host = rig.field(device, nbytes), rig.buffer(HOST, nbytes)

    def enqueue(self, up: bool) -> Stream:
        stream, device, memory = self.streams[up], self.field.device, self.field.address
        if up:
            stream.copy(memory, self.host.address, self.nbytes, dst_device=device, src_device=HOST)
        else:
            stream.copy(self.host.address, memory, self.nbytes, dst_device=HOST, src_device=device)
        return stream

    def rate(self, legs: list[Leg], up: bool) -> float:
        return self.rate_of(self.rig, [(leg, up) for leg in legs])

    @staticmethod
    def rate_of(rig: Rig, legs: list[tuple[Leg, bool]], copies: int = 4) -> float:
        """GB/s of each leg when all of them run at once."""

        def once() -> None:
            streams = [leg.enqueue(up) for _ in range(copies) for leg, up in legs]
            for stream in dict.fromkeys(streams):
                rig.sync(stream, "a copy from or to the host")

        return legs[0][0].nbytes * copies / seconds_alone(rig, once, rig.pick(2, 3, 5)) / 1e9


class Bandwidth(PairCheck):
    key = "bandwidth"
    description = "single copies of each pair, direct and staged, beside the two legs of the staged one"
    proves = "direct copies are worth it, staged ones come near their slower leg; what was timed was right"

    SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB)
    MORE = (64 * MIB, 256 * MIB)

    def sizes(self, rig: Rig) -> list[int]:
        if rig.runtime.backend == "sim":  # time is simulated, but the bytes are real
            return [*self.SIZES[:-1], 4 * MIB]
        return [*self.SIZES, *(self.MORE if rig.level == Level.FULL else self.MORE[:1] if rig.level else ())]

    def run(self, rig: Rig) -> Iterator[Result]:
        results = list(super().run(rig))
        top = f"direct_{size_name(self.sizes(rig)[-1])}_GBps"
        rates = [result.figures[top] for result in results if top in result.figures]
        usual = statistics.median(rates) if rates else 0.0
        for result in results:
            rate = result.figures.get(top, usual)
            if result.verdict == Verdict.PASS and rate < SLOW * usual:
                reason = f"slow: direct copies at {rate:.1f} GB/s; the pairs here usually reach {usual:.1f}"
                hint = "a link between the devices may be down; compare with the vendor's topology tool"
                result = replace(result, verdict=Verdict.INCONCLUSIVE, reason=reason, hint=hint)
            yield result

    def run_pair(self, rig: Rig, src: int, dst: int) -> Iterator[Result]:
        sizes = self.sizes(rig)
        largest = sizes[-1]
        figures: dict[str, Any] = {}
        with rig.scope():
            source, target = rig.field(src, largest), rig.field(dst, largest)
            for path in rig.paths(src, dst):
                way = link_way(rig, src, dst, path, largest)
                for nbytes in sizes:
                    begin, into = source.part(0, nbytes), target.part(0, nbytes)
                    seconds = seconds_alone(rig, partial(way, begin, into), rig.pick(3, 7, 21))
                    figures[f"{path}_{size_name(nbytes)}_us"] = round(seconds * 1e6, 2)
                    figures[f"{path}_{size_name(nbytes)}_GBps"] = round(nbytes / seconds / 1e9, 3)
                if damage := carry(rig, way, source, target):
                    reason = f"{path}: {damage}"
                    yield self.result(Verdict.FAIL, (src, dst), reason, "its speed means nothing", **damage.figures)
                    return
            legs = [(Leg(rig, src, largest), False), (Leg(rig, dst, largest), True)]
            figures["legs_together_GBps"] = round(Leg.rate_of(rig, legs), 2)
        name = size_name(largest)
        direct, staged = figures.get(f"direct_{name}_GBps", 0.0), figures[f"staged_{name}_GBps"]
        figures["staged_of_leg"] = round(staged / figures["legs_together_GBps"], 3)
        slower = f"direct copies of {name} are slower than staged ones: auto stages them" if 0 < direct < staged else ""
        yield self.result(Verdict.PASS, (src, dst), slower, **figures)


class Latency(PairCheck):
    key = "latency"
    description = "time of the smallest copies, and of one device waiting for the other and back"
    proves = "nothing: figures only"

    HOPS = 32

    def run_pair(self, rig: Rig, src: int, dst: int) -> Iterator[Result]:
        with rig.scope():
            source, target, arrived = rig.field(src, 16), rig.field(dst, 16), rig.event()
            figures: dict[str, Any] = {}
            for path in rig.paths(src, dst):
                link = rig.link(src, dst, path=path, max_bytes=16)

                def once(copy: Callable[..., None] = link.copy) -> None:
                    copy(target.address, source.address, 16, arrived=arrived)
                    rig.wait(arrived, "a copy of 16 bytes")

                figures[f"{path}_16B_us"] = round(seconds_alone(rig, once, rig.pick(20, 50, 200)) * 1e6, 2)
            figures["hop_us"] = round(self._hop(rig, src, dst) * 1e6, 2)
        yield self.result(Verdict.PASS, (src, dst), **figures)

    def _hop(self, rig: Rig, src: int, dst: int) -> float:
        """Seconds of one record and wait between the devices, of many in a row queued beforehand."""
        near, far = rig.stream(src), rig.stream(dst)
        begin, end, there, back = rig.event(timing=True), rig.event(timing=True), rig.event(), rig.event()
        latch = rig.latch(near)
        begin.record(near)
        for _ in range(self.HOPS):
            there.record(near)
            far.wait(there)
            back.record(far)
            near.wait(back)
        end.record(near)
        latch.open()
        rig.wait(end, "events between two devices")
        return end.elapsed_since(begin) / (2 * self.HOPS)
