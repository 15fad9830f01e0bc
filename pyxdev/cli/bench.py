"""pyxdev bench: what the devices of this machine reach. `pipeline`: the demo's prompt over more and more of them."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from pyxdev.cli import demo, machine
from pyxdev.cli.output import print_json, print_table
from pyxdev.demo.prompt import PROMPT
from pyxdev.demo.run import Row, Work
from pyxdev.demo.run import run as run_demo


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    benches = commands.add_parser("bench", help="measures").add_subparsers(required=True, metavar="BENCH")
    pipeline = benches.add_parser("pipeline", help="the demo's prompt over 1, 2, 4, ... devices")
    pipeline.add_argument("--prompt", metavar="TEXT", default=PROMPT, help="default: that of the demo")
    pipeline.add_argument("--devices", metavar="1,2,4", type=counts, help="how many (powers of two up to all)")
    demo.add_arguments(pipeline)
    pipeline.set_defaults(run=run_pipeline)


def counts(text: str) -> list[int]:
    return [machine.count(part) for part in text.split(",")]


def run_pipeline(arguments: argparse.Namespace) -> int:
    """One JSON object a line with --json. 1 where logits differ from those of one device."""
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


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length())]
