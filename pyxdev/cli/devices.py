"""pyxdev devices: what there is, and which way copies take between each two of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from pyxdev import topology
from pyxdev._native import Runtime
from pyxdev.cli import machine
from pyxdev.cli.output import print_json, print_table, size
from pyxdev.errors import NoPeerAccess

DEVICE = ("device", "name", "arch", "memory", "free", "pci", "uuid")
PAIR = ("peer", "verdict", "waits", "path", "direct_from", "direct_to", "why")  # as in topology.Pair
REASON = ("peer", "verdict", "path", "why")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("devices", help="lists the devices and the paths of copies between them")
    machine.add_flags(parser, "host_stage")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    with machine.open_runtime(arguments) as runtime:
        ordinals = range(runtime.device_count)
        devices = [_device(runtime, device) for device in ordinals]
        pairs = [_pair(runtime, src, dst) for src in ordinals for dst in ordinals if src != dst]
        backend = runtime.backend
    if arguments.json:
        print_json({"backend": backend, "devices": devices, "pairs": pairs})
        return 0
    rows = ([size(row[key]) if key in ("memory", "free") else row[key] for key in DEVICE] for row in devices)
    print_table(DEVICE, rows, f"{backend} devices")
    if pairs:
        _show_pairs(pairs, ordinals)
    return 0


def _device(runtime: Runtime, device: int) -> dict[str, Any]:
    info, (free, total) = runtime.device_info(device), runtime.memory_info(device)
    return {
        "device": device, "name": info.name, "arch": info.arch, "memory": total, "free": free, "pci": info.pci,
        "uuid": info.uuid, "integrated": info.integrated, "copy_engines": info.copy_engines,
    }  # fmt: skip


def _pair(runtime: Runtime, src: int, dst: int) -> dict[str, Any]:
    row: dict[str, Any] = {"src": src, "dst": dst}
    try:
        pair = topology.choose(runtime, src, dst, runtime.settings.host_stage)
    except NoPeerAccess as error:
        pair = topology.Pair(src, dst, "direct", "no", "not tried", "direct", str(error))
        return row | {key: getattr(pair, key) for key in PAIR} | {"path": "refused"}
    return row | {key: getattr(pair, key) for key in PAIR}


def _show_pairs(pairs: Sequence[dict[str, Any]], ordinals: range) -> None:
    """The path of each pair as a matrix, and each reason once."""
    path = {(pair["src"], pair["dst"]): pair["path"] for pair in pairs}
    print_table(
        ("from", *(f"to {dst}" for dst in ordinals)),
        ([src, *(path.get((src, dst), "") for dst in ordinals)] for src in ordinals),
        "copies between devices",
    )
    reasons: dict[tuple[Any, ...], list[str]] = {}
    for pair in pairs:
        reasons.setdefault(tuple(pair[key] for key in REASON), []).append(f"{pair['src']}>{pair['dst']}")
    print_table(
        ("peer access", "verdict", "path", "why", "pairs"),
        ([*reason, "all" if len(reasons) == 1 else " ".join(which)] for reason, which in reasons.items()),
    )
