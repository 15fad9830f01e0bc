"""The loader on every driver: the bytes of a file are in the memory of its devices."""

import json

import pytest
from hardware import pattern, same

from pyxdev import load
from pyxdev.loader import loader


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


def test_through_memory_that_is_not_page_locked(runtime, tmp_path, monkeypatch):
    """As where none can be had that is."""
    values = pattern(5_000_011, 3).reshape(1, -1)
    write_safetensors(tmp_path / "model.safetensors", {"layers.0.weight": values})
    opened = []

    def pageable(runtime, size):
        opened.append(runtime.ring(size.tiles, size.tile_bytes, pageable=True))
        return opened[-1]

    monkeypatch.setattr(loader, "_open_ring", pageable)
    for threads in (1, 4):
        with load(tmp_path / "model.safetensors", runtime=runtime, threads=threads, verify=True) as weights:
            assert weights.report.pinned == 0 and not weights.report.async_uploads
            same(weights["layers.0.weight"].numpy().reshape(-1), values.reshape(-1))
    assert len(opened) == 2
