"""Fill, check and spin: the kernels of the checks, compiled at run time on GPUs, host functions on simulated devices.

    fill(address, nbytes, key, first)            writes pattern bytes first .. first + nbytes - 1
    check(address, nbytes, key, first, report)   adds to three 64-bit words: wrong bytes, ~first wrong, last wrong + 1
    spin(latch, seconds)                         until the host sets the first word of the latch, at most so long;
                                                 sets the second one at its end

Addresses need no alignment. The report must be zero before the first check.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from pyxdev._native import Runtime, Stream
from pyxdev.backends.hip import loaded_copies
from pyxdev.checks import pattern
from pyxdev.errors import BackendUnavailable, DriverError

REPORT_BYTES = 24
LATCH_BYTES = 8  # two 32-bit words of page-locked memory

# For NVRTC and hiprtc alike. wall_clock64 counts in ticks of the device's constant clock, globaltimer in ns.
SOURCE = r"""
typedef unsigned char u8;
typedef unsigned long long u64;

static __device__ u64 mix64(u64 v)
{
    v ^= v >> 30;
    v *= 0xbf58476d1ce4e5b9ull;
    v ^= v >> 27;
    v *= 0x94d049bb133111ebull;
    return v ^ v >> 31;
}

static __device__ u64 ticks(void)
{
#ifdef __CUDACC_RTC__
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
#else
    return wall_clock64();
#endif
}

#define FOR_WORDS                                                                              \
    for (u64 w = first / 8 + blockIdx.x * (u64)blockDim.x + threadIdx.x; w * 8 < first + bytes; \
         w += (u64)gridDim.x * blockDim.x)
#define BEGIN (w * 8 < first ? first : w * 8)
#define END (w * 8 + 8 > first + bytes ? first + bytes : w * 8 + 8)

extern "C" __global__ void fill(u8 *at, u64 bytes, u64 key, u64 first)
{
    FOR_WORDS {
        u64 word = mix64(key + w), begin = BEGIN, end = END;
        u8 *to = at + (begin - first);
        if (end - begin == 8 && (u64)to % 8 == 0)
            *(u64 *)to = word;
        else
            for (u64 i = begin; i < end; i++)
                at[i - first] = (u8)(word >> i % 8 * 8);
    }
}

extern "C" __global__ void check(const u8 *at, u64 bytes, u64 key, u64 first, u64 *report)
{
    FOR_WORDS {
        u64 word = mix64(key + w), begin = BEGIN, end = END;
        const u8 *from = at + (begin - first);
        if (end - begin == 8 && (u64)from % 8 == 0 && *(const u64 *)from == word)
            continue;
        for (u64 i = begin; i < end; i++)
            if (at[i - first] != (u8)(word >> i % 8 * 8)) {
                atomicAdd(&report[0], 1ull);
                atomicMax(&report[1], ~(i - first));
                atomicMax(&report[2], i - first + 1);
            }
    }
}

extern "C" __global__ void spin(volatile unsigned *latch, u64 limit)
{
    u64 begin = ticks();
    while (!*latch && ticks() - begin < limit)
        ;
    latch[1] = 1;
    __threadfence_system();
}
"""
NAMES = ("fill", "check", "spin")
THREADS = 256
MAX_BLOCKS = 2048

_Argument = tuple[int, Any]


class Kernels(Protocol):
    """The kernels of one runtime; each call enqueues on the stream, on the stream's device."""

    remote: bool  # they reach memory of peers too

    def fill(self, stream: Stream, address: int, nbytes: int, key: int, first: int) -> None: ...
    def check(self, stream: Stream, address: int, nbytes: int, key: int, first: int, report: int) -> None: ...
    def spin(self, stream: Stream, latch: int, seconds: float) -> None: ...
    def close(self) -> None: ...


def open_kernels(runtime: Runtime) -> Kernels:
    """Raises BackendUnavailable if they cannot be compiled; the message says what is missing."""
    if runtime.backend == "sim":
        return HostKernels()
    return GpuKernels(CudaModules(runtime) if runtime.backend == "cuda" else HipModules(runtime))


def memory(address: int, nbytes: int) -> pattern.Bytes:
    """Host memory (or a simulated device's) as uint8 of shape (nbytes,). It must outlive the array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class HostKernels:
    """Simulated devices: the memory of a device is the host's, a spin takes all of its time."""

    remote = False
    RATE = 400e9  # bytes/s

    def fill(self, stream: Stream, address: int, nbytes: int, key: int, first: int) -> None:
        def run() -> None:
            memory(address, nbytes)[:] = pattern.make(key, first, nbytes)

        stream.launch(run, cost=nbytes / self.RATE, label="fill", writes=[(address, nbytes)])

    def check(self, stream: Stream, address: int, nbytes: int, key: int, first: int, report: int) -> None:
        def run() -> None:
            wrong = np.flatnonzero(memory(address, nbytes) != pattern.make(key, first, nbytes))
            if len(wrong):
                words = memory(report, REPORT_BYTES).view(np.uint64)
                words[0] += np.uint64(len(wrong))
                words[1] = max(words[1], ~np.uint64(wrong[0]))
                words[2] = max(words[2], np.uint64(wrong[-1] + 1))

        stream.launch(
            run,
            cost=nbytes / self.RATE,
            label="check",
            reads=[(address, nbytes)],
            writes=[(report, REPORT_BYTES)],
        )

    def spin(self, stream: Stream, latch: int, seconds: float) -> None:
        def end() -> None:
            memory(latch, LATCH_BYTES).view(np.uint32)[1] = 1

        stream.launch(lambda: None, cost=seconds, label="spin")
        stream.launch(end, label="end of spin")  # a kernel of its own: the first one may run at its beginning

    def close(self) -> None:
        """Nothing is held."""


class Modules(Protocol):
    """The vendor's side: one loaded module per device."""

    ticks: float  # of the spin kernel, per second

    def launch(self, stream: Stream, name: str, blocks: int, threads: int, arguments: Sequence[_Argument]) -> None: ...
    def close(self) -> None: ...


class GpuKernels:
    """The compiled kernels, over either vendor's modules."""

    remote = True

    def __init__(self, modules: Modules) -> None:
        self._modules = modules

    def fill(self, stream: Stream, address: int, nbytes: int, key: int, first: int) -> None:
        self._run(stream, "fill", nbytes, [address], [nbytes, key, first], [])

    def check(self, stream: Stream, address: int, nbytes: int, key: int, first: int, report: int) -> None:
        self._run(stream, "check", nbytes, [address], [nbytes, key, first], [report])

    def spin(self, stream: Stream, latch: int, seconds: float) -> None:
        arguments = [(latch, ctypes.c_void_p), (int(seconds * self._modules.ticks), ctypes.c_ulonglong)]
        self._modules.launch(stream, "spin", 1, 1, arguments)

    def close(self) -> None:
        self._modules.close()

    def _run(
        self, stream: Stream, name: str, nbytes: int, before: list[int], numbers: list[int], after: list[int]
    ) -> None:
        if nbytes == 0:
            return
        arguments: list[_Argument] = [(pointer, ctypes.c_void_p) for pointer in before]
        arguments += [(number, ctypes.c_ulonglong) for number in numbers]
        arguments += [(pointer, ctypes.c_void_p) for pointer in after]
        blocks = min(MAX_BLOCKS, nbytes // (8 * THREADS) + 1)
        self._modules.launch(stream, name, blocks, THREADS, arguments)


def _checked(operation: str, answer: Any) -> Any:
    """What a vendor's Python call returned after its code."""
    code, *values = answer if isinstance(answer, tuple) else (answer,)
    if int(code):
        raise DriverError(f"{operation}: {code!r}", status="DRIVER", code=int(code), operation=operation)
    return values[0] if len(values) == 1 else tuple(values)


class CudaModules:
    """Compiled by NVRTC to a cubin: a driver older than NVRTC refuses its PTX."""

    ticks = 1e9

    def __init__(self, runtime: Runtime) -> None:
        try:
            from cuda.bindings import driver, nvrtc

            self._driver = driver
            self._images = _compile_each(runtime, lambda arch: _nvrtc(nvrtc, arch))
        except BackendUnavailable:
            raise
        except (ImportError, RuntimeError) as failure:
            raise BackendUnavailable(
                f"the checks' kernels need NVRTC (pip install nvidia-cuda-nvrtc): {failure}"
            ) from failure
        self._contexts: dict[int, tuple[Any, Any]] = {}  # device: its handle, its primary context
        self._modules: list[tuple[int, Any]] = []
        self._functions: dict[tuple[int, str], Any] = {}

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        driver = self._driver
        _checked("cuCtxPushCurrent", driver.cuCtxPushCurrent(self._contexts[device][1]))
        try:
            yield
        finally:
            _checked("cuCtxPopCurrent", driver.cuCtxPopCurrent())

    def _load(self, device: int) -> None:
        driver = self._driver
        if device not in self._contexts:
            handle = _checked("cuDeviceGet", driver.cuDeviceGet(device))
            context = _checked("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(handle))
            self._contexts[device] = handle, context
        with self._on(device):
            module = _checked("cuModuleLoadData", driver.cuModuleLoadData(self._images[device]))
            self._modules.append((device, module))
            for name in NAMES:
                found = driver.cuModuleGetFunction(module, name.encode())
                self._functions[device, name] = _checked("cuModuleGetFunction", found)

    def launch(self, stream: Stream, name: str, blocks: int, threads: int, arguments: Sequence[_Argument]) -> None:
        driver, device = self._driver, stream.device
        if (device, name) not in self._functions:
            self._load(device)
        values, kinds = zip(*arguments, strict=True)
        with self._on(device):
            function = self._functions[device, name]
            launched = driver.cuLaunchKernel(
                function, blocks, 1, 1, threads, 1, 1, 0, stream.handle, (values, kinds), 0
            )
            _checked("cuLaunchKernel", launched)

    def close(self) -> None:
        driver = self._driver
        for device, module in self._modules:
            with self._on(device):
                _checked("cuModuleUnload", driver.cuModuleUnload(module))
        for handle, _ in self._contexts.values():
            _checked("cuDevicePrimaryCtxRelease", driver.cuDevicePrimaryCtxRelease(handle))
        self._modules.clear()
        self._contexts.clear()
        self._functions.clear()


def _compile_each(runtime: Runtime, compile_for: Callable[[str], bytes]) -> list[bytes]:
    """An image per device, each architecture compiled once."""
    names = [runtime.device_info(device).arch for device in range(runtime.device_count)]
    images = {arch: compile_for(arch) for arch in dict.fromkeys(names)}
    return [images[arch] for arch in names]


def _nvrtc(nvrtc: Any, arch: str) -> bytes:
    program = _checked("nvrtcCreateProgram", nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"checks.cu", 0, [], []))
    try:
        options = [f"--gpu-architecture={arch}".encode()]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(code):
            log = b" " * _checked("nvrtcGetProgramLogSize", nvrtc.nvrtcGetProgramLogSize(program))
            _checked("nvrtcGetProgramLog", nvrtc.nvrtcGetProgramLog(program, log))
            raise BackendUnavailable(f"NVRTC refused the checks' kernels for {arch}: {log.decode(errors='replace')}")
        image: bytes = b" " * _checked("nvrtcGetCUBINSize", nvrtc.nvrtcGetCUBINSize(program))
        _checked("nvrtcGetCUBIN", nvrtc.nvrtcGetCUBIN(program, image))
        return image
    finally:
        nvrtc.nvrtcDestroyProgram(program)


class HipModules:
    """Compiled by hiprtc. Launches need the stream's device current; the caller's is put back."""

    WALL_CLOCK_RATE = 10017  # hipDeviceAttributeWallClockRate, kHz

    def __init__(self, runtime: Runtime) -> None:
        try:
            from hip import hip, hiprtc

            self._hip: Any = hip
            self.ticks = 1000.0 * self._rate()
            _one_library()
            self._images = _compile_each(runtime, lambda arch: _hiprtc(hiprtc, arch))
        except BackendUnavailable:
            raise
        except (ImportError, RuntimeError) as failure:
            raise BackendUnavailable(f"the checks' kernels need hiprtc (hip-python): {failure}") from failure
        self._modules: dict[int, Any] = {}
        self._functions: dict[tuple[int, str], Any] = {}

    def _rate(self) -> int:
        """kHz of wall_clock64. Runtimes without the attribute count in ns: HIP over CUDA devices."""
        attribute = self._hip.hipDeviceAttribute_t(self.WALL_CLOCK_RATE)
        code, rate = self._hip.hipDeviceGetAttribute(attribute, 0)
        if int(code):
            self._hip.hipGetLastError()
            return 1_000_000
        return int(rate) or 1_000_000

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        hip = self._hip
        before = _checked("hipGetDevice", hip.hipGetDevice())
        _checked("hipSetDevice", hip.hipSetDevice(device))
        try:
            yield
        finally:
            _checked("hipSetDevice", hip.hipSetDevice(before))

    def _load(self, device: int) -> None:
        hip = self._hip
        self._modules[device] = _checked("hipModuleLoadData", hip.hipModuleLoadData(self._images[device]))
        for name in NAMES:
            found = hip.hipModuleGetFunction(self._modules[device], name.encode())
            self._functions[device, name] = _checked("hipModuleGetFunction", found)

    def launch(self, stream: Stream, name: str, blocks: int, threads: int, arguments: Sequence[_Argument]) -> None:
        hip, device = self._hip, stream.device
        with self._on(device):
            if device not in self._modules:
                self._load(device)
            function = self._functions[device, name]
            values = tuple(kind(value) for value, kind in arguments)
            launched = hip.hipModuleLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream.handle, None, values)
            _checked("hipModuleLaunchKernel", launched)

    def close(self) -> None:
        for device, module in self._modules.items():
            with self._on(device):
                _checked("hipModuleUnload", self._hip.hipModuleUnload(module))
        self._modules.clear()
        self._functions.clear()


def _one_library() -> None:
    """hip-python, which launches the kernels, must use the library that our streams are of."""
    copies = loaded_copies()
    if len(copies) > 1:
        raise BackendUnavailable(
            f"two HIP libraries are in this process, {' and '.join(copies)}, and hip-python uses another than pyxdev: "
            "let ROCM_PATH and LD_LIBRARY_PATH lead to that of PYXDEV_HIP_LIBRARY, or unset it"
        )


def _hiprtc(hiprtc: Any, arch: str) -> bytes:
    program = _checked("hiprtcCreateProgram", hiprtc.hiprtcCreateProgram(SOURCE.encode(), b"checks.hip", 0, None, None))
    try:
        options = [f"--offload-arch={arch}".encode()]
        (code,) = hiprtc.hiprtcCompileProgram(program, len(options), options)
        if int(code):
            log = bytearray(_checked("hiprtcGetProgramLogSize", hiprtc.hiprtcGetProgramLogSize(program)))
            _checked("hiprtcGetProgramLog", hiprtc.hiprtcGetProgramLog(program, log))
            raise BackendUnavailable(f"hiprtc refused the checks' kernels for {arch}: {log.decode(errors='replace')}")
        image = bytearray(_checked("hiprtcGetCodeSize", hiprtc.hiprtcGetCodeSize(program)))
        _checked("hiprtcGetCode", hiprtc.hiprtcGetCode(program, image))
        return bytes(image)
    finally:
        hiprtc.hiprtcDestroyProgram(program.createRef())
