"""Which tile and which ring are the best for staged copies here, beside what the library chooses by itself.

    python bench/tiles.py                   two GPUs: half a minute

The library's tile is sqrt(what a tile costs beyond its bytes x rate x size). This measures single copies with tiles
around that one and rings of 2 to 8, and prints for each size the best of them, the chosen one, and what a tile costs
by the best: cost = tile^2 / (rate x size).
"""

from __future__ import annotations

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # here, copy.py would hide Python's copy

import argparse

from bench import copy, record
from pyxdev import backends, probe

KIB, MIB = copy.KIB, copy.MIB
SIZES = (256 * KIB, MIB, 4 * MIB, 12 * MIB, 64 * MIB, 256 * MIB)
FACTORS = (0.25, 0.5, 0.7, 1, 1.4, 2, 4)
RINGS = (2, 3, 4, 6, 8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("cuda", "hip", "sim"), default="cuda")
    backend = parser.parse_args().backend
    machine = {"device": {"count": 2}} if backend == "sim" else None
    rows = []
    with backends.open(backend, machine=machine) as runtime:
        rate = probe.leg(runtime, 0, 1)
        sizes = SIZES if backend != "sim" else SIZES[:3]
        bench = copy.Bench(runtime, sizes)
        print(f"{record.machine(runtime)}: legs {rate / 1e9:.1f} GB/s")
        print(f"{'size':>8}{'chosen tile x 4':>18}{'GB/s':>8}{'best':>18}{'GB/s':>8}{'cost us':>9}")
        with bench.rig:
            for nbytes in sizes:
                found = sweep(bench, nbytes, rate)
                chosen, best = found[None], max(found.items(), key=lambda item: item[1][1])
                tile, gb_s = best[1]
                tiles = best[0][1] if best[0] else 4
                cost = tile * tile / rate / nbytes * 1e6
                print(
                    f"{copy.size(nbytes):>8}{chosen[0] // KIB:>14} KiB{chosen[1]:>8.2f}"
                    f"{tile // KIB:>10} KiB x {tiles}{gb_s:>8.2f}{cost:>9.1f}",
                    flush=True,
                )
                figures = {"gb_s": chosen[1], "peer": f"{tile} x {tiles}", "peer_gb_s": gb_s}
                rows.append({"case": "chosen tile", "bytes": nbytes, "tile": chosen[0], **figures})
                rows[-1]["ratio"] = round(chosen[1] / gb_s, 3)
        stamp = record.stamp("tiles", record.machine(runtime))
    if backend != "sim":
        record.append(record.RESULTS / "tiles.jsonl", ({**stamp, **row} for row in rows))
    return 0


def sweep(bench: copy.Bench, nbytes: int, rate: float) -> dict[tuple[int, int] | None, tuple[int, float]]:
    """(tile, GB/s) by (tile, tiles); the library's own under None."""
    with bench.rig.scope():
        link = bench.rig.link(0, 1, rate=rate, max_bytes=nbytes)
        fitted = link.tile(nbytes)
        found: dict[tuple[int, int] | None, tuple[int, float]] = {None: (fitted, time_of(bench, link, nbytes))}
    for factor in FACTORS:
        tile = max(4096, int(fitted * factor) // 4096 * 4096)
        if tile > nbytes:
            continue
        for tiles in RINGS:
            with bench.rig.scope():
                link = bench.rig.link(0, 1, tile_bytes=tile, tiles=tiles, max_bytes=nbytes)
                found[tile, tiles] = tile, time_of(bench, link, nbytes)
    return found


def time_of(bench: copy.Bench, link: copy.Link, nbytes: int) -> float:
    """GB/s."""
    way = bench.ours(link)
    return round(nbytes / bench.time_of(lambda: way(nbytes), seconds=0.03)[0] / 1e9, 3)


if __name__ == "__main__":
    sys.exit(main())
