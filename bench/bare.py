"""Stages of one kernel of a known length, by hand and by the executor: what is left is our own cost.

A stage computes 3x + its index, modulo 2**32, and then keeps its device busy for the rest of its time. On simulated
devices it is a host function with that cost, so the same program runs without a GPU, in simulated time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from bench.ways import ByExecutor, Limits, Run, Way, copies, direct, pair
from pyxdev import Executor
from pyxdev._native import HOST, Array, Buffer, Event, Link, Runtime, Stream
from pyxdev.checks.kernels import memory

SOURCE = r"""
typedef unsigned long long u64;

static __device__ u64 now(void)
{
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

extern "C" __global__ void stage(unsigned *out, const unsigned *in, u64 words, u64 index, u64 ns)
{
    u64 begin = now();
    for (u64 i = threadIdx.x; i < words; i += blockDim.x)
        out[i] = 3 * in[i] + (unsigned)index;
    while (now() - begin < ns)
        ;
}
"""
THREADS = 1024


class Kernel(Protocol):
    def launch(self, stream: Stream, out: int, x: int, nbytes: int, index: int, seconds: float) -> None: ...
    def close(self) -> None: ...


class HostKernel:
    """On simulated devices, whose memory is the host's."""

    def launch(self, stream: Stream, out: int, x: int, nbytes: int, index: int, seconds: float) -> None:
        def run() -> None:
            memory(out, nbytes).view(np.uint32)[:] = expected(memory(x, nbytes).view(np.uint32), index)

        stream.launch(run, cost=seconds, label=f"stage {index}", reads=[(x, nbytes)], writes=[(out, nbytes)])

    def close(self) -> None:
        """Nothing is held."""


class CudaKernel:
    """Compiled by NVRTC, launched through cuda-python with arguments laid out once."""

    def __init__(self, runtime: Runtime) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._handles = [checked(driver.cuDeviceGet(device)) for device in range(runtime.device_count)]
        self._contexts = [checked(driver.cuDevicePrimaryCtxRetain(handle)) for handle in self._handles]
        self._modules, self._functions = [], []
        for device, context in enumerate(self._contexts):
            checked(driver.cuCtxSetCurrent(context))
            module = checked(driver.cuModuleLoadData(_compiled(runtime.device_info(device).arch)))
            self._modules.append(module)
            self._functions.append(checked(driver.cuModuleGetFunction(module, b"stage")))
        self._values = (ctypes.c_uint64 * 5)()
        self._pointers = (ctypes.c_void_p * 5)(*[ctypes.addressof(self._values) + 8 * n for n in range(5)])
        self._arguments = ctypes.addressof(self._pointers)

    def launch(self, stream: Stream, out: int, x: int, nbytes: int, index: int, seconds: float) -> None:
        driver, device = self._driver, stream.device
        self._values[:] = (out, x, nbytes // 4, index, int(seconds * 1e9))
        checked(driver.cuCtxSetCurrent(self._contexts[device]))
        function = self._functions[device]
        checked(driver.cuLaunchKernel(function, 1, 1, 1, THREADS, 1, 1, 0, stream.handle, self._arguments, 0))

    def close(self) -> None:
        for context, module in zip(self._contexts, self._modules, strict=True):
            checked(self._driver.cuCtxSetCurrent(context))
            checked(self._driver.cuModuleUnload(module))
        for handle in self._handles:
            checked(self._driver.cuDevicePrimaryCtxRelease(handle))


def checked(answer: tuple[Any, ...]) -> Any:
    """What a call of cuda-python returned after its code."""
    if int(answer[0]):
        raise RuntimeError(f"CUDA: {answer[0]!r}")
    return answer[1] if len(answer) > 1 else None


def _compiled(arch: str) -> bytes:
    from cuda.bindings import nvrtc

    program = checked(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"stage.cu", 0, [], []))
    checked(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture={arch}".encode()]))
    image = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, image))
    return image


def expected(x: Any, *indices: int) -> Any:
    """What stages of these indices make of x, uint32."""
    for index in indices:
        x = np.uint32(3) * x + np.uint32(index)
    return x


class ByHand:
    """Streams, events, links and slots as one would write them down, without what the executor promises besides.

    A microbatch begins in the caller's memory on a device and ends in the caller's memory on the last device.
    """

    def __init__(
        self, runtime: Runtime, kernel: Kernel, devices: tuple[int, ...], seconds: tuple[float, ...], nbytes: int,
        depth: int, path: str,
    ) -> None:  # fmt: skip
        self.runtime, self.kernel, self.devices, self.seconds = runtime, kernel, devices, seconds
        self.nbytes, self.depth = nbytes, depth
        self.streams: list[Stream] = [runtime.stream(device) for device in devices]
        self.links: list[Link] = [self._link(a, b, path) for a, b in zip((devices[0], *devices), devices, strict=False)]
        self.back: Link = self._link(devices[-1], devices[0], path)
        self.inputs = [[self._buffer(device) for _ in range(depth)] for device in devices]
        self.outputs = [[self._buffer(device) for _ in range(depth)] for device in devices[:-1]]
        # Of slot k of stage n: its input is there; its input was read and its output is there.
        self.arrived: list[list[Event]] = [[runtime.event() for _ in range(depth)] for _ in devices]
        self.done: list[list[Event]] = [[runtime.event() for _ in range(depth)] for _ in devices]

    def _link(self, src: int, dst: int, path: str) -> Link:
        return self.runtime.link(src, dst, path="direct" if src == dst else path, max_bytes=self.nbytes)

    def _buffer(self, device: int) -> Buffer:
        return self.runtime.buffer(device, self.nbytes)

    def step(self, k: int, link: Link, x: int, ready: Event | None, result: int) -> Event:
        """Queues one microbatch through slot k of every stage, from address x to address result."""
        last = len(self.devices) - 1
        for n, stream in enumerate(self.streams):
            slot, arrived, done = self.inputs[n][k].address, self.arrived[n][k], self.done[n][k]
            link.copy(slot, x, self.nbytes, source_ready=ready, dest_free=done, arrived=arrived)
            stream.wait(arrived)
            if n < last:
                x, link = self.outputs[n][k].address, self.links[n + 1]
                stream.wait(self.arrived[n + 1][k])  # the output of this slot before has been read
            self.kernel.launch(stream, x if n < last else result, slot, self.nbytes, n, self.seconds[n])
            done.record(stream)
            ready = done
        assert ready is not None
        return ready

    def close(self) -> None:
        for owned in (self.links, [self.back], self.streams, *self.inputs, *self.outputs, *self.arrived, *self.done):
            for thing in owned:
                thing.close()


class HandWay:
    """ByHand as a way."""

    def __init__(self, bare: Bare, path: str) -> None:
        self.bare, self.path = bare, path
        self.hand = ByHand(bare.runtime, bare.kernel, bare.devices, bare.seconds, bare.nbytes, bare.depth, path)
        self._clock = bare.runtime.clock
        self._used = 0

    def run(self, m: int) -> Run:
        hand, xs, results, self._used = self.hand, self.bare.xs, self.bare.results, min(m, self.bare.most)
        begin = self._clock()
        for i in range(m):
            end = hand.step(i % hand.depth, hand.links[0], xs[i % len(xs)], None, results[i % len(results)])
        host = self._clock() - begin
        end.wait()
        return Run(self._clock() - begin, host)

    stream = run

    def loop(self, sequences: int, steps: int) -> Run:
        hand, results, self._used = self.hand, self.bare.results, sequences
        begin = self._clock()
        ends = [hand.step(k, hand.links[0], self.bare.xs[k], None, results[k]) for k in range(sequences)]
        for _ in range(steps - 1):
            for k in range(sequences):
                ends[k] = hand.step(k, hand.back, results[k], ends[k], results[k])
        host = self._clock() - begin
        for end in ends:
            end.wait()
        return Run(self._clock() - begin, host)

    def outputs(self) -> list[Any]:
        last = self.bare.devices[-1]
        return [self.bare.words(last, address) for address in self.bare.results[: self._used]]

    def close(self) -> None:
        self.hand.close()


class OneWay:
    """Both stages on device 0, one after the other on one stream."""

    path = "none"

    def __init__(self, bare: Bare) -> None:
        self.bare = bare
        self.stream_ = bare.runtime.stream(0)
        self.buffers = [bare.runtime.buffer(0, bare.nbytes) for _ in range(bare.most + 1)]
        self._used = 0

    def run(self, m: int) -> Run:
        bare, between, self._used = self.bare, self.buffers[-1].address, min(m, self.bare.most)
        launch, stream, clock, nbytes = bare.kernel.launch, self.stream_, bare.runtime.clock, bare.nbytes
        begin = clock()
        for i in range(m):
            result = self.buffers[i % bare.most].address
            launch(stream, between, bare.xs[i % bare.most], nbytes, 0, bare.seconds[0])
            launch(stream, result, between, nbytes, 1, bare.seconds[1])
        host = clock() - begin
        stream.synchronize()
        return Run(clock() - begin, host)

    stream = run

    def outputs(self) -> list[Any]:
        return [self.bare.words(0, buffer.address) for buffer in self.buffers[: self._used]]

    def close(self) -> None:
        for thing in (self.stream_, *self.buffers):
            thing.close()


class OurWay(ByExecutor):
    """The executor with raw stages."""

    def __init__(self, bare: Bare, path: str, in_flight: int | str = "auto") -> None:
        runtime, launch, nbytes = bare.runtime, bare.kernel.launch, bare.nbytes

        def make(index: int, seconds: float) -> Any:
            def stage(at: Any, x: Array) -> Array:
                y: Array = at.empty(x.shape, x.dtype)
                launch(at.stream, y.address, x.address, nbytes, index, seconds)
                return y

            return stage

        stages = [make(index, seconds) for index, seconds in enumerate(bare.seconds)]
        staged = {"direct": 0, "staged": 1}[path]
        executor = Executor(
            bare.devices, stages, adapter="raw", runtime=runtime, host_stage=staged, in_flight=in_flight
        )
        xs = [Array(runtime, 0, address, (nbytes // 4,), "uint32", owner=bare) for address in bare.xs]
        super().__init__(executor, xs, path, self._wait)

    def _wait(self) -> None:
        """For the copies that the last result() has queued."""
        for output in self._outputs[-1:]:
            output.ready.wait()

    def outputs(self) -> list[Any]:
        return [output.numpy() for output in super().outputs()]


class Bare:
    """Two stages of one kernel each on two devices, or side by side on one: a kernel takes one of its processors."""

    name = "bare"
    tolerance = 0.0
    alike = ()  # error() says so already

    def __init__(self, runtime: Runtime, seconds: float, nbytes: int, most: int, depth: int = 4) -> None:
        """seconds: of each stage. nbytes: of the activations. most: inputs and outputs that are kept."""
        self.runtime, self.devices = runtime, pair(runtime)
        self.seconds, self.nbytes, self.most, self.depth = (seconds, seconds), nbytes, most, depth
        self.absent: dict[str, str] = {}
        self.kernel: Kernel = HostKernel() if runtime.backend == "sim" else CudaKernel(runtime)
        self.buffers = [runtime.buffer(device, nbytes) for device in self.devices for _ in range(most)]
        self.xs, self.results = [b.address for b in self.buffers[:most]], [b.address for b in self.buffers[most:]]
        self._host, self._stream = runtime.buffer(HOST, nbytes), [runtime.stream(device) for device in self.devices]
        self.values = [np.random.default_rng(seed).integers(0, 2**32, nbytes // 4, np.uint32) for seed in range(most)]
        for address, values in zip(self.xs, self.values, strict=True):
            self._fill(address, values)

    def _fill(self, address: int, values: Any) -> None:
        self.runtime.host_access(self._host.address, self.nbytes, write=True)
        memory(self._host.address, self.nbytes).view(np.uint32)[:] = values
        self._stream[0].copy(address, self._host.address, self.nbytes, dst_device=0, src_device=HOST)
        self._stream[0].synchronize()

    def words(self, device: int, address: int) -> Any:
        """An activation, uint32 of shape (nbytes / 4,)."""
        self._stream[device].copy(self._host.address, address, self.nbytes, dst_device=HOST, src_device=device)
        self._stream[device].synchronize()
        self.runtime.host_access(self._host.address, self.nbytes, write=False)
        return memory(self._host.address, self.nbytes).view(np.uint32).copy()

    def ways(self) -> Iterator[tuple[str, Callable[[], Way]]]:
        yield "one", lambda: OneWay(self)
        paths = {"": "direct", "-staged": "staged"}
        if not direct(self.runtime, *self.devices):
            del paths[""]
            self.absent |= dict.fromkeys(("hand", "ours", "ours-deep"), "no peer access")
        if len(set(self.devices)) == 1:
            del paths["-staged"]  # a copy within a device has no legs
        for suffix, path in paths.items():
            yield "hand" + suffix, lambda path=path: HandWay(self, path)
            yield "ours" + suffix, lambda path=path: OurWay(self, path)
            if path == "direct":
                yield "ours-deep", lambda path=path: OurWay(self, path, in_flight=self.most)

    def limits(self) -> Limits:
        found = []
        for index, seconds in enumerate(self.seconds):
            stream, count = self._stream[index], max(4, int(2e-3 / seconds))
            address = self.xs[0] if index == 0 else self.results[0]
            begin = self.runtime.clock()
            for _ in range(count):
                self.kernel.launch(stream, address, address, self.nbytes, index, seconds)
            stream.synchronize()
            found.append((self.runtime.clock() - begin) / count)
        self._fill(self.xs[0], self.values[0])  # the stage has written there
        return Limits(found, copies(self.runtime, self.devices, self.nbytes))

    def error(self, outputs: list[Any]) -> float:
        """The share of wrong words."""
        return self._wrong(outputs, (0, 1))

    def loop_error(self, outputs: list[Any], steps: int) -> float:
        return self._wrong(outputs, (0, 1) * steps)

    def _wrong(self, outputs: list[Any], indices: tuple[int, ...]) -> float:
        pairs = list(zip(self.values, outputs, strict=False))
        wrong = sum(int(np.count_nonzero(got != expected(values, *indices))) for values, got in pairs)
        return wrong / (len(pairs) * self.nbytes / 4)

    def same(self, outputs: list[Any], others: list[Any]) -> bool:
        return all(np.array_equal(a, b) for a, b in zip(outputs, others, strict=True))

    def close(self) -> None:
        for thing in (*self.buffers, self._host, *self._stream, self.kernel):
            thing.close()
