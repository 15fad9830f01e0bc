"""pyxdev devices: what there is, and how each device reaches each other one."""

from __future__ import annotations

import argparse
from typing import Any

from pyxdev import topology
from pyxdev._native import Runtime
from pyxdev.cli import machine
from pyxdev.cli.output import print_json, print_table, size
from pyxdev.errors import NoPeerAccess

COLUMNS = ("device", "name", "arch", "memory", "free", "pci", "uuid")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("devices", help="lists the devices and the paths of copies between them")
    machine.add_flags(parser, "host_stage")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    with machine.open_runtime(arguments) as runtime:
        devices = [_device(runtime, device) for device in range(runtime.device_count)]
        pairs = [_pair(runtime, src, dst) for src in range(len(devices)) for dst in range(len(devices)) if src != dst]
        backend = runtime.backend
    if arguments.json:
        print_json({"backend": backend, "devices": devices, "pairs": pairs})
        return 0
    print_table(
        COLUMNS,
        ([size(row[key]) if key in ("memory", "free") else row[key] for key in COLUMNS] for row in devices),
        f"{backend} devices",
    )
    print_table(
        ("from", "to", "peer access", "verdict", "path", "why"),
        ([row[key] for key in ("src", "dst", "peer", "verdict", "path", "why")] for row in pairs),
        "copies",
    )
    return 0


def _device(runtime: Runtime, device: int) -> dict[str, Any]:
    info, (free, total) = runtime.device_info(device), runtime.memory_info(device)
    return {
        "device": device, "name": info.name, "arch": info.arch, "memory": total, "free": free, "pci": info.pci,
        "uuid": info.uuid, "integrated": info.integrated, "copy_engines": info.copy_engines,
    }  # fmt: skip


def _pair(runtime: Runtime, src: int, dst: int) -> dict[str, Any]:
    try:
        pair = topology.choose(runtime, src, dst, runtime.settings.host_stage)
    except NoPeerAccess as error:
        return {"src": src, "dst": dst, "peer": "no", "verdict": "not tried", "path": "refused", "why": str(error)}
    return {key: getattr(pair, key) for key in ("src", "dst", "peer", "verdict", "path", "why")}
