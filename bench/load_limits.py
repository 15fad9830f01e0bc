"""What the machine allows a loader, measured in the same run: uploads, copies out of the page cache, direct reads."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pyxdev._native import HOST, Runtime

MIB = 1 << 20
WINDOW = 64 * MIB  # of page-locked memory for uploads
COPY = 4 * MIB  # bytes of one upload


def upload_rate(runtime: Runtime, devices: Sequence[int], nbytes: int) -> float:
    """Bytes a second from page-locked memory to all of these devices at once."""
    window = min(WINDOW, nbytes)
    pinned = [runtime.buffer(HOST, window) for _ in devices]
    targets = [runtime.buffer(device, window) for device in devices]
    streams = [runtime.stream(device) for device in devices]
    best = 0.0
    for _ in range(3):
        begin = runtime.clock()
        for at in range(0, nbytes, COPY):
            place = at % window
            size = min(COPY, nbytes - at, window - place)
            for device, source, target, stream in zip(devices, pinned, targets, streams, strict=True):
                stream.copy(target.address + place, source.address + place, size, dst_device=device, src_device=HOST)
        for stream in streams:
            stream.synchronize()
        best = max(best, len(devices) * nbytes / (runtime.clock() - begin))
    for thing in (*streams, *targets, *pinned):
        thing.close()
    return best


def read_rate(paths: Sequence[Path], threads: int, chunk: int, ring: int, *, direct: bool = False) -> float:
    """Bytes a second that this many threads read, each into its part of a ring of so many bytes."""
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    fds = [os.open(path, flags) for path in paths]
    jobs = [(fd, at) for fd, path in zip(fds, paths, strict=True) for at in range(0, path.stat().st_size, chunk)]
    slots = max(1, ring // threads // chunk)
    memories = [mmap.mmap(-1, slots * chunk) for _ in range(threads)]
    for memory in memories:
        memory.write(bytes(len(memory)))  # its pages are there
    lock, counts = threading.Lock(), [0] * threads

    def read(number: int) -> None:
        views = [memoryview(memories[number])[slot * chunk : (slot + 1) * chunk] for slot in range(slots)]
        turn = 0
        while True:
            with lock:
                if not jobs:
                    break
                fd, at = jobs.pop()
            counts[number] += os.preadv(fd, [views[turn % slots]], at)
            turn += 1
        for view in views:
            view.release()

    seconds = _together(read, threads)
    for fd in fds:
        os.close(fd)
    for memory in memories:
        memory.close()
    return sum(counts) / seconds


def _together(work: Callable[[int], None], threads: int) -> float:
    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    begin = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - begin
