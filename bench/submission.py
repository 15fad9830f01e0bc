"""What it costs the submitting thread to queue a microbatch, in instructions and driver calls, counted and not timed.

    python bench/submission.py                   counts; needs valgrind and a C compiler: about half a minute
    python bench/submission.py --backend cuda    times, on one GPU or several: a few seconds

Stages that do nothing: in Python, as C functions, and by hand, which is the fewest streams, events, links and slots
that are right, called from Python too. From 2 and 4 stages: "each stage" is what one more stage costs, hop included,
"besides" what a microbatch costs apart from that: its place in flight, the input's way into the first slot, its ticket.
"result" is what it costs to take the result of a microbatch that is through; by hand there is nothing to do.

Counts are of simulated devices. A child process runs under callgrind, which counts between two marks; the same program
gives the same counts, so that a guard can be tight. "beyond" leaves out what the driver's own functions take; of calls
and times, what the version by hand takes.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import ctypes
import gc
import json
import re
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from bench import record
from bench.bare import ByHand
from pyxdev import CFunction, Executor, Stage, Ticket
from pyxdev._native import Array, FaultDriver, Runtime
from pyxdev.adapters.function import FunctionAdapter
from pyxdev.backends import open as open_backend
from pyxdev.backends import sim

STAGES = (2, 4)
WARM, COUNTED = 80, 60  # microbatches
ROUNDS = 40
IN_FLIGHT = COUNTED  # submit() never waits while it is counted
KEPT = 8  # tickets that the caller holds on to
RESULT = "result"
NBYTES = 1024
FAR = 1 << 62  # the call at which the counting driver would fail

NOTHING = """
int nothing(void *stream, void *const *inputs, const unsigned long *sizes, void *const *outputs, void *user)
{
    return 0;
}
"""
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


def compiled(folder: Path, name: str, source: str) -> ctypes.CDLL:
    (folder / f"{name}.c").write_text(source)
    compiler = os.environ.get("CC", "cc").split()
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", folder / f"{name}.so", folder / f"{name}.c"], check=True)
    return ctypes.CDLL(str(folder / f"{name}.so"))


def steps(stack: ExitStack, runtime: Runtime, devices: tuple[int, ...]) -> Iterator[tuple[str, Step, Wait, Wait]]:
    """By name, what queues microbatch i, what waits for the last one, and what takes one of the last KEPT results."""
    x, result = (stack.enter_context(closing(runtime.buffer(device, NBYTES))) for device in (devices[0], devices[-1]))
    times = (0.0,) * len(devices)
    hand = stack.enter_context(closing(ByHand(runtime, NoKernel(), devices, times, NBYTES, 4, "direct")))
    yield (
        "hand",
        lambda i: hand.step(i % 4, hand.links[0], x.address, None, result.address),
        hand.streams[-1].synchronize,
        lambda: None,
    )

    array = Array(runtime, devices[0], x.address, (NBYTES,), "uint8", owner=x)
    shape, dtype = array.shape, array.dtype
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    nothing = CFunction(compiled(folder, "nothing", NOTHING).nothing)
    stack.callback(setattr, FunctionAdapter, "later", FunctionAdapter.later)
    FunctionAdapter.later = ()  # called when they are submitted, as on real devices
    for name, stage in ("python", lambda at, x: at.empty(shape, dtype)), ("native", Stage(nothing, out=array)):
        executor = Executor(
            devices, [stage] * len(devices), adapter="raw", runtime=runtime, in_flight=IN_FLIGHT, depth=4, host_stage=0
        )
        stack.enter_context(closing(executor))
        kept: deque[Any] = deque(maxlen=KEPT)
        yield (
            name,
            lambda i, submit=executor.submit, kept=kept: kept.append(submit(array)),
            lambda kept=kept: through(kept[-1]),
            lambda kept=kept: kept.popleft().result(),
        )


def through(ticket: Ticket) -> None:
    while not ticket.done():
        pass


def _warm_up(step: Step, wait: Wait, take: Wait) -> None:
    """The code of both, and memory for results; submit() waits on the device for their copies, a few times more."""
    for _ in range(2):
        for i in range(WARM):
            step(i)
        wait()
        for _ in range(KEPT):
            take()
    for i in range(WARM):
        step(i)
    wait()


def driver_calls(begin: Callable[[], object], end: Callable[[bytes], object]) -> dict[str, float]:
    """Of a microbatch, by "name stages". begin and end are called around what is counted."""
    calls = {}
    for stages in STAGES:
        driver = FaultDriver(sim.driver({"device": {"count": max(STAGES)}}))
        with ExitStack() as stack:
            runtime = stack.enter_context(Runtime(driver))
            driver.arm(FAR)
            for name, step, wait, take in steps(stack, runtime, tuple(range(stages))):
                _warm_up(step, wait, take)
                before = driver.calls
                begin()
                for i in range(COUNTED):
                    step(i)
                end(f"{name} {stages}".encode())
                calls[f"{name} {stages}"] = (driver.calls - before) / COUNTED
                wait()
                before = driver.calls
                begin()
                for _ in range(KEPT):
                    take()
                end(f"{name} {stages} {RESULT}".encode())
                calls[f"{name} {stages} {RESULT}"] = (driver.calls - before) / KEPT
    return calls


def child(folder: Path) -> None:
    """Under callgrind. Without the collector, whose turn may come in one case and not in the other."""
    gc.disable()
    marks = ctypes.CDLL(str(folder / "marks.so"))
    (folder / "calls.json").write_text(json.dumps(driver_calls(marks.begin, marks.end)))


def count() -> dict[str, dict[str, float]]:
    """Of a microbatch, by what is counted ("instructions", "driver", "driver calls") and "name stages". Raises
    FileNotFoundError without valgrind or a compiler."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compiled(folder, "marks", MARKS)
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out", "-q"]
        python = [sys.executable, __file__, "--child", name]
        subprocess.run([*command, *python], check=True, env={**os.environ, "PYTHONHASHSEED": "0"})
        found: dict[str, dict[str, float]] = {"instructions": {}, "driver": {}}
        for path in folder.glob("out*"):
            text = path.read_text()
            mark = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.M)
            total = re.search(r"^(?:totals|summary): (\d+)", text, re.M)
            if mark and total:
                counted = KEPT if mark[1].endswith(RESULT) else COUNTED
                found["instructions"][mark[1]] = int(total[1]) / counted
                found["driver"][mark[1]] = _of_driver(path) / counted
        return found | {"driver calls": json.loads((folder / "calls.json").read_text())}


def _of_driver(path: Path) -> int:
    """Instructions between entering and leaving functions of the driver's table, all of which fault.c wraps."""
    command = ["callgrind_annotate", "--inclusive=yes", "--threshold=100", "--auto=no", str(path)]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    table = r"fault_(?:stream_wait|event_record|event_query|event_wait|copy|call)"
    return sum(int(one.replace(",", "")) for one in re.findall(rf"^ *([\d,]+) .*:{table} \[", text, re.M))


def split(found: dict[str, float], name: str) -> tuple[float, float, float]:
    """(of each stage, besides, of the result)."""
    few, many = STAGES
    each = (found[f"{name} {many}"] - found[f"{name} {few}"]) / (many - few)
    return each, found[f"{name} {few}"] - few * each, found[f"{name} {few} {RESULT}"]


def times(runtime: Runtime) -> dict[str, float]:
    """Microseconds of the host for a microbatch, by "name stages": the median of ROUNDS rounds."""
    found = {}
    for stages in STAGES:
        with ExitStack() as stack:
            devices = tuple(n % runtime.device_count for n in range(stages))
            for name, step, wait, take in steps(stack, runtime, devices):
                rounds, results = [], []
                for _ in range(ROUNDS):
                    begin = perf_counter()
                    for i in range(COUNTED):
                        step(i)
                    rounds.append((perf_counter() - begin) / COUNTED * 1e6)
                    wait()
                    begin = perf_counter()
                    for _ in range(KEPT):
                        take()
                    results.append((perf_counter() - begin) / KEPT * 1e6)
                found[f"{name} {stages}"] = median(rounds)
                found[f"{name} {stages} {RESULT}"] = median(results)
    return found


def rows_of(unit: str, found: dict[str, float], driver: dict[str, float] | None = None) -> Iterator[dict[str, Any]]:
    """The peer is by hand; beyond: more than that, or than the driver's part where that is known."""
    for name in ("python", "native"):
        ours, hand = split(found, name), split(found, "hand")
        base = split(driver, name) if driver else hand
        for part, figure, peer, taken in zip(("each stage", "besides", RESULT), ours, hand, base, strict=True):
            row = {"case": f"{part}, {name}", "unit": unit, "figure": round(figure, 2), "peer": round(peer, 2)}
            yield row | {"beyond": round(figure - taken, 2), "ratio": round(figure / peer, 3) if peer else None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="sim", choices=("sim", "cuda", "hip"))
    parser.add_argument("--out", type=Path, default=record.RESULTS / "submission.jsonl")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child)
        return 0
    if given.backend == "sim":
        found = count()
        machine = f"{max(STAGES)}x simulated devices"
        rows = [
            *rows_of("instructions", found["instructions"], found["driver"]),
            *rows_of("driver calls", found["driver calls"]),
        ]
    else:
        with open_backend(given.backend) as runtime:
            machine = record.machine(runtime)
            rows = list(rows_of("us", times(runtime)))
    record.append(given.out, ({**record.stamp("submission", machine), **row} for row in rows))
    for row in rows:
        print("{case:<20}{unit:<14}{figure:>12}  by hand {peer:>12}  beyond {beyond:>12}".format(**row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
