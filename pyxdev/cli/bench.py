"""pyxdev bench: what pipelines reach. On simulated devices the seed's tables are replayed; on GPUs the demo's model
runs over more and more of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pyxdev import plot, trace
from pyxdev._native import SimDriver
from pyxdev.backends import sim
from pyxdev.cli import demo, machine, replay
from pyxdev.cli.output import print_json, print_table
from pyxdev.demo.prompt import PROMPT
from pyxdev.demo.run import Row, Work
from pyxdev.demo.run import run as run_demo
from pyxdev.errors import InvalidArgument

MICROBATCHES = 16  # of the seed's tables
SWEEP = (1, 2, 4, 8, 16)
SCALED_DEVICES = (16, 32, 64)
SCALED_STAGES = (5e-3, 1e-3, 200e-6)  # seconds

REPLAY_COLUMNS = (">devices", ">microbatches", "mode", ">tokens/s", ">speedup", ">bound", ">of the bound")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    benches = commands.add_parser("bench", help="measures").add_subparsers(required=True, metavar="BENCH")
    pipeline = benches.add_parser(
        "pipeline",
        help="tokens a second over 2, 4, ... devices",
        description="Simulated devices: gpt-oss-120B's prompt processing as the seed measured it on ten MI50, in three "
        "ways of running, in simulated time. GPUs: the demo's model and prompt.",
    )
    add = pipeline.add_argument
    add("--devices", metavar="2,4", type=counts, help="how many (simulated: 2, 4, 6, ...; GPUs: powers of two)")
    add("--microbatches", metavar="1,16", type=counts, help="simulated devices: of the prompt (16, and 1 to 16 on all)")
    add("--mode", dest="modes", metavar="A,B", type=modes, default=[*replay.MODES], help="blocking,seed,pyxdev")
    add("--scaling", action="store_true", help="simulated devices: 16 to 64 of them, until the host is the limit")
    add("--trace", metavar="FILE", help="simulated devices: the last run's trace for Perfetto")
    add("--plot", metavar="FILE.png", help="simulated devices: a picture of the rates; with --trace the timeline too")
    add("--prompt", metavar="TEXT", default=PROMPT, help="GPUs: default: that of the demo")
    demo.add_arguments(pipeline)
    pipeline.set_defaults(run=run_pipeline)


def counts(text: str) -> list[int]:
    return [machine.count(part) for part in text.split(",")]


def modes(text: str) -> list[str]:
    for mode in text.split(","):
        if mode not in replay.MODES:
            raise argparse.ArgumentTypeError(f"{mode!r} is no mode; allowed: {', '.join(replay.MODES)}")
    return text.split(",")


def run_pipeline(arguments: argparse.Namespace) -> int:
    """1 where logits differ from those of one device. With --json one object a line."""
    with machine.open_runtime(arguments) as runtime:
        simulated = runtime.backend == "sim"
    return _replay(arguments) if simulated else _measure(arguments)


# ---- simulated devices -----------------------------------------------------------------------------------------------


def _replay(arguments: argparse.Namespace) -> int:
    profile = arguments.profile or "mi50x10"
    count = sim.resolve(profile)["device"]["count"]
    devices = arguments.devices or [*range(2, count + 1, 2)] or [1]
    if max(devices) > count:
        raise InvalidArgument(f"--devices names {max(devices)}; the profile {profile} has {count}")
    work = replay.Workload()
    tables = {"the prompt in microbatches": replay.replay(
        profile, work, devices, arguments.microbatches or [MICROBATCHES], arguments.modes
    )}  # fmt: skip
    if arguments.microbatches is None:
        tables["microbatches on all devices"] = replay.replay(profile, work, devices[-1:], SWEEP, arguments.modes)
    if arguments.scaling:
        for seconds in SCALED_STAGES:
            tables[f"stages of {seconds * 1e6:g} us"] = _scale(profile, seconds)
    for title, rows in tables.items():
        _show(title, rows, arguments.json)
    if arguments.plot:
        _plot(arguments.plot, next(iter(tables.values())), profile)
    if arguments.trace:
        _trace(arguments, profile, work, devices[-1])
    return 0


def _scale(profile: str, seconds: float) -> list[replay.Row]:
    """Equal stages of so many seconds, a small activation, more devices than any machine has."""
    rows = []
    for count in SCALED_DEVICES:
        work = replay.Workload(layers=count, activation=1 << 16, first=seconds * count, per_earlier=0.0)
        scaled = {"profile": profile, "device": {"count": count}}
        rows += replay.replay(scaled, work, [count], [4 * SCALED_DEVICES[0]], ["pyxdev"])
    return rows


def _show(title: str, rows: Sequence[replay.Row], as_json: bool) -> None:
    if as_json:
        for row in rows:
            print_json(asdict(row))
        return
    print_table(REPLAY_COLUMNS, (
        (row.devices, row.microbatches, row.mode, f"{row.tokens_per_s:.1f}", f"{row.speedup:.2f}", f"{row.bound:.2f}",
         f"{row.speedup / row.bound:.3f}") for row in rows
    ), title)  # fmt: skip


def _plot(path: str, rows: Sequence[replay.Row], profile: str) -> None:
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        curves.setdefault(row.mode, []).append((row.devices, row.tokens_per_s))
        curves.setdefault("bound", []).append((row.devices, row.tokens_per_s * row.bound / row.speedup))
    curves["bound"] = sorted(set(curves["bound"]))
    plot.scaling(path, curves, "tokens/s", f"{profile}: {rows[0].microbatches} microbatches of a prompt")


def _trace(arguments: argparse.Namespace, profile: str, work: replay.Workload, devices: int) -> None:
    """Runs the last mode once more, watched."""
    mode, microbatches = arguments.modes[-1], (arguments.microbatches or [MICROBATCHES])[-1]
    watched: list[trace.Span] = []

    def keep(driver: SimDriver) -> None:
        watched.extend(trace.spans(driver))

    replay.replay({"profile": profile, "run": {"trace": True}}, work, [devices], [microbatches], [mode], keep)
    trace.write(arguments.trace, watched)
    if arguments.plot:
        picture = f"{arguments.plot.removesuffix('.png')}-timeline.png"
        plot.timeline(picture, watched, f"{profile}, {mode}: {microbatches} microbatches over {devices} devices")


# ---- GPUs ------------------------------------------------------------------------------------------------------------


def _measure(arguments: argparse.Namespace) -> int:
    rows: list[Row] = []
    agree = True
    work = Work(arguments.prompt, arguments.microbatch, 0)
    with machine.open_runtime(arguments, max(arguments.devices or [1])) as runtime:
        paths = demo.paths(runtime.settings.host_stage)
        for number in arguments.devices or _powers(runtime.device_count):
            split, in_flight = arguments.tensor_split, arguments.in_flight or "auto"
            outcome = run_demo(runtime, range(number), paths, work, split, in_flight)
            agree = agree and outcome.logits_agree
            rows += outcome.rows
            if arguments.json:
                for row in outcome.rows:
                    print_json(asdict(row))
    if not arguments.json:
        print_table(demo.COLUMNS, map(demo.cells, rows), "tokens of the prompt a second")
    return 0 if agree else 1


def _powers(most: int) -> list[Any]:
    return [1 << exponent for exponent in range(most.bit_length())]
