"""The four events of a copy: source ready and destination free are waited for, released and arrived come in time.

Each wait that a link makes is held open by a latch in turn, so that a copy which goes ahead is seen in data or by an
event that comes early.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyxdev._native import Link
from pyxdev.checks.check import SEE_ORDER, PairCheck, Result, Unclear, Verdict
from pyxdev.checks.rig import Latch, Rig
from pyxdev.errors import OrderViolation

TILE = 256 << 10
TILES = 4
RING = TILES * TILE


class LinkWaits(PairCheck):
    key = "link-waits"
    description = "every wait of a copy, held open in turn, on each path"
    proves = "a copy waits for its source, its destination and its tiles, and its events come when they promise to"
    requires = "one device"
    alone = True

    def run_pair(self, rig: Rig, src: int, dst: int) -> Iterator[Result]:
        for path in rig.paths(src, dst):
            with rig.scope():
                problems = list(Held(rig, src, dst, path).problems())
            verdict = Verdict.FAIL if problems else Verdict.PASS
            hint = SEE_ORDER if problems else ""
            yield self.result(verdict, (src, dst), "; ".join(f"{path}: {text}" for text in problems), hint, path=path)


class Held:
    """Copies of one pair on one path, with a latch somewhere in front of them."""

    def __init__(self, rig: Rig, src: int, dst: int, path: str) -> None:
        self.rig, self.path = rig, path
        self.out, self.into = rig.stream(src, "producer"), rig.stream(dst, "consumer")
        self.source, self.target = rig.field(src, 2 * RING + 3), rig.field(dst, 2 * RING + 3)
        self.before = rig.field(dst, 2 * RING + 3)
        self.link = rig.link(src, dst, path=path, tile_bytes=TILE, tiles=TILES)
        self.narrow = rig.link(src, dst, path=path, tile_bytes=RING // 2, tiles=1)
        self.ready, self.free = rig.event(), rig.event()
        self.released, self.arrived = rig.event(), rig.event()

    def problems(self) -> Iterator[str]:
        yield from self.destination_held()  # with the ring at its beginning, and again in the middle of a half
        yield from self.source_held()
        self.skip_tiles(5)
        yield from self.destination_held()
        yield from self.nothing_held()
        yield from self.one_tile()
        if self.path == "staged":
            yield from self.early_release()

    def prepare(self, iteration: int) -> None:
        rig = self.rig
        rig.fill(self.out, self.source, iteration)
        rig.poison(self.into, self.target, iteration)
        rig.sync(self.out, "a fill")
        rig.sync(self.into, "a fill")

    def copy(self, link: Link, nbytes: int, *, source: bool = False, destination: bool = False) -> None:
        link.copy(
            self.target.address,
            self.source.address,
            nbytes,
            source_ready=self.ready if source else None,
            dest_free=self.free if destination else None,
            released=self.released,
            arrived=self.arrived,
        )

    def skip_tiles(self, count: int) -> None:
        for _ in range(count):
            self.copy(self.link, 1)
        self.rig.wait(self.arrived, f"a {self.path} copy")

    def need(self, latch: Latch) -> None:
        if not latch.held:
            raise Unclear(f"{self.path}: the host was held up while it queued work; see host-calls")

    def wrong(self, iteration: int, nbytes: int) -> Iterator[str]:
        self.rig.wait(self.arrived, f"a {self.path} copy")
        self.rig.wait(self.released, f"a {self.path} copy")
        guards = nbytes == self.target.nbytes
        if damage := self.rig.examine(self.into, self.target.part(0, nbytes), iteration, guards=guards):
            yield str(damage)

    def source_held(self) -> Iterator[str]:
        """The source is written late; nothing may come before."""
        rig, iteration = self.rig, self.rig.iteration()
        self.prepare(iteration - 1)
        rig.poison(self.into, self.target, iteration)
        rig.sync(self.into, "a fill")
        latch = rig.latch(self.out)
        rig.fill(self.out, self.source, iteration)
        self.ready.record(self.out)
        self.copy(self.link, self.source.nbytes, source=True)
        self.need(latch)
        if rig.came_early(self.arrived, latch):
            yield "arrived before its source was ready"
        if self.released.done() and latch.held:
            yield "released before its source was ready"
        latch.open()
        for text in self.wrong(iteration, self.source.nbytes):
            yield f"did not wait for its source: {text}"

    def destination_held(self) -> Iterator[str]:
        """The old content of the destination is read late. The copy is longer than the ring: all tiles are held."""
        rig, iteration = self.rig, self.rig.iteration()
        self.prepare(iteration)
        latch = rig.latch(self.into)
        rig.copy_within(self.into, self.before, self.target)
        self.free.record(self.into)
        self.copy(self.link, self.source.nbytes, destination=True)
        self.need(latch)
        if rig.came_early(self.arrived, latch):
            yield "arrived before its destination was free"
        if self.released.done() and latch.held:
            yield "released before all of its source was read"
        latch.open()
        for text in self.wrong(iteration, self.source.nbytes):
            yield f"tiles were written again too early: {text}"
        if not rig.poisoned(self.into, self.before, iteration):
            yield "did not wait for its destination: the reader of the old content saw the new"

    def early_release(self) -> Iterator[str]:
        """A copy that fits into the ring lets its source go after the first leg; writing it then does no harm."""
        rig, iteration, nbytes = self.rig, self.rig.iteration(), RING - 5
        self.prepare(iteration)
        latch = rig.latch(self.into)
        self.free.record(self.into)
        self.copy(self.link, nbytes, destination=True)
        self.need(latch)
        if not self.released.wait(rig.patience):
            yield "did not release its source"
        elif not latch.held:
            yield "released its source only after its destination was free"
        self.out.wait(self.released)
        rig.poison(self.out, self.source, iteration)
        rig.sync(self.out, "a fill")
        latch.open()
        for text in self.wrong(iteration, nbytes):
            yield f"released its source too early: {text}"

    def nothing_held(self) -> Iterator[str]:
        """A copy of no bytes keeps the order all the same."""
        for side, stream, event in (("source", self.out, self.ready), ("destination", self.into, self.free)):
            latch = self.rig.latch(stream)
            event.record(stream)
            self.copy(self.link, 0, source=side == "source", destination=side == "destination")
            self.need(latch)
            if self.rig.came_early(self.arrived, latch):
                yield f"a copy of no bytes arrived before its {side} was ready"
            latch.open()
            self.rig.wait(self.arrived, "a copy of no bytes")

    def one_tile(self) -> Iterator[str]:
        """A ring of one tile: every leg has to wait for the one before."""
        iteration = self.rig.iteration()
        self.prepare(iteration)
        self.copy(self.narrow, self.source.nbytes)
        for text in self.wrong(iteration, self.source.nbytes):
            yield f"legs of one tile overlapped: {text}"


class SlotReuse(PairCheck):
    key = "slot-reuse"
    description = "copies without a pause from one source into two slots that a slow consumer reads"
    proves = "no slot, tile or source is written before its last reader is done; without the gate it is seen to be"
    deadline = 120.0

    BYTES = 3 * (64 << 10) + 5
    DELAY = 1e-3  # of the consumer, for each slot

    def run_pair(self, rig: Rig, src: int, dst: int) -> Iterator[Result]:
        for path in rig.paths(src, dst):
            yield self._ask(rig, src, dst, path)

    def _ask(self, rig: Rig, src: int, dst: int, path: str) -> Result:
        pair, rounds = (src, dst), rig.pick(8, 24, 200)
        for tiles in (1, 2, 4):
            if problem := self._stream(rig, src, dst, path, rounds, tiles=tiles, gate=True):
                reason = f"{path}, ring of {tiles}: {problem}"
                return self.result(Verdict.FAIL, pair, reason, SEE_ORDER, path=path)
        try:
            seen = self._stream(rig, src, dst, path, 8, tiles=4, gate=False)
        except OrderViolation as violation:  # the ordering checker of simulated devices saw it
            rig.forgive()
            seen = str(violation)
        if not seen:
            reason = f"{path}: leaving out the wait for a free slot was not seen: the consumer is not slow enough"
            return self.result(Verdict.INCONCLUSIVE, pair, reason, path=path)
        return self.result(Verdict.PASS, pair, path=path, rounds=rounds)

    def _stream(self, rig: Rig, src: int, dst: int, path: str, rounds: int, *, tiles: int, gate: bool) -> str:
        """What was wrong with the first wrong microbatch, or ""."""
        nbytes = self.BYTES
        with rig.scope():
            out, into = rig.stream(src, "producer"), rig.stream(dst, "consumer")
            source, slots = rig.field(src, nbytes), [rig.field(dst, nbytes) for _ in range(2)]
            archive = rig.field(dst, rounds * nbytes)
            link = rig.link(src, dst, path=path, tile_bytes=64 << 10, tiles=tiles, gate=gate)
            ready, released, arrived = rig.event(), rig.event(), rig.event()
            free = [rig.event(), rig.event()]
            numbers = [rig.iteration() for _ in range(rounds)]
            for index, iteration in enumerate(numbers):
                slot = slots[index % 2]
                out.wait(released)
                rig.fill(out, source, iteration)
                ready.record(out)
                link.copy(
                    slot.address,
                    source.address,
                    nbytes,
                    source_ready=ready,
                    dest_free=free[index % 2],
                    released=released,
                    arrived=arrived,
                )
                into.wait(arrived)
                rig.delay(into, self.DELAY)
                rig.copy_within(into, archive.part(index * nbytes, nbytes), slot)
                free[index % 2].record(into)
            rig.sync(into, "a slow consumer")
            for index, iteration in enumerate(numbers):
                part = archive.part(index * nbytes, nbytes)
                if damage := rig.examine(into, part, iteration, guards=False):
                    return f"microbatch {index}: {damage}"
        return ""
