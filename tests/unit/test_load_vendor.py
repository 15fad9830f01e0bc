"""Loading through the CUDA and HIP drivers, over stand-ins for the vendors' libraries that are strict about which
device is current."""

from __future__ import annotations

from pathlib import Path

import model_files as mf
import pytest
from vendor_child import FAKES, ROCM, build_fakes, run

LAYERS = [
    (f"layers.{n}.w", "U8", (300 + n, 1000), bytes((n + i) & 255 for i in range((300 + n) * 1000))) for n in range(8)
]


@pytest.fixture(scope="module", autouse=True)
def fakes() -> None:
    build_fakes()


@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_a_load_over_the_stand_in(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(mf.packed(LAYERS))
    run(
        f"""
import os, threading
from pyxdev import backends
from pyxdev.loader import loader

loader.TILE_BYTES = 64 << 10
with backends.open({backend!r}) as runtime:
    for threads, direct_io, uploads, split_mode in (
        (1, "off", True, "layer"), (6, "on", False, "row"), (6, "auto", True, "row"), (3, "on", True, "layer")
    ):
        with loader.load({str(path)!r}, runtime=runtime, threads=threads, direct_io=direct_io, async_uploads=uploads,
                         split_mode=split_mode, verify=True) as weights:
            for n in range(8):
                made = weights[f"layers.{{n}}.w"]
                parts = getattr(made, "parts", (made,))
                got = b"".join(part.raw.numpy().tobytes() for part in parts)
                assert got == bytes((n + i) & 255 for i in range((300 + n) * 1000)), (threads, n)
            assert {{one.device for one in weights.report.devices if one.nbytes}} == {{0, 1, 2}}
        assert not runtime.live().any()
    assert runtime.settings.async_uploads is ({backend!r} == "cuda")
""",
        FAKES,
        ROCM,
        PYXDEV_FAKE_CUDA_DEVICES="3",
    )
