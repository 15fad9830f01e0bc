"""Copies between two devices, beside the limits of the machine and what people use, all in one run.

    python bench/copy.py                    two GPUs: about a minute
    python bench/copy.py --backend sim      simulated devices, simulated time: no peers to compare with

A single copy is timed from the call to its end, each by itself, by the host's clock; every way waits by an event of
ours. "leg" is the slower of a download and an upload of 1 GiB alone. Two child processes: in the first, peer access is
never enabled, so that the driver's copy is its own staging. Every way is checked by data at every size.
"""

from __future__ import annotations

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # here, this file would hide Python's copy

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench import record
from pyxdev import backends
from pyxdev._native import HOST, Array, Link, Runtime, Stream
from pyxdev.checks.kernels import open_kernels
from pyxdev.checks.rig import Field, Rig

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 12 * MIB, 64 * MIB, 256 * MIB, GIB)
SIM_SIZES = SIZES[:8]
SECONDS = 0.12  # for the repeats of one figure
PITCHED = (4096, 3072, 3584)  # rows, bytes of a row, bytes between rows

# Staged copies over the leg, by size, at least.
TARGETS = {GIB: 0.96, 64 * MIB: 0.88, 12 * MIB: 0.76, 4 * MIB: 0.62, MIB: 0.40}

Row = dict[str, Any]
Way = Callable[[int], None]  # enqueues a copy of so many bytes, and the record of its end


class Bench:
    """A pair of devices, one source, one target, and the rows found."""

    def __init__(self, runtime: Runtime, sizes: tuple[int, ...], pair: tuple[int, int] = (0, 1)) -> None:
        self.runtime, self.sizes = runtime, sizes
        self.rig = Rig(runtime, open_kernels(runtime), devices=tuple(dict.fromkeys(pair)), patience=30.0)
        self.source, self.target = (self.rig.field(device, sizes[-1]) for device in pair)
        self.end = self.rig.event()
        self.rows: list[Row] = []

    def add(self, case: str, method: str, nbytes: int, **figures: Any) -> None:
        self.rows.append({"case": case, "method": method, "bytes": nbytes, **figures})

    def clock(self) -> float:
        return self.runtime.clock()

    def time_of(self, way: Callable[[], None], seconds: float = SECONDS) -> tuple[float, float]:
        """Median seconds of one copy and of the call alone; repeats for so many seconds."""
        whole, calls, until = [], [], time.monotonic() + seconds
        for count in range(400):
            begin = self.clock()
            way()
            called = self.clock()
            self.end.wait()
            whole.append(self.clock() - begin)
            calls.append(called - begin)
            if count > 4 and time.monotonic() > until:
                break
        return statistics.median(whole[1:]), statistics.median(calls[1:])

    def right(self, way: Way, nbytes: int) -> bool:
        rig, iteration = self.rig, self.rig.iteration()
        source, target = self.source.part(0, nbytes), self.target.part(0, nbytes)
        rig.fill(rig.stream(source.device), source, iteration)
        rig.poison(rig.stream(target.device), target, iteration)
        for device in (source.device, target.device):
            rig.sync(rig.stream(device), "a fill")
        way(nbytes)
        self.end.wait()
        damage = rig.examine(rig.stream(target.device), target, iteration, guards=False)
        return damage is None

    def compare(self, case: str, ways: dict[str, Way]) -> None:
        """All ways at all sizes, one size after the other."""
        for nbytes in self.sizes:
            for method, way in ways.items():
                right = self.right(way, nbytes)
                seconds, call = self.time_of(lambda way=way, nbytes=nbytes: way(nbytes))
                figures = {"us": round(seconds * 1e6, 2), "gb_s": round(nbytes / seconds / 1e9, 3)}
                self.add(case, method, nbytes, **figures, submit_us=round(call * 1e6, 2), right=right)

    # -- ways --

    def link(self, path: str, src: int = 0, dst: int = 1) -> Link:
        return self.rig.link(src, dst, path=path, max_bytes=self.sizes[-1])

    def ours(self, link: Link) -> Way:
        def copy(nbytes: int) -> None:
            link.copy(self.target.address, self.source.address, nbytes, arrived=self.end)

        return copy

    def bare(self, stream: Stream) -> Way:
        """cuMemcpyPeerAsync, called through cuda-python."""
        from cuda.bindings import driver

        def checked(answer: tuple[Any, ...]) -> Any:
            if int(answer[0]):
                raise SystemExit(f"the driver's copy failed: {answer[0]!r}")
            return answer[1] if len(answer) > 1 else None

        contexts = [checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(device)))) for device in (0, 1)]
        checked(driver.cuCtxSetCurrent(contexts[0]))
        target, source, handle = self.target.address, self.source.address, stream.handle

        def copy(nbytes: int) -> None:
            checked(driver.cuMemcpyPeerAsync(target, contexts[1], source, contexts[0], nbytes, handle))
            self.end.record(stream)

        return copy

    def torch(self) -> Way:
        import torch

        target, source = (
            Array(self.runtime, field.device, field.address, (field.nbytes,), "uint8", owner=self).torch()
            for field in (self.target, self.source)
        )
        stream = self.rig.adopt(0, torch.cuda.current_stream(0).cuda_stream or 1)

        def copy(nbytes: int) -> None:
            with torch.cuda.device(0):
                target[:nbytes].copy_(source[:nbytes], non_blocking=True)
            self.end.record(stream)

        return copy

    def cupy(self) -> Way:
        import cupy

        def pointer(field: Field) -> Any:
            memory = cupy.cuda.UnownedMemory(field.address, field.nbytes, self, field.device)
            return cupy.cuda.MemoryPointer(memory, 0)

        target, source = pointer(self.target), pointer(self.source)
        with cupy.cuda.Device(0):
            queue = cupy.cuda.Stream(non_blocking=True)
        stream = self.rig.adopt(0, queue.ptr)

        def copy(nbytes: int) -> None:
            with cupy.cuda.Device(0):
                target.copy_from_device_async(source, nbytes, queue)
            self.end.record(stream)

        return copy

    # -- limits --

    def legs(self) -> dict[str, float]:
        """GB/s of large downloads of device 0 and uploads of device 1: alone, both, and all four at once."""
        rig, nbytes = self.rig, min(self.sizes[-1], 256 * MIB)
        hosts = {leg: rig.buffer(HOST, nbytes).address for leg in ("down0", "up1", "down1", "up0")}
        streams = {leg: rig.stream(int(leg[-1]), leg) for leg in hosts}
        fields = {0: self.source.address, 1: self.target.address}

        def rate(*legs: str) -> float:
            def once() -> float:
                begin = self.clock()
                for leg in legs:
                    device = int(leg[-1])
                    for _ in range(4):
                        if leg.startswith("down"):
                            streams[leg].copy(hosts[leg], fields[device], nbytes, dst_device=HOST, src_device=device)
                        else:
                            streams[leg].copy(fields[device], hosts[leg], nbytes, dst_device=device, src_device=HOST)
                for leg in legs:
                    rig.sync(streams[leg], "a leg")
                return self.clock() - begin

            return 4 * nbytes / statistics.median([once() for _ in range(4)][1:]) / 1e9

        found = {
            "down": rate("down0"),
            "up": rate("up1"),
            "both legs": rate("down0", "up1"),
            "all four legs": rate(*hosts),
        }
        for name, gb_s in found.items():
            self.add("limit", name, nbytes, gb_s=round(gb_s, 2))
        return found

    # -- more cases --

    def submit(self, link: Link, path: str, sizes: tuple[int, ...]) -> None:
        """The call alone, behind a stream that is busy for milliseconds."""
        rig, src = self.rig, self.source.device
        out = rig.stream(src, "busy")
        ready, busy = rig.event(), rig.buffer(HOST, 64 * MIB if self.runtime.backend != "sim" else MIB)
        for nbytes in sizes:
            calls = []
            for _ in range(12):
                for _ in range(8):
                    out.copy(busy.address, self.source.address, busy.nbytes, dst_device=HOST, src_device=src)
                ready.record(out)
                begin = self.clock()
                link.copy(self.target.address, self.source.address, nbytes, source_ready=ready, arrived=self.end)
                calls.append(self.clock() - begin)
                held = not ready.done()
                self.end.wait()
            tiles = -(-nbytes // link.tile(nbytes)) if path == "staged" else 1
            call = statistics.median(calls) * 1e6
            figures = {"tiles": tiles, "us_a_tile": round(call / tiles, 2), "held": held}
            self.add(f"{path}, submit behind work", "pyxdev", nbytes, submit_us=round(call, 2), **figures)

    def stream_of_copies(self, case: str, ways: dict[str, Way], nbytes: int = 12 * MIB, count: int = 16) -> None:
        """One after the other without a wait of the host."""
        for method, way in ways.items():

            def many(way: Way = way) -> None:
                for _ in range(count):
                    way(nbytes)

            seconds = self.time_of(many)[0] / count
            self.add(f"{case}, in a row", method, nbytes, gb_s=round(nbytes / seconds / 1e9, 2))

    def both_ways(self, path: str, there: Link, back: Link) -> None:
        rig, nbytes = self.rig, min(self.sizes[-1], 64 * MIB)
        ends = rig.event(), rig.event()
        near, far = rig.field(0, nbytes), rig.field(1, nbytes)
        sources = self.source.part(0, nbytes), self.target.part(0, nbytes)
        numbers = rig.iteration(), rig.iteration()
        for source, iteration in zip(sources, numbers, strict=True):
            rig.fill(rig.stream(source.device), source, iteration)
            rig.sync(rig.stream(source.device), "a fill")

        def once() -> float:
            begin = self.clock()
            for _ in range(8):
                there.copy(far.address, sources[0].address, nbytes, arrived=ends[0])
                back.copy(near.address, sources[1].address, nbytes, arrived=ends[1])
            for end in ends:
                end.wait()
            return self.clock() - begin

        seconds = statistics.median([once() for _ in range(4)][1:])
        wrong = [
            rig.examine(rig.stream(got.device), got, iteration, guards=False)
            for got, iteration in zip((far, near), numbers, strict=True)
        ]
        gb_s = round(8 * nbytes / seconds / 1e9, 2)
        self.add(f"{path}, both ways", "pyxdev", nbytes, gb_s=gb_s, right=not any(wrong))

    def all_pairs(self, path: str) -> None:
        """Every ordered pair of the machine at once; GB/s of all together. Two devices have both_ways() only."""
        devices = range(self.runtime.device_count)
        if len(devices) < 3:
            return
        rig, nbytes = self.rig, min(self.sizes[-1], 16 * MIB)
        with rig.scope():
            pairs = [(src, dst) for src in devices for dst in devices if src != dst and path in rig.paths(src, dst)]
            links = [rig.link(src, dst, path=path, max_bytes=nbytes) for src, dst in pairs]
            sources = {device: rig.buffer(device, nbytes).address for device in devices}
            targets = [rig.buffer(dst, nbytes).address for _, dst in pairs]
            ends = [rig.event() for _ in pairs]

            def once() -> float:
                begin = self.clock()
                for _ in range(4):
                    for (src, _), link, target, end in zip(pairs, links, targets, ends, strict=True):
                        link.copy(target, sources[src], nbytes, arrived=end)
                for end in ends:
                    end.wait()
                return self.clock() - begin

            seconds = statistics.median([once() for _ in range(4)][1:])
        gb_s = round(4 * len(pairs) * nbytes / seconds / 1e9, 2)
        self.add(f"{path}, {len(pairs)} pairs at once", "pyxdev", nbytes, gb_s=gb_s)

    def pitched(self, path: str, link: Link) -> None:
        """Some of the rows are looked at."""
        rows, width, pitch = PITCHED
        if rows * pitch > self.sizes[-1]:
            return
        rig, iteration, nbytes = self.rig, self.rig.iteration(), rows * width
        rig.fill(rig.stream(0), self.source.part(0, rows * pitch), iteration)
        rig.sync(rig.stream(0), "a fill")

        def copy() -> None:
            pitches = {"dst_pitch": pitch, "src_pitch": pitch}
            link.copy(self.target.address, self.source.address, width, height=rows, arrived=self.end, **pitches)

        seconds, call = self.time_of(copy)
        looked_at = ((row, self.target.part(row * pitch, width)) for row in range(0, rows, rows // 16))
        wrong = sum(rig.count_wrong(rig.stream(1), part, iteration, row * pitch)[0] for row, part in looked_at)
        figures = {"gb_s": round(nbytes / seconds / 1e9, 2), "submit_us": round(call * 1e6, 2), "right": not wrong}
        self.add(f"{path}, {rows} rows of {width} bytes", "pyxdev", nbytes, **figures)


def measure(part: str, backend: str) -> list[Row]:
    """One child's work. Part "staged" never enables peer access, part "direct" does."""
    machine = {"device": {"count": 3}} if backend == "sim" else None
    with backends.open(backend, machine=machine) as runtime:
        if runtime.device_count < 2:
            raise SystemExit(f"bench/copy.py needs two devices; there are {runtime.device_count}")
        bench = Bench(runtime, SIM_SIZES if backend == "sim" else SIZES)
        with bench.rig:
            bench.add("machine", record.machine(runtime), 0)
            if part == "direct" and (reason := bench.rig.no_direct(0, 1)):
                bench.add("no direct path", reason, 0)
                return bench.rows
            link, back = bench.link(part), bench.link(part, 1, 0)
            ways = {"pyxdev": bench.ours(link)}
            if part == "staged":
                bench.legs()
                bench.add("pinned", "pyxdev", link.pinned_bytes)
                if backend == "cuda":
                    ways["driver"] = bench.bare(bench.rig.stream(0, "bare"))
            elif backend == "cuda":
                ways["cuMemcpyPeerAsync"] = bench.bare(bench.rig.stream(0, "bare"))
                ways |= {name: made for name in ("torch", "cupy") if (made := optional(getattr(bench, name)))}
            bench.compare(part, ways)
            bench.submit(link, part, (MIB, 12 * MIB, bench.sizes[-1]))
            bench.stream_of_copies(part, ways)
            bench.both_ways(part, link, back)
            bench.all_pairs(part)
            bench.pitched(part, link)
    return bench.rows


def optional(make: Callable[[], Way]) -> Way | None:
    try:
        return make()
    except ImportError:
        return None


# ---- the parent ------------------------------------------------------------------------------------------------------


def with_ratios(rows: list[Row]) -> Iterator[Row]:
    """Each row of ours beside its limit or peer of the same run."""
    found = {(row["case"], row["method"], row["bytes"]): row for row in rows}
    limits = {row["method"]: row["gb_s"] for row in rows if row["case"] == "limit"}
    leg = min(limits["down"], limits["up"])
    for row in rows:
        if row["case"].startswith("staged") and "gb_s" in row and "pairs at once" not in row["case"]:
            name, limit = ("leg of four", limits["all four legs"]) if "both ways" in row["case"] else ("leg", leg)
            row |= {"limit": name, "limit_gb_s": limit, "ratio": round(row["gb_s"] / limit, 3)}
        for peer in ("driver", "cuMemcpyPeerAsync"):
            other = found.get((row["case"], peer, row["bytes"]))
            if other and other is not row:
                row |= {"peer": peer, "peer_gb_s": other["gb_s"], "over_peer": round(row["gb_s"] / other["gb_s"], 3)}
                row.setdefault("ratio", row["over_peer"])
        yield row


def size(nbytes: int) -> str:
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if nbytes >= scale:
            return f"{nbytes / scale:g} {unit}"
    return f"{nbytes} B"


def report(rows: list[Row]) -> Iterator[str]:
    """The table, and the targets that are missed or reached."""
    for row in rows:
        if row["case"] == "limit":
            yield f"limit   {row['method']:<16}{row['gb_s']:8.1f} GB/s"
    for case in ("staged", "direct"):
        yield f"{case:<8}{'size':>8} {'method':<18}{'us':>10}{'GB/s':>8}{'submit us':>11}{'of leg':>8}{'of peer':>8}"
        for row in rows:
            if row["case"] == case:
                shares = f"{row['ratio'] if 'limit' in row else '':>8}{row.get('over_peer', ''):>8}"
                yield (
                    f"        {size(row['bytes']):>8} {row['method']:<18}{row['us']:>10.1f}{row['gb_s']:>8.2f}"
                    f"{row['submit_us']:>11.1f}{shares}{'' if row['right'] else ' WRONG'}"
                )
    for row in rows:
        if ", " in row["case"]:
            figures = {name: row[name] for name in ("gb_s", "submit_us", "us_a_tile", "ratio", "right") if name in row}
            yield f"{row['case']:<32}{size(row['bytes']):>9} {row['method']:<18}{figures}"


def verdicts(rows: list[Row]) -> Iterator[tuple[bool, str]]:
    ours = {(row["case"], row["bytes"]): row for row in rows if row["method"] == "pyxdev"}
    for nbytes, target in TARGETS.items():
        if row := ours.get(("staged", nbytes)):
            yield row["ratio"] >= target, f"staged {size(nbytes)}: {row['ratio']} of the leg, wanted {target}"
    for (case, nbytes), row in ours.items():
        if case == "staged" and "over_peer" in row:
            yield row["over_peer"] >= 1, f"staged {size(nbytes)}: {row['over_peer']} of the driver's staging, wanted 1"
        if case == "direct" and "over_peer" in row:
            yield row["over_peer"] >= 0.98, f"direct {size(nbytes)}: {row['over_peer']} of the bare copy, wanted 0.98"
    first = ours.get(("staged", 4 * KIB), {})
    if "over_peer" in first:
        share = round(1 / first["over_peer"], 3)
        yield share <= 0.85, f"staged 4 KiB: {share} of the time of the driver's staging, wanted 0.85"
    if row := ours.get(("staged, submit behind work", 12 * MIB)):
        yield row["submit_us"] <= 35, f"submitting 12 MiB: {row['submit_us']} us, wanted 35"
        yield row["us_a_tile"] <= 5, f"submitting 12 MiB: {row['us_a_tile']} us a tile, wanted 5"
    bare = [row for row in rows if row["method"] == "cuMemcpyPeerAsync" and row["case"] == "direct"]
    extra = [ours["direct", row["bytes"]]["submit_us"] - row["submit_us"] for row in bare]
    if extra:
        worst = round(max(extra), 2)
        yield worst <= 1, f"direct: at most {worst} us more to submit than the bare copy, wanted 1"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("cuda", "hip", "sim"), default="cuda")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "copy.jsonl")
    parser.add_argument("--part", choices=("staged", "direct"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        print(json.dumps(measure(given.part, given.backend)))
        return 0
    rows: list[Row] = []
    for part in ("staged", "direct"):
        command = [sys.executable, __file__, "--backend", given.backend, "--part", part]
        rows += json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    machine = next(row["method"] for row in rows if row["case"] == "machine")
    rows = list(with_ratios([row for row in rows if row["case"] != "machine"]))
    record.append(given.out, ({**record.stamp("copy", machine), **row} for row in rows))
    print(machine)
    print("\n".join(report(rows)))
    if given.backend != "sim":  # simulated devices have no driver's copy, and the leg of no real machine
        for reached, text in verdicts(rows):
            print("ok    " if reached else "MISSED", text)
    return 0 if all(row.get("right", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
