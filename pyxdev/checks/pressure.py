"""Right under load: a full window of work in flight, and devices with hardly any memory left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyxdev._native import Runtime, Throttle
from pyxdev.checks.check import Check, Hung, Level, PairCheck, Result, Verdict
from pyxdev.checks.data import carry, link_way
from pyxdev.checks.rig import Rig
from pyxdev.errors import OutOfMemory

MIB = 1 << 20


class ThrottleLoad(PairCheck):
    key = "throttle-load"
    description = "many microbatches through a throttle onto slots that only the throttle protects"
    proves = "no more than the limit are in flight, every place comes back, and no slot is used twice at a time"

    LIMIT = 3
    BYTES = 128 * 1024 + 1

    def run_pair(self, rig: Rig, src: int, dst: int) -> Iterator[Result]:
        for path in rig.paths(src, dst):
            with rig.scope():
                throttle = rig.runtime.throttle(self.LIMIT)
                try:
                    problem = self._load(rig, src, dst, path, throttle)
                finally:
                    throttle.close()
            yield self.result(Verdict.FAIL if problem else Verdict.PASS, (src, dst), problem, path=path)

    def _load(self, rig: Rig, src: int, dst: int, path: str, throttle: Throttle) -> str:
        count, nbytes = rig.pick(12, 48, 400), self.BYTES
        out, into, link = rig.stream(src), rig.stream(dst), rig.link(src, dst, path=path, max_bytes=nbytes)
        source, archive = rig.field(src, nbytes), rig.field(dst, count * nbytes)
        slots = [rig.field(dst, nbytes) for _ in range(self.LIMIT)]
        ready, released, arrived = rig.event(), rig.event(), rig.event()
        numbers = [rig.iteration() for _ in range(count)]
        for index, iteration in enumerate(numbers):
            if not throttle.admit(rig.patience):
                raise Hung(f"microbatch {index} was not admitted within {rig.patience:g} s")
            if not 1 <= throttle.in_flight <= self.LIMIT:
                return f"{throttle.in_flight} microbatches are in flight; the limit is {self.LIMIT}"
            slot = slots[index % self.LIMIT]
            out.wait(released)
            rig.fill(out, source, iteration)
            ready.record(out)
            events: dict[str, Any] = {"source_ready": ready, "released": released, "arrived": arrived}
            link.copy(slot.address, source.address, nbytes, **events)
            into.wait(arrived)
            rig.delay(into, 200e-6)
            rig.copy_within(into, archive.part(index * nbytes, nbytes), slot)
            throttle.retire(into)
        rig.sync(into, "microbatches in flight")
        if throttle.in_flight:
            return f"{throttle.in_flight} places have not come back"
        for index, iteration in enumerate(numbers):
            damage = rig.examine(into, archive.part(index * nbytes, nbytes), iteration, guards=False)
            if damage:
                return f"{path}, microbatch {index}: {damage}"
        return ""


class MemoryPressure(Check):
    key = "memory-pressure"
    description = "more than there is, then all but a little, then copies in what is left"
    proves = "a refused allocation is a plain error and harms nothing; a nearly full device copies right"
    requires = "two devices"
    level = Level.NORMAL

    LEFT = 64 * MIB
    BYTES = MIB + 1

    def needs(self, runtime: Runtime) -> str | None:
        return None if runtime.device_count > 1 else "there is only one device"

    def run(self, rig: Rig) -> Iterator[Result]:
        if len(rig.devices) < 2:
            yield self.too_few()
            return
        for device in rig.devices:
            other = next(other for other in rig.devices if other != device)
            with rig.scope():
                problem = self._press(rig, device, other)
            yield self.result(Verdict.FAIL if problem else Verdict.PASS, device, problem)

    def _press(self, rig: Rig, device: int, other: int) -> str:
        free, total = rig.runtime.memory_info(device)
        try:
            rig.runtime.buffer(device, total + MIB).close()
        except OutOfMemory:
            pass
        else:
            return f"{total + MIB} bytes were allocated on a device of {total}"
        self._fill_up(rig, device, free - self.LEFT)
        for src, dst in ((device, other), (other, device)):
            source, target = rig.field(src, self.BYTES), rig.field(dst, self.BYTES)
            if damage := carry(rig, link_way(rig, src, dst, "staged", self.BYTES), source, target):
                return f"{src}>{dst} with little memory left: {damage}"
        return ""

    def _fill_up(self, rig: Rig, device: int, nbytes: int) -> None:
        """In ever smaller pieces: what is free need not be in one piece."""
        piece = nbytes
        while nbytes > self.LEFT and piece >= MIB:
            try:
                nbytes -= rig.buffer(device, min(piece, nbytes)).nbytes
            except OutOfMemory:
                piece //= 2
