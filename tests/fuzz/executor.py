"""Fault injections into executors, as tests/unit/test_executor_faults.py has them, with ever new seeds: `make fuzz`.

    python tests/fuzz/executor.py [--seconds 60] [--seed 1]

The first life of an executor that hangs, leaks, gives a wrong result or another exception than the one that belongs to
what went wrong is reported with its seed, and the exit code is 1. `--seconds 0` runs that one seed alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit")]

import executor_faults  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    seed = first = given.seed * 1_000_000 if given.seconds else given.seed
    counts: Counter[str] = Counter()
    end = time.monotonic() + given.seconds
    while seed == first or time.monotonic() < end:
        try:
            counts += executor_faults.live(seed)
        except BaseException:
            sys.stderr.write(f"seed {seed} (python tests/fuzz/executor.py --seconds 0 --seed {seed})\n")
            raise
        seed += 1
    sys.stdout.write(f"seeds {first} to {seed - 1}: {counts.total()} injections: {dict(counts)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
