"""Do the right bytes arrive, all of them, and nothing beside them?

Here the host waits between all steps, so that only the copies themselves are asked; order.py and waits.py ask for
the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pyxdev._native import HOST, Runtime
from pyxdev.checks import pattern
from pyxdev.checks.check import Check, Level, Pair, PairCheck, Result, Verdict
from pyxdev.checks.rig import GUARD, Damage, Field, Rig

Way = Callable[[Field, Field], None]  # (source, target): copies and waits

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

STAGE = "PYXDEV_HOST_STAGE=auto,{0}>{1}=1 stages this pair"
BROKEN_PEER = STAGE + "; IOMMU off or in passthrough mode, ACS off on the bridges, or another driver may cure it"
BROKEN_STAGED = "copies between these devices and the host are wrong: check the slot, the link and the memory"


def link_way(rig: Rig, src: int, dst: int, path: str, room: int, tile_bytes: int = 0, tiles: int = 0) -> Way:
    """room: the most bytes of a copy."""
    link = rig.link(src, dst, path=path, max_bytes=room, tile_bytes=tile_bytes, tiles=tiles)
    arrived = rig.event()

    def copy(source: Field, target: Field) -> None:
        link.copy(target.address, source.address, source.nbytes, arrived=arrived)
        rig.wait(arrived, f"a {path} copy of {source.nbytes} bytes")

    return copy


def host_way(rig: Rig, src: int, dst: int, room: int) -> Way:
    """Down, wait, up, wait."""
    between, out, into = rig.buffer(HOST, room).address, rig.stream(src), rig.stream(dst)

    def copy(source: Field, target: Field) -> None:
        out.copy(between, source.address, source.nbytes, dst_device=HOST, src_device=src)
        rig.sync(out, f"a download of {source.nbytes} bytes")
        into.copy(target.address, between, source.nbytes, dst_device=dst, src_device=HOST)
        rig.sync(into, f"an upload of {source.nbytes} bytes")

    return copy


def carry(rig: Rig, way: Way, source: Field, target: Field, first: int = 0) -> Damage | None:
    """New data in the source, poison in the target, one copy, and what the target's device and the host then see."""
    iteration, out, into = rig.iteration(), rig.stream(source.device), rig.stream(target.device)
    rig.fill(out, source, iteration, first)
    rig.poison(into, target, iteration)
    rig.sync(out, "a fill")
    rig.sync(into, "a fill")
    way(source, target)
    return rig.examine(into, target, iteration, first)


def around(*sizes: int) -> list[int]:
    return [size + step for size in sizes for step in (-1, 0, 1)]


class DataCheck(PairCheck):
    """Copies over one path of every pair."""

    condemns = True
    path: str

    def run_pair(self, rig: Rig, src: int, dst: int) -> Iterator[Result]:
        if self.path == "direct" and (reason := rig.no_direct(src, dst)):
            yield self.result(Verdict.WAIVED, (src, dst), reason, "copies of this pair are staged")
            return
        with rig.scope():
            yield self.ask(rig, src, dst)

    def ask(self, rig: Rig, src: int, dst: int) -> Result:
        raise NotImplementedError

    def wrong(self, pair: Pair, where: str, damage: Damage) -> Result:
        hint = BROKEN_PEER if self.path == "direct" else BROKEN_STAGED
        figures = {"path": self.path, **damage.figures}
        return self.result(Verdict.FAIL, pair, f"{where}: {damage}", hint.format(*pair), **figures)


class FirstCopy(PairCheck):
    key = "first-copy"
    description = "the first copy of a fresh process, on each path of each pair"
    proves = "set-up on first use loses no data"
    condemns = True

    BYTES = MIB + 3

    def run_pair(self, rig: Rig, src: int, dst: int) -> Iterator[Result]:
        for path in rig.paths(src, dst):
            with rig.scope():
                source, target = rig.field(src, self.BYTES), rig.field(dst, self.BYTES)
                way, seconds = link_way(rig, src, dst, path, self.BYTES), 0.0

                def timed(source: Field, target: Field, way: Way = way) -> None:
                    nonlocal seconds
                    seconds = rig.runtime.clock()
                    way(source, target)
                    seconds = rig.runtime.clock() - seconds

                damage = carry(rig, timed, source, target)
            figures: dict[str, Any] = {"path": path, "cold_us": round(seconds * 1e6, 1)}
            if damage:
                hint = (BROKEN_PEER if path == "direct" else BROKEN_STAGED).format(src, dst)
                yield self.result(Verdict.FAIL, (src, dst), f"{path}: {damage}", hint, **figures, **damage.figures)
            else:
                yield self.result(Verdict.PASS, (src, dst), **figures)


class DeviceData(Check):
    key = "device-data"
    description = "what a device's own kernel wrote, and what the host sent, seen by the device and by the host"
    proves = "the kernels, uploads and downloads that all other checks rest on"

    def run(self, rig: Rig) -> Iterator[Result]:
        nbytes = rig.pick(MIB, 4 * MIB, 64 * MIB) + 3
        for device in rig.devices:
            with rig.scope():
                source, target = rig.field(device, nbytes), rig.field(device, nbytes)
                where, damage = "written by its own kernel", self._write(rig, source)
                if not damage:
                    way = host_way(rig, device, device, nbytes)
                    where, damage = "down and up again", carry(rig, way, source, target)
            if damage:
                reason = f"{where}: {damage}"
                yield self.result(Verdict.FAIL, device, reason, BROKEN_STAGED, **damage.figures)
            else:
                yield self.result(Verdict.PASS, device, bytes=nbytes)

    def _write(self, rig: Rig, field: Field) -> Damage | None:
        stream, iteration = rig.stream(field.device), rig.iteration()
        rig.poison(stream, field, iteration)
        rig.fill(stream, field, iteration)
        return rig.examine(stream, field, iteration)


class Sweep(DataCheck):
    """Many sizes and offsets over each way of a path."""

    # Both sides of every size at which a driver is known to change its way.
    SIZES = (1, 3, 4, 15, 16, 17, 255, 256, 257, *around(4 * KIB, 64 * KIB, 256 * KIB, MIB))
    MORE = (*around(2 * MIB, 4 * MIB - 32, 4 * MIB),)
    MOST = (*around(64 * MIB, 256 * MIB),)
    OFFSETS = ((0, 0), (1, 0), (0, 3), (4, 16), (4095, 1))  # of source and destination
    ALL_OFFSETS = 256 * KIB + 1  # the largest size that is tried with each

    def sizes(self, rig: Rig) -> list[int]:
        return [*self.SIZES, *(self.MORE if rig.level else ()), *(self.MOST if rig.level == Level.FULL else ())]

    def ways(self, rig: Rig, src: int, dst: int) -> Iterator[tuple[str, list[int], Way]]:
        """(name, sizes, way) in turn."""
        raise NotImplementedError

    def ask(self, rig: Rig, src: int, dst: int) -> Result:
        copies = 0
        for name, sizes, way in self.ways(rig, src, dst):
            room = max(sizes) + 4096
            source, target = rig.field(src, room), rig.field(dst, room)
            for nbytes in sizes:
                for src_offset, dst_offset in self.OFFSETS if nbytes <= self.ALL_OFFSETS else self.OFFSETS[-1:]:
                    begin = source.part(src_offset, nbytes)
                    damage = carry(rig, way, begin, target.part(dst_offset, nbytes), src_offset)
                    copies += 1
                    if damage:
                        where = f"{name}, {nbytes} bytes from offset {src_offset} to offset {dst_offset}"
                        return self.wrong((src, dst), where, damage)
        return self.result(Verdict.PASS, (src, dst), copies=copies)


class DirectData(Sweep):
    key = "direct-data"
    description = "direct copies of many sizes and offsets, each checked by the destination's own device"
    proves = "what is written through peer access arrives, whole and in place"
    requires = "peer access"
    path = "direct"

    def ways(self, rig: Rig, src: int, dst: int) -> Iterator[tuple[str, list[int], Way]]:
        yield "direct", self.sizes(rig), link_way(rig, src, dst, "direct", max(self.sizes(rig)))


class StagedData(Sweep):
    key = "staged-data"
    description = "staged copies around tile and ring boundaries, fitted tiles and fixed ones, rings of 1, 2 and 4"
    proves = "what goes through page-locked memory arrives, whole and in place"
    requires = "one device"
    alone = True
    path = "staged"

    TILE = 64 * KIB

    def ways(self, rig: Rig, src: int, dst: int) -> Iterator[tuple[str, list[int], Way]]:
        yield "staged", self.sizes(rig), link_way(rig, src, dst, "staged", max(self.sizes(rig)))
        for tiles in (1, 2, 4):
            ring = tiles * self.TILE
            sizes = sorted({1, *around(self.TILE, ring, 2 * ring), 7 * self.TILE + 3})
            yield f"staged, ring of {tiles}", sizes, link_way(rig, src, dst, "staged", max(sizes), self.TILE, tiles)


class Pitched(PairCheck):
    key = "pitched-data"
    description = "two-dimensional copies with unequal pitches"
    proves = "every row arrives in its place and the gaps between the rows stay as they were"
    condemns = True

    SHAPES = ((1, 5, 7, 3), (100, 33, 128, 100), (4096, 17, 4096, 5000), (70001, 5, 70004, 70016))

    def run_pair(self, rig: Rig, src: int, dst: int) -> Iterator[Result]:
        for path in rig.paths(src, dst):
            problem = ""
            for width, height, src_pitch, dst_pitch in self.SHAPES:
                with rig.scope():
                    if found := self._copy(rig, src, dst, path, width, height, src_pitch, dst_pitch):
                        problem = f"{path}, {height} rows of {width} bytes, {src_pitch} to {dst_pitch} apart: {found}"
                        break
            verdict = Verdict.FAIL if problem else Verdict.PASS
            hint = STAGE.format(src, dst) if problem and path == "direct" else ""
            yield self.result(verdict, (src, dst), problem, hint, path=path)

    def _copy(
        self, rig: Rig, src: int, dst: int, path: str, width: int, height: int, src_pitch: int, dst_pitch: int
    ) -> str:
        iteration, out, into = rig.iteration(), rig.stream(src), rig.stream(dst)
        source, target = rig.field(src, height * src_pitch), rig.field(dst, height * dst_pitch)
        link, arrived = rig.link(src, dst, path=path, tile_bytes=64 * KIB, tiles=2), rig.event()
        rig.fill(out, source, iteration)
        rig.poison(into, target, iteration)
        rig.sync(out, "a fill")
        rig.sync(into, "a fill")
        pitches: dict[str, Any] = {"dst_pitch": dst_pitch, "src_pitch": src_pitch}
        link.copy(target.address, source.address, width, height=height, arrived=arrived, **pitches)
        rig.wait(arrived, f"a {path} copy")
        key = pattern.key(rig.seed, iteration)
        wanted = np.full(target.nbytes + 2 * GUARD, pattern.poison(iteration), np.uint8)
        for row in range(height):
            begin = GUARD + row * dst_pitch
            wanted[begin : begin + width] = pattern.make(key, row * src_pitch, width)
        wrong = np.flatnonzero(rig.download(into, target) != wanted)
        if not len(wrong):
            return ""
        row, column = divmod(int(wrong[0]) - GUARD, dst_pitch)
        place = f"row {row}, byte {column}" if column < width else f"the gap after row {row}"
        return f"{len(wrong)} wrong bytes, the first in {place}"


class PathsAgree(PairCheck):
    key = "paths-agree"
    description = "the same data direct, staged, and by the host with a wait after each step"
    proves = "all ways give the same bytes; tells a broken path from a broken device"
    condemns = True

    def run_pair(self, rig: Rig, src: int, dst: int) -> Iterator[Result]:
        nbytes = rig.pick(MIB, 8 * MIB, 64 * MIB) + 5
        with rig.scope():
            source, target = rig.field(src, nbytes), rig.field(dst, nbytes)
            ways = {"host": host_way(rig, src, dst, nbytes)}
            ways |= {path: link_way(rig, src, dst, path, nbytes) for path in rig.paths(src, dst)}
            found = {name: damage for name, way in ways.items() if (damage := carry(rig, way, source, target))}
        if not found:
            yield self.result(Verdict.PASS, (src, dst), bytes=nbytes, ways=" ".join(ways))
            return
        right = [name for name in ways if name not in found]
        reason = "; ".join(f"{name}: {damage}" for name, damage in found.items())
        if right:
            reason += f"; right: {', '.join(right)}"
        hint = BROKEN_STAGED if "host" in found else BROKEN_PEER if "direct" in found else ""
        path = "direct" if list(found) == ["direct"] else ""
        yield self.result(Verdict.FAIL, (src, dst), reason, hint.format(src, dst), wrong=" ".join(found), path=path)


class ManySmall(PairCheck):
    key = "many-small"
    description = "many small copies of changing values from one place to one place, without the host"
    proves = "no copy is lost, merged with the next or served from a stale cache"
    requires = "one device"
    alone = True

    SIZES = (1, 4, 16, 4096)

    def run_pair(self, rig: Rig, src: int, dst: int) -> Iterator[Result]:
        count = rig.pick(64, 256, 2000)
        for path in rig.paths(src, dst):
            problem = ""
            for nbytes in self.SIZES:
                if problem := self._burst(rig, src, dst, path, nbytes, count):
                    break
            verdict = Verdict.FAIL if problem else Verdict.PASS
            hint = BROKEN_PEER.format(src, dst) if problem and path == "direct" else ""
            yield self.result(verdict, (src, dst), problem, hint, path=path, copies=count * len(self.SIZES))

    def _burst(self, rig: Rig, src: int, dst: int, path: str, nbytes: int, count: int) -> str:
        with rig.scope():
            out, into = rig.stream(src, "producer"), rig.stream(dst, "consumer")
            link = rig.link(src, dst, path=path, max_bytes=nbytes)
            source, target = rig.field(src, nbytes), rig.field(dst, nbytes)
            archive = rig.field(dst, nbytes * count)
            ready, free, released, arrived = (rig.event() for _ in range(4))
            order: dict[str, Any] = {
                "source_ready": ready,
                "dest_free": free,
                "released": released,
                "arrived": arrived,
            }
            numbers = [rig.iteration() for _ in range(count)]
            for index, iteration in enumerate(numbers):
                out.wait(released)
                rig.fill(out, source, iteration)
                ready.record(out)
                link.copy(target.address, source.address, nbytes, **order)
                into.wait(arrived)
                rig.copy_within(into, archive.part(index * nbytes, nbytes), target)
                free.record(into)
            rig.sync(into, "small copies")
            found = rig.download(into, archive)[GUARD:-GUARD].reshape(count, nbytes)
        wanted = np.stack([pattern.make(pattern.key(rig.seed, iteration), 0, nbytes) for iteration in numbers])
        wrong = np.flatnonzero((found != wanted).any(axis=1))
        if not len(wrong):
            return ""
        index = int(wrong[0])
        name = pattern.name_damage(found[index], 0, rig.seed, numbers[index], nbytes)
        return f"{path}: {len(wrong)} of {count} copies of {nbytes} bytes are wrong, first number {index}: {name}"


class Together(PairCheck):
    key = "both-ways"
    description = "copies in both directions of a pair at once, and over all pairs at once"
    proves = "copies do not disturb each other"
    condemns = True

    def pairs(self, rig: Rig) -> list[Pair]:
        return [(low, high) for low, high in rig.pairs if low < high]

    def run_pair(self, rig: Rig, src: int, dst: int) -> Iterator[Result]:
        yield from self._ask(rig, [(src, dst), (dst, src)], (src, dst))

    def run(self, rig: Rig) -> Iterator[Result]:
        yield from super().run(rig)
        if len(rig.devices) > 2:
            yield from self._ask(rig, rig.pairs, None)

    def _ask(self, rig: Rig, pairs: list[Pair], name: Pair | None) -> Iterator[Result]:
        nbytes = rig.pick(256 * KIB, MIB, 16 * MIB) + 1
        for path in ("direct", "staged"):
            used = [pair for pair in pairs if path in rig.paths(*pair)]
            if not used:
                continue
            with rig.scope():
                wrong, damage = self._rounds(rig, used, path, nbytes)
            if damage:
                reason = f"{path}, beside others: {damage}"
                yield self.result(Verdict.FAIL, wrong, reason, path=path, **damage.figures)
            else:
                yield self.result(Verdict.PASS, name, path=path, bytes=nbytes)

    def _rounds(self, rig: Rig, pairs: list[Pair], path: str, nbytes: int) -> tuple[Pair, Damage] | tuple[None, None]:
        """The first pair that got something wrong, and what."""
        sources = {pair: rig.field(pair[0], nbytes) for pair in pairs}
        targets = {pair: rig.field(pair[1], nbytes) for pair in pairs}
        links = {pair: rig.link(*pair, path=path, max_bytes=nbytes) for pair in pairs}
        arrived = {pair: rig.event() for pair in pairs}
        for _ in range(rig.pick(3, 5, 30)):
            numbers = {pair: rig.iteration() for pair in pairs}
            for (src, dst), iteration in numbers.items():
                rig.fill(rig.stream(src), sources[src, dst], iteration)
                rig.poison(rig.stream(dst), targets[src, dst], iteration)
            for device in rig.devices:
                rig.sync(rig.stream(device), "a fill")
            for pair in pairs:
                links[pair].copy(targets[pair].address, sources[pair].address, nbytes, arrived=arrived[pair])
            for pair in pairs:
                rig.wait(arrived[pair], f"a {path} copy beside others")
            for pair, iteration in numbers.items():
                if damage := rig.examine(rig.stream(pair[1]), targets[pair], iteration):
                    return pair, damage
        return None, None


class Large(PairCheck):
    key = "large"
    description = "copies across 2 and 4 GiB, and small ones beyond"
    proves = "sizes and offsets are 64 bits wide all the way"
    requires = "two devices, 2 or 4 GiB free on each"
    condemns = True
    level = Level.FULL

    BOUNDARIES = (2 * GIB, 4 * GIB)
    SIMULATED = 64 * MIB  # device memory of a simulated machine is the host's

    def run_pair(self, rig: Rig, src: int, dst: int) -> Iterator[Result]:
        for boundary in self.BOUNDARIES:
            room = boundary + 8192
            if reason := self._no_room(rig, src, dst, room):
                yield self.result(Verdict.WAIVED, (src, dst), reason, boundary=boundary)
                return  # the next boundary is higher
            for path in rig.paths(src, dst):
                with rig.scope():
                    problem = self._cross(rig, src, dst, path, boundary, room)
                hint = STAGE.format(src, dst) if problem and path == "direct" else ""
                verdict = Verdict.FAIL if problem else Verdict.PASS
                yield self.result(verdict, (src, dst), problem, hint, path=path, boundary=boundary)

    def _no_room(self, rig: Rig, src: int, dst: int, room: int) -> str:
        if rig.runtime.backend == "sim" and room > self.SIMULATED:
            return f"{room >> 20} MiB of simulated memory would be the host's"
        for device in (src, dst):
            free, _ = rig.runtime.memory_info(device)
            if free < room + room // 8:
                return f"device {device} has {free >> 20} MiB free, {room >> 20} MiB are needed"
        return ""

    def _cross(self, rig: Rig, src: int, dst: int, path: str, boundary: int, room: int) -> str:
        source, target = rig.field(src, room), rig.field(dst, room)
        way = link_way(rig, src, dst, path, room)
        for nbytes in (*around(boundary), boundary + 5):
            if damage := carry(rig, way, source.part(0, nbytes), target.part(0, nbytes)):
                return f"{path}, {nbytes} bytes: {damage}"
        begin = boundary + 11
        if damage := carry(rig, way, source.part(begin, 10), target.part(begin + 2, 10), begin):
            return f"{path}, 10 bytes at offset {begin}: {damage}"
        return ""


class PeerKernels(DataCheck):
    key = "peer-kernels"
    description = "kernels that write to and read from the other device's memory"
    proves = "loads and stores through peer access reach the owner, not a private mirror"
    requires = "peer access, real devices"
    path = "direct"

    def needs(self, runtime: Runtime) -> str | None:
        if runtime.backend == "sim":
            return "kernels of simulated devices reach their own memory only"
        return super().needs(runtime)

    def ask(self, rig: Rig, src: int, dst: int) -> Result:
        nbytes, out, into = rig.pick(MIB, 4 * MIB, 64 * MIB) + 5, rig.stream(src), rig.stream(dst)
        source, target, iteration = rig.field(src, nbytes), rig.field(dst, nbytes), rig.iteration()
        rig.fill(out, source, iteration)
        rig.poison(into, target, iteration)
        rig.sync(out, "a fill")
        rig.sync(into, "a fill")
        rig.fill(out, target, iteration)
        rig.sync(out, "a kernel that writes to a peer")
        if damage := rig.examine(into, target, iteration):
            return self.wrong((src, dst), "written by a kernel of the other device", damage)
        if rig.no_direct(dst, src):
            return self.result(Verdict.PASS, (src, dst), bytes=nbytes, loads=0)
        if wrong := rig.count_wrong(into, source, iteration)[0]:
            damage = Damage("read by a kernel of the other device", wrong, 0, nbytes - 1)
            return self.wrong((src, dst), "loads", damage)
        return self.result(Verdict.PASS, (src, dst), bytes=nbytes, loads=1)
