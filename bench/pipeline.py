"""Pipelines over two devices, or two stages on one, beside their bound and what people use, all in one run.

    python bench/pipeline.py                      two GPUs, or one for both stages: about two minutes
    python bench/pipeline.py --backend sim        simulated devices, simulated time: bare kernels only
    python bench/pipeline.py --show FILE          the tables of the last run in a file of rows

Two stages of the same length, transformer blocks in torch (bfloat16) and bare kernels. The inputs lie on device 0, the
outputs end on device 1 (on device 0 where only that one works). L: one microbatch through both stages and the copy.
B: the slowest stage or copy. Both are measured between the other figures, each part alone on its device. The bound of
m microbatches is L + (m - 1) B seconds; a ratio is the bound over the time taken, medians of several rounds, in each of
which every way has its turn, after some microbatches that nobody times: without them a single eager one, right after
another way, took up to twice as long. "stream" is many microbatches one after the other, its limit one every B seconds.
Token loops: the limit of several sequences is as many times one of them as there are stages to keep busy, but no more
than one step every B, for a GPU that works without a pause is slower: on two H200 the stages of 5 ms take 5.2 ms each
with one sequence, 5.9 ms back to back. A run ends when the device with the outputs is through. Host us: what the
submitting thread is busy with for each microbatch, waits at the bound of microbatches in flight left out.

Ways in torch: one (both stages on device 0), naive (.to() between devices, no synchronisation), events (streams and
events by hand; inputs are read and results lie where they lie), events-copies (the same with inputs and results of the
caller's own, as ours are), graphs (that with a CUDA graph for a stage and slot), gpipe (torch.distributed.pipelining's
ScheduleGPipe, two processes and NCCL), ours, and what of it there is staged and with graphs. Of bare kernels: one, hand
(streams, events and links by hand), ours, ours-deep (all microbatches in flight at once).
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from bench import record
from bench.ways import ByExecutor, Family, Limits, Run, Way
from pyxdev import backends
from pyxdev._native import Runtime
from pyxdev.errors import Error

STAGES = (50, 150, 500, 5000)  # us, about
MICROBATCHES = (1, 8, 32)
SEQUENCES = (1, 2, 4)
LOOP, STREAM = 5e-4, 2e-3  # of --seconds, for one run
STEPS, STREAMED = (12, 400), (64, 2000)
ROUNDS = (3, 25)
WARM = 8  # microbatches before each run
BARE_BYTES = 64 << 10
GPIPE_DEADLINE = 90.0  # seconds for all of its cases

Row = dict[str, Any]


# ---- one pair of stages ----------------------------------------------------------------------------------------------


class Case:
    """Every way to run one family of stages of one length, and the rows found."""

    def __init__(self, family: Family, us: int, chosen: Callable[[str], bool], budget: float, seconds: float) -> None:
        """budget: seconds for measure(). seconds: for all of the program."""
        self.family, self.us, self.budget, self.seconds = family, us, budget, seconds
        self.rows: list[Row] = []
        self._stack = ExitStack()
        self.ways: dict[str, Way] = {}
        for name, make in family.ways():
            if chosen(name) and (way := self.attempt(name, make)):
                self.ways[name] = self._stack.enter_context(closing(way))
        for name, reason in family.absent.items():
            if chosen(name):
                self.add("absent", name, why=reason)

    def add(self, case: str, way: str, **figures: Any) -> None:
        self.rows.append({"case": case, "family": self.family.name, "stage_us": self.us, "way": way, **figures})

    def close(self) -> None:
        self._stack.close()

    def attempt(self, name: str, call: Callable[[], Any]) -> Any:
        """What the call returns. Where it fails: None, and the way takes no further part."""
        try:
            return call()
        except (Error, RuntimeError, ImportError) as error:
            self.fail(name, f"{type(error).__name__}: {error}")
            return None

    def fail(self, name: str, why: str) -> None:
        self.ways.pop(name, None)
        self.add("failed", name, why=" ".join(why.split())[:300])

    def check(self, m: int) -> None:
        """One run of every way, also as its warm-up: the outputs are those of one device."""
        found = {}
        for name, way in list(self.ways.items()):
            if self.attempt(name, lambda way=way: way.run(m)) is None:
                continue
            if isinstance(way, ByExecutor) and (why := way.eager()):
                self.fail(name, f"stays eager: {why}")
                continue
            found[name] = way.outputs()
            self.judge(name, self.family.error(found[name]), m=m)
        for name, other in self.family.alike:
            if name in found and other in found:
                same = self.family.same(found[name], found[other])
                self.add("check", name, m=m, same_bits_as=other, right=same)

    def judge(self, name: str, error: float, **figures: Any) -> None:
        """Wrong outputs have no speed."""
        right = error <= self.family.tolerance
        self.add("check", name, **figures, error=error, right=right)
        if not right:
            self.fail(name, f"wrong outputs: {error:.2g} off, {self.family.tolerance:g} allowed")

    def measure(self, microbatches: Iterable[int]) -> Limits:
        """Pipelines of every length, in turns with the limits."""
        wanted = [(m, name) for m in microbatches for name in self.ways]
        found: dict[tuple[int, str], list[Run]] = {key: [] for key in wanted}
        limits: list[Limits] = []
        until = time.monotonic() + self.budget
        while len(limits) < ROUNDS[0] or (time.monotonic() < until and len(limits) < ROUNDS[1]):
            limits.append(self.family.limits())
            for m, name in wanted:
                way = self.ways.get(name)
                if way and (run := self.attempt(name, lambda way=way, m=m: warmed(way, m))):
                    found[m, name].append(run)
        limit = middle(limits)
        self.add("limit", "stages", us=[micro(seconds) for seconds in limit.stages])
        for path, copy in limit.copies.items():
            self.add("limit", path, us=micro(copy.latency), each_us=micro(copy.each))
        for (m, name), runs in found.items():
            if name in self.ways:
                self.pipeline(name, m, runs, limit.pipeline(self.ways[name].path, m))
        return limit

    def pipeline(self, name: str, m: int, runs: list[Run], bound: float) -> None:
        seconds, host = (statistics.median(values) for values in zip(*runs, strict=True))
        self.rate("pipeline", name, m, seconds, bound, host_us=micro(host / m), rounds=len(runs))

    def rate(self, case: str, name: str, m: int, seconds: float, bound: float, **figures: Any) -> None:
        rates = {"per_s": round(m / seconds, 1), "limit_per_s": round(m / bound, 1), "ratio": round(bound / seconds, 4)}
        self.add(case, name, m=m, **rates, **figures)

    def processes(self, found: list[dict[str, Any]], why: str, limit: Limits) -> None:
        """What the two processes of gpipe found for stages of this length."""
        mine = [case for case in found if case["stage_us"] == self.us]
        for case in mine:
            self.judge("gpipe", case["error"], m=case["m"])
            if case["error"] <= self.family.tolerance:
                runs = [Run(*run) for run in case["runs"]]
                self.pipeline("gpipe", case["m"], runs, limit.pipeline("direct", case["m"]))
        if why and not mine:
            self.fail("gpipe", why)

    def stream(self, limit: Limits) -> None:
        m = within(STREAMED, STREAM * self.seconds / max(limit.stages))
        for name, way in list(self.ways.items()):
            if run := self.attempt(name, lambda way=way: way.stream(m)):
                self.rate("stream", name, m, run.seconds, m * limit.slowest(way.path))

    def loops(self, sequences: Iterable[int], limit: Limits) -> None:
        """Token loops: one sequence is compared with its peer by hand, several with one of the same way."""
        steps = within(STEPS, LOOP * self.seconds / sum(limit.stages))
        alone: dict[str, float] = {}
        for s in sequences:
            for name, way in [(name, way) for name, way in self.ways.items() if hasattr(way, "loop")]:
                runs = self.attempt(name, lambda way=way, s=s: [way.loop(s, steps) for _ in range(3)][1:])
                if runs is None:
                    continue
                self.judge(name, self.family.loop_error(way.outputs(), steps), s=s, steps=steps)
                seconds, host = (statistics.median(values) for values in zip(*runs, strict=True))
                rate = s * steps / seconds
                alone.setdefault(name, rate)
                figures: Row = {"steps": steps, "per_s": round(rate, 1), "host_us": micro(host / s / steps)}
                if s > 1:
                    limit_per_s = min(min(s, len(limit.stages)) * alone[name], 1 / limit.slowest(way.path))
                    figures |= {"limit_per_s": round(limit_per_s, 1), "ratio": round(rate / limit_per_s, 4)}
                self.add("loop", name, s=s, **figures)
        rows = {(row["s"], row["way"]): row for row in self.rows if row["case"] == "loop"}
        for (s, name), row in rows.items():
            peers = [rows[s, peer] for peer in ("hand", "naive", "events") if name != peer and (s, peer) in rows]
            if peers:
                best = max(peers, key=lambda peer: peer["per_s"])
                row |= {"peer": best["way"], "over_peer": round(row["per_s"] / best["per_s"], 4)}
                row.setdefault("ratio", row["over_peer"])


def warmed(way: Way, m: int) -> Run:
    way.run(WARM)
    return way.run(m)


def within(bounds: tuple[int, int], number: float) -> int:
    return max(bounds[0], min(bounds[1], int(number)))


def micro(seconds: float) -> float:
    return round(seconds * 1e6, 2)


def middle(limits: list[Limits]) -> Limits:
    """The medians."""
    stages = [statistics.median(values) for values in zip(*(limit.stages for limit in limits), strict=True)]
    paths = limits[0].copies
    return Limits(
        stages,
        {
            path: type(copy)(*map(statistics.median, zip(*(limit.copies[path] for limit in limits), strict=True)))
            for path, copy in paths.items()
        },
    )


def over_peers(rows: list[Row]) -> None:
    """Each way of ours beside the one by hand of the same run."""
    peers = {"ours": ("hand", "events"), "ours-graphs": ("graphs",), "ours-staged": ("hand-staged",)}
    found = {(row["case"], row["family"], row["stage_us"], row.get("m"), row["way"]): row for row in rows}
    for (case, family, us, m, way), row in found.items():
        for peer in peers.get(way, ()):
            other = found.get((case, family, us, m, peer))
            if other and "per_s" in row and "per_s" in other and case in ("pipeline", "stream"):
                row |= {"peer": peer, "over_peer": round(row["per_s"] / other["per_s"], 4)}
                if case == "pipeline":
                    row["extra_us_a_stage"] = round((row["host_us"] - other["host_us"]) / 2, 2)


# ---- tables ----------------------------------------------------------------------------------------------------------


def heading(row: Row) -> str:
    return "{machine}, {date}, commit {commit}".format(**row)


def tables(rows: list[Row]) -> Iterator[str]:
    for family in dict.fromkeys(row["family"] for row in rows):
        mine = [row for row in rows if row["family"] == family]
        yield from (*lengths(mine, family), "")
        for case, key, title in (
            ("pipeline", "m", "ratio to the bound by microbatches (host us of a microbatch, at the most of them)"),
            ("stream", None, "streaming: ratio to one microbatch every B"),
            ("loop", "s", "token loops: steps/s by sequences s in flight (ratio to min(s, 2) times one, at most 1/B)"),
        ):
            part = [row for row in mine if row["case"] == case]
            if part:
                yield from (f"{family}, {title}", "", *grid(part, key), "")
        for row in mine:
            where = f"- {family} {row['way']}, stages of {row['stage_us']} us"
            if "why" in row:
                yield f"{where}: {row['case']}, {row['why']}"
            elif "same_bits_as" in row and not row["right"]:
                yield f"{where}: WRONG, other bits than {row['same_bits_as']}"


def lengths(rows: list[Row], family: str) -> Iterator[str]:
    for us in dict.fromkeys(row["stage_us"] for row in rows):
        found = {row["way"]: row for row in rows if row["stage_us"] == us and row["case"] == "limit"}
        if stages := found.pop("stages", None):
            copies = [f"{path} copy {row['us']:.1f}, {row['each_us']:.1f} in a row" for path, row in found.items()]
            measured = " and ".join(f"{value:.1f}" for value in stages["us"])
            yield "; ".join([f"- {family}, us: stages of {us} took {measured}", *copies])


def grid(rows: list[Row], key: str | None) -> Iterator[str]:
    """Rows: ways. Columns: stage lengths, each with its figures for every value of the key."""
    lengths, values = sorted({row["stage_us"] for row in rows}), sorted({row.get(key, 0) for row in rows})
    found = {(row["way"], row["stage_us"], row.get(key, 0)): row for row in rows}
    heads = f": {' / '.join(map(str, values))}" if key else ""
    yield "| way | " + " | ".join(f"{us} us{heads}" for us in lengths) + " |"
    yield "| --- |" + " --- |" * len(lengths)
    for way in dict.fromkeys(row["way"] for row in rows):
        cells = [cell([row for value in values if (row := found.get((way, us, value)))]) for us in lengths]
        yield f"| {way} | {' | '.join(cells)} |"


def cell(rows: list[Row]) -> str:
    if not rows:
        return "absent"
    if rows[0]["case"] == "loop":
        return " / ".join(f"{row['per_s']:.0f}" + (f" ({row['ratio']:.2f})" if row["s"] > 1 else "") for row in rows)
    ratios = " / ".join(f"{row['ratio']:.3f}".lstrip("0") for row in rows)
    return f"{ratios} ({rows[-1]['host_us']:.0f})" if "host_us" in rows[-1] else ratios


# ---- what is run -----------------------------------------------------------------------------------------------------


def measure(given: argparse.Namespace, runtime: Runtime) -> Iterator[list[Row]]:
    """The rows of one family of stages of one length after the other."""
    families = [name for name in given.families if name != "torch" or runtime.backend != "sim"]
    budget = 0.5 * given.seconds / (len(families) * len(given.stages))
    other: tuple[list[dict[str, Any]], str] = ([], "")
    if "torch" in families and given.chosen("gpipe") and runtime.device_count > 1:
        from bench import blocks, gpipe

        sizes = {us: tuple(blocks.SIZES[us]) for us in given.stages}
        begin = time.monotonic()
        other = gpipe.measure(sizes, given.microbatches, 0.1 * given.seconds, GPIPE_DEADLINE)
        print(f"gpipe: {time.monotonic() - begin:.0f} s; {other[1] or 'all measured'}", file=sys.stderr)
    for name in families:
        for us in given.stages:
            begin = time.monotonic()
            with ExitStack() as stack:
                family = stack.enter_context(closing(make(name, runtime, us, max(given.microbatches))))
                case = stack.enter_context(closing(Case(family, us, given.chosen, budget, given.seconds)))
                case.check(min(8, max(given.microbatches)))
                limit = case.measure(given.microbatches)
                if name == "torch":
                    case.processes(*other, limit)
                case.stream(limit)
                case.loops(SEQUENCES, limit)
                over_peers(case.rows)
                print(f"{name} stages of {us} us: measured in {time.monotonic() - begin:.0f} s", file=sys.stderr)
                yield case.rows


def make(name: str, runtime: Runtime, us: int, most: int) -> Family:
    if name == "bare":
        from bench.bare import Bare

        return Bare(runtime, us * 1e-6, BARE_BYTES, max(most, max(SEQUENCES)))
    from bench.blocks import SIZES, Blocks

    return Blocks(runtime, SIZES[us], max(most, max(SEQUENCES)))


def arguments() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def words(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--machine", default="h200x2", help="the profile of the simulated devices (%(default)s)")
    parser.add_argument("--families", type=words, default=["bare", "torch"], metavar="bare,torch")
    parser.add_argument("--stages", type=numbers, default=list(STAGES), metavar="50,150,500,5000", help="us")
    parser.add_argument("--microbatches", type=numbers, default=list(MICROBATCHES), metavar="1,8,32")
    parser.add_argument("--variants", type=words, metavar="one,graphs,ours", help="the ways to run (all)")
    parser.add_argument("--seconds", type=float, default=100.0, help="of measuring, about (%(default)g)")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "pipeline.jsonl")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the tables of the last run in FILE")
    given = parser.parse_args()
    given.chosen = lambda name: given.variants is None or name in given.variants
    return given


def main() -> int:
    given = arguments()
    rows: list[Row] = []
    if given.show:
        rows = record.last_run(given.show)
    else:
        machine = given.machine if given.backend == "sim" else None
        with backends.open(given.backend, machine=machine) as runtime:
            simulated = "simulated " if runtime.backend == "sim" else ""  # whatever the profile's devices are called
            stamp = record.stamp("pipeline", simulated + record.machine(runtime))
            for found in measure(given, runtime):
                record.append(given.out, ({**stamp, **row} for row in found))
                rows += [{**stamp, **row} for row in found]
    print(heading(rows[-1]), "", *tables(rows), sep="\n")
    return 0 if all(row.get("right", True) and row["case"] != "failed" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
