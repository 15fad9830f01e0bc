"""Loads in processes of their own: files that are cut while they are read, limits of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import model_files as mf
import pytest

MIB = 1 << 20
RING = 64 * MIB  # page-locked, at most

CHILD = """
import json, os, resource, sys
from pyxdev import backends
from pyxdev.errors import Error
from pyxdev.loader.loader import load

path, kept, room, options = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])

def status(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))

def cut(progress):  # before the first byte is read
    os.truncate(path, kept)

with backends.open("sim", machine={"device": {"count": 2}}) as runtime:
    if room:
        resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + room, resource.RLIM_INFINITY))
    before = status("VmRSS")
    try:
        load(path, runtime=runtime, progress=cut if kept >= 0 else False, **options).close()
        said = ""
    except Error as error:
        said = f"{type(error).__name__}: {error}"
    print(json.dumps({"said": said, "live": runtime.live().any(), "grown": status("VmHWM") - before}))
"""


def load_in_a_process(path: Path, *, kept: int = -1, room: int = 0, **options: Any) -> dict[str, Any]:
    """kept: bytes that the file is cut to when the load begins. room: bytes of address space that it may add."""
    command = [sys.executable, "-c", CHILD, str(path), str(kept), str(room), json.dumps(options)]
    environment = os.environ | {"MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr}"
    found: dict[str, Any] = json.loads(done.stdout)
    assert not found["live"]
    return found


def write(path: Path, tensors: int, nbytes: int) -> Path:
    """Tensors of so many zero bytes, which take no room on the disk."""
    entries = {f"blk.{n}.w": mf.entry("U8", [nbytes], n * nbytes, (n + 1) * nbytes) for n in range(tensors)}
    with path.open("wb") as file:
        size = file.write(mf.safetensors(entries))
        file.truncate(size + tensors * nbytes)
    return path


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("direct_io", ["off", "auto"])
def test_a_file_cut_while_it_is_loaded(tmp_path: Path, threads: int, direct_io: str) -> None:
    """An exception that names file, tensor and bytes; a mapping would end the process by SIGBUS."""
    path = write(tmp_path / "model.safetensors", 8, 4 * MIB)
    kept = path.stat().st_size - 6 * MIB
    found = load_in_a_process(path, kept=kept, threads=threads, direct_io=direct_io)
    assert found["said"].startswith(f"FileRefused: {path}: tensor blk.")
    assert "bytes wanted at offset" in found["said"] and "present" in found["said"]


def test_no_file_is_mapped(tmp_path: Path) -> None:
    """There is room for the devices' memory, which is the process's own here, and for what a load may add to it."""
    path = write(tmp_path / "model.safetensors", 4, 64 * MIB)
    more = RING + 8 * 10 * MIB  # threads and their stacks
    assert load_in_a_process(path, room=256 * MIB + more, threads=8)["said"] == ""
    assert load_in_a_process(path, room=128 * MIB, threads=8)["said"].startswith("OutOfMemory: ")


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """What a load takes beside the devices' memory is the ring, whatever the file's size."""
    grown = []
    for layers in (2, 24):
        path = write(tmp_path / f"model-{layers}.safetensors", layers, 16 * MIB)
        found = load_in_a_process(path, threads=16)
        assert found["said"] == ""
        grown.append(found["grown"] - layers * 16 * MIB)
    assert grown[0] < 80 * MIB and grown[1] < RING + 16 * MIB, grown
