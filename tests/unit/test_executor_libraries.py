"""Stages of array libraries, as far as they can be tested without a GPU.

That is CuPy's adapter and what it shares with those of numba and cuda.core, over a stand-in for CuPy
(simulated_cupy.py) on simulated devices, with the ordering checker on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import simulated_cupy
from executor_cases import machine
from simulated_cupy import kernel

from pyxdev import adapters
from pyxdev.adapters import library
from pyxdev.adapters.interface import describe
from pyxdev.adapters.library import Library, LibraryAdapter
from pyxdev.backends import open as open_backend
from pyxdev.errors import BackendUnavailable, InvalidArgument, StageError, Unsupported
from pyxdev.executor import Executor, Stage

REAL = dict(adapters._KNOWN)


class Bench:
    """A machine of two devices with the stand-in on it."""

    def __init__(self, seed: int, checked: bool = True) -> None:
        described = machine(2, seed)
        described["run"]["check"] = checked
        self.runtime = open_backend("sim", machine=described)
        self.cupy = simulated_cupy.module(self.runtime)

    def pipe(self, *fns: Any, **options: Any) -> Executor:
        options = {"adapter": "cupy", "host_stage": "0", **options}
        return Executor([n % 2 for n in range(len(fns))], fns, runtime=self.runtime, **options)


@pytest.fixture(autouse=True)
def on_simulated_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cupy", "numba"):
        monkeypatch.setitem(adapters._KNOWN, name, adapters._KNOWN[name]._replace(backends=("sim",)))


@pytest.fixture
def new_bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    opened: list[Bench] = []

    def new(seed: int = 0, **options: Any) -> Bench:
        opened.append(Bench(seed, **options))
        monkeypatch.setitem(sys.modules, "cupy", opened[-1].cupy)
        sys.modules.pop("pyxdev.adapters.cupy", None)
        return opened[-1]

    yield new
    sys.modules.pop("pyxdev.adapters.cupy", None)
    for bench in opened:
        bench.cupy.pool.close()
        bench.runtime.close()


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of outputs that were copied."""
    found: list[int] = []

    class Noting(library.RawStage):
        def copy(self, address: int, nbytes: int) -> Any:
            found.append(address)
            return super().copy(address, nbytes)

    monkeypatch.setattr(library, "RawStage", Noting)
    return found


XS = [np.full((40, 50), n, np.float32) for n in range(10)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("depth", [1, 3])
def test_stages_give_the_bits_of_running_in_order(new_bench: Any, copied: list[int], seed: int, depth: int) -> None:
    bench = new_bench(seed)
    stages = [lambda x: (x + 1) * 2, lambda x: {"y": x * 3, "n": 7}, lambda x: x["y"] + x["n"]]
    with bench.pipe(*stages, depth=depth, in_flight=6) as pipe:
        assert [stage.adapter for stage in pipe.plan().stages] == ["cupy"] * 3
        for n, y in enumerate(pipe.map(XS)):
            assert isinstance(y, bench.cupy.ndarray)
            with bench.cupy.cuda.Device(0):
                assert (y.get() == (n + 1) * 2 * 3 + 7).all(), f"seed {seed}"
    assert copied == []


def spoiled(bench: Bench) -> bool:
    """Whether a pipeline whose second stage is slow has a wrong result."""

    def slow(x: Any) -> Any:
        for _ in range(6):
            x = x + 0
        return x

    with bench.pipe(lambda x: x + 1, slow, in_flight=8, depth=2) as pipe:
        for n, y in enumerate(pipe.map(XS)):
            with bench.cupy.cuda.Device(1):
                if not (y.get() == n + 1).all():
                    return True
    return False


def test_the_pool_may_not_have_outputs_back_before_they_are_read(
    new_bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs given back at once are overwritten by the next microbatch; held, as they are, they are not."""
    assert not any(spoiled(new_bench(seed, checked=False)) for seed in range(6))
    take_over = LibraryAdapter._take_over
    monkeypatch.setattr(
        LibraryAdapter, "_take_over", lambda *args: [(None, address) for _, address in take_over(*args)]
    )
    assert any(spoiled(new_bench(seed, checked=False)) for seed in range(6))


KEEP = {
    "output": lambda y: (y, y),
    "view": lambda y: (y, y[3:]),
    "base": lambda y: (y[3:], y),
    "transposed": lambda y: (y, y.T),
}


@pytest.mark.parametrize("how", KEEP)
@pytest.mark.parametrize("seed", range(3))
def test_what_a_stage_keeps_is_copied(new_bench: Any, copied: list[int], how: str, seed: int) -> None:
    """And may be written again by its next call."""
    bench = new_bench(seed)
    kept: list[Any] = []

    def static(x: Any) -> Any:
        if not kept:
            kept.append(x * 0)
        y, kept_part = KEEP[how](kept[0])
        kernel(lambda x: x, x, out=kept[0])
        kept[1:] = [kept_part]
        return y

    with bench.pipe(static, lambda x: x + 0, in_flight=6, depth=1) as pipe:
        for n, y in enumerate(pipe.map(XS)):
            with bench.cupy.cuda.Device(1):
                assert (y.get() == n).all(), f"seed {seed}"
        kept.clear()
    assert len(copied) == len(XS)


@pytest.mark.parametrize("give", [lambda x: x, lambda x: x[5:], lambda x: [x, x]])
def test_inputs_returned_are_copied(new_bench: Any, copied: list[int], give: Any) -> None:
    bench = new_bench()
    with bench.pipe(give, in_flight=1) as pipe:
        for n in range(4):
            y = pipe.submit(XS[n]).result()
            assert all((one.get() == n).all() for one in (y if isinstance(y, list) else [y]))
    assert len(copied) >= 4


def test_outputs_with_gaps_come_in_c_order(new_bench: Any) -> None:
    bench = new_bench()
    x = np.arange(600, dtype=np.int32).reshape(20, 30)
    with bench.pipe(lambda x: ((x + 1).T, (x + 2)[::3])) as pipe:
        for _ in range(3):
            a, b = pipe.submit(x).result()
            assert (a.get() == x.T + 1).all() and (b.get() == x[::3] + 2).all() and a.strides == (80, 4)


def test_memory_that_is_not_cupys_own_is_copied(new_bench: Any, copied: list[int]) -> None:
    bench = new_bench()
    mine = bench.cupy.empty((40, 50), np.float32)

    def stage(x: Any) -> Any:
        kernel(lambda x: x, x, out=mine)
        place = simulated_cupy.MemoryPointer(simulated_cupy.UnownedMemory(mine.data.ptr, None, 0), 0)
        return bench.cupy.ndarray(mine.pool, mine.shape, mine.dtype, place)

    with bench.pipe(stage, in_flight=1) as pipe:
        assert [(y.get() == n).all() for n, y in enumerate(pipe.map(XS))] == [True] * 10
    assert copied == [mine.data.ptr] * 10


def test_an_input_left_in_a_cycle_is_not_kept(new_bench: Any) -> None:
    """As numba's compiler leaves it."""
    bench = new_bench()

    def leaves(x: Any) -> Any:
        cycle = [x]
        cycle.append(cycle)
        return x + 1

    with bench.pipe(leaves) as pipe:
        assert [(y.get() == x + 1).all() for x, y in zip(XS, pipe.map(XS), strict=True)] == [True] * 10


@pytest.mark.parametrize("way", [lambda x: x, lambda x: x[3:], lambda x: lambda: x])
def test_keeping_an_input_is_an_error(new_bench: Any, way: Any) -> None:
    bench, kept = new_bench(), []

    def keep(x: Any) -> Any:
        kept.append(way(x))
        return x + 1

    with bench.pipe(keep) as pipe:
        with pytest.raises(StageError, match="kept an array of its input") as caught:
            pipe.submit(XS[0]).result()
        assert isinstance(caught.value.__cause__, InvalidArgument)
        kept.clear()


def test_a_stage_may_keep_a_copy_and_raise_and_go_on(new_bench: Any) -> None:
    bench, kept = new_bench(), []

    def stage(x: Any) -> Any:
        kept.append(x.copy())
        if len(kept) == 2:
            raise RuntimeError("second")
        return kept[-1] + len(kept)

    with bench.pipe(stage) as pipe:
        assert (pipe.submit(XS[5]).result().get() == 6).all()
        with pytest.raises(StageError, match="second"):
            pipe.submit(XS[5]).result()
        assert (pipe.submit(XS[5]).result().get() == 8).all()
        kept.clear()


def test_arrays_of_the_library_are_inputs(new_bench: Any) -> None:
    """Read after what their stream has queued, which may write them again right after submit()."""
    for seed in range(4):
        bench = new_bench(seed)
        with bench.pipe(lambda x: x * 2, lambda x: x + 1, in_flight=6) as pipe:
            x = bench.cupy.empty((40, 50), np.float32)
            tickets = []
            for n in range(6):
                kernel(lambda x, n=n: np.full_like(x, n), x, out=x)
                tickets.append(pipe.submit(x))
            for n, ticket in enumerate(tickets):
                with bench.cupy.cuda.Device(1):
                    assert (ticket.result().get() == 2 * n + 1).all(), f"seed {seed}"


def test_token_loops(new_bench: Any) -> None:
    bench = new_bench()
    with bench.pipe(lambda x: x * 2, lambda x: x + 1) as pipe:
        tickets = [pipe.submit(x) for x in XS[:3]]
        for _ in range(4):
            tickets = [pipe.submit(ticket) for ticket in tickets]
        for n, ticket in enumerate(tickets):
            with bench.cupy.cuda.Device(1):
                assert (ticket.result().get() == 32 * n + 31).all()


def test_results_are_the_callers_own(new_bench: Any) -> None:
    bench = new_bench()
    with bench.pipe(lambda x: x + 1) as pipe:
        ticket = pipe.submit(XS[0])
        y = ticket.result()
        kernel(lambda x: x * 0 - 5, y, out=y)
        others = [pipe.submit(ticket).result() for _ in range(6)]
        assert all((other.get() == 2).all() for other in others) and (y.get() == -5).all()


def test_device_and_stream_of_the_caller_stay(new_bench: Any) -> None:
    bench = new_bench()
    pool = bench.cupy.pool
    seen = []

    def look(x: Any) -> Any:
        seen.append((pool.devices[-1], pool.stream().ptr))
        return x + 1

    with bench.pipe(look, look) as pipe:
        streams = [stage.stream.handle for stage in pipe._line.stages]
        pipe.submit(XS[0]).result()
    assert seen == list(enumerate(streams)) and pool.devices == [0] and not pool.current


# ---- libraries without a current stream ------------------------------------------------------------------------------


class Explicit(Library):
    """As of numba or cuda.core: the stage is given the stream, and allocates with empty()."""

    cupy: Any = None

    def __init__(self, device: int, handle: int) -> None:
        self.stream = self.cupy.cuda.ExternalStream(handle, device)
        self.device = self.cupy.cuda.Device(device)

    def current(self) -> Any:
        return nullcontext()

    def wrap(self, array: Any) -> Any:
        return self.cupy.from_dlpack(array)

    def callers_stream(self) -> int:
        return int(self.cupy.pool.stream().ptr)


@pytest.fixture
def explicit(monkeypatch: pytest.MonkeyPatch, new_bench: Any) -> Any:
    def new(seed: int = 0) -> Bench:
        bench = new_bench(seed)
        kind = type("Bound", (Explicit,), {"cupy": bench.cupy})
        monkeypatch.setattr(adapters, "make", lambda name, layouts, backend: LibraryAdapter("numba", layouts, kind))
        return bench

    return new


def on(stream: Any, f: Any, x: Any, out: Any) -> Any:
    with simulated_cupy.Device(x.pool, stream.device_id), stream:
        return kernel(f, x, out=out)


def twice(stage: Any, x: Any) -> Any:
    return on(stage.stream, lambda x: x * 2, x, stage.empty(x.shape, x.dtype))


@pytest.mark.parametrize("seed", range(4))
def test_memory_of_empty_is_passed_on(explicit: Any, copied: list[int], seed: int) -> None:
    bench = explicit(seed)

    def parts(stage: Any, x: Any) -> Any:
        y = twice(stage, x)
        return y[1:], stage.empty((), np.float32), y, x.shape[0]

    with bench.pipe(twice, parts, lambda stage, x: twice(stage, x[2]), adapter="numba", in_flight=6) as pipe:
        for n, y in enumerate(pipe.map(XS)):
            assert (y.get() == 8 * n).all(), f"seed {seed}"
            del y
        before = pipe.plan().memory
        for _ in pipe.map(XS):
            pass
        assert pipe.plan().memory == before
    assert copied == []


@pytest.mark.parametrize("seed", range(4))
def test_all_else_is_copied(explicit: Any, copied: list[int], seed: int) -> None:
    bench = explicit(seed)
    kept: list[Any] = []

    def static(stage: Any, x: Any) -> Any:
        kept[:] = kept or [stage.empty(x.shape, "float32")]
        return on(stage.stream, lambda x: x + 1, x, kept[0])

    def own(stage: Any, x: Any) -> Any:
        with simulated_cupy.Device(x.pool, stage.device), stage.stream:
            return x + 1

    with bench.pipe(static, own, lambda stage, x: x, adapter="numba", in_flight=6, depth=1) as pipe:
        assert [(y.get() == n + 2).all() for n, y in enumerate(pipe.map(XS))] == [True] * 10, f"seed {seed}"
        kept.clear()
    assert len(copied) == 30


def test_results_may_be_dropped_while_the_caller_still_reads_them(explicit: Any) -> None:
    for seed in range(4):
        bench = explicit(seed)
        totals = []
        with bench.pipe(twice, adapter="numba", in_flight=4) as pipe:
            for y in pipe.map(XS):
                totals.append(y + 0)
                del y
        assert [total.get()[0, 0] for total in totals] == [2 * n for n in range(10)], f"seed {seed}"


def test_wrong_outputs(explicit: Any) -> None:
    bench = explicit()
    elsewhere = bench.cupy.empty((3,), np.float32)
    for wrong, message in [
        (lambda stage, x: twice(stage, x).T, "with gaps or in another order; C order is allowed"),
        (lambda stage, x: elsewhere, "ndarray on device 0; its own device 1 is allowed"),
    ]:
        with bench.pipe(twice, wrong, adapter="numba") as pipe, pytest.raises(StageError, match=message):
            pipe.submit(XS[0]).result()


# ---- which adapter ---------------------------------------------------------------------------------------------------


GPU: Any = SimpleNamespace(backend="cuda")
SIMULATED: Any = SimpleNamespace(backend="sim")


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules with the names of the libraries, each with one type and one function of its own."""
    monkeypatch.setattr(adapters, "_KNOWN", REAL)
    made = SimpleNamespace()
    for name in ("torch", "cupy", "numba.cuda", "cuda.core", "numba.core"):
        module = ModuleType(name)
        kind = type("Thing", (), {"__module__": name, "__call__": lambda self, x: x})
        vars(module).update(Thing=kind, thing=kind())
        monkeypatch.setitem(sys.modules, name, module)
        setattr(made, name.replace(".", "_"), module)
    return made


def test_auto_is_what_the_stage_is_or_names(libraries: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch, cupy, numba, core = libraries.torch, libraries.cupy, libraries.numba_cuda, libraries.cuda_core
    thing, jitted, device, compiled = cupy.thing, numba.thing, core.thing, libraries.numba_core.thing

    class Method:
        def __call__(self, x: Any) -> Any:
            return cupy.thing(x)

        def other(self, x: Any) -> Any:
            return torch.thing(x)

    cases = {
        "torch": [torch.thing, lambda x: torch.thing(x), partial(lambda x, n: torch.thing(x), n=1), Method().other],
        "cupy": [cupy.thing, lambda x: cupy.thing(x), lambda x: thing(x), Method(), lambda x, n=0: thing(x)],
        "numba": [lambda stage, x: jitted(x), lambda stage, x: numba.thing],
        "cuda.core": [lambda stage, x: device(x)],
        "raw": [lambda stage, x: x, lambda stage, x: torch.thing(x), lambda stage, x: compiled(x)],
    }
    for name, fns in cases.items():
        assert [adapters.choose("auto", GPU, fn) for fn in fns] == [name] * len(fns)


def test_auto_without_a_word_is_what_is_imported(libraries: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert adapters.choose("auto", GPU, lambda x: x) == "torch"
    monkeypatch.delitem(sys.modules, "torch")
    assert adapters.choose("auto", GPU, lambda x: x) == "cupy"
    monkeypatch.delitem(sys.modules, "cupy")
    assert adapters.choose("auto", GPU, lambda x: x) == "raw"
    assert adapters.choose("auto", SIMULATED, lambda x: x) == "numpy"
    assert adapters.choose("auto", SIMULATED, lambda x: libraries.torch.thing(x)) == "numpy"  # names a test's namespace
    torch = libraries.torch
    assert adapters.choose("auto", SIMULATED, lambda x: torch.thing(x)) == "torch"


@pytest.mark.parametrize(
    ("backend", "cuda", "hip", "words"),
    [
        ("cuda", "13.0", None, ()),
        ("hip", None, "7.2.1", ()),
        ("hip", "13.0", None, ("torch 2.99", "CUDA 13.0", "backend hip", "ROCm build", "choose the backend cuda")),
        (
            "cuda",
            None,
            "7.2.1",
            ("torch 2.99", "ROCm (HIP 7.2.1)", "backend cuda", "CUDA build", "the backend hip"),
        ),
        ("cuda", None, None, ("the CPU alone", "backend cuda", "CUDA build")),
    ],
)
def test_torch_must_be_built_for_the_devices(
    libraries: Any, backend: str, cuda: str | None, hip: str | None, words: tuple[str, ...]
) -> None:
    """torch of either vendor calls its devices "cuda"; only its version tells."""
    libraries.torch.version = SimpleNamespace(cuda=cuda, hip=hip)
    libraries.torch.__version__ = "2.99"
    runtime: Any = SimpleNamespace(backend=backend)
    for name in ("torch", "auto"):
        if words:
            with pytest.raises(BackendUnavailable) as caught:
                adapters.choose(name, runtime, libraries.torch.thing)
            assert all(word in str(caught.value) for word in words), caught.value
        else:
            assert adapters.choose(name, runtime, libraries.torch.thing) == "torch"
    assert adapters.choose("raw", runtime, libraries.torch.thing) == "raw"


@pytest.mark.parametrize(
    "name, module, extra",
    [
        ("torch", "torch", "torch"),
        ("cupy", "cupy", "cupy"),
        ("numba", "numba.cuda", "numba"),
        ("cuda.core", "cuda.core", "cuda-core"),
    ],
)
def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch, name: str, module: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(
        BackendUnavailable, match=rf"the {name} adapter needs {module}: pip install 'pyxdev\[{extra}\]'"
    ):
        adapters.make(name, adapters.Layouts(), "cuda")


def test_adapters_that_do_not_run_there_are_refused() -> None:
    with pytest.raises(
        Unsupported, match=r"the cuda.core adapter does not run on sim devices; these do: numpy, torch, .*raw"
    ):
        Executor([0], [lambda x: x], backend="sim", adapter="cuda.core")
    with pytest.raises(InvalidArgument, match=r"adapter is 'jax'; allowed: auto, numpy, torch, cupy, numba, cuda.core"):
        Executor([0], [Stage(lambda x: x, adapter="jax")], backend="sim")


# ---- arrays of other libraries on the host ---------------------------------------------------------------------------


def test_tensors_in_host_memory_go_to_raw_stages() -> None:
    torch = pytest.importorskip("torch")
    with Executor([0], [lambda stage, x: x], adapter="raw", machine=machine(1)) as pipe:
        y = pipe.submit({"x": torch.arange(6).reshape(2, 3), "n": 1}).result()
        assert y["x"].numpy().tolist() == [[0, 1, 2], [3, 4, 5]] and y["n"] == 1
        with pytest.raises(InvalidArgument, match=r"this torch.Tensor has nothing that NumPy knows"):
            pipe.submit(torch.ones(3, dtype=torch.bfloat16))


def described(**changes: Any) -> Any:
    interface = {"shape": (2, 3), "typestr": "<f4", "data": (4096, False), "strides": None, "version": 3, **changes}
    return describe(SimpleNamespace(__cuda_array_interface__=interface))


def test_the_interface_is_read() -> None:
    assert described(stream=77) == ((((2, 3)), "float32", 24), 4096, True, 77)
    assert described(stream=None).stream == 1 and described().stream == 1
    assert described(strides=(12, 4)).dense and not described(strides=(4, 8)).dense
    assert described(shape=(1, 3), strides=(999, 4)).dense and described(shape=(0, 3), strides=(1, 1)).dense
    assert not described(strides=(24, 4)).dense
    for typestr in (">f4", "<U3", "|V2", "<M8[s]", "|O"):
        with pytest.raises(InvalidArgument, match="numbers and bools can"):
            described(typestr=typestr)
