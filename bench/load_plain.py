"""plain_load.c, built and run: what a loop in C reaches with these files and devices, and what is in its way."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
RING = 64 * MIB
WAITS = ("spin", "nap", "sync")


@dataclass(frozen=True)
class Way:
    """depth: tiles of each thread. wait: for a tile's event: asking again and again, napping between two questions, or
    the driver's own wait."""

    threads: int
    tile: int = MIB
    depth: int = 4
    own_streams: bool = False
    wait: str = "nap"
    read: bool = True
    upload: bool = True

    def __str__(self) -> str:
        parts = [f"{self.threads} threads", f"{self.depth} tiles of {self.tile / MIB:g} MiB each", self.wait]
        parts += ["a stream each"] * self.own_streams + ["no reads"] * (not self.read)
        return ", ".join(parts + ["no uploads"] * (not self.upload))

    @property
    def line(self) -> str:
        flags = int(self.own_streams), WAITS.index(self.wait), int(self.read), int(self.upload)
        return " ".join(map(str, (self.threads, self.tile, self.depth, *flags)))


def fitted(threads: int, tile: int, **more: bool | str) -> Way:
    """As many tiles a thread as a ring of 64 MiB has, four at most."""
    return Way(threads, tile, max(1, min(4, RING // (threads * tile))), **more)  # type: ignore[arg-type]


def ways(devices: int) -> Iterator[Way]:
    """Threads and tiles; then what is left without reads, without uploads, and with other waits and streams."""
    counts = [count * devices for count in (1, 2, 4, 8, 12, 16) if count * devices <= 32]
    for threads in counts:
        for tile in (MIB // 2, MIB, 2 * MIB, 4 * MIB):
            if threads * tile <= RING:
                yield fitted(threads, tile)
    for threads in counts[-3:]:
        for tile in (MIB, 2 * MIB):
            yield fitted(threads, tile, upload=False)
            for wait in WAITS:
                for own in (False, True):
                    for read in (True, False):
                        if wait != "nap" or own or not read:
                            yield fitted(threads, tile, wait=wait, own_streams=own, read=read)
    for tile in (MIB // 2, MIB):
        for depth in (1, 2, 8):
            if counts[-2] * depth * tile <= RING:
                yield Way(counts[-2], tile, depth)


@functools.cache
def _built() -> Path:
    """The program, built once a process."""
    folder = tempfile.mkdtemp(prefix="plain-load-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    program, here = Path(folder, "plain_load"), Path(__file__).parent
    command = [os.environ.get("CC", "cc"), "-std=c11", "-D_GNU_SOURCE", "-O2", f"-I{here.parent / 'native'}",
               here / "plain_load.c", "-o", program, "-ldl", "-lpthread"]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ImportError(f"plain_load.c: {getattr(error, 'stderr', None) or error}") from error
    return program


class Plain:
    """The loop over these files, ready to run; ImportError where it cannot be built or there is no such device."""

    def __init__(self, files: Sequence[Path], devices: Sequence[int]) -> None:
        program = _built()
        self._nbytes = sum(path.stat().st_size for path in files)
        arguments = [program, ",".join(map(str, devices)), str(4 * MIB), *files]
        self._child = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.opened = self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._child.stdout and self._child.stderr
        line = self._child.stdout.readline()
        if not line:
            raise ImportError(self._child.stderr.read().strip() or f"plain_load: exit code {self._child.wait()}")
        return dict(json.loads(line))

    def run(self, way: Way, times: int = 3) -> dict[str, float]:
        """The best of some runs: `rate` in bytes a second, `pin` in seconds, and microseconds a tile that a thread
        spent in `wait`, `read`, `submit` and `record`."""
        assert self._child.stdin
        found = []
        for _ in range(times):
            self._child.stdin.write(way.line + "\n")
            self._child.stdin.flush()
            found.append(self._answer())
        best = min(found, key=lambda one: one["seconds"])
        return {**best, "rate": self._nbytes / best["seconds"]}

    def close(self) -> None:
        assert self._child.stdin and self._child.stdout and self._child.stderr
        self._child.stdin.close()
        self._child.wait(60)
        self._child.stdout.close()
        self._child.stderr.close()
