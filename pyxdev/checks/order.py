"""Do the waits of one device for another wait? Seen in data, with a control that leaves the wait out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from pyxdev._native import HOST, Event, Runtime, Stream
from pyxdev.checks.check import SEE_ORDER, Check, Pair, PairCheck, Result, Verdict
from pyxdev.checks.rig import Damage, Latch, Rig
from pyxdev.errors import OrderViolation

BYTES = 64 << 10

NO_WAITS = "PYXDEV_FORCE_XDEV_SYNC=1 lets the host do the waits; a newer driver may help"


class Hop:
    """Data of one device, through page-locked memory, to another: no peer access is needed."""

    def __init__(self, rig: Rig, src: int, dst: int) -> None:
        self.rig = rig
        self.producer, self.consumer = rig.stream(src, "producer"), rig.stream(dst, "consumer")
        self.source, self.target = rig.field(src, BYTES), rig.field(dst, BYTES)
        self.between = rig.buffer(HOST, BYTES)
        self.ready, self.done = rig.event(), rig.event()

    def prepare(self, iteration: int) -> None:
        self.rig.fill(self.producer, self.source, iteration)
        self.rig.poison(self.consumer, self.target, iteration)
        self.rig.sync(self.producer, "a fill")
        self.rig.sync(self.consumer, "a fill")

    def down(self) -> None:
        source = self.source
        self.producer.copy(self.between.address, source.address, BYTES, dst_device=HOST, src_device=source.device)
        self.ready.record(self.producer)

    def up(self) -> None:
        target = self.target
        self.consumer.copy(target.address, self.between.address, BYTES, dst_device=target.device, src_device=HOST)
        self.done.record(self.consumer)

    def by_host(self) -> Damage | None:
        """The host waits between the legs."""
        iteration = self.rig.iteration()
        self.prepare(iteration)
        self.down()
        self.rig.sync(self.producer, "a download")
        self.up()
        self.rig.wait(self.done, "an upload")
        return self.rig.examine(self.consumer, self.target, iteration)

    def held(self, *, wait: bool) -> tuple[bool, Damage | None]:
        """The producer is held by a latch; whether the consumer was early, and what it got."""
        iteration = self.rig.iteration()
        self.prepare(iteration)
        latch = self.rig.latch(self.producer)
        self.down()
        if wait:
            self.consumer.wait(self.ready)
        self.up()
        if wait:
            early = self.rig.came_early(self.done, latch)
        else:
            self.rig.wait(self.done, "a stream that waits for nobody")
            early = latch.held
        latch.open()
        self.rig.sync(self.producer, "a stream whose latch is open")
        self.rig.wait(self.done, "an event of another device")
        return early, self.rig.examine(self.consumer, self.target, iteration)


class EventOrder(PairCheck):
    key = "event-order"
    description = "a stream waits for an event of another device (and of its own)"
    proves = "the consumer sees what a delayed producer wrote, every time; without the wait it is seen not to"
    requires = "one device"

    def needs(self, runtime: Runtime) -> str | None:
        return None

    def pairs(self, rig: Rig) -> list[Pair]:
        return rig.pairs + [(device, device) for device in rig.devices]

    def run_pair(self, rig: Rig, src: int, dst: int) -> Iterator[Result]:
        with rig.scope():
            yield self._ask(rig, Hop(rig, src, dst), (src, dst))

    def _ask(self, rig: Rig, hop: Hop, pair: Pair) -> Result:
        if damage := hop.by_host():
            reason = f"wrong data with the host waiting between the legs: {damage}"
            return self.result(Verdict.FAIL, pair, reason, "the copies themselves are wrong", **damage.figures)
        try:
            early, damage = hop.held(wait=False)
        except OrderViolation:  # the ordering checker of simulated devices saw it
            rig.forgive()
            early, damage = True, Damage("", 1, 0, 0)
        rounds = rig.pick(10, 30, 200)
        for number in range(rounds):
            waited_early, waited_damage = hop.held(wait=True)
            if waited_damage or waited_early:
                what = str(waited_damage) if waited_damage else "it was done while the producer was still held"
                reason = f"the wait did not wait (round {number + 1} of {rounds}): {what}"
                return self.result(
                    Verdict.FAIL, pair, reason, NO_WAITS, **(waited_damage.figures if waited_damage else {})
                )
        if not early or not damage:
            reason = "leaving the wait out was not seen: the streams run one after the other, or the latch did not hold"
            hint = "see whether a debugger or CUDA_LAUNCH_BLOCKING is on"
            return self.result(Verdict.INCONCLUSIVE, pair, reason, hint)
        return self.result(Verdict.PASS, pair, rounds=rounds)


class EventChain(Check):
    key = "event-chain"
    description = "waits through all devices in a row, and one device that waits for all"
    proves = "order holds over many hops and for several waits of one stream"
    requires = "two devices"

    def needs(self, runtime: Runtime) -> str | None:
        return None if runtime.device_count > 1 else "there is only one device"

    def run(self, rig: Rig) -> Iterator[Result]:
        *others, last = rig.devices
        if not others:
            yield self.too_few()
            return
        chain = list(pairwise(rig.devices))
        fan_in = [(src, last) for src in others]
        for name, pairs, one_round in (("chain", chain, self._chain), ("fan-in", fan_in, self._fan_in)):
            rounds = rig.pick(5, 20, 100)
            with rig.scope():
                hops = [Hop(rig, src, dst) for src, dst in pairs]
                problem = next((found for _ in range(rounds) if (found := one_round(rig, hops))), "")
            if problem:
                yield self.result(Verdict.FAIL, None, f"{name}: {problem}", SEE_ORDER, shape=name)
            else:
                yield self.result(Verdict.PASS, None, shape=name, rounds=rounds)

    def _chain(self, rig: Rig, hops: list[Hop]) -> str:
        """Down from each device, up to the next; the first one is held."""
        iteration = rig.iteration()
        for hop in hops:
            hop.prepare(iteration)
            rig.poison(hop.producer, hop.source, iteration)
        rig.fill(hops[0].producer, hops[0].source, iteration)
        for hop in hops:
            rig.sync(hop.producer, "a fill")
        latch = rig.latch(hops[0].producer)
        before: Hop | None = None
        for hop in hops:
            if before:
                hop.producer.wait(before.done)
                rig.copy_within(hop.producer, hop.source, before.target)
            hop.down()
            hop.consumer.wait(hop.ready)
            hop.up()
            before = hop
        return self._outcome(rig, latch, hops[-1], [hops[-1]], iteration)

    def _fan_in(self, rig: Rig, hops: list[Hop]) -> str:
        """Every other device sends to the last one, which waits for all; each of them is held in turn."""
        for held in hops:
            iteration = rig.iteration()
            for hop in hops:
                hop.prepare(iteration)
            latch = rig.latch(held.producer)
            for hop in hops:
                hop.down()
            for hop in hops:
                hop.consumer.wait(hop.ready)
            for hop in hops:
                hop.up()
            if problem := self._outcome(rig, latch, hops[0], hops, iteration):
                return f"device {held.producer.device} held: {problem}"
        return ""

    def _outcome(self, rig: Rig, latch: Latch, last: Hop, looked_at: list[Hop], iteration: int) -> str:
        early = rig.came_early(last.done, latch)
        latch.open()
        for hop in looked_at:
            rig.wait(hop.done, "the end of the chain")
        for hop in looked_at:
            if damage := rig.examine(hop.consumer, hop.target, iteration):
                return f"device {hop.target.device} got {damage}"
        return "the last device was done while the first was still held" if early else ""


class EventRules(Check):
    key = "event-rules"
    description = "events never recorded, recorded again, polled, and recorded on another device"
    proves = "a wait means the last record; asking early is no error; an event follows the stream that records it"

    def run(self, rig: Rig) -> Iterator[Result]:
        for device in rig.devices:
            with rig.scope():
                problems = list(self._problems(rig, rig.stream(device, "producer"), rig.stream(device, "consumer")))
            other = next((other for other in rig.devices if other != device), device)
            with rig.scope():
                problems += self._moved(rig, device, other)
            verdict = Verdict.FAIL if problems else Verdict.PASS
            yield self.result(verdict, device, "; ".join(problems))

    def _problems(self, rig: Rig, producer: Stream, consumer: Stream) -> Iterator[str]:
        never, again = rig.event(), rig.event()
        consumer.wait(never)
        if not never.done() or not consumer.synchronize(rig.patience):
            yield "an event that was never recorded is waited for"
        again.record(producer)
        rig.wait(again, "an event on an idle stream")
        latch = rig.latch(producer)
        again.record(producer)
        consumer.wait(again)
        end = rig.event()
        end.record(consumer)
        if rig.came_early(end, latch):
            yield "a wait for an event that was recorded twice means its first record"
        latch.open()
        rig.wait(end, "an event recorded twice")

    def _moved(self, rig: Rig, device: int, other: int) -> Iterator[str]:
        """Recorded on one device, then on another: the wait is for the other."""
        event: Event = rig.event()
        event.record(rig.stream(device, "producer"))
        latch = rig.latch(rig.stream(other, "producer"))
        event.record(rig.stream(other, "producer"))
        if event.device != other:
            yield f"an event recorded on device {other} says it is of device {event.device}"
        if rig.came_early(event, latch):
            yield f"an event of device {device}, recorded again on device {other}, came early"
        latch.open()
        rig.wait(event, "an event recorded on another device")
