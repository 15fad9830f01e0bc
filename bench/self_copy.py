"""Staged copies from a GPU to itself: what driver calls cost, and which tile, ring and order of calls are the best.

    python bench/self_copy.py               one GPU: a minute and a half
    python bench/self_copy.py --pair 0 1    the same between two GPUs; peer access is never enabled
    python bench/self_copy.py --places      what depends on the CPU of the thread and on where the ring is

Both legs of such a copy run at once through one GPU's link, so tile sizes and the cost of submission can be tuned where
only one GPU is at hand. The calls are made bare, in C (self_copy.c, compiled here with cc); the library's own staged
copies follow, for comparison. All rows go to bench/results/self_copy.jsonl.
"""

from __future__ import annotations

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # here, copy.py would hide Python's copy

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import copy, record
from pyxdev import backends

HERE = Path(__file__).parent
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror")
SECONDS = 0.025  # for the repeats of one figure of the bare calls

# Of the rows of self_copy.c: the calls that are tried with each context, "not ready" not counted.
CALLS = ("down", "record out", "wait in", "up", "record in", "wait out", "memset in", "up on the source's stream",
         "down on the destination's stream")  # fmt: skip

Row = dict[str, Any]


def bare(pair: tuple[int, int], seconds: float, most: int, what: str = "sweep") -> list[Row]:
    """The rows of self_copy.c, up to copies of so many bytes. what: "sweep" or "places"."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "self_copy"
        sources = [f"-I{HERE.parent / 'native'}", "-o", str(program), str(HERE / "self_copy.c"), "-ldl", "-pthread"]
        subprocess.run(["cc", *FLAGS, *sources], check=True)
        command = [str(program), *map(str, pair), str(seconds), str(most), what]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    if ran.returncode:
        rows.append({"case": "ended early", "method": f"exit code {ran.returncode}", "right": False})
    return rows


def library(backend: str, pair: tuple[int, int], sizes: tuple[int, ...]) -> list[Row]:
    """The library's own copies, called from Python: fitted tiles, then the same with other tiles and rings."""
    with backends.open(backend) as runtime:
        bench = copy.Bench(runtime, sizes, pair)
        with bench.rig:
            for nbytes in sizes:
                with bench.rig.scope():
                    measure(bench, "pyxdev", nbytes, bench.rig.link(*pair, path="staged", max_bytes=nbytes))
                if nbytes < copy.MIB:
                    continue
                with bench.rig.scope():
                    link = bench.rig.link(*pair, path="staged", max_bytes=nbytes)
                    bench.submit(link, "staged", (nbytes,))
                    fitted = link.tile(nbytes)
                for tile in (fitted // 2, fitted * 3 // 4, fitted * 3 // 2, fitted * 2):
                    with bench.rig.scope():
                        link = bench.rig.link(*pair, path="staged", tile_bytes=tile // 4096 * 4096, max_bytes=nbytes)
                        measure(bench, "pyxdev, tiles", nbytes, link)
        return bench.rows


def library_places(backend: str, pair: tuple[int, int]) -> list[Row]:
    """The library's copies by a thread on each CPU in turn, and 64 MiB over rings of fresh links."""
    with backends.open(backend) as runtime:
        bench = copy.Bench(runtime, (64 * copy.MIB,), pair)
        everywhere = os.sched_getaffinity(0)
        with bench.rig:
            try:
                for cpu in sorted(everywhere):
                    os.sched_setaffinity(0, {cpu})
                    for nbytes in (4 * copy.KIB, 12 * copy.MIB):
                        with bench.rig.scope():
                            link = bench.rig.link(*pair, path="staged", max_bytes=nbytes)
                            measure(bench, "pyxdev", nbytes, link, f"cpu {cpu}")
            finally:
                os.sched_setaffinity(0, everywhere)
            for tile in (4 << 20, 4684 << 10, 3512 << 10):
                for _ in range(3):
                    with bench.rig.scope():
                        link = bench.rig.link(*pair, path="staged", tile_bytes=tile, max_bytes=64 * copy.MIB)
                        measure(bench, "pyxdev", 64 * copy.MIB, link, "ring: fresh link")
        return bench.rows


def measure(bench: copy.Bench, method: str, nbytes: int, link: copy.Link, case: str = "library") -> None:
    way, tile = bench.ours(link), link.tile(nbytes)
    right = bench.right(way, nbytes)
    seconds, call = bench.time_of(lambda: way(nbytes), seconds=0.05)
    figures = {"us": round(seconds * 1e6, 2), "gb_s": round(nbytes / seconds / 1e9, 3)}
    figures |= {"tile": tile, "tiles": -(-nbytes // tile), "ring": link.pinned_bytes // tile}
    bench.add(case, method, nbytes, **figures, submit_us=round(call * 1e6, 2), right=right)


# ---- the table -------------------------------------------------------------------------------------------------------


def report(rows: list[Row]) -> Iterator[str]:
    leg = min((row["gb_s"] for row in rows if row["case"] == "limit" and row["method"] != "both legs"), default=0.0)
    for row in rows:
        if row["case"] == "limit":
            yield f"limit {row['method']:<12}{row['gb_s']:8.1f} GB/s"
        elif row["case"] == "call":
            yield f"call  {row['method']:<28}{row['ns']:7.0f} ns"
        elif row["case"] == "current":
            failed = ", ".join(f"{name} {code}" for name, code in row.items() if code and name in CALLS)
            yield f"with the context of {row['method']}: {'refused: ' + failed if failed else 'all calls work'}"
        elif row["case"] in ("one stream", "ended early"):
            yield f"{row['case']}: {row['method']}"
    yield f"{'size':>8} {'method':<14}{'tile KiB':>9}{'tiles':>6}{'us':>10}{'of leg':>8}{'submit':>9}{'behind':>9}"
    copies = [row for row in rows if row["case"] in ("copy", "library")]
    for nbytes in dict.fromkeys(row["bytes"] for row in copies):
        for method in dict.fromkeys(row["method"] for row in copies):
            mine = [row for row in copies if row["bytes"] == nbytes and row["method"] == method]
            if mine:
                best = min(mine, key=lambda row: row["us"])
                wrong = "" if all(row["right"] for row in mine) else " WRONG"
                yield (
                    f"{copy.size(nbytes):>8} {method:<14}{best['tile'] // 1024:>9}{best['tiles']:>6}{best['us']:>10.1f}"
                    f"{best['gb_s'] / leg:>8.3f}{best['submit_us']:>9.1f}{best.get('behind_us', ''):>9}{wrong}"
                )
    for row in rows:
        if row["case"].startswith(("cpu ", "wait: ", "ring: ")):
            yield (
                f"{row['case']:<20}{row['method']:<8}{copy.size(row['bytes']):>8}{row['tile'] // 1024:>6} KiB"
                f"{row['us']:>10.1f} us, submit {row['submit_us']}, behind work {row.get('behind_us', '')}"
            )
        if "behind work" in row["case"]:
            yield f"library, {copy.size(row['bytes'])} behind work: {row['submit_us']} us, {row['us_a_tile']} a tile"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", nargs=2, type=int, default=(0, 0), metavar=("SRC", "DST"))
    parser.add_argument("--places", action="store_true", help="which CPU, which memory")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for the repeats of one figure")
    parser.add_argument("--most", type=int, default=copy.GIB, help="bytes of the largest copy")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "self_copy.jsonl")
    given = parser.parse_args()
    pair = given.pair[0], given.pair[1]
    if given.places:
        rows = bare(pair, given.seconds, min(given.most, 256 * copy.MIB), "places") + library_places("cuda", pair)
    else:
        rows = bare(pair, given.seconds, given.most)
        rows += library("cuda", pair, tuple(nbytes for nbytes in copy.SIZES if nbytes <= given.most))
    with backends.open("cuda") as runtime:
        machine = record.machine(runtime)
    stamp = record.stamp("self_copy", machine)
    record.append(given.out, ({**stamp, "pair": list(pair), **row} for row in rows))
    print(machine)
    print("\n".join(report(rows)))
    return 0 if all(row.get("right", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
