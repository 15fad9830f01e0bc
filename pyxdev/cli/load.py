"""pyxdev load: a model's files into the memory of the devices, or only what would go where."""

from __future__ import annotations

import argparse
from typing import Any

from pyxdev.cli import machine
from pyxdev.cli.output import console, print_json, print_table, size
from pyxdev.loader.files import open_model
from pyxdev.loader.header import shown
from pyxdev.loader.loader import load
from pyxdev.loader.plan import Plan, make_plan
from pyxdev.loader.report import Report

DOES_NOT_FIT = 1  # exit code of a dry run
EPILOG = """exit codes: 0 loaded, or (dry run) would load; 1 dry run: the files are whole but do not fit; 2 refused, or
any other error; 130 Ctrl-C."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("load", help="loads a model, to see that it loads and how fast", epilog=EPILOG)
    add = parser.add_argument
    add("path", metavar="FILE", help="a .gguf or .safetensors file, an index.json, or a folder of them")
    add("-ts", "--tensor-split", metavar="3,1", type=machine.shares, help="a share for each device (equal)")
    add("-sm", "--split-mode", choices=("layer", "row", "none"), default="layer", help="what is handed out (layer)")
    add("--direct-io", choices=("auto", "on", "off"), default="auto", help="read past the page cache (auto)")
    add("--verify", action="store_true", help="reads everything back and compares checksums")
    add("--dry-run", action="store_true", help="checks the files and shows who would get what; loads nothing")
    machine.add_devices(parser)
    machine.add_flags(parser, "threads_load", "async_uploads")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    with machine.open_runtime(arguments, arguments.devices) as runtime:
        devices = machine.ordinals(arguments.devices, runtime)
        placing: dict[str, Any] = {
            "tensor_split": arguments.tensor_split,
            "split_mode": arguments.split_mode,
        }
        if arguments.dry_run:
            with open_model(arguments.path) as model:
                return _show_plan(make_plan(model, runtime, devices, **placing), arguments)
        with load(
            arguments.path,
            devices,
            runtime=runtime,
            direct_io=arguments.direct_io,
            verify=arguments.verify,
            progress=not arguments.json,
            **placing,
        ) as weights:
            report = weights.report
    if arguments.json:
        print_json({"path": arguments.path, "verified": arguments.verify} | report.as_dict())
    else:
        _show_report(report, arguments)
    return 0


def _show_plan(plan: Plan, arguments: argparse.Namespace) -> int:
    if arguments.json:
        print_json({"path": arguments.path} | plan.as_dict())
        return 0 if plan.fits else DOES_NOT_FIT
    tensors = [
        (shown(one["name"]), one["dtype"], " x ".join(map(str, one["shape"])), one["bytes"], one["device"])
        for one in plan.as_dict()["tensors"]
    ]
    print_table(("tensor", "dtype", "shape", ">bytes", ">device"), tensors, shown(arguments.path, 4096))
    needs = [
        (need.device, need.tensors, size(need.nbytes), size(need.free), "yes" if need.fits else "no")
        for need in plan.needs
    ]
    print_table((">device", ">tensors", ">wants", ">free", "fits"), needs)
    for note in plan.model.notes:
        console().print(note)
    return 0 if plan.fits else DOES_NOT_FIT


def _show_report(report: Report, arguments: argparse.Namespace) -> None:
    loads = [(str(one.device), one.nbytes, one.seconds, one.rate, one.source) for one in report.devices]
    loads.append(("all", report.nbytes, report.seconds, report.rate, ""))
    rows = [
        (name, size(nbytes), f"{seconds:.3f}", f"{rate / 1e9:.2f}", source)
        for name, nbytes, seconds, rate, source in loads
    ]
    print_table(("device", ">bytes", ">seconds", ">GB/s", "files"), rows, shown(arguments.path, 4096))
    console().print(
        f"{report.tensors} tensors by {report.threads} threads through {size(report.pinned)} of page-locked memory, "
        f"first read after {report.setup:.3f} s\nlimited by {report.limit}"
        + ("\nread back from the devices: as it was read from the files" if arguments.verify else "")
    )
