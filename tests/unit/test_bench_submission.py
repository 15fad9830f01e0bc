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

# By hand a stage takes 7: two waits, a copy and a record for the hop, two waits and a record for the
# stage. A result is a question, a copy and a record.
CALLS = {"python": (7, -1, 3), "native": (7, -1, 3)}
# Of each stage, besides, and of a result, beyond what the driver's functions take.
INSTRUCTIONS = {"python": (20_000, 37_000, 24_500), "native": (14_000, 37_000, 24_500)}
INTERPRETER = 1.0 if sys.version_info < (3, 12) else 1.125  # later ones take more


def test_driver_calls():
    calls = submission.driver_calls(lambda: None, lambda name: None)
    assert submission.split(calls, "hand") == (7, -2, 0)
    for name, allowed in CALLS.items():
        found = submission.split(calls, name)
        assert all(one <= most for one, most in zip(found, allowed, strict=True)), (name, found)


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="instructions are counted by valgrind")
def test_instructions():
    found = submission.count()
    names = {f"{name} {stages}" for name in ("hand", "python", "native") for stages in submission.STAGES}
    names |= {f"{name} {submission.RESULT}" for name in names}
    assert set(found["instructions"]) == set(found["driver"]) == names
    nothing = {name for name in names if name.startswith("hand") and name.endswith(submission.RESULT)}
    assert all(0 < found["driver"][name] < found["instructions"][name] for name in names - nothing)
    for name, allowed in INSTRUCTIONS.items():
        each, driver = submission.split(found["instructions"], name), submission.split(found["driver"], name)
        beyond = [one - taken for one, taken in zip(each, driver, strict=True)]
        assert all(0 < one <= most * INTERPRETER for one, most in zip(beyond, allowed, strict=True)), (name, beyond)
