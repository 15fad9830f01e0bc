"""Runs Python code in a child process that finds the vendors' libraries where a test says: the loader reads its search
path once, at the start of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAKES = ROOT / "build" / "fakes"  # CUDA
ROCM = FAKES / "rocm" / "lib"  # HIP over whatever libcuda.so.1 is found

# What every child may use.
PRELUDE = """
import gc, logging, os, sys
from pyxdev import errors
from pyxdev._native import HOST, Runtime

def raises(kind, call, *words):
    try:
        call()
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{missing} not in {error}"
        return error
    raise AssertionError(f"no {kind.__name__}")

def pattern(n, seed=1):
    return bytes((i * 131 + seed * 17 + (i >> 8)) & 255 for i in range(n))
"""


def build_fakes() -> None:
    """Brings the stand-ins up to date."""
    subprocess.run(["make", "--quiet", "-C", str(ROOT / "tests" / "fakes")], check=True)


def run(code: str, *libraries: Path, **variables: str) -> str:
    """What the code printed, with these folders first where the loader looks. Fails with the child's traceback if the
    code raised."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYXDEV_")}
    environment |= variables
    environment["PYTHONPATH"] = str(ROOT)
    environment["LD_LIBRARY_PATH"] = ":".join(str(folder) for folder in libraries)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PRELUDE + code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
