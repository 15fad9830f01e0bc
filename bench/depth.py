"""What microbatches in flight and slots are worth: rate over the ideal one, by how much the times of stages vary.

    python bench/depth.py

n stages of 1 ms on n simulated devices, each microbatch's time drawn anew from 1 ms plus or minus `jitter`. The ideal
rate is one microbatch a millisecond. Times are virtual, so the table is the same everywhere.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import random

import numpy as np

from pyxdev import Executor, Stage

MEAN = 1e-3  # seconds


def ratio(stages: int, in_flight: int | str, depth: int | str, jitter: float, microbatches: int = 400) -> float:
    def stage(seed: int) -> Stage:
        draw = random.Random(seed).uniform
        return Stage(lambda x: x, out=lambda x: x, cost=lambda x: MEAN * draw(1 - jitter, 1 + jitter))

    machine = {"device": {"count": stages}}
    made = [stage(n) for n in range(stages)]
    with Executor(range(stages), made, machine=machine, host_stage="0", in_flight=in_flight, depth=depth) as pipe:
        x = np.zeros(10)
        list(pipe.map([x] * 3 * stages))
        begin = pipe.runtime.clock()
        list(pipe.map([x] * microbatches))
        return (microbatches + stages - 1) * MEAN / (pipe.runtime.clock() - begin)


def main() -> int:
    write = sys.stdout.write
    write("| stages | jitter | n, 4 slots | n + 2, 4 | 2n, 4 | 3n, 4 | 4n, 8 | 8n, 16 |\n" + "| --- " * 8 + "|\n")
    for n in (2, 4, 8):
        for jitter in (0.0, 0.3, 0.6):
            pairs = ((n, 4), (n + 2, 4), (2 * n, 4), (3 * n, 4), (4 * n, 8), (8 * n, 16))
            cells = " | ".join(f"{ratio(n, in_flight, depth, jitter):.3f}" for in_flight, depth in pairs)
            write(f"| {n} | {jitter:.0%} | {cells} |\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
