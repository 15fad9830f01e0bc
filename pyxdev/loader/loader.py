"""Loads a model's files into the memory of all its devices at once."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple, SupportsIndex

from pyxdev import backends
from pyxdev._native import Buffer, Reader, Ring, Runtime
from pyxdev.errors import Cancelled, Error, FileRefused, InvalidArgument, OutOfMemory, ReadError
from pyxdev.loader.files import open_model
from pyxdev.loader.header import ModelFile, refused, shown
from pyxdev.loader.plan import Plan, make_plan
from pyxdev.loader.progress import Bar, Callback, Progress
from pyxdev.loader.report import DeviceReport, Report
from pyxdev.loader.weights import Weights
from pyxdev.settings import Settings, resolve

log = logging.getLogger("pyxdev")

RING_BYTES = 64 << 20  # page-locked, at most
TILE_BYTES = 2 << 20  # at most: uploads of 1 MiB reach 0.89 of a link's rate, of 2 MiB 0.95
FEW_TILES, MANY_TILES = 2, 4  # of a thread: one is filled, the others are on their way
DIRECT_IO = ("auto", "on", "off")
# What -1 means, within three quarters of the cores: about 6 GB/s each against 55 of an upload.
THREADS_A_DEVICE, MANY_THREADS = 12, 24
MOST_THREADS = 64
_PAGE = 4096  # of which tiles are made
_PERIOD = 0.05  # seconds between two looks at the workers, for progress and Ctrl-C


def load(
    path: str | os.PathLike[str],
    devices: Sequence[SupportsIndex] | None = None,
    *,
    tensor_split: Sequence[float] | None = None,
    split_mode: str = "layer",
    place: Callable[[str], int] | None = None,
    runtime: Runtime | None = None,
    backend: str | None = None,
    threads: int | None = None,
    async_uploads: bool | None = None,
    direct_io: str = "auto",
    verify: bool = False,
    progress: bool | Callback = False,
) -> Weights:
    """Reads a model into the memory of its devices; returns when every byte is there.

    path: a .safetensors or .gguf file, any part of a GGUF split set, an index.json, a folder, a Hugging Face cache.
    devices: device numbers in the order in which layers are handed out; None: all.
    tensor_split: a share for each device. split_mode: "layer" (whole layers), "row" (rows of each matrix) or "none"
    (all on the first device). place: a function of a tensor's name that returns its device, instead of these.
    runtime: an open one, which stays yours; otherwise one of `backend` is opened and closed with the weights.
    threads, async_uploads: as in the settings table, for this load. direct_io: "auto" (past the page cache what is not
    in it), "on" or "off". verify: reads everything back from the devices and compares checksums (XXH64) that were taken
    of what was read; DriverError where a device does not hold it.
    progress: True draws a bar on a terminal; a function is called with a Progress before the first byte, about 20 times
    a second and after the last byte; it cancels the load by returning False, and an exception from it passes through.

    Everything about the files is checked, and the memory of each device, before anything is allocated. After an error
    nothing is left allocated. Raises FileRefused, ReadError, OutOfMemory, Cancelled, InvalidArgument, SettingError.
    """
    begin = time.monotonic()
    if direct_io not in DIRECT_IO:
        raise InvalidArgument(f"direct_io is {direct_io!r}; allowed: {', '.join(DIRECT_IO)}")
    with ExitStack() as undo:
        model = undo.enter_context(open_model(path))
        for note in model.notes:
            log.warning("%s", note)
        owned = None
        if runtime is None:
            settings = resolve({"backend": backend, "threads_load": threads, "async_uploads": async_uploads})
            runtime = owned = undo.enter_context(backends.open(settings=settings))
        elif backend is not None:
            raise InvalidArgument("backend and runtime cannot both be given")
        settings = _settings(runtime, threads, async_uploads)
        plan = make_plan(model, runtime, devices, tensor_split=tensor_split, split_mode=split_mode, place=place)
        plan.check_memory()
        size = _size_ring(settings.threads_load, plan)
        buffers, ring = _allocate(runtime, plan, size, undo)
        report = _read(plan, runtime, buffers, ring, size, settings, direct_io, verify, progress, begin)
        weights = Weights(plan, runtime, buffers, report, owned)
        undo.pop_all()
        model.close()
        return weights


def _settings(runtime: Runtime, threads: int | None, async_uploads: bool | None) -> Settings:
    """The runtime's settings, with what this call says instead."""
    kept: Settings | None = getattr(runtime, "settings", None)
    given = resolve({"threads_load": threads, "async_uploads": async_uploads})
    if kept is None:
        return given.for_backend(runtime.backend)
    return replace(
        kept,
        threads_load=kept.threads_load if threads is None else given.threads_load,
        async_uploads=kept.async_uploads if async_uploads is None else given.async_uploads,
    )


class _RingSize(NamedTuple):
    threads: int
    tiles: int
    tile_bytes: int


def _size_ring(asked: int, plan: Plan) -> _RingSize:
    """As many threads as the settings say (-1: as many as help), never more than there are tiles to read; four tiles a
    thread, fewer for many threads. No tiles if there is nothing to read."""
    total = int(plan.parts.nbytes.sum())
    if asked < 0:
        asked = min(THREADS_A_DEVICE * len(plan.devices), MANY_THREADS, len(os.sched_getaffinity(0)) * 3 // 4)
    threads = max(1, min(asked, MOST_THREADS, -(-total // TILE_BYTES)))
    tile = min(TILE_BYTES, RING_BYTES // (FEW_TILES * threads) // _PAGE * _PAGE)
    return _RingSize(threads, min(threads * min(MANY_TILES, RING_BYTES // tile // threads), -(-total // tile)), tile)


def _allocate(runtime: Runtime, plan: Plan, size: _RingSize, undo: ExitStack) -> tuple[list[Buffer], Ring | None]:
    """The memory of every device and the ring, all made at the same time: each takes milliseconds. `undo` closes it."""
    tasks: list[Callable[[], Any]] = [
        functools.partial(runtime.buffer, need.device, need.nbytes, managed=True) for need in plan.needs
    ]
    if size.tiles:
        tasks.append(functools.partial(_open_ring, runtime, size))
    made: list[Any] = [None] * len(tasks)

    def close() -> None:
        for one in made:
            if one is not None:
                one.close()

    undo.callback(close)
    _run_together(tasks, made)
    return made[: len(plan.needs)], made[-1] if size.tiles else None


def _open_ring(runtime: Runtime, size: _RingSize) -> Ring:
    """With fewer tiles where page-locked memory is short, and without such memory where there is none."""
    tiles = size.tiles
    while True:
        try:
            return runtime.ring(tiles, size.tile_bytes)
        except OutOfMemory as error:
            if error.status != "NO_PINNED_MEMORY":
                raise
            if tiles == 1:
                return _open_pageable(runtime, size, error)
            log.warning("%s; trying with %d tiles", error, tiles // 2)
            tiles //= 2


def _open_pageable(runtime: Runtime, size: _RingSize, why: OutOfMemory) -> Ring:
    log.warning("%s; loading through memory that is not page-locked, which takes longer", why)
    try:
        return runtime.ring(size.tiles, size.tile_bytes, pageable=True)
    except OutOfMemory as error:
        text = f"{why}; nor is there memory that is not page-locked: {error}"
        raise OutOfMemory(text, status=error.status, code=error.code, operation=error.operation) from error


def _run_together(tasks: Sequence[Callable[[], Any]], results: list[Any]) -> None:
    """Calls all tasks, the first on this thread, each other on its own, and puts down what they return. Whatever
    happens, none is running when this returns. Raises the error of the first that failed."""
    failures: dict[int, Error | MemoryError] = {}
    ended = threading.Semaphore(0)

    def call(number: int) -> None:
        try:
            results[number] = tasks[number]()
        except (Error, MemoryError) as error:
            failures[number] = error
        finally:
            ended.release()

    threads = [
        threading.Thread(target=call, args=(number,), name="pyxdev-load", daemon=True)
        for number in range(1, len(tasks))
    ]
    try:
        for thread in threads:
            thread.start()
        call(0)
        for _ in tasks:
            ended.acquire()  # which Ctrl-C may interrupt: a thread whose join was interrupted counts as ended
    finally:
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if failures:
        raise failures[min(failures)]


def _read(
    plan: Plan,
    runtime: Runtime,
    buffers: Sequence[Buffer],
    ring: Ring | None,
    size: _RingSize,
    settings: Settings,
    direct_io: str,
    verify: bool,
    progress: bool | Callback,
    begin: float,
) -> Report:
    """Reads all parts into their places."""
    with ExitStack() as stack:
        direct_fds = [_open_direct(file, direct_io, stack) for file in plan.model.files]
        addresses = [buffer.address for buffer in buffers]
        pieces, tensor_of = plan.pieces(addresses, direct_fds)
        total = int(plan.parts.nbytes.sum())
        tiles = ring.tiles if ring else 0
        pageable = ring is not None and ring.pageable  # asked now: the reader takes the ring over
        threads = min(size.threads, max(1, tiles))
        reader = Reader(
            runtime,
            pieces,
            workers=threads,
            ring=ring,
            async_uploads=bool(settings.async_uploads),
            io="direct" if direct_io == "on" else "auto",
            verify=verify,
        )
        stack.callback(reader.close)
        callback: Callback | None = None
        if progress is True:
            callback = stack.enter_context(Bar())
        elif callable(progress):
            callback = progress
        setup = time.monotonic() - begin
        try:
            _run(reader, _Watch(plan, reader, total, callback), reader.run)
        except (ReadError, FileRefused) as error:
            raise _name_file(error, plan, reader, tensor_of) from error
        end = time.monotonic()
        if verify:
            _run(reader, lambda: None, reader.verify)
        for file in plan.model.files:
            if code := reader.refused(file.fd):
                log.info(
                    "%s: direct I/O refused (%s), read through the page cache", shown(file.path), os.strerror(code)
                )
        reading, waiting = reader.times
        return Report(
            tensors=len(plan.model.tensors),
            seconds=end - begin,
            setup=setup,
            reading=reading,
            waiting=waiting,
            threads=threads,
            pinned=0 if pageable else tiles * size.tile_bytes,
            async_uploads=bool(settings.async_uploads) and not pageable,
            devices=tuple(_device_report(reader, device, begin) for device in plan.devices),
        )


def _device_report(reader: Reader, device: int, begin: float) -> DeviceReport:
    done, direct, first, last = reader.progress(device)
    return DeviceReport(device, done, direct, max(0.0, first - begin), max(0.0, last - begin))


def _open_direct(file: ModelFile, direct_io: str, stack: ExitStack) -> int:
    """A second descriptor of an open file, for reading past the page cache; -1 where that is not wanted or refused."""
    if direct_io == "off":
        return -1
    try:
        fd = os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if direct_io == "on":
            text = f"{shown(file.path, 4096)}: direct I/O was asked for and is refused: {error.strerror}"
            raise ReadError(text, status="READ", code=error.errno or 0, operation="open") from error
        _log_refused(file, error.errno or 0)
        return -1
    stack.callback(os.close, fd)
    return fd


def _log_refused(file: ModelFile, code: int) -> None:
    log.info("%s: direct I/O refused (%s), read through the page cache", shown(file.path, 4096), os.strerror(code))


class _Watch:
    """Tells the callback how far the load is, and hears whether it goes on."""

    def __init__(self, plan: Plan, reader: Reader, total: int, callback: Callback | None) -> None:
        self._reader = reader
        self._total = total
        self._totals = {
            device: int(plan.parts.nbytes[plan.parts.device == number].sum())
            for number, device in enumerate(plan.devices)
        }
        self._callback = callback
        self._begin = time.monotonic()

    def __call__(self) -> None:
        if self._callback is None:
            return
        devices = {device: (self._reader.progress(device)[0], total) for device, total in self._totals.items()}
        done = sum(one for one, _ in devices.values())
        if self._callback(Progress(done, self._total, time.monotonic() - self._begin, devices)) is False:
            raise Cancelled(f"the progress callback cancelled the load after {done} of {self._total} bytes")


def _run(reader: Reader, watch: Callable[[], None], task: Callable[[], None]) -> None:
    """Runs the task of a reader and waits for it. Whatever happens, nothing of it runs when this returns: the calling
    thread looks up often, so Ctrl-C and an exception of the callback stop it within one tile."""
    failures: list[Error] = []
    ended = threading.Semaphore(0)

    def work() -> None:
        try:
            task()
        except Error as error:
            failures.append(error)
        finally:
            ended.release()

    watch()
    worker = threading.Thread(target=work, name="pyxdev-load", daemon=True)
    try:
        worker.start()
        while not ended.acquire(timeout=_PERIOD):
            watch()
    except BaseException:
        reader.cancel()
        raise
    finally:
        if worker.ident is not None:
            worker.join()
    if failures:
        raise failures[0]
    watch()


def _name_file(error: Error, plan: Plan, reader: Reader, tensor_of: Any) -> Error:
    """The same error with the file and the tensor that were being read."""
    row = reader.failed
    if row is None:
        return error
    tensor = int(tensor_of[row])
    path, name = plan.model.files[plan.model.file_of[tensor]].path, plan.model.tensors[tensor].name
    text = str(refused(path, str(error), name))
    return type(error)(text, status=error.status, code=error.code, operation=error.operation)
