"""Every wait of the executor is needed: without any one of them a pipeline gives wrong bytes within a few seeds.

MUTATIONS is the list of the waits, and of the records and bounds that a later wait relies on. Each is taken out alone,
in the source of its function, and the scene beside it must then see wrong results for one of the seeds. Unchanged, all
scenes are right for all seeds. The ordering checker is off: it is the data that must be wrong.
"""

from __future__ import annotations
import __future__

import inspect
import json
import os
import re
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
from graph_cases import kernel

from pyxdev import Array, topology
from pyxdev._native import HOST, Lease
from pyxdev.backends import open as open_backend
from pyxdev.checks.kernels import memory
from pyxdev.errors import Error
from pyxdev.executor import Executor, Stage, executor, stages
from pyxdev.executor.graphs import WARM, Captured
from pyxdev.executor.inputs import Inputs
from pyxdev.executor.results import Fetch
from pyxdev.topology import Pair

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 8
SIZE = 20000  # floats of an activation


def machine(seed: int, **changes: Any) -> dict[str, Any]:
    run = {"seed": seed, "jitter": 1.0, "delay_us": 200.0, "check": False}
    return {"device": {"count": 3}, "run": run, **changes}


# ---- scenes: each says whether all results were right ----


def pipeline(seed: int, costs: tuple[float, ...], **options: Any) -> bool:
    """Three stages, twelve different inputs."""
    fns = [lambda x: x + 1, lambda x: x * 2, lambda x: x - 3]
    xs = [np.full(SIZE, n, np.float32) for n in range(12)]
    placed = [Stage(fn, cost=cost) for fn, cost in zip(fns, costs, strict=True)]
    with Executor([0, 1, 2], placed, machine=machine(seed), **{"host_stage": "0", **options}) as pipe:
        ys = list(pipe.map(xs))
    return all(np.array_equal(y, (x + 1) * 2 - 3) for x, y in zip(xs, ys, strict=True))


def slow_producers(seed: int) -> bool:
    return pipeline(seed, (1e-3, 1e-3, 0), in_flight=9, depth=3)


def slow_consumers(seed: int) -> bool:
    return pipeline(seed, (0, 1e-3, 3e-3), in_flight=9, depth=1)


def slow_staged(seed: int) -> bool:
    return pipeline(seed, (0, 1e-3, 3e-3), in_flight=9, depth=1, host_stage="1", tile_mb=0.01)


def slow_links(seed: int) -> bool:
    return pipeline(seed, (0, 0, 0), in_flight=9, depth=2, host_stage="1", tile_mb=0.01)


def graph(seed: int, costs: tuple[float, ...], **options: Any) -> bool:
    """The last of four stages reads the first and the third."""
    fns = [lambda x: x + 1, lambda x: x * 2, lambda x: x - 3, lambda x: x[0] * 10 + x[1]]
    xs = [np.full(SIZE, n, np.float32) for n in range(12)]
    placed = [
        Stage(fn, cost=cost, inputs=read)
        for fn, cost, read in zip(fns, costs, (None, None, None, (0, -1)), strict=True)
    ]
    with Executor([0, 1, 2, 0], placed, machine=machine(seed), **{"host_stage": "0", **options}) as pipe:
        ys = list(pipe.map(xs))
    return all(np.array_equal(y, (x + 1) * 12 - 3) for x, y in zip(xs, ys, strict=True))


def skips(seed: int) -> bool:
    return graph(seed, (0, 0, 0, 0), in_flight=9, depth=2, host_stage="1", tile_mb=0.01)


def slow_join(seed: int) -> bool:
    return graph(seed, (0, 0, 0, 3e-3), in_flight=9, depth=1)


def slow_first(seed: int) -> bool:
    return pipeline(seed, (3e-3, 0, 0), in_flight=9, depth=1)


def growing(seed: int) -> bool:
    """Each activation needs more room than the ones before it."""
    xs = [np.full(1000 * 2**n, n, np.float32) for n in range(9)]
    placed = [Stage(lambda x: x + 1, cost=1e-3), Stage(lambda x: x * 2, cost=1e-3, out=lambda x: x)]
    with Executor([0, 1], [placed[1], placed[1]], machine=machine(seed), host_stage="0", in_flight=4, depth=1) as pipe:
        return all(np.array_equal(y, x * 4) for x, y in zip(xs, pipe.map(xs), strict=True))


def loop(seed: int) -> bool:
    """Sequences whose next input is their last output, alone and as one part of the input."""
    placed = [
        Stage(lambda x: {"h": x["h"] + x["w"], "k": x["k"] + 1, "w": x["w"]}, cost=0),
        Stage(lambda x: {**x, "h": x["h"] * 2 + x["k"]}, cost=2e-3),
    ]
    with Executor([0, 1], placed, machine=machine(seed), host_stage="0", in_flight=6, depth=1) as pipe:
        tickets = [pipe.submit({"h": np.full(SIZE, n, "f4"), "k": n, "w": np.full(SIZE, 1.0, "f4")}) for n in range(3)]
        for _ in range(4):
            tickets = [pipe.submit(ticket) for ticket in tickets]
        got = [ticket.result() for ticket in tickets]
    for n, y in enumerate(got):
        h = float(n)
        for k in range(5):
            h = (h + 1) * 2 + n + k + 1
        if y["k"] != n + 5 or not np.array_equal(y["h"], np.full(SIZE, h, "f4")):
            return False
    return True


def parts(seed: int) -> bool:
    """Inputs put together of tickets, their plain values and host arrays."""
    placed = [Stage(lambda x: (x[0][0] + x[1], x[0][1] + x[2]), cost=1e-3), Stage(lambda x: x, cost=2e-3)]
    with Executor([0, 1], placed, machine=machine(seed), host_stage="0", in_flight=6, depth=1) as pipe:
        ticket = pipe.submit(((np.zeros(SIZE, "f4"), 0), np.zeros(SIZE, "f4"), 0))
        other = ticket
        for n in range(1, 6):
            other = pipe.submit(((np.full(SIZE, n, "f4"), n), np.zeros(SIZE, "f4"), 0))
            ticket = pipe.submit((ticket, np.full(SIZE, n, "f4"), n))
        got, last = ticket.result(), other.result()
    return got[1] == 15 and np.array_equal(got[0], np.full(SIZE, 15, "f4")) and bool((last[0] == 5).all())


def late_parts(seed: int) -> bool:
    """A ticket that was done long ago, put together with host arrays while the first stage is busy."""
    placed = [Stage(lambda x: x[0] + x[1], cost=3e-3), lambda x: x]
    with Executor([0, 1], placed, machine=machine(seed), host_stage="0", in_flight=6, depth=1) as pipe:
        ticket = pipe.submit((np.full(SIZE, 100, "f4"), np.zeros(SIZE, "f4")))
        ticket.result()
        tickets = []
        for n in range(4):
            tickets.append(pipe.submit((np.full(SIZE, n, "f4"), np.zeros(SIZE, "f4"))))
            tickets.append(pipe.submit((ticket, np.full(SIZE, n, "f4"))))
        wanted = [value for n in range(4) for value in (n, 100 + n)]
        return all(bool((one.result() == value).all()) for one, value in zip(tickets, wanted, strict=True))


def plain_parts(seed: int) -> bool:
    """Only a plain value of a ticket goes into the next input."""
    placed = [Stage(lambda x: x["before"]["k"] + 1, cost=0), Stage(lambda k: {"k": k}, cost=2e-3)]
    with Executor([0, 1], placed, machine=machine(seed), host_stage="0", in_flight=6, depth=1) as pipe:
        ticket = pipe.submit({"before": {"k": 0}})
        for _ in range(5):
            ticket = pipe.submit({"before": ticket})
        return bool(ticket.result() == {"k": 6})


def two_ways(seed: int) -> bool:
    """A link whose small copies are staged, slowly, and whose large ones are direct."""
    big, small = np.full(SIZE, 1, np.float32), np.full(SIZE // 10, 2, np.float32)
    pair = Pair(0, 1, "auto", "yes", "verified", "by_size", "", direct_from=SIZE)
    xs = [(small + n, big + n) for n in range(6)]
    slow = {"device": {"count": 2, "to_device_gb_s": 0.05, "to_host_gb_s": 0.05}}
    with open_backend("sim", machine=machine(seed) | slow) as runtime:
        topology.topology(runtime)[0, 1, "auto"] = pair
        with Executor([0, 1], [lambda _, x: x] * 2, runtime=runtime, in_flight=6, adapter="raw") as pipe:
            ys = [tuple(a.numpy() for a in y) for y in pipe.map(xs)]
    return all(np.array_equal(a, b) for x, y in zip(xs, ys, strict=True) for a, b in zip(x, y, strict=True))


def given_arrays(seed: int) -> bool:
    """Arrays on a device, in memory that is written again as soon as nobody refers to it."""
    pool: list[Any] = []

    def slow(stage: Any, x: Array) -> Array:
        stage.stream.launch(lambda: None, cost=3e-3)
        return x

    with open_backend("sim", machine=machine(seed)) as runtime:
        with Executor(
            [0, 1], [slow, slow], runtime=runtime, in_flight=6, depth=1, adapter="raw", host_stage="0"
        ) as pipe:
            tickets = []
            for n in range(8):
                lease = Lease(pool.pop() if pool else runtime.buffer(0, 4 * SIZE, managed=True), pool)
                address = lease.item.address
                memory(address, 4 * SIZE).view(np.float32)[:] = n
                tickets.append(pipe.submit(Array(runtime, 0, address, (SIZE,), "float32", owner=lease)))
                del lease
            right = [bool((ticket.result().numpy() == n).all()) for n, ticket in enumerate(tickets)]
            del tickets
        pool.clear()
    return all(right)


SLOW_COPIES = {"device": {"count": 1, "memory_gb_s": 0.2, "to_device_gb_s": 10}}


@contextmanager
def from_host(runtime: Any, numbers: Iterable[int]) -> Iterator[Callable[[Any, int], Array]]:
    """A stage that gives an array full of the number it gets. It comes from the host, so that no engine keeps it from
    being written while an earlier one in the same memory is still being copied."""
    values = {n: runtime.buffer(HOST, 4 * SIZE) for n in numbers}
    for n, buffer in values.items():
        memory(buffer.address, 4 * SIZE).view(np.float32)[:] = n

    def given(stage: Any, n: int) -> Array:
        y: Array = stage.empty((SIZE,), "float32")
        stage.stream.copy(y.address, values[n].address, 4 * SIZE, dst_device=0, src_device=HOST)
        return y

    try:
        yield given
    finally:
        for buffer in values.values():
            buffer.close()


def results(seed: int) -> bool:
    """Results on a device, read or dropped while they are being copied."""
    count = 12
    with open_backend("sim", machine=machine(seed) | SLOW_COPIES) as runtime, from_host(runtime, range(count)) as given:
        ys = []
        with Executor([0], [given], runtime=runtime, in_flight=2, depth=1, adapter="raw") as pipe:
            for n in range(count):
                ticket = pipe.submit(n)
                ys.append(ticket.result())
                del ticket
            read = pipe.submit(7).result().numpy()
        right = [bool((y.numpy() == n).all()) for n, y in enumerate(ys)] + [bool((read == 7).all())]
        del ys
    return all(right)


def graphs(runtime: Any, fn: Any, in_flight: int) -> Executor:
    """One stage that is run by graphs."""
    return Executor([0], [fn], runtime=runtime, graph="on", in_flight=in_flight, depth=2, adapter="raw")


def graph_results(seed: int) -> bool:
    """Read where they lie, as soon as they are there."""
    right = []

    def adds(stage: Any, x: Any) -> Any:
        y = stage.empty(x["a"].shape, x["a"].dtype)
        kernel(stage, lambda a: a + np.float32(5), y, x["a"])
        return {"a": y}

    with open_backend("sim", machine=machine(seed) | SLOW_COPIES) as runtime, graphs(runtime, adds, 2) as pipe:
        for n, y in enumerate(pipe.map({"a": np.full(SIZE, n, np.float32)} for n in range(12))):
            right.append(bool((memory(y["a"].address, 4 * SIZE).view(np.float32) == n + 5).all()))
        del y
    return all(right)


def graph_dropped(seed: int) -> bool:
    """A result that nobody wants is still being copied when the stage runs as it is, for another number."""
    right = []
    with (
        open_backend("sim", machine=machine(seed) | SLOW_COPIES) as runtime,
        from_host(runtime, (1, 2)) as given,
        graphs(runtime, given, 4) as pipe,
    ):
        for n in (1,) * (WARM + 2) + (1, 2) * 6:
            ticket = pipe.submit(n)
            if n == 2:
                right.append(bool((ticket.result().numpy() == 2).all()))
            del ticket
    return all(right)


SCENES = (
    slow_producers,
    slow_consumers,
    slow_staged,
    slow_links,
    skips,
    slow_join,
    slow_first,
    growing,
    loop,
    parts,
    late_parts,
    plain_parts,
    two_ways,
    given_arrays,
    results,
    graph_results,
    graph_dropped,
)

# What is taken out, the function, the text, what stands there instead, the scene that shows it.
Mutation = tuple[str, Any, str, str, Callable[[int], bool]]
MUTATIONS: list[Mutation] = [
    (
        "graph: copies held",
        Captured.launch,
        "stage.outputs.hold(batch.end, (copies.keep, batch.exit), batch.turn, False)",
        "pass",
        graph_dropped,
    ),
    ("join: input arrived", stages.Join.run, "self.consumer.stream.wait(self._arrived)", "pass", skips),
    (
        "join: outputs held",
        stages.Join.run,
        "producer.outputs.hold(released, source.keep, batch.turn)",
        "pass",
        slow_join,
    ),
    ("upload: slot free", Inputs._upload, "self.stream.wait(slot.free)", "pass", slow_first),
    ("upload: arrived recorded", Inputs.gather, "slot.arrived.record(self.stream)", "pass", slow_links),
    ("upload: page-locked memory", Inputs._pinned_memory, "turn % len(self._pinned)", "0", slow_first),
    ("part: arrived", Inputs.gather, "self.stream.wait(self._joined)", "pass", parts),
    ("part: plain value there", Inputs.gather, "self.stream.wait(leaf.ready)", "pass", plain_parts),
    ("bound in flight", executor.Executor._admit, "if not self._line.throttle.admit(0):", "if False:", slow_first),
    (
        "bound in flight: waits",
        executor.Executor._admit,
        "while not self._line.throttle.admit(GLANCE):",
        "while False:",
        loop,
    ),
    ("result: complete", executor.Executor._wait, "while not batch.end.wait(", "while False and (", slow_producers),
    (
        "result: output held",
        Fetch.copies,
        "outputs.hold(ready, output.keep, NEVER, False)",
        "pass",
        results,
    ),
    ("result: downloaded", Fetch._download, "self.stream.synchronize()", "pass", slow_producers),
]

# The same for _pipeline.pyx and what it includes, where a line is changed. All are built into one module, in which
# `mutant` tells which one counts.
COMPILED: list[tuple[str, str, str, Callable[[int], bool]]] = [
    ("stage: input arrived", "self.stream.wait_for(slot.arrived)", "pass", slow_links),
    ("stage: slot free recorded", "slot.free.record_in(self.tail)", "pass", slow_consumers),
    ("graph: outputs there", "self.tail.wait_for(self.done)", "pass", graph_results),
    ("graph: end after the copy", "slot.free.record_in(self.tail)", "slot.free.record_in(self.stream)", graph_results),
    ("stage: outputs read", "self.stream.wait_for(released)", "pass", slow_consumers),
    ("stage: outputs held", "self.held.append((released, keep, turn, lent))", "pass", slow_consumers),
    ("slot: who had it has left", "slot.turn = turn", "slot.turn = -1000", slow_consumers),
    ("hop: source ready", "ready, gate = source.ready, free", "ready, gate = None, free", slow_producers),
    ("hop: slot free", "ready, gate = source.ready, free", "ready, gate = source.ready, None", slow_consumers),
    ("hop: released recorded", "read, written = released if ends else None,", "read, written = None,", slow_staged),
    ("hop: arrived recorded", "arrived if ends or turns else None", "None", slow_links),
    ("result: ready recorded", "event.record(self.stream)", "pass", results),
    ("caller's arrays: kept", "self.held.append((turn, source.keep))", "pass", given_arrays),
    ("caller's arrays: until it has left", "left = batch.turn - self.in_flight", "left = batch.turn", given_arrays),
    ("part: source ready", "ready, slot.free, released, arrived)", "None, slot.free, released, arrived)", parts),
    ("part: slot free", "ready, slot.free, released, arrived)", "ready, None, released, arrived)", late_parts),
    ("hop: ways change", "turns = not ends and", "turns = False and", two_ways),
]


def mutants() -> str:
    """The source of _pipeline.pyx, and of what it includes, with all of COMPILED in it."""
    source = (ROOT / "pyxdev/_pipeline.pyx").read_text()
    lines = re.sub('^include "(.+)"$', lambda found: (ROOT / "pyxdev" / found[1]).read_text(), source, flags=re.M)
    lines = lines.splitlines()
    changed: dict[int, list[tuple[int, str]]] = {}
    for k, (name, old, new, _) in enumerate(COMPILED):
        at = [n for n, line in enumerate(lines) if old in line]
        assert len(at) == 1, f"{name}: _pipeline.pyx has {old!r} {len(at)} times"
        changed.setdefault(at[0], []).append((k, lines[at[0]].replace(old, new)))
    for n, versions in changed.items():
        indent = " " * (len(lines[n]) - len(lines[n].lstrip()))
        others = [
            f"{indent}{'el' if k else ''}if mutant == {number}:\n    {line}"
            for k, (number, line) in enumerate(versions)
        ]
        lines[n] = "\n".join([*others, f"{indent}else:\n    {lines[n]}"])
    return "\n".join([*lines, "", "mutant = -1", ""])


BUILD = """
import subprocess, sys
from Cython.Compiler.Main import compile_single
from Cython.Compiler.Options import CompilationOptions, default_options

options = CompilationOptions(
    {**default_options, "include_path": [sys.argv[1], sys.argv[1] + "/pyxdev"], "module_name": "pyxdev._pipeline",
     "compiler_directives": {"language_level": "3"}}
)
assert not compile_single("_pipeline.pyx", options, "pyxdev._pipeline").num_errors
command = ["cc", "-shared", "-fPIC", "-O0", "-I", sys.argv[1] + "/native", "-I", sys.argv[2]]
subprocess.run([*command, "-D_GNU_SOURCE", "-o", "_pipeline.so", "_pipeline.c"], check=True)
"""

# In a process of its own: the module that counts is the one that pyxdev imports first.
CHILD = """
import importlib.util, json, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, sys.argv[1]) if name == "pyxdev._pipeline" else None

sys.meta_path.insert(0, Finder())
from pyxdev import _pipeline
import test_mutations_executor as tests

found = {"unchanged": tests.sees_wrong_data(lambda seed: all(scene(seed) for *_, scene in tests.COMPILED))}
for _pipeline.mutant, (name, _, _, scene) in enumerate(tests.COMPILED):
    found[name] = tests.sees_wrong_data(scene)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int | None]:
    """By name, the first seed that is wrong without it."""
    folder = tmp_path_factory.mktemp("mutants")
    (folder / "_pipeline.pyx").write_text(mutants())
    build = [sys.executable, "-c", BUILD, str(ROOT), sysconfig.get_path("include")]
    subprocess.run(build, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    command = [sys.executable, "-c", CHILD, str(folder / "_pipeline.so")]
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(ran.stdout)


def mutate(function: FunctionType, old: str, new: str) -> Any:
    """The code of a function with one piece of its source changed."""
    function = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{function.__qualname__} has {old!r} {source.count(old)} times"
    space: dict[str, Any] = {}
    code = compile(source.replace(old, new), "mutant", "exec", flags=__future__.annotations.compiler_flag)
    exec(code, function.__globals__, space)
    return inspect.unwrap(space[function.__name__]).__code__


def sees_wrong_data(scene: Callable[[int], bool]) -> int | None:
    """The first seed for which the scene is wrong, or the executor notices."""
    for seed in range(SEEDS):
        try:
            if not scene(seed):
                return seed
        except Error:
            return seed
    return None


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_unchanged_every_scene_is_right(scene: Callable[[int], bool]) -> None:
    for seed in range(SEEDS):
        assert scene(seed), f"seed {seed}"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation[0])
def test_without_it_the_data_are_wrong(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    _, function, old, new, scene = mutation
    monkeypatch.setattr(inspect.unwrap(function), "__code__", mutate(function, old, new))
    seed = sees_wrong_data(scene)
    assert seed is not None, f"{SEEDS} seeds of {scene.__name__} are right without it"


@pytest.mark.parametrize("name", ["unchanged", *(name for name, *_ in COMPILED)])
def test_compiled(compiled: dict[str, int | None], name: str) -> None:
    if name == "unchanged":
        assert compiled[name] is None, f"seed {compiled[name]}"
    else:
        assert compiled[name] is not None, f"{SEEDS} seeds are right without it"
