"""What it costs to queue a microbatch, by counts that do not depend on the machine's load.

The guards are what the executor costs today and a little more. Who makes it cheaper lowers them; who adds a driver call
or a quarter more Python to every stage has to say so here.
"""

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench import submission  # noqa: E402

# By hand a stage takes 7: two waits, a copy and a record for the hop, two waits and a record for the stage.
CALLS_OF_A_STAGE, CALLS_BESIDES = 7, 0
INSTRUCTIONS_OF_A_STAGE, INSTRUCTIONS_BESIDES = 22_000, 52_000  # beyond those by hand


def test_driver_calls():
    calls = submission.driver_calls(lambda: None, lambda name: None)
    each, besides = submission.split(calls, "executor")
    assert submission.split(calls, "hand")[0] == 7
    assert each <= CALLS_OF_A_STAGE and besides <= CALLS_BESIDES


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="instructions are counted by valgrind")
def test_instructions():
    instructions, _ = submission.count()
    assert set(instructions) == {f"{name} {stages}" for name in ("hand", "executor") for stages in submission.STAGES}
    each, besides = (
        ours - hand
        for ours, hand in zip(*(submission.split(instructions, name) for name in ("executor", "hand")), strict=True)
    )
    found = f"{each:.0f} a stage, {besides:.0f} besides"
    assert 0 < each <= INSTRUCTIONS_OF_A_STAGE and 0 < besides <= INSTRUCTIONS_BESIDES, found
