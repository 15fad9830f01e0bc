"""One loader at a time in a process of its own, for bench/load.py: our loader and those of other people.

    python bench/loaders.py LOADER BACKEND DEVICES FILE...

It makes the devices ready, says so with a line, and then loads once for each line it reads, answering with seconds. A
loader whose package is missing answers with the reason instead, as JSON.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

REST = 0.1  # seconds a GiB before the next load: freed memory is cleared by the device's own copy engines
Load = Callable[[Sequence[str]], Any]  # files -> what holds the tensors


# ---- ours ------------------------------------------------------------------------------------------------------------


@contextmanager
def pyxdev(
    backend: str,
    devices: list[int],
    threads: int = -1,
    tile: int = 2,
    streams: int = 0,
    keep: bool = False,
    every: bool = False,
    empty: bool = False,
    **options: Any,
) -> Iterator[Load]:
    """tile: MiB. streams: of a device, 0: as it comes. keep: no memory is freed before the end. every: makes all arrays
    too. empty: reads cost nothing and bring nothing."""
    from pyxdev import backends
    from pyxdev.loader import loader

    loader.TILE_BYTES = tile << 20
    if streams:
        loader.Reader = functools.partial(loader.Reader, streams=streams)
    if empty:
        sys.path.insert(0, os.path.join(sys.path[0], "tests", "unit"))
        from io_faults import Faults

        faults = Faults()
        faults.arm(nothing=True)
        loader.Reader = functools.partial(loader.Reader, calls=faults.address)
    spent = timed(loader)
    machine = {"device": {"count": max(devices) + 1}} if backend == "sim" else None
    with backends.open(backend, machine=machine) as runtime, ExitStack() as kept:
        for device in devices:  # their contexts
            runtime.buffer(device, 256).close()
            runtime.stream(device).close()

        def run(files: Sequence[str]) -> Any:
            path = os.path.dirname(files[0]) if len(files) > 1 else files[0]
            spent.clear()
            weights = loader.load(path, devices, runtime=runtime, threads=threads, **options)
            if every:
                list(weights.values())
            weights.phases = phases(spent)
            if keep:
                kept.callback(weights.close)
                weights.close = lambda: None
            return weights

        yield run


def timed(loader: Any) -> dict[str, tuple[float, float]]:
    """When each of the loader's steps begins and ends from now on, by name."""
    spent: dict[str, tuple[float, float]] = {}

    def wrap(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def wrapped(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return step(*args, **options)
            finally:
                spent[name] = begin, time.perf_counter()

        return wrapped

    for name in ("open_model", "make_plan", "_allocate", "_read", "_run"):
        setattr(loader, name, wrap(name, getattr(loader, name)))
    return spent


def phases(spent: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Seconds of a load's steps. "memory" is the devices' and the ring's, "streams" are pieces too, "end" is closing
    and the report."""
    length = {name: end - begin for name, (begin, end) in spent.items()}
    return {
        "headers": length["open_model"],
        "plan": length["make_plan"],
        "memory": length["_allocate"],
        "streams": spent["_run"][0] - spent["_read"][0],
        "reads and uploads": length["_run"],
        "end": spent["_read"][1] - spent["_run"][1],
    }


# ---- other people's --------------------------------------------------------------------------------------------------


@contextmanager
def with_torch(devices: list[int], load: Callable[[Sequence[str], str], dict[str, Any]]) -> Iterator[Load]:
    """One device a process."""
    import torch

    device = f"cuda:{devices[0]}"
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    torch.cuda.synchronize(device)

    def run(files: Sequence[str]) -> Any:
        tensors = load(files, device)
        torch.cuda.synchronize(device)
        return tensors

    yield run


def load_file(files: Sequence[str], device: str) -> dict[str, Any]:
    from safetensors.torch import load_file as load_one

    return {name: tensor for file in files for name, tensor in load_one(file, device=device).items()}


def prefetch(files: Sequence[str], device: str, threads: int, together: bool) -> dict[str, Any]:
    from safetensors import safe_open

    tensors: dict[str, Any] = {}
    opened = [safe_open(file, framework="pt", device=device) for file in files]
    if together:
        loaders = [one.prefetch(threads=max(1, threads // len(files))) for one in opened]
        for loader in loaders:
            tensors.update(loader)
    else:
        for one in opened:
            tensors.update(one.prefetch(threads=threads))
    return tensors


class Held(dict[str, Any]):
    """Tensors whose memory others free, which is not loading."""

    owners: Sequence[Any] = ()

    def close(self) -> None:
        self.clear()
        for owner in self.owners:
            owner.close()


def instanttensor(files: Sequence[str], device: str, **options: Any) -> dict[str, Any]:
    import instanttensor as package

    names = {"buffered": package.BackendPolicy.BUFFERED, "mmap": package.Backend.MMAP}
    if "backend" in options:
        options["backend"] = names[options["backend"]]
    with package.safe_open(list(files), framework="pt", device=device, **options) as opened:
        return dict(opened.tensors())


def fastsafetensors(files: Sequence[str], device: str, **options: Any) -> dict[str, Any]:
    from fastsafetensors import SafeTensorsFileLoader

    loader = SafeTensorsFileLoader(None, device, nogds=True, **options)
    loader.add_filenames({0: list(files)})
    buffers = loader.copy_files_to_device()
    tensors = Held({name: buffers.get_tensor(name) for name in loader.get_keys()})
    tensors.owners = [buffers, loader]
    return tensors


def runai(files: Sequence[str], device: str) -> dict[str, Any]:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(list(files), device=device)
        return dict(streamer.get_tensors())


def peer(load: Callable[..., dict[str, Any]], **options: Any) -> Callable[[str, list[int]], Any]:
    def opened(backend: str, devices: list[int]) -> Any:
        if backend != "cuda":
            raise ImportError(f"wants CUDA devices, these are {backend}")
        return with_torch(devices, lambda files, device: load(files, device, **options))

    return opened


def ours(**options: Any) -> Callable[[str, list[int]], Any]:
    return lambda backend, devices: pyxdev(backend, devices, **options)


# name -> (package, how it is opened)
LOADERS: dict[str, tuple[str, Callable[[str, list[int]], Any]]] = {
    "pyxdev": ("pyxdev", ours()),
    "pyxdev, 8 threads": ("pyxdev", ours(threads=8)),
    "pyxdev, 16 threads": ("pyxdev", ours(threads=16)),
    "pyxdev, 24 threads": ("pyxdev", ours(threads=24)),
    "pyxdev, 1 MiB tiles": ("pyxdev", ours(tile=1)),
    "pyxdev, 4 MiB tiles": ("pyxdev", ours(tile=4)),
    "pyxdev, nothing freed": ("pyxdev", ours(keep=True)),
    "pyxdev, default threads": ("pyxdev", ours(threads=None)),
    "pyxdev, every array made": ("pyxdev", ours(every=True)),
    "pyxdev, synchronous uploads": ("pyxdev", ours(async_uploads=False)),
    "pyxdev, page cache only": ("pyxdev", ours(direct_io="off")),
    "safetensors load_file": ("safetensors.torch", peer(load_file)),
    "safetensors prefetch": ("safetensors", peer(prefetch, threads=16, together=False)),
    "safetensors prefetch, files together": ("safetensors", peer(prefetch, threads=16, together=True)),
    "InstantTensor": ("instanttensor", peer(instanttensor)),
    "InstantTensor buffered": ("instanttensor", peer(instanttensor, backend="buffered")),
    "InstantTensor buffered, 2 MiB x 16": (
        "instanttensor",
        peer(instanttensor, backend="buffered", chunk_size=2 << 20, io_depth=16),
    ),
    "InstantTensor mmap, 1 MiB x 32": (
        "instanttensor",
        peer(instanttensor, backend="mmap", chunk_size=1 << 20, io_depth=32, concurrency=16),
    ),
    "fastsafetensors": ("fastsafetensors", peer(fastsafetensors, disable_cache=False)),
    "fastsafetensors buffered": ("fastsafetensors", peer(fastsafetensors, disable_cache=False)),
    "fastsafetensors buffered, 32 MiB, 16 threads": (
        "fastsafetensors",
        peer(fastsafetensors, bbuf_size_kb=32 << 10, max_threads=16, disable_cache=False),
    ),
    "Run:ai streamer": ("runai_model_streamer", peer(runai)),
    "Run:ai streamer buffered": ("runai_model_streamer", peer(runai)),
}
# For loaders with "buffered" in their name: those that read directly unless told.
BUFFERED = {"FASTSAFETENSORS_ODIRECT": "0", "RUNAI_STREAMER_FS_STRATEGY": "sync_buffered"}
# What helps and what is in the way: threads, tiles, streams, and the same without reading.
PROBES = {
    f"pyxdev, {threads} threads, {tile} MiB tiles, {streams} streams{', empty reads' if empty else ''}": (
        "pyxdev",
        ours(threads=threads, tile=tile, streams=streams, empty=empty, direct_io="off"),
    )
    for empty in (False, True)
    for tile in (1, 2)
    for streams in (1, 2, 4)
    for threads in (8, 12, 16)
    if not empty or (threads == 12 and streams < 4)
}
LOADERS |= PROBES


def answer(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main() -> None:
    name, backend, devices, *files = sys.argv[1:]
    os.environ.setdefault("RUNAI_STREAMER_CONCURRENCY", "16")
    if "buffered" in name:
        os.environ.update(BUFFERED)
    package, opened = LOADERS[name]
    if backend == "sim" and package != "pyxdev":
        answer(absent=f"wants CUDA devices, these are {backend}")
        return
    try:
        importlib.import_module(package)
        with opened(backend, [int(one) for one in devices.split(",")]) as load:
            rest = 0.5 + sum(map(os.path.getsize, files)) / (1 << 30)
            answer(ready=True)
            for _ in sys.stdin:
                begin = time.perf_counter()
                held = load(files)
                seconds = time.perf_counter() - begin
                report = held.report.as_dict() | {"phases": held.phases} if hasattr(held, "report") else {}
                if hasattr(held, "close"):
                    held.close()
                del held
                time.sleep(REST * rest)
                answer(seconds=seconds, report=report)
    except (ImportError, AttributeError, TypeError, RuntimeError, ValueError, OSError) as error:
        answer(absent=f"{type(error).__name__}: {str(error)[:300]}")


if __name__ == "__main__":
    main()
