"""CuPy, numba and cuda.core stages on real GPUs.

    pytest tests/conformance/test_library_stages.py --pyxdev-backend=cuda

Where there is no GPU, tests/unit/test_executor_libraries.py runs what the three share over simulated devices.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from pyxdev import Executor, Stage
from pyxdev.errors import InvalidArgument, StageError

SIZE = 1 << 18  # floats of an activation
SLOW = 40  # kernels that take far longer than the copies beside them


def cupy_kit(cupy):
    def apply(stage, x, a, b, out=None, times=1):
        for _ in range(times - 1):
            x * a
        y = x * cupy.float32(a) + cupy.float32(b)
        if out is None:
            return y
        out[...] = y
        return out

    return SimpleNamespace(
        apply=apply,
        fn=lambda f: lambda x: f(None, x),
        empty=lambda stage, n: cupy.empty(n, cupy.float32),
        own=lambda stage, n: cupy.empty(n, cupy.float32),
        host=cupy.asnumpy,
        part=lambda x: x[16:],
    )


def numba_kit(cuda):
    @cuda.jit
    def scale(y, x, a, b):
        n = cuda.grid(1)
        if n < x.size:
            y[n] = x[n] * a + b

    def apply(stage, x, a, b, out=None, times=1):
        y = stage.empty(x.shape, np.float32) if out is None else out
        for _ in range(times):
            scale[-(-x.size // 256), 256, stage.stream](y, x, np.float32(a), np.float32(b))
        return y

    return SimpleNamespace(
        apply=apply,
        fn=lambda f: f,
        empty=lambda stage, n: stage.empty((n,), "float32"),
        own=lambda stage, n: cuda.device_array(n, np.float32, stream=stage.stream),
        host=lambda y: y.copy_to_host(),
        part=lambda x: x[16:],
    )


def core_kit(core):
    code = """
    extern "C" __global__ void scale(float *y, const float *x, float a, float b, long long size) {
        long long n = blockIdx.x * (long long)blockDim.x + threadIdx.x;
        if (n < size)
            y[n] = x[n] * a + b;
    }
    """
    device = core.Device(0)
    device.set_current()
    options = core.ProgramOptions(std="c++17", arch=f"sm_{device.arch}")
    kernel = core.Program(code, code_type="c++", options=options).compile("cubin").get_kernel("scale")

    def address(x):
        return int(x.handle) if isinstance(x, core.Buffer) else x.ptr

    def apply(stage, x, a, b, out=None, times=1):
        y = stage.empty(x.shape, np.float32) if out is None else out
        config = core.LaunchConfig(grid=-(-x.shape[0] // 256), block=256)
        values = np.float32(a), np.float32(b), np.int64(x.shape[0])
        for _ in range(times):
            core.launch(stage.stream, config, kernel, address(y), address(x), *values)
        return y

    def own(stage, n):
        return core.DeviceMemoryResource(stage.device).allocate(4 * n, stream=stage.stream)

    return SimpleNamespace(
        apply=apply,
        fn=lambda f: f,
        empty=lambda stage, n: stage.empty((n,), "float32"),
        own=own,
        host=lambda y: y.exporting_obj.numpy(),
        part=None,
    )


KITS = {"cupy": ("cupy", cupy_kit), "numba": ("numba.cuda", numba_kit), "cuda.core": ("cuda.core", core_kit)}


@pytest.fixture(params=KITS)
def kit(request, pyxdev_backend):
    if pyxdev_backend != "cuda":
        pytest.skip("stages of libraries run on CUDA devices; simulated ones have tests of their own")
    name, make = KITS[request.param]
    library = pytest.importorskip(name)
    torch = pytest.importorskip("torch", reason="torch tells whether there is a GPU")
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    if name == "numba.cuda":
        try:
            library.jit("void(float32[:])")(lambda x: None)
        except AttributeError as error:
            pytest.skip(f"this numba does not compile beside NumPy {np.__version__}: {error}")
    kit = make(library)
    kit.adapter, kit.library = request.param, library
    return kit


@pytest.fixture
def devices(runtime):
    return [0, runtime.device_count - 1, 0]


def inputs(count):
    return [np.full(SIZE, n, np.float32) for n in range(count)]


def opened(runtime, devices, kit, *fns, **options):
    return Executor(devices[: len(fns)], [kit.fn(fn) for fn in fns], adapter=kit.adapter, runtime=runtime, **options)


@pytest.mark.parametrize("depth, in_flight", [(1, 1), (1, 8), (3, 6), ("auto", "auto")])
@pytest.mark.parametrize("host_stage", ["1", "auto"])
def test_stages_give_the_bits_of_running_in_order(kit, runtime, devices, depth, in_flight, host_stage):
    """A slow stage in the middle: what is handed on too early, or given back too early, is overwritten."""

    def first(stage, x):
        return {"y": kit.apply(stage, x, 2, 1), "n": 3}

    def slow(stage, x):
        return kit.apply(stage, x["y"], 1, x["n"], times=SLOW), x["n"]

    def last(stage, x):
        return kit.apply(stage, x[0], 3, x[1])

    options = {"depth": depth, "in_flight": in_flight, "host_stage": host_stage}
    with opened(runtime, devices, kit, first, slow, last, **options) as pipeline:
        assert {stage.adapter for stage in pipeline.plan().stages} == {kit.adapter}
        for _ in range(3):
            for n, y in enumerate(pipeline.map(inputs(20))):
                assert (kit.host(y) == (2 * n + 1 + 3) * 3 + 3).all(), n


@pytest.mark.parametrize("how", ["static", "own", "input", "twice"])
def test_outputs_that_others_refer_to(kit, runtime, devices, how):
    kept = []

    def stage(stage, x):
        if how == "static":
            kept[:] = kept or [kit.empty(stage, SIZE)]
            return kit.apply(stage, x, 1, 1, out=kept[0])
        if how == "own":
            return kit.apply(stage, x, 1, 1, out=kit.own(stage, SIZE))
        if how == "input":
            return kit.apply(stage, x, 1, 1, out=x)
        y = kit.apply(stage, x, 1, 1)
        return y, y

    def slow(stage, x):
        x = x[-1] if isinstance(x, tuple) else x
        if how == "own" and kit.adapter == "cuda.core":  # a Buffer has bytes, no numbers
            y = stage.empty((SIZE,), "float32")
            memory = kit.library.Buffer.from_handle(x.ptr, 4 * SIZE, owner=x)
            kit.library.Buffer.from_handle(y.ptr, 4 * SIZE, owner=y).copy_from(memory, stream=stage.stream)
            return y
        return kit.apply(stage, x, 1, 0, times=SLOW)

    with opened(runtime, devices, kit, stage, slow, in_flight=6, depth=1) as pipeline:
        for n, y in enumerate(pipeline.map(inputs(20))):
            assert (kit.host(y) == n + 1).all(), n
        kept.clear()


def test_a_part_of_an_output(kit, runtime, devices):
    if kit.part is None:
        pytest.skip("views of cuda.core are not cut")
    with opened(runtime, devices, kit, lambda stage, x: kit.part(kit.apply(stage, x, 1, 2))) as pipeline:
        for n, y in enumerate(pipeline.map(inputs(6))):
            assert kit.host(y).shape == (SIZE - 16,) and (kit.host(y) == n + 2).all()


def test_keeping_an_input_is_an_error(kit, runtime, devices):
    kept = []

    def keep(stage, x):
        kept.append(x)
        return kit.apply(stage, x, 1, 1)

    with opened(runtime, devices, kit, keep) as pipeline:
        with pytest.raises(StageError, match="kept an array of its input") as caught:
            pipeline.submit(inputs(1)[0]).result()
        assert isinstance(caught.value.__cause__, InvalidArgument)
        kept.clear()
        del caught


def test_a_stage_that_raises(kit, runtime, devices):
    def fails(stage, x):
        if x["n"] == 2:
            raise RuntimeError("here")
        return kit.apply(stage, x["x"], 1, 1)

    with opened(runtime, devices, kit, fails) as pipeline:
        x = inputs(1)[0]
        tickets = [pipeline.submit({"x": x, "n": n}) for n in range(4)]
        with pytest.raises(StageError, match="microbatch 2"):
            tickets[2].result()
        assert (kit.host(pipeline.submit({"x": x, "n": 0}).result()) == 1).all()
        del tickets


def test_token_loops(kit, runtime, devices):
    with opened(
        runtime, devices, kit, lambda s, x: kit.apply(s, x, 2, 0), lambda s, x: kit.apply(s, x, 1, 1)
    ) as pipeline:
        tickets = [pipeline.submit(x) for x in inputs(3)]
        for _ in range(6):
            tickets = [pipeline.submit(ticket) for ticket in tickets]
        for n, ticket in enumerate(tickets):
            assert (kit.host(ticket.result()) == 128 * n + 127).all()
        del tickets, ticket


def test_memory_stays_bounded(kit, runtime, devices):
    with opened(runtime, devices, kit, lambda s, x: kit.apply(s, x, 2, 0), in_flight=4) as pipeline:
        free = []
        for _ in range(6):
            for y in pipeline.map(inputs(20)):
                del y
            free.append(runtime.memory_info(0)[0])
        assert free[-1] == free[2]


def test_arrays_of_the_library_are_inputs_and_results_are_the_callers_own(kit, runtime, devices):
    """Read after what their stream has queued, which may write them again right after submit()."""
    if kit.adapter != "cupy":
        pytest.skip("with CuPy's current stream")
    cupy = kit.library
    with opened(
        runtime, devices, kit, lambda s, x: kit.apply(s, x, 2, 0, times=SLOW), lambda s, x: kit.apply(s, x, 1, 1)
    ) as pipeline:
        with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True) as theirs:
            x = cupy.empty(SIZE, cupy.float32)
            tickets = []
            for n in range(12):
                for _ in range(SLOW):
                    x[...] = -1
                x[...] = n
                tickets.append(pipeline.submit(x))
                assert cupy.cuda.get_current_stream() == theirs and cupy.cuda.get_current_stream().ptr == theirs.ptr
        with cupy.cuda.Device(devices[1]):
            for n, ticket in enumerate(tickets):
                y = ticket.result()
                y += 5
                assert (cupy.asnumpy(y) == 2 * n + 6).all(), n
                again = pipeline.submit(ticket).result()  # the output itself is as it was
                assert (cupy.asnumpy(again) == 4 * n + 3).all(), n
        assert cupy.cuda.runtime.getDevice() == 0
        del tickets, ticket, y, again


VIEWS = {
    "part": lambda cupy, y: y[5:],
    "other shape": lambda cupy, y: y.reshape(2, -1),
    "flat": lambda cupy, y: y.ravel()[::3],
    "broadcast": lambda cupy, y: cupy.broadcast_to(y, (2, *y.shape))[0],
    "real": lambda cupy, y: y.real[1:],
    "new view": lambda cupy, y: y.view(),
    "torch": lambda cupy, y: cupy.from_dlpack(pytest.importorskip("torch").from_dlpack(y)),
    "interface": lambda cupy, y: cupy.ndarray(
        y.shape, y.dtype, cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(y.data.ptr, y.nbytes, y), 0)
    ),
}


@pytest.mark.parametrize("way", VIEWS)
def test_views_that_a_stage_of_cupy_keeps(kit, runtime, devices, way):
    """The next call writes to the view while the output is still being read: it must have been a copy."""
    if kit.adapter != "cupy":
        pytest.skip("CuPy's views")
    kept = []

    def stage(stage, x):
        if kept:
            kept.pop()[...] = -1
        y = kit.apply(stage, x, 1, 1)
        kept.append(VIEWS[way](kit.library, y))
        return y

    def slow(stage, x):
        return kit.apply(stage, x, 1, 0, times=SLOW)

    with opened(runtime, devices, kit, stage, slow, in_flight=8, depth=1) as pipeline:
        for n, y in enumerate(pipeline.map(inputs(20))):
            assert (kit.host(y) == n + 1).all(), n
        kept.clear()
        del y


@pytest.mark.parametrize("pool", ["default", "async", "none"])
def test_every_allocator_of_cupy(kit, runtime, devices, pool):
    if kit.adapter != "cupy":
        pytest.skip("CuPy's allocators")
    cupy = kit.library
    allocator = {
        "default": lambda: cupy.cuda.MemoryPool().malloc,
        "async": lambda: cupy.cuda.MemoryAsyncPool().malloc,
        "none": lambda: None,
    }[pool]()
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(allocator)
    try:
        with opened(
            runtime, devices, kit, lambda s, x: kit.apply(s, x, 2, 1), lambda s, x: kit.apply(s, x, 1, 1, times=SLOW),
            in_flight=8, depth=1,
        ) as pipeline:  # fmt: skip
            for n, y in enumerate(pipeline.map(inputs(30))):
                assert (kit.host(y) == 2 * n + 2).all(), n
            del y
    finally:
        cupy.cuda.set_allocator(before)


def test_with_torch_in_one_pipeline(kit, runtime, devices):
    torch = pytest.importorskip("torch")
    stages = [
        Stage(lambda x: x * 2, adapter="torch"),
        Stage(kit.fn(lambda s, x: kit.apply(s, x, 1, 1)), adapter=kit.adapter),
        Stage(lambda x: torch.relu(x - 3), adapter="torch"),
    ]
    with torch.no_grad(), Executor(devices, stages, runtime=runtime) as pipeline:
        for n, y in enumerate(pipeline.map(inputs(12))):
            assert (y == max(0, 2 * n + 1 - 3)).all().item(), n
        del y
