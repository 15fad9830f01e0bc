"""The automatic depth is worth what docs/design.md says. Times are virtual, so this does not depend on the machine."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import depth


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_the_automatic_depth_is_near_the_best(stages: int) -> None:
    for jitter, lost in ((0.0, 0.0), (0.3, 0.006), (0.6, 0.031)):
        automatic = depth.ratio(stages, "auto", "auto", jitter)
        best = depth.ratio(stages, 8 * stages, 16, jitter)
        assert automatic >= best - lost, jitter
    assert depth.ratio(stages, stages, "auto", 0.3) < best  # a bound of one for each stage starves them
