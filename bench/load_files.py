"""Model files for bench/load.py: bfloat16 tensors whose bytes tell where they belong."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MIB, GIB = 1 << 20, 1 << 30
LAYERS = 32
SHARDS = 8
MANY = 18_867  # tensors of 1 GiB, as a mixture of experts has them


@dataclass(frozen=True)
class Case:
    """A model: what it is called, its tensors (name, bytes), and the files they are spread over."""

    name: str
    form: str
    tensors: tuple[tuple[str, int], ...]
    files: int

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self.tensors)


def cases(nbytes: int, many_bytes: int, many: int) -> list[Case]:
    """Large tensors in shards and in one GGUF file, and many small ones in one file of each format."""
    each = nbytes // (LAYERS * 4) // 512 * 512
    large = tuple((f"model.layers.{n // 4}.mlp.{n % 4}.weight", each) for n in range(LAYERS * 4))
    rng = np.random.default_rng(7)
    sizes = rng.integers(1, 2 * many_bytes // many // 64, many) * 64
    small = tuple(
        (f"model.layers.{n * LAYERS // many}.mlp.experts.{n}.weight", int(size)) for n, size in enumerate(sizes)
    )
    return [
        Case("shards", "safetensors", large, SHARDS),
        Case("one gguf", "gguf", large, 1),
        Case("many", "safetensors", small, 1),
        Case("many gguf", "gguf", small, 1),
    ]


def write(case: Case, folder: Path) -> list[Path]:
    """The files of a case, made if they are not there."""
    folder = folder / case.name.replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    step = -(-len(case.tensors) // case.files)
    paths = []
    for number in range(case.files):
        suffix = f"-{number + 1:05}-of-{case.files:05}" if case.files > 1 else ""
        path = folder / f"model{suffix}.{case.form}"
        paths.append(path)
        tensors = case.tensors[number * step : (number + 1) * step]
        if not path.exists():
            with path.open("wb") as file:
                file.write(_safetensors_header(tensors) if case.form == "safetensors" else _gguf_header(tensors))
                for name, size in tensors:
                    file.write(content(name, size))
                    if case.form == "gguf":
                        file.write(bytes(-size % 32))
                file.flush()
                os.fsync(file.fileno())
    return paths


def content(name: str, nbytes: int) -> bytes:
    """What a tensor of this name holds."""
    block = np.arange(-(-min(nbytes, MIB) // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    block += np.uint64(int.from_bytes(name.encode()[-8:], "little"))
    whole = block.tobytes()
    return (whole * (-(-nbytes // MIB)))[:nbytes]


def _safetensors_header(tensors: tuple[tuple[str, int], ...]) -> bytes:
    header, at = {}, 0
    for name, size in tensors:
        header[name] = {"dtype": "BF16", "shape": [size // 64, 32], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _gguf_header(tensors: tuple[tuple[str, int], ...]) -> bytes:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    parts, at = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), 0)], 0
    for name, size in tensors:
        parts.append(text(name) + struct.pack("<IQQIQ", 2, 32, size // 64, 30, at))
        at += size + -size % 32
    head = b"".join(parts)
    return head + bytes(-len(head) % 32)


# ---- the page cache --------------------------------------------------------------------------------------------------


def warm(paths: list[Path]) -> None:
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.read(64 * MIB):
                pass


def evict(paths: list[Path]) -> None:
    """Takes the files out of the page cache; raises OSError where the system keeps them."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
        if (held := held_share(path)) > 0.02:
            raise OSError(f"{path}: {held:.0%} stay in the page cache")


def held_share(path: Path) -> float:
    """The part of a file that the page cache holds."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as view:
        seen = np.zeros(-(-len(view) // mmap.PAGESIZE), np.uint8)
        start = np.frombuffer(view, np.uint8)
        failed = libc.mincore(
            ctypes.c_void_p(start.ctypes.data), ctypes.c_size_t(len(view)), ctypes.c_void_p(seen.ctypes.data)
        )
        del start
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return float((seen & 1).mean())


def tensor_bytes(case: Case) -> Iterator[tuple[str, bytes]]:
    for name, size in case.tensors:
        yield name, content(name, size)
