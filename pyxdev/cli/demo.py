"""pyxdev demo: a real language model over several devices."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from pyxdev._native import Runtime
from pyxdev.cli import machine
from pyxdev.cli.output import console, print_json, print_table
from pyxdev.demo.prompt import PROMPT, QUESTION
from pyxdev.demo.run import Outcome, Row, Work
from pyxdev.demo.run import run as run_demo
from pyxdev.settings import HostStage

COLUMNS = (
    ">devices", ">in flight", "path", ">microbatches", ">one at a time, t/s", ">pipelined, t/s", ">speedup", ">bound",
)  # fmt: skip


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "demo",
        help="a language model answers a prompt, its layers spread over the devices",
        description="Loads SmolLM2-135M-Instruct, spreads its layers over the devices, runs a prompt through them in "
        "microbatches and continues it. The times of simulated devices are simulated.",
    )
    parser.add_argument("--prompt", metavar="TEXT", default=PROMPT, help="default: a long text and a question about it")
    parser.add_argument("--tokens", metavar="N", type=machine.count, default=32, help="of the answer, at most (32)")
    machine.add_devices(parser)
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the pipeline is made of; `pyxdev bench pipeline` has the same."""
    add = parser.add_argument
    add("--microbatch", metavar="N", type=machine.count, default=64, help="tokens of the prompt at a time (64)")
    add("--in-flight", metavar="N", type=machine.count, help="microbatches (twice the stages)")
    add("-ts", "--tensor-split", metavar="3,1", type=machine.shares, help="shares of the layers (equal)")
    machine.add_flags(parser, "host_stage", "tile_mb", "gate", "force_sync", "threads_load", "async_uploads")


def run(arguments: argparse.Namespace) -> int:
    """1 where logits differ from those of one device."""
    with machine.open_runtime(arguments, arguments.devices) as runtime:
        outcome = run_demo(
            runtime,
            machine.ordinals(arguments.devices, runtime),
            paths(runtime.settings.host_stage),
            Work(arguments.prompt, arguments.microbatch, arguments.tokens),
            arguments.tensor_split,
            arguments.in_flight or "auto",
        )
        if arguments.json:
            print_json(document(outcome))
        else:
            _show(outcome, runtime, QUESTION if arguments.prompt is PROMPT else arguments.prompt)
    return 0 if outcome.logits_agree else 1


def paths(host_stage: HostStage) -> list[HostStage]:
    """Staged and direct, unless the setting says which."""
    return [HostStage("staged"), HostStage("direct")] if host_stage == HostStage() else [host_stage]


def document(outcome: Outcome) -> dict[str, Any]:
    return {
        "text": outcome.text,
        "prompt_tokens": len(outcome.prompt),
        "tokens": {"prompt": outcome.prompt, "generated": outcome.generated},
        "top": [{"id": token, "logit": logit} for token, logit in outcome.top],
        "logits_agree": outcome.logits_agree,
        "rows": [asdict(row) for row in outcome.rows],
    }


def cells(row: Row) -> Iterable[object]:
    rates = f"{row.one_at_a_time:.1f}", f"{row.pipelined:.1f}", f"{row.speedup:.2f}", f"{row.bound:.2f}"
    return row.devices, row.in_flight, row.path, row.microbatches, *rates


def _show(outcome: Outcome, runtime: Runtime, question: str) -> None:
    out = console()
    out.print(f"{len(outcome.prompt)} tokens of prompt: {question}")
    out.print(f"{len(outcome.generated)} tokens of answer: {outcome.text.strip()}", style="bold")
    title = f"{runtime.device_info(0).name}: tokens of the prompt a second"
    print_table(COLUMNS, map(cells, outcome.rows), f"{title} of simulated time" if runtime.backend == "sim" else title)
    apart = f"{outcome.difference:g} apart, {outcome.tolerance:g} allowed"
    if outcome.logits_agree:
        out.print(f"logits agree with those of one device: {apart}")
    else:
        out.print(f"LOGITS DIFFER from those of one device: {apart}", style="red")
