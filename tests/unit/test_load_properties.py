"""Generated models, loaded in generated ways onto simulated devices: every byte arrives, whatever the mode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_header_properties import FILES, Named

from pyxdev import backends
from pyxdev._native import Array
from pyxdev.loader import loader
from pyxdev.loader.loader import load
from pyxdev.loader.weights import Rows

DEVICES = 3
WAYS = st.fixed_dictionaries(
    {
        "threads": st.integers(1, 4),
        "direct_io": st.sampled_from(["auto", "on", "off"]),
        "async_uploads": st.booleans(),
        "split_mode": st.sampled_from(["layer", "row", "none"]),
        "verify": st.booleans(),
    }
)
SPLITS = st.lists(st.integers(0, 3), min_size=1, max_size=DEVICES).filter(any)


def data_of(made: Array | Rows) -> bytes:
    arrays = made.parts if isinstance(made, Rows) else (made,)
    return b"".join(np.asarray(array.raw).tobytes() for array in arrays if array.nbytes)


@pytest.mark.parametrize("form", FILES)
def test_every_byte_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    path = tmp_path / f"model.{form}"
    monkeypatch.setattr(loader, "TILE_BYTES", 4096)
    with backends.open("sim", machine={"device": {"count": DEVICES}, "run": {"delay_us": 20}}) as runtime:

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
        @given(FILES[form], WAYS, SPLITS, st.permutations(range(DEVICES)))
        def arrives(file: tuple[Named, bytes], way: dict[str, object], split: list[int], order: list[int]) -> None:
            tensors, content = file
            path.write_bytes(content)
            devices = order[: len(split)]
            with load(path, devices, runtime=runtime, tensor_split=split, **way) as weights:  # type: ignore[arg-type]
                assert weights.keys() == {name for name, *_ in tensors}
                for name, _, shape, data in tensors:
                    assert weights[name].shape == shape
                    assert data_of(weights[name]) == data
            assert not runtime.live().any()

        arrives()
