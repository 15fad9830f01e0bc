"""Loading models, beside the limits of the machine and what people use, all in one run.

    python bench/load.py                        on the GPUs there are: some minutes, 12 GB of disk and 5 GB of /dev/shm
    python bench/load.py --probe --only shards --conditions warm    what is in the way, without other people's loaders
    python bench/load.py --backend sim --quick  simulated devices and small files: shows that everything runs

Every loader runs in a process of its own, whose device contexts exist before the clock starts; the processes of a table
start together, rest, and load one after the other. "first" is a loader's first load with all set-up, "second" the next.
Peers load one device a process, side by side for two devices, each its share
of the files. "warm": the files are in the page cache; "tmpfs": in /dev/shm; "cold": taken out of the page cache before
each load. A peer whose package is not installed, or that fails, is listed as absent with the reason.
"""

from __future__ import annotations

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from bench import load_files, load_limits, record
from bench.load_files import GIB, MIB, Case
from bench.load_plain import Plain, fitted, ways
from bench.loaders import LOADERS, PROBES
from pyxdev import backends
from pyxdev._native import HOST, Runtime
from pyxdev.loader.loader import load
from pyxdev.loader.weights import Weights

Row = dict[str, Any]
OURS = [name for name in LOADERS if name.startswith("pyxdev") and name not in PROBES]
FEW_OF_OURS = ["pyxdev", "pyxdev, 8 threads", "pyxdev, 16 threads", "pyxdev, default threads"]
PEERS = [name for name in LOADERS if not name.startswith("pyxdev")]
DIRECT_PEERS = ("fastsafetensors", "Run:ai streamer", "InstantTensor")  # past the page cache
WARM_PEERS = [name for name in PEERS if name not in DIRECT_PEERS]
TMPFS_PEERS = [name for name in WARM_PEERS if "mmap" in name or "together" in name or "32 MiB" in name]
COLD_PEERS = [*DIRECT_PEERS, *(name for name in PEERS if name.startswith("safetensors"))]
DEADLINE = 300.0  # seconds for one loader
WINDOW = 64 * MIB  # of page-locked memory for reading back


def shown(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {figure:.4g}" for name, figure in figures.items())


class Process:
    """One loader, ready to load."""

    def __init__(self, loader: str, backend: str, devices: Sequence[int], files: Sequence[Path]) -> None:
        self.ready: Row = {}  # what it said then
        script = Path(__file__).with_name("loaders.py")
        command = [sys.executable, script, loader, backend, ",".join(map(str, devices)), *map(str, files)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self) -> Row:
        """What it says next; `absent` when it is gone."""
        assert self._child.stdout
        for line in self._child.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        return {"absent": f"ended with exit code {self._child.wait()}"}

    def go(self) -> None:
        assert self._child.stdin
        self._child.stdin.write("go\n")
        self._child.stdin.flush()

    def close(self) -> None:
        assert self._child.stdin and self._child.stdout
        self._child.stdin.close()
        self._child.wait(DEADLINE)
        self._child.stdout.close()


def start(loader: str, backend: str, devices: Sequence[int], files: Sequence[Path]) -> list[Process]:
    """Its processes: ours takes all devices in one."""
    if loader not in PEERS:
        shares = [(list(devices), list(files))]
    else:
        step = -(-len(files) // len(devices))
        shares = [([device], list(files[n * step : (n + 1) * step])) for n, device in enumerate(devices)]
    return [Process(loader, backend, mine, part) for mine, part in shares]


def measure(processes: Sequence[Process], prepare: Callable[[], None]) -> Iterator[Row]:
    """The first and the second load: seconds, or why there are none."""
    try:
        answers = [process.ready for process in processes]
        for _ in range(2):
            if reasons := [answer["absent"] for answer in answers if "absent" in answer]:
                yield {"absent": reasons[0]}
                return
            prepare()
            for process in processes:
                process.go()
            answers = [process.answer() for process in processes]
            if all("seconds" in answer for answer in answers):
                yield {"seconds": max(answer["seconds"] for answer in answers), "report": answers[0]["report"]}
    finally:
        for process in processes:
            process.close()


def read_back(weights: Weights) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """Every tensor's bytes as its device holds them. All of a device's memory is copied back, window by window: a copy
    for each of many tensors would take a minute."""
    runtime = weights.runtime
    for device in weights.devices:
        mine = {name: array for name, array in weights.items() if array.device == device}
        base = min((array.address for array in mine.values()), default=0)
        held = np.empty(max((array.address + array.nbytes for array in mine.values()), default=0) - base, np.uint8)
        with (
            closing(runtime.buffer(HOST, min(len(held), WINDOW))) as pinned,
            closing(runtime.stream(device)) as stream,
        ):
            for at in range(0, len(held), WINDOW):
                part = held[at : at + WINDOW]
                stream.copy(pinned.address, base + at, len(part), dst_device=HOST, src_device=device)
                stream.synchronize()
                runtime.host_access(pinned.address, len(part), write=False)
                part[:] = np.frombuffer(pinned, np.uint8, len(part))
        for name, array in mine.items():
            yield name, held[array.address - base :][: array.nbytes]


class Bench:
    def __init__(self, given: argparse.Namespace, runtime: Runtime, devices: list[int]) -> None:
        self.given, self.runtime, self.devices = given, runtime, devices
        self.rows: list[Row] = []
        self.stamp = record.stamp("load", record.machine(runtime))
        self.out: Path | None = given.out or (None if given.quick else record.RESULTS / "load.jsonl")
        self.console = Console()

    def add(self, **row: Any) -> None:
        """Kept for the tables, and written at once: a run that is stopped half way has its rows."""
        self.rows.append(row)
        if self.out:
            record.append(self.out, [self.stamp | row])

    def run(self) -> None:
        small = self.given.quick
        cases = load_files.cases(*((64 * MIB, 16 * MIB, 1000) if small else (4 * GIB, GIB, load_files.MANY)))
        for case in cases:
            if self.given.only and not any(word in case.name for word in self.given.only):
                continue
            for condition in self.given.conditions:
                self.run_case(case, condition)

    def run_case(self, case: Case, condition: str) -> None:
        folder = Path("/dev/shm/pyxdev-bench") if condition == "tmpfs" else self.given.folder
        files = load_files.write(case, folder)
        load_files.warm(files)
        prepare: Callable[[], None] = (lambda: load_files.evict(files)) if condition == "cold" else lambda: None
        self.check(case, files)
        for count in self.given.counts:
            chosen = self.devices[:count]
            limits = self.limits(case, files, condition, chosen)
            if self.given.probe and condition != "cold":
                self.run_plain(case, condition, files, chosen, limits["upload"])
            self.run_loaders(case, condition, chosen, files, prepare, limits)
            self.compare(case, condition, count, limits)
        if condition == "tmpfs":
            for path in files:
                path.unlink()

    def loaders(self, case: Case, condition: str, count: int) -> list[str]:
        if self.given.probe:
            return list(PROBES)
        peers = {"warm": WARM_PEERS, "tmpfs": TMPFS_PEERS, "cold": COLD_PEERS}[condition]
        if case.form == "gguf" or count > case.files:
            peers = []  # they read no GGUF, and share out whole files
        mine = list(FEW_OF_OURS)
        if condition == "warm":
            mine = OURS if case.name == "shards" else [*mine, "pyxdev, every array made"]
        return [name for name in [*mine, *peers] if not self.given.loaders or name in self.given.loaders]

    def limits(self, case: Case, files: list[Path], condition: str, devices: list[int]) -> dict[str, float]:
        """Bytes a second, by name; each is a row."""
        nbytes = min(case.nbytes, 2 * GIB)
        found = {"upload": load_limits.upload_rate(self.runtime, devices, nbytes)}
        if condition == "cold":
            rates = []
            for threads, chunk in ((1, 8 * MIB), (16, 8 * MIB), (32, 2 * MIB)):
                load_files.evict(files)
                rates.append(load_limits.read_rate(files, threads, chunk, threads * chunk, direct=True))
            found["direct reads"] = max(rates)
        else:
            for threads in (1, 4, 8, 16, 32):
                found[f"page cache, {threads} threads"] = load_limits.read_rate(files, threads, MIB, 64 * MIB)
            found |= self.plain_limit(files, devices)
        for name, rate in found.items():
            self.add(case=self.title(case, condition, len(devices)), method=f"limit: {name}", figure=rate / 1e9,
                     unit="GB/s", limit=rate / 1e9, ratio=1.0)  # fmt: skip
        return found

    def plain_limit(self, files: list[Path], devices: list[int]) -> dict[str, float]:
        """What the loop in C reaches, with as many threads and tiles as serve it best."""
        if self.given.backend != "cuda":
            return {}
        try:
            plain = Plain(files, devices)
        except ImportError as error:
            self.say(f"plain loop in C: absent, {error}")
            return {}
        tried = [fitted(threads * len(devices), tile) for threads in (8, 12, 16) for tile in (MIB, 2 * MIB)]
        rates = [plain.run(way)["rate"] for way in tried]
        plain.close()
        return {"plain loop in C": max(rates)}

    def run_loaders(
        self,
        case: Case,
        condition: str,
        devices: list[int],
        files: list[Path],
        prepare: Callable[[], None],
        limits: dict[str, float],
    ) -> None:
        names = self.loaders(case, condition, len(devices))
        started = {name: start(name, self.given.backend, devices, files) for name in names}
        processes = [process for of_one in started.values() for process in of_one]
        try:
            for process in processes:
                process.ready = process.answer()
            for name, of_one in started.items():
                self.run_loader(name, of_one, case, condition, devices, prepare, limits)
        finally:
            for process in processes:
                process.close()

    def run_loader(
        self,
        loader: str,
        processes: Sequence[Process],
        case: Case,
        condition: str,
        devices: list[int],
        prepare: Callable[[], None],
        limits: dict[str, float],
    ) -> None:
        title = self.title(case, condition, len(devices))
        name, limit = ("direct reads", limits["direct reads"]) if condition == "cold" else ("upload", limits["upload"])
        turns = iter(("first", "second"))
        for found in measure(processes, prepare):
            row: Row = {"case": title, "method": loader, "load": next(turns)}
            if "absent" in found:
                self.add(**row, figure=None, absent=found["absent"])
                self.say(f"{title}: {loader}: absent, {found['absent']}")
                return
            rate = case.nbytes / found["seconds"]
            row |= {
                "figure": rate / 1e9,
                "unit": "GB/s",
                "limit_name": name,
                "limit": limit / 1e9,
                "ratio": rate / limit,
            }
            self.add(**row, seconds=found["seconds"], report=found["report"])
            report = found["report"]
            first = f", first tile after {1e3 * report['first']:.1f} ms" if "first" in report else ""
            spent = {key: report[key] for key in ("reading", "waiting") if key in report} | report.get("phases", {})
            self.say(f"{title}: {loader}, {row['load']}: {rate / 1e9:.2f} GB/s, {rate / limit:.2f} of {name}{first}")
            if self.given.probe:
                self.say(f"    seconds: {shown(spent)}")

    def run_plain(self, case: Case, condition: str, files: list[Path], devices: list[int], upload: float) -> None:
        """The loop in C in all its ways, each said when it is done."""
        title = self.title(case, condition, len(devices))
        try:
            plain = Plain(files, devices)
        except ImportError as error:
            self.say(f"{title}: plain loop: absent, {error}")
            return
        self.say(f"{title}: plain loop, seconds: {shown(plain.opened)}")
        self.add(case=title, method="plain loop: what it takes to begin", figure=sum(plain.opened.values()), unit="s",
                 ratio=1.0, report=plain.opened)  # fmt: skip
        for way in ways(len(devices)):
            found = plain.run(way)
            rate = found["rate"]
            self.add(case=title, method=f"plain loop: {way}", load="second", figure=rate / 1e9, unit="GB/s",
                     limit_name="upload", limit=upload / 1e9, ratio=rate / upload, report=found)  # fmt: skip
            spent = {key: found[key] for key in ("wait", "read", "submit", "record")}
            self.say(f"plain loop: {way}: {rate / 1e9:.2f} GB/s; us a tile: {shown(spent)}")
        plain.close()

    def compare(self, case: Case, condition: str, count: int, limits: dict[str, float]) -> None:
        """Our best against the best peer, load by load: a row each."""
        title = self.title(case, condition, count)
        for turn in ("first", "second"):
            found = [row for row in self.rows if row["case"] == title and row.get("load") == turn and row["figure"]]
            mine = [row for row in found if row["method"] in OURS]
            others = [row for row in found if row["method"] in PEERS]
            if mine and others:
                best, peer = (max(rows, key=lambda row: row["figure"]) for rows in (mine, others))
                self.add(
                    case=title,
                    method=best["method"],
                    load=turn,
                    figure=best["figure"],
                    unit="GB/s",
                    peer=peer["method"],
                    peer_figure=peer["figure"],
                    ratio=best["figure"] / peer["figure"],
                )

    def check(self, case: Case, files: list[Path]) -> None:
        """Every byte of one load is right."""
        path = files[0].parent if len(files) > 1 else files[0]
        with load(path, self.devices, runtime=self.runtime, threads=-1) as weights:
            sizes = dict(case.tensors)
            if weights.keys() != sizes.keys():
                raise SystemExit(f"{path}: other tensors than were written")
            for name, held in read_back(weights):
                if held.tobytes() != load_files.content(name, sizes[name]):
                    raise SystemExit(f"{path}: tensor {name} is wrong")

    @staticmethod
    def title(case: Case, condition: str, count: int) -> str:
        size = f"{case.nbytes / GIB:.2g} GiB"
        return f"{case.name} ({case.form}, {size}, {len(case.tensors)} tensors), {condition}, {count} devices"

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def print_tables(self) -> None:
        for case in dict.fromkeys(row["case"] for row in self.rows):
            table = Table("method", "first, GB/s", "second, GB/s", "against", "ratio", title=case, title_justify="left")
            rows = [row for row in self.rows if row["case"] == case]
            for method in dict.fromkeys(row["method"] for row in rows if "peer" not in row):
                mine = [row for row in rows if row["method"] == method and "peer" not in row]
                figures = ["absent" if row["figure"] is None else f"{row['figure']:.2f}" for row in mine]
                last = mine[-1]
                ratio = f"{last['ratio']:.2f}" if "ratio" in last else ""
                table.add_row(method, figures[0], figures[1] if len(figures) > 1 else "", last.get("limit_name"), ratio)
            for row in rows:
                if "peer" in row:
                    table.add_row(f"best against {row['peer']}, {row['load']}", f"{row['figure']:.2f}",
                                  f"{row['peer_figure']:.2f}", "peer", f"{row['ratio']:.2f}")  # fmt: skip
            self.console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--backend", default="cuda", choices=("cuda", "hip", "sim"))
    add(
        "--folder", type=Path, default=Path("/var/tmp/pyxdev-bench"), help="where the files are (/var/tmp/pyxdev-bench)"
    )
    add("--conditions", nargs="+", choices=("warm", "tmpfs", "cold"), default=["warm", "tmpfs", "cold"])
    add("--counts", nargs="+", type=int, help="of devices (1, and 2 if there are two)")
    add("--only", nargs="+", metavar="WORD", help="cases with a word in their name: shards, gguf, many")
    add("--loaders", nargs="+", metavar="NAME", help=f"of {', '.join(LOADERS)}")
    add(
        "--probe",
        action="store_true",
        help="a plain loop in C, and ours: threads, tiles, streams, waits, without reads",
    )
    add("--quick", action="store_true", help="small files")
    add("--out", type=Path, help="JSON lines are added here (bench/results/load.jsonl; none with --quick)")
    given = parser.parse_args()
    with backends.open(given.backend) as runtime:
        devices = list(range(runtime.device_count))
        given.counts = given.counts or [1, 2][: len(devices)]
        bench = Bench(given, runtime, devices[: max(given.counts)])
        try:
            bench.run()
        finally:
            bench.print_tables()


if __name__ == "__main__":
    main()
