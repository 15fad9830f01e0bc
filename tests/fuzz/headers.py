"""Feeds changed model files to the header readers, and keeps what reaches new code: `make fuzz`.

    python tests/fuzz/headers.py [--seconds 60] [--seed 1] [--engine auto|atheris|own] [FILE ...]

Any exception but FileRefused, an answer that takes over a second or 256 MiB, a header that loads and is not consistent,
and a scanner that disagrees with the readers in Python are faults. The input is then written to build/fuzz, and the
exit code is 1. With FILE these inputs are run alone. atheris is used where it is installed, otherwise our own loop,
which says every ten seconds how far it is. An input without an answer ends the run: after five seconds in Python, half
a minute after the run's end in C, with a traceback; build/fuzz/last holds the input that was read last, also of a run
that was killed.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import importlib.util
import os
import random
import resource
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit")]

import header_rules  # noqa: E402
import model_files as mf  # noqa: E402

MEMORY = 256 << 20  # bytes that reading one header may cost
HANG, GRACE, SAY = 5.0, 30.0, 10.0  # seconds: without an answer in Python, after the end in C, between two lines
FOLDER = ROOT / "build" / "fuzz"
WORDS = [
    b'"dtype"', b'"shape"', b'"data_offsets"', b'"__metadata__"', b"F32", b"BF16", b"F4", b"[0,0]", b"{}", b"null",
    b"general.alignment", b"GGUF", b"\\u0000", b"\xff", b"-1", b"1e3", b"9" * 19,
]  # fmt: skip
NUMBERS = [0, 1, 2, 8, 9, 31, 32, 33, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]


def one_input(data: bytes) -> None:
    """The first byte chooses the format, the rest is the file."""
    form = "gguf" if data[:1] < b"\x80" else "safetensors"
    fd = os.memfd_create("fuzz")
    try:
        os.write(fd, data[1:])
        header_rules.check(f"/proc/self/fd/{fd}", form)
    finally:
        os.close(fd)


def seeds() -> Iterator[bytes]:
    yield b"\xff" + mf.packed([("a", "F32", (2, 2), bytes(16)), ("b", "U8", (3,), b"abc")], {"k": "v"})
    yield b"\xff" + mf.packed([("blk.0.w", "BF16", (0, 7), b""), ("s", "F64", (), bytes(8))])
    keys = [
        mf.key("general.architecture", mf.STRING, "llama"),
        mf.key("tokens", mf.ARRAY, (mf.STRING, ["a", "bc", ""])),
        mf.key("n", mf.ARRAY, (mf.ARRAY, [(mf.INT32, [1, 2])])),
    ]
    tensors = [("blk.0.w", 2, [32, 2], bytes(36)), ("b", 0, [3], bytes(12)), ("s", 1, [], bytes(2))]
    yield b"\0" + mf.packed_gguf(tensors, keys)
    yield b"\0" + mf.packed_gguf(tensors, keys, alignment=64)
    yield b"\xff" + mf.packed([("h.layers.12.blk.3.w", "U8", (1,), b"a"), ("blk.\u0663.w", "U8", (1,), b"b")])


# ---- our own engine --------------------------------------------------------------------------------------------------


def mutate(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """One to four changes: a byte, a number, a word, a run copied, dropped or taken from another input."""
    out = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(out) + 1)
        step = rng.choice((1, 4, 8, rng.randrange(1, 64)))
        match rng.randrange(7):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
            case 2:
                out[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS) & 0xFFFFFFFF)
            case 3:
                out[at : at + rng.choice((0, step))] = rng.choice(WORDS)
            case 4:
                out[at:at] = out[at : at + step]
            case 5:
                del out[at : at + step]
            case _:
                start = rng.randrange(len(other) + 1)
                out[at : at + step] = other[start : start + step]
    return bytes(out[: 1 << 16])


class Coverage:
    """The pairs of lines of the loader that ran one after the other."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, int, int]] = set()
        self._new = False

    def reaches_more(self, data: bytes) -> bool:
        self._new = False
        sys.settrace(self._enter)
        try:
            one_input(data)
        finally:
            sys.settrace(None)
        return self._new

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if "/pyxdev/loader/" not in name:
            return None
        last = 0

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            edge = (name, last, frame.f_lineno)
            last = frame.f_lineno
            if edge not in self.seen:
                self.seen.add(edge)
                self._new = True
            return line

        return line


def no_answer(number: int, frame: FrameType | None) -> None:
    raise AssertionError(f"no answer within {HANG:g} s")


def own_engine(seconds: float, seed: int) -> None:
    rng, coverage, corpus = random.Random(seed), Coverage(), list(seeds())
    FOLDER.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGALRM, no_answer)
    faulthandler.dump_traceback_later(seconds + GRACE, exit=True)
    for data in corpus:
        coverage.reaches_more(data)
    runs, begin = 0, time.monotonic()
    now = said = begin
    with open(FOLDER / "last", "wb", buffering=0) as last:
        while now < begin + seconds:
            data = mutate(rng.choice(corpus), rng.choice(corpus), rng)
            os.pwrite(last.fileno(), data, 0)
            os.ftruncate(last.fileno(), len(data))
            signal.setitimer(signal.ITIMER_REAL, HANG)
            try:
                if coverage.reaches_more(data):
                    corpus.append(data)
            except BaseException:
                signal.setitimer(signal.ITIMER_REAL, 0)
                keep(data)
                raise
            runs, now = runs + 1, time.monotonic()
            if now - said >= SAY:
                said = now
                say(f"{now - begin:.0f} s", runs, corpus, coverage)
    signal.setitimer(signal.ITIMER_REAL, 0)
    faulthandler.cancel_dump_traceback_later()
    say(f"seed {seed}", runs, corpus, coverage)


def say(when: str, runs: int, corpus: list[bytes], coverage: Coverage) -> None:
    sys.stdout.write(f"{when}: {runs} inputs, {len(corpus)} kept, {len(coverage.seen)} pairs of lines\n")
    sys.stdout.flush()


def keep(data: bytes) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"crash-{hashlib.sha256(data).hexdigest()[:16]}"
    path.write_bytes(data)
    sys.stderr.write(f"the input is in {path}\n")


# ---- atheris ---------------------------------------------------------------------------------------------------------


def atheris_engine(seconds: float, seed: int) -> None:
    import atheris

    folder = FOLDER
    (folder / "corpus").mkdir(parents=True, exist_ok=True)
    for data in seeds():
        (folder / "corpus" / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    for name in ("gguf", "safetensors", "header"):
        module = sys.modules[f"pyxdev.loader.{name}"]
        for value in list(vars(module).values()):
            if callable(value) and getattr(value, "__module__", "") == module.__name__ and hasattr(value, "__code__"):
                setattr(module, value.__name__, atheris.instrument_func(value))
    options = [f"-max_total_time={int(seconds)}", f"-seed={seed}", "-rss_limit_mb=2048", "-max_len=65536", "-timeout=5"]
    atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={folder}/", str(folder / "corpus")], one_input)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=("auto", "atheris", "own"), default="auto")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    given = parser.parse_args()
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if given.files:
        for path in given.files:
            one_input(path.read_bytes())
    elif given.engine == "own" or (given.engine == "auto" and not importlib.util.find_spec("atheris")):
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, resource.RLIM_INFINITY))
        own_engine(given.seconds, given.seed)
    else:
        atheris_engine(given.seconds, given.seed)


if __name__ == "__main__":
    main()
