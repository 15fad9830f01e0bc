"""Copies whose ends were allocated by others: memory pools, mapped memory, torch's expandable segments. Field case 9.

docs/copies.md says which memory a copy takes. The destination of a direct copy between devices must be reachable for
the source, and enabling peer access opens plain allocations only: the owner of a pool or of mapped memory grants it, as
is done here.
"""

import contextlib
import os

import numpy as np
import pytest
from hardware import POISON, pattern, same

from pyxdev._native import HOST

NBYTES = (1 << 20) + 5
TILE = 256 << 10


@contextlib.contextmanager
def plain(devices, device):
    """Ours."""
    with contextlib.closing(devices.runtime.buffer(device, NBYTES)) as buffer:
        yield buffer.address


@contextlib.contextmanager
def pool(devices, device):
    """The device's own pool, cuMemAllocAsync."""
    driver = cuda(devices)
    with contextlib.closing(devices.runtime.stream(device)) as stream, current(driver, device):
        of_device = checked(driver.cuDeviceGetDefaultMemPool(checked(driver.cuDeviceGet(device))))
        others = [grant(driver, other) for other in reaching(devices, device)]
        if others:
            checked(driver.cuMemPoolSetAccess(of_device, others, len(others)))
        address = checked(driver.cuMemAllocAsync(NBYTES, stream.handle))
        assert stream.synchronize()
        try:
            yield int(address)
        finally:
            checked(driver.cuMemFreeAsync(address, stream.handle))
            assert stream.synchronize()


@contextlib.contextmanager
def mapped(devices, device):
    """Physical memory mapped into a reserved range: what expandable segments are made of."""
    driver = cuda(devices)
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = device
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    with contextlib.ExitStack() as undo:
        undo.enter_context(current(driver, device))
        step = checked(driver.cuMemGetAllocationGranularity(wanted, least))
        size = -(-NBYTES // step) * step
        address = checked(driver.cuMemAddressReserve(size, 0, 0, 0))
        undo.callback(driver.cuMemAddressFree, address, size)
        memory = checked(driver.cuMemCreate(size, wanted, 0))
        undo.callback(driver.cuMemRelease, memory)
        checked(driver.cuMemMap(address, size, 0, memory, 0))
        undo.callback(driver.cuMemUnmap, address, size)
        access = [grant(driver, user) for user in (device, *reaching(devices, device))]
        checked(driver.cuMemSetAccess(address, size, access, len(access)))
        yield int(address)


@contextlib.contextmanager
def torch_segments(devices, device):
    """torch's allocator with expandable segments."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA device here")
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", torch.cuda.memory._set_allocator_settings)
    configure("expandable_segments:True")
    try:
        tensor = torch.empty(NBYTES, dtype=torch.uint8, device=f"cuda:{device}")
        kinds = {
            segment.get("is_expandable")
            for segment in torch.cuda.memory_snapshot()
            if segment["address"] <= tensor.data_ptr() < segment["address"] + segment["total_size"]
        }
        assert kinds == {True}, "torch gave memory of another kind"
        for other in reaching(devices, device):
            tensor[:1].copy_(torch.zeros(1, dtype=torch.uint8, device=f"cuda:{other}"))  # torch grants access
        torch.cuda.synchronize(device)
        yield tensor.data_ptr()
        del tensor
        torch.cuda.empty_cache()
    finally:
        configure("expandable_segments:False")


KINDS = {"plain": plain, "pool": pool, "mapped": mapped, "torch": torch_segments}


def pytest_generate_tests(metafunc):
    """Devices other than CUDA's have one kind of memory here, and so have those of a GPU that is there twice: nobody
    else knows of the second one (tests/fakes/twice.c)."""
    all_kinds = metafunc.config.getoption("--pyxdev-backend") == "cuda" and "PYXDEV_TWICE" not in os.environ
    kinds = list(KINDS) if all_kinds else ["plain"]
    metafunc.parametrize("of", kinds)
    metafunc.parametrize("to", kinds)


def cuda(devices):
    """cuda-python's driver API, where it runs on a real driver."""
    from cuda.bindings import driver

    try:
        checked(driver.cuDeviceGetDefaultMemPool(checked(driver.cuDeviceGet(0))))
    except RuntimeError as missing:
        pytest.skip(f"this driver has no memory pools: {missing}")
    return driver


def checked(answer):
    """What a call of cuda-python returned after its code."""
    if int(answer[0]):
        raise RuntimeError(f"CUDA: {answer[0]!r}")
    return answer[1] if len(answer) > 1 else None


@contextlib.contextmanager
def current(driver, device):
    """The device's primary context is current. (Its runtime has retained it.)"""
    handle = checked(driver.cuDeviceGet(device))
    checked(driver.cuCtxPushCurrent(checked(driver.cuDevicePrimaryCtxRetain(handle))))
    try:
        yield
    finally:
        checked(driver.cuCtxPopCurrent())
        checked(driver.cuDevicePrimaryCtxRelease(handle))


def reaching(devices, device):
    """The other devices that can reach this one's memory."""
    return [other for other in devices if other != device and devices.runtime.peer_capable(other, device)]


def grant(driver, device):
    """Access for a device."""
    made = driver.CUmemAccessDesc()
    made.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = device
    made.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return made


def carry(devices, device, address, data):
    """The host's bytes to device memory of any kind."""
    with devices.runtime_pinned(len(data)) as pinned, devices.own_stream(device) as stream:
        devices.write(pinned, data)
        stream.copy(address, pinned.address, len(data), dst_device=device, src_device=HOST)
        assert stream.synchronize()


def fetch(devices, device, address):
    with devices.runtime_pinned(NBYTES) as pinned, devices.own_stream(device) as stream:
        stream.copy(pinned.address, address, NBYTES, dst_device=HOST, src_device=device)
        assert stream.synchronize()
        return devices.read(pinned)


def test_copies_between_memory_of_any_kind(devices, of, to):
    for src, dst in dict.fromkeys([(0, 0), *devices.pairs]):
        with KINDS[of](devices, src) as source, KINDS[to](devices, dst) as target:
            for salt, path in enumerate(devices.paths(src, dst)):
                data = pattern(NBYTES, salt)
                carry(devices, src, source, data)
                carry(devices, dst, target, np.full(NBYTES, POISON, np.uint8))
                arrived = devices.event()
                with contextlib.closing(devices.runtime.link(src, dst, path=path, tile_bytes=TILE)) as link:
                    link.copy(target, source, NBYTES, arrived=arrived)
                    assert arrived.wait(20)
                assert same(fetch(devices, dst, target), data), f"{of} to {to}, {path}"
