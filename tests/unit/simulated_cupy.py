"""A stand-in for CuPy over the memory of simulated devices: what pyxdev/adapters/cupy.py uses of it.

As CuPy does, it queues kernels on the current stream of the current device and returns; its pool keeps free memory by
the stream it was allocated on and hands it out again at once, whatever still reads it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

COST = 3e-4  # seconds of a kernel
GRAIN = 4096  # bytes; sizes of allocations are multiples


class Pool:
    """Device memory by stream, and what is current."""

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime
        self.free: dict[Any, list[Any]] = {}
        self.buffers: list[Any] = []
        self.streams: list[Any] = []
        self.defaults: dict[int, ExternalStream] = {}  # of the caller, by device
        self.current: list[ExternalStream] = []
        self.devices = [0]

    def stream(self) -> ExternalStream:
        """The current one of the current device."""
        device = self.devices[-1]
        for stream in reversed(self.current):
            if stream.device_id == device:
                return stream
        if device not in self.defaults:
            own = self.runtime.stream(device)
            self.streams.append(own)
            self.defaults[device] = ExternalStream(self, own.handle, device)
        return self.defaults[device]

    def close(self) -> None:
        for stream in self.defaults.values():
            stream.queue.synchronize()
        for thing in [*self.streams, *self.buffers]:
            thing.close()


class PooledMemory:
    def __init__(self, pool: Pool, nbytes: int) -> None:
        stream = pool.stream()
        self.device_id = stream.device_id
        size = -(-max(nbytes, 1) // GRAIN) * GRAIN
        self.home = pool.free.setdefault((stream.device_id, stream.ptr, size), [])
        if not self.home:
            self.home.append(pool.runtime.buffer(self.device_id, size))
            pool.buffers.append(self.home[0])
        self.buffer = self.home.pop()
        self.ptr = self.buffer.address

    def __del__(self) -> None:
        self.home.append(self.buffer)


class UnownedMemory:
    def __init__(self, ptr: int, owner: Any, device: int) -> None:
        self.ptr, self.owner, self.device_id = ptr, owner, device


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset


class ExternalStream:
    def __init__(self, pool: Pool, ptr: int, device_id: int) -> None:
        self.pool, self.ptr, self.device_id = pool, ptr, device_id
        self.queue = pool.runtime.adopt_stream(device_id, ptr)
        pool.streams.insert(0, self.queue)

    def __enter__(self) -> None:
        self.pool.current.append(self)

    def __exit__(self, *exc: object) -> None:
        self.pool.current.pop()


class Device:
    def __init__(self, pool: Pool, number: int) -> None:
        self.pool, self.id = pool, number

    def __enter__(self) -> None:
        self.pool.devices.append(self.id)

    def __exit__(self, *exc: object) -> None:
        self.pool.devices.pop()


class Place(tuple[Any, ...]):
    """Address, shape, strides and dtype: all that a kernel knows of an array. It keeps nothing alive."""

    @property
    def span(self) -> tuple[int, int]:
        address, shape, strides, dtype = self
        if 0 in shape:
            return address, 0
        return address, sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + dtype.itemsize

    def values(self) -> Any:
        address, shape, strides, dtype = self
        memory = np.frombuffer((ctypes.c_uint8 * self.span[1]).from_address(address), np.uint8)
        return (
            as_strided(memory[: dtype.itemsize].view(dtype), shape, strides) if len(memory) else np.empty(shape, dtype)
        )


class ndarray:
    def __init__(
        self, pool: Pool, shape: Sequence[int], dtype: Any, data: Any = None, strides: Any = None, base: Any = None
    ) -> None:
        self.pool, self.shape, self.dtype, self.base = pool, tuple(shape), np.dtype(dtype), base
        self.strides = strides or np.broadcast_to(np.empty((), self.dtype), self.shape).copy().strides
        self.nbytes = int(np.prod(self.shape)) * self.dtype.itemsize
        self.data = data or MemoryPointer(PooledMemory(pool, self.nbytes), 0)

    @property
    def place(self) -> Place:
        return Place((self.data.ptr, self.shape, self.strides, self.dtype))

    @property
    def __cuda_array_interface__(self) -> Any:
        return {
            "shape": self.shape, "typestr": self.dtype.str, "data": (self.data.ptr, False), "strides": self.strides,
            "version": 3, "stream": self.pool.stream().ptr,
        }  # fmt: skip

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.data.mem.device_id

    def _alias(self, shape: Any, strides: Any, offset: int = 0) -> ndarray:
        data = MemoryPointer(self.data.mem, self.data.ptr - self.data.mem.ptr + offset)
        return ndarray(self.pool, shape, self.dtype, data, strides, self if self.base is None else self.base)

    def __getitem__(self, part: slice) -> ndarray:
        begin, end, step = part.indices(self.shape[0])
        shape = (len(range(begin, end, step)), *self.shape[1:])
        return self._alias(shape, (self.strides[0] * step, *self.strides[1:]), begin * self.strides[0])

    @property
    def T(self) -> ndarray:
        return self._alias(self.shape[::-1], self.strides[::-1])

    def copy(self) -> ndarray:
        return kernel(lambda x: x, self)

    def __add__(self, other: Any) -> ndarray:
        return kernel(lambda x, y: x + y, self, other)

    def __mul__(self, other: Any) -> ndarray:
        return kernel(lambda x, y: x * y, self, other)

    def get(self) -> Any:
        """The values, when all that is queued on the current stream is done."""
        self.pool.stream().queue.synchronize()
        return self.place.values().copy()


def kernel(f: Callable[..., Any], x: ndarray, *others: Any, out: ndarray | None = None) -> ndarray:
    """out = f(x, *others), queued on the current stream."""
    out = ndarray(x.pool, x.shape, x.dtype) if out is None else out
    ins = [one.place if isinstance(one, ndarray) else one for one in (x, *others)]
    target = out.place

    def run() -> None:
        target.values()[...] = f(*(one.values() if isinstance(one, Place) else one for one in ins))

    x.pool.stream().queue.launch(
        run, cost=COST, reads=[one.span for one in ins if isinstance(one, Place)], writes=[target.span]
    )
    return out


def module(runtime: Any) -> ModuleType:
    """The stand-in for the devices of a runtime. `.pool` must be closed before it."""
    pool = Pool(runtime)
    cupy, cuda, memory = (ModuleType(name) for name in ("cupy", "cupy.cuda", "cupy.cuda.memory"))
    vars(memory).update(PooledMemory=PooledMemory, Memory=PooledMemory, MemoryAsync=PooledMemory)
    vars(cuda).update(
        memory=memory,
        Device=lambda number: Device(pool, number),
        Stream=object,  # of a CuPy before 14
        ExternalStream=lambda ptr, device: ExternalStream(pool, ptr, device),
        get_current_stream=pool.stream,
    )

    def from_dlpack(array: Any) -> ndarray:
        mem = UnownedMemory(array.address, array.__dlpack__(stream=-1), array.device)
        return ndarray(pool, array.shape, array.dtype, MemoryPointer(mem, 0))

    vars(cupy).update(
        cuda=cuda, ndarray=ndarray, pool=pool, from_dlpack=from_dlpack, ascontiguousarray=ndarray.copy,
        empty=lambda shape, dtype: ndarray(pool, shape, dtype),
    )  # fmt: skip
    return cupy
