"""pyxdev devices: what there is, and which way copies take between each two of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pyxdev import backends, topology
from pyxdev._native import Runtime
from pyxdev.cli import machine
from pyxdev.cli.output import console, print_json, print_table, size
from pyxdev.errors import NoPeerAccess

DEVICE = ("device", "name", "arch", "memory", "free", "pci", "uuid")
REASON = ("peer", "verdict", "waits", "path", "why")  # as in topology.Pair


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("devices", help="lists the devices and the paths of copies between them")
    machine.add_flags(parser, "host_stage")
    parser.add_argument("--measure", action="store_true", help="tries every pair again, whatever was found out before")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    with machine.open_runtime(arguments) as runtime:
        ordinals = range(runtime.device_count)
        devices = [_device(runtime, device) for device in ordinals]
        pairs = [_pair(runtime, src, dst, arguments.measure) for src in ordinals for dst in ordinals if src != dst]
        backend = runtime.backend
    variables, places = backends.visible(backend, len(devices))
    if arguments.json:
        visible = {"variables": variables, "devices": places}
        print_json({"backend": backend, "devices": devices, "pairs": pairs, "visible": visible})
        return 0
    rows = ([size(row[key]) if key in ("memory", "free") else row[key] for key in DEVICE] for row in devices)
    print_table(DEVICE, rows, f"{backend} devices")
    for line in [*(f"{name}={value}" for name, value in variables.items()), *places]:
        console().print(line)
    if pairs:
        _show_pairs(pairs, ordinals)
    return 0


def _device(runtime: Runtime, device: int) -> dict[str, Any]:
    info, (free, total) = runtime.device_info(device), runtime.memory_info(device)
    return {
        "device": device, "name": info.name, "arch": info.arch, "memory": total, "free": free, "pci": info.pci,
        "uuid": info.uuid, "integrated": info.integrated, "copy_engines": info.copy_engines,
    }  # fmt: skip


def _pair(runtime: Runtime, src: int, dst: int, fresh: bool) -> dict[str, Any]:
    try:
        pair = topology.choose(runtime, src, dst, runtime.settings.host_stage, fresh=fresh)
    except NoPeerAccess as error:
        pair = topology.Pair(src, dst, "direct", "no", "not tried", "direct", str(error))
        return asdict(pair) | {"path": "refused"}
    return asdict(pair)


def _cell(pair: dict[str, Any] | None) -> str:
    """The path, and below it GB/s direct and staged of the largest copy that was measured."""
    if pair is None:
        return ""
    speeds = [pair["speeds"][-1][path] for path in ("direct", "staged")] if pair["speeds"] else []
    text = " / ".join(f"{speed:.3g}" if speed else "-" for speed in speeds)
    return f"{pair['path']}\n{text}" if text else str(pair["path"])


def _show_pairs(pairs: Sequence[dict[str, Any]], ordinals: range) -> None:
    """The path of each pair as a matrix, and each reason once."""
    known = {(pair["src"], pair["dst"]): pair for pair in pairs}
    print_table(
        ("from", *(f"to {dst}" for dst in ordinals)),
        ([src, *(_cell(known.get((src, dst))) for dst in ordinals)] for src in ordinals),
        "copies between devices: path, GB/s direct / staged",
    )
    reasons: dict[tuple[Any, ...], list[str]] = {}
    for pair in pairs:
        reasons.setdefault(tuple(pair[key] for key in REASON), []).append(f"{pair['src']}>{pair['dst']}")
    print_table(
        ("peer access", "verdict", "waits", "path", "why", "pairs"),
        ([*reason, "all" if len(reasons) == 1 else " ".join(which)] for reason, which in reasons.items()),
    )
