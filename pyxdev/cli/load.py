"""pyxdev load: a model's files into the memory of the devices."""

from __future__ import annotations

import argparse

from pyxdev.cli import machine
from pyxdev.cli.output import console, print_json, print_table, size
from pyxdev.loader.loader import load


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("load", help="loads a model, to see that it loads and how fast")
    add = parser.add_argument
    add("path", metavar="FILE", help="a .gguf or .safetensors file, an index.json, or a folder of them")
    add("-ts", "--tensor-split", metavar="3,1", type=machine.shares, help="a share for each device (equal)")
    add("--split-mode", choices=("layer", "row", "none"), default="layer", help="what is not split (layer)")
    add("--direct-io", choices=("auto", "on", "off"), default="auto", help="read past the page cache (auto)")
    machine.add_devices(parser)
    machine.add_flags(parser, "threads_load", "async_uploads")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    with (
        machine.open_runtime(arguments, arguments.devices) as runtime,
        load(
            arguments.path,
            machine.ordinals(arguments.devices, runtime),
            tensor_split=arguments.tensor_split,
            split_mode=arguments.split_mode,
            runtime=runtime,
            direct_io=arguments.direct_io,
            progress=not arguments.json,
        ) as weights,
    ):
        report = weights.report
    if arguments.json:
        print_json({"path": arguments.path} | report.as_dict())
        return 0
    loads = [(str(one.device), one.nbytes, one.seconds, one.rate) for one in report.devices]
    loads.append(("all", report.nbytes, report.seconds, report.rate))
    rows = [(name, size(nbytes), f"{seconds:.3f}", f"{rate / 1e9:.2f}") for name, nbytes, seconds, rate in loads]
    print_table(("device", ">bytes", ">seconds", ">GB/s"), rows, arguments.path)
    console().print(
        f"{report.tensors} tensors by {report.threads} threads through {size(report.pinned)} of page-locked memory, "
        f"{size(report.direct)} past the page cache"
    )
    return 0
