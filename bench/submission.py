"""What it costs the submitting thread to queue a microbatch, in instructions and driver calls, counted and not timed.

    python bench/submission.py          needs valgrind and a C compiler: about a minute

Stages that do nothing on simulated devices, by the executor and by hand: the fewest streams, events, links and slots
that are right, called from Python too. Both include what the simulated driver itself costs. A child process runs under
callgrind, which counts between two marks; the same program gives the same counts, so that a guard can be tight. From 2
and 4 stages: "each stage" is what one more stage costs, hop included, "besides" what a microbatch costs apart from
that: its place in flight, the input's way into the first slot, its ticket.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import ctypes
import json
import re
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from bench import record
from bench.bare import ByHand
from pyxdev import Executor
from pyxdev._native import Array, FaultDriver, Runtime
from pyxdev.backends import sim

STAGES = (2, 4)
WARM, COUNTED = 80, 60  # microbatches
IN_FLIGHT = COUNTED  # submit() never waits while it is counted
KEPT = 8  # tickets that the caller holds on to
NBYTES = 1024
FAR = 1 << 62  # the call at which the counting driver would fail

MARKS = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void end(const char *name) { CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }
"""

Step = Callable[[int], object]
Wait = Callable[[], object]


class NoKernel:
    """Launches nothing."""

    def launch(self, stream: Any, out: int, x: int, nbytes: int, index: int, seconds: float) -> None:
        """The stage is empty."""

    def close(self) -> None:
        """Nothing is held."""


def steps(stack: ExitStack, runtime: Runtime, devices: tuple[int, ...]) -> Iterator[tuple[str, Step, Wait]]:
    """By name, what queues microbatch i, and what waits for the last one."""
    x, result = (stack.enter_context(closing(runtime.buffer(device, NBYTES))) for device in (devices[0], devices[-1]))
    times = (0.0,) * len(devices)
    hand = stack.enter_context(closing(ByHand(runtime, NoKernel(), devices, times, NBYTES, 4, "direct")))
    yield (
        "hand",
        lambda i: hand.step(i % 4, hand.links[0], x.address, None, result.address),
        hand.streams[-1].synchronize,
    )

    array = Array(runtime, devices[0], x.address, (NBYTES,), "uint8", owner=x)
    shape, dtype = array.shape, array.dtype
    stages = [lambda at, x: at.empty(shape, dtype)] * len(devices)
    executor = Executor(devices, stages, adapter="raw", runtime=runtime, in_flight=IN_FLIGHT, depth=4, host_stage=0)
    stack.enter_context(closing(executor))
    kept: deque[Any] = deque(maxlen=KEPT)
    yield "executor", lambda i: kept.append(executor.submit(array)), lambda: kept[-1].result()


def driver_calls(begin: Callable[[], object], end: Callable[[bytes], object]) -> dict[str, float]:
    """Of a microbatch, by "name stages". begin and end are called around what is counted."""
    calls = {}
    for stages in STAGES:
        driver = FaultDriver(sim.driver({"device": {"count": max(STAGES)}}))
        with ExitStack() as stack:
            runtime = stack.enter_context(Runtime(driver))
            driver.arm(FAR)
            for name, step, wait in steps(stack, runtime, tuple(range(stages))):
                for i in range(WARM):
                    step(i)
                wait()
                before = driver.calls
                begin()
                for i in range(WARM, WARM + COUNTED):
                    step(i)
                end(f"{name} {stages}".encode())
                calls[f"{name} {stages}"] = (driver.calls - before) / COUNTED
    return calls


def child(folder: Path) -> None:
    """Under callgrind."""
    marks = ctypes.CDLL(str(folder / "marks.so"))
    (folder / "calls.json").write_text(json.dumps(driver_calls(marks.begin, marks.end)))


def count() -> tuple[dict[str, float], dict[str, float]]:
    """Instructions and driver calls of a microbatch, by "name stages". Raises FileNotFoundError without valgrind or a
    compiler."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "marks.c").write_text(MARKS)
        compiler = os.environ.get("CC", "cc").split()
        subprocess.run([*compiler, "-shared", "-fPIC", "-o", folder / "marks.so", folder / "marks.c"], check=True)
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out", "-q"]
        python = [sys.executable, __file__, "--child", name]
        subprocess.run([*command, *python], check=True, env={**os.environ, "PYTHONHASHSEED": "0"})
        instructions = {}
        for path in folder.glob("out*"):
            text = path.read_text()
            mark = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.M)
            total = re.search(r"^(?:totals|summary): (\d+)", text, re.M)
            if mark and total:
                instructions[mark[1]] = int(total[1]) / COUNTED
        return instructions, json.loads((folder / "calls.json").read_text())


def split(found: dict[str, float], name: str) -> tuple[float, float]:
    """(of each stage, besides)."""
    few, many = STAGES
    each = (found[f"{name} {many}"] - found[f"{name} {few}"]) / (many - few)
    return each, found[f"{name} {few}"] - few * each


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "submission.jsonl")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child)
        return 0
    rows = []
    for what, found in zip(("instructions", "driver calls"), count(), strict=True):
        ours, hand = split(found, "executor"), split(found, "hand")
        for part, figure, peer in zip(("each stage", "besides"), ours, hand, strict=True):
            row = {"case": part, "unit": what, "figure": round(figure, 1), "peer": round(peer, 1)}
            rows.append(row | {"beyond": round(figure - peer, 1), "ratio": round(figure / peer, 3) if peer else None})
        print(what, {name: round(value, 1) for name, value in sorted(found.items())})
    record.append(given.out, ({**record.stamp("submission", "2x simulated devices"), **row} for row in rows))
    for row in rows:
        print("{case:<12}{unit:<14}executor {figure:>10}  by hand {peer:>10}  beyond {beyond:>10}".format(**row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
