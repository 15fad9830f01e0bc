"""python -m pyxdev.report.loads: loads a made-up model in a few ways, read back and compared each time, as JSON."""

from __future__ import annotations

import argparse
import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from pyxdev.cli import machine
from pyxdev.cli.output import print_json
from pyxdev.loader.loader import load

MIB = 1 << 20
TENSORS = 32
# (threads, asynchronous uploads)
WAYS = ((1, False), (4, False), (4, True), (8, False), (8, True))


def write(path: Path, nbytes: int) -> None:
    """A safetensors file with so many bytes of data, no page of them like another."""
    each = nbytes // TENSORS
    header: dict[str, Any] = {
        f"blk.{number}.weight": {"dtype": "U8", "shape": [each], "data_offsets": [number * each, (number + 1) * each]}
        for number in range(TENSORS)
    }
    text = json.dumps(header).encode()
    random = np.random.default_rng(1)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in range(TENSORS):
            file.write(random.bytes(each))


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Every way once for warmth and once for its time, on all devices. Raises pyxdev.Error where bytes differ."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="pyxdev-report-") as folder, machine.open_runtime(asked) as runtime:
        path = Path(folder, "model.safetensors")
        write(path, asked.mib * MIB)
        for threads, async_uploads in WAYS:
            for verify in (True, False):
                with load(
                    path, runtime=runtime, threads=threads, async_uploads=async_uploads, verify=verify
                ) as weights:
                    report = weights.report
            rows.append({"threads": threads, "async_uploads": async_uploads, "verified": True} | report.as_dict())
        return {"backend": runtime.backend, "bytes": asked.mib * MIB, "loads": rows}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=machine.count, default=1024)
    machine.add_flags(parser, "backend")
    print_json(measure(parser.parse_args()))
