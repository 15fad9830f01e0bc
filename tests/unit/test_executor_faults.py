"""10,000 seeded fault injections: no hang, no leak, no wrong result, the right exception each time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import executor_faults
import pytest

BLOCKS, INJECTIONS = 20, 500


@pytest.mark.parametrize("block", range(BLOCKS))
def test_injections(block: int, record_property: Callable[[str, object], None]) -> None:
    counts: Counter[str] = Counter()
    seed = 1000 * block
    while counts.total() < INJECTIONS:
        counts += executor_faults.live(seed)
        seed += 1
    record_property("seeds", f"{1000 * block} to {seed - 1}: {dict(counts)}")
    assert set(counts) == {kind.__name__ for kind in executor_faults.KINDS}, counts
