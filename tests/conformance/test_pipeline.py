"""The Executor and the loader, with what every backend has: raw stages and bytes."""

import json

import numpy as np
import pytest
from hardware import pattern, same

from pyxdev import Executor, load
from pyxdev.errors import NoPeerAccess, StageError


def marking(number):
    """A stage that passes its input on, with its own mark at one place; raises when it is told to."""

    def run(stage, x):
        if x["fail"] == number:
            raise ValueError(f"told to fail in stage {number}")
        y = stage.empty(x["data"].shape, "uint8")
        stage.stream.copy(
            y.address, x["data"].address, y.nbytes, dst_device=stage.device, src_device=stage.device
        )  # fmt: skip
        stage.stream.fill(y.address + number, number + 1, 1)
        return {"data": y, "fail": x["fail"]}

    return run


def wanted(data, stages):
    marked = data.copy()
    marked[:stages] = np.arange(1, stages + 1)
    return marked


def microbatch(salt, nbytes=10_001, fail=-1):
    return {"data": pattern(nbytes, salt), "fail": fail}


@pytest.mark.parametrize("options", [{}, {"in_flight": 1, "depth": 1}, {"depth": 2, "tile_mb": 0.002}, {"gate": 1}])
def test_results_come_in_order_and_are_right(runtime, options):
    stages = runtime.device_count + 1
    devices = [*range(runtime.device_count), 0]
    with Executor(devices, [marking(n) for n in range(stages)], adapter="raw", runtime=runtime, **options) as pipeline:
        for salt, result in enumerate(pipeline.map(microbatch(salt) for salt in range(12))):
            same(result["data"].numpy(), wanted(pattern(10_001, salt), stages))


@pytest.mark.parametrize("way", [0, 1])
def test_direct_or_staged_as_it_was_asked_for(runtime, way):
    devices = range(runtime.device_count)
    stages = [marking(n) for n in devices]
    hops = [(src, src + 1) for src in devices[:-1]]
    if way == 0 and not all(runtime.peer_enable(*hop) for hop in hops):
        with pytest.raises(NoPeerAccess):
            Executor(devices, stages, adapter="raw", runtime=runtime, host_stage=way)
        return
    with Executor(devices, stages, adapter="raw", runtime=runtime, host_stage=way) as pipeline:
        assert {link.path for link in pipeline.plan().links} <= {"staged" if way else "direct"}
        for salt, result in enumerate(pipeline.map(microbatch(salt) for salt in range(6))):
            same(result["data"].numpy(), wanted(pattern(10_001, salt), len(stages)))


def test_a_ticket_is_an_input(runtime):
    devices = range(runtime.device_count)
    with Executor(devices, [marking(n) for n in devices], adapter="raw", runtime=runtime) as pipeline:
        ticket = pipeline.submit(microbatch(3))
        for _ in range(5):
            ticket = pipeline.submit(ticket)
        same(ticket.result()["data"].numpy(), wanted(pattern(10_001, 3), len(devices)))


def test_sizes_change_from_one_microbatch_to_the_next(runtime):
    devices = [0, runtime.device_count - 1]
    sizes = [10, 100_000, 11, 5000, 300_000, 10]
    with Executor(devices, [marking(0), marking(1)], adapter="raw", runtime=runtime, depth=2) as pipeline:
        for nbytes, result in zip(sizes, pipeline.map(microbatch(n, n) for n in sizes), strict=True):
            same(result["data"].numpy(), wanted(pattern(nbytes, nbytes), 2))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_raises_says_where_and_the_pipeline_goes_on(runtime, stage):
    devices = [0, runtime.device_count - 1]
    with Executor(devices, [marking(0), marking(1)], adapter="raw", runtime=runtime) as pipeline:
        good, bad = pipeline.submit(microbatch(0)), pipeline.submit(microbatch(1, fail=stage))
        same(good.result()["data"].numpy(), wanted(pattern(10_001, 0), 2))
        with pytest.raises(StageError) as caught:
            bad.result()
        assert (caught.value.stage, caught.value.microbatch) == (stage, 1)
        assert isinstance(caught.value.__cause__, ValueError)
        same(pipeline.submit(microbatch(2)).result()["data"].numpy(), wanted(pattern(10_001, 2), 2))


def test_nothing_is_alive_after_close(runtime):
    pipeline = Executor([0], [marking(0)], adapter="raw", runtime=runtime)
    result = pipeline.submit(microbatch(0)).result()
    pipeline.close()
    pipeline.close()
    same(result["data"].numpy(), wanted(pattern(10_001, 0), 1))
    del result
    assert not runtime.live().any()


def write_safetensors(path, tensors):
    header, at = {}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": "U8", "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(values.tobytes() for values in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("uploads", [True, False])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_model_file_is_on_its_devices_byte_for_byte(runtime, tmp_path, threads, uploads):
    tensors = {f"layers.{n}.weight": pattern(7919 * (n % 5) + n, n).reshape(1, -1) for n in range(1, 40)}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    file = tmp_path / "model.safetensors"
    with load(file, runtime=runtime, threads=threads, async_uploads=uploads) as weights:
        assert set(weights) == set(tensors)
        assert {weights[name].device for name in tensors} == set(range(runtime.device_count))
        for name, values in tensors.items():
            assert weights[name].shape == values.shape
            same(weights[name].numpy().reshape(-1), values.reshape(-1))
