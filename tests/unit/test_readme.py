"""What the README says is so: its example runs, its commands exist, its table of settings is the one in the code."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pyxdev.settings import TABLE

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_is_short_runs_as_it_stands_and_is_the_file_in_examples(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert block == (ROOT / "examples/pipeline.py").read_text()
    assert len([line for line in block.splitlines() if line]) <= 15
    command = [sys.executable, "-W", "error", "-X", "dev", "-c", block]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "16 microbatches, the same bits as one at a time\n"


def test_the_table_of_settings_is_the_one_in_the_code():
    rows = re.findall(r"^\| (PYXDEV_\w+) \| ([^|]+) \| (.+) \| ([^|]+) \|$", README, re.MULTILINE)
    assert [(variable, flags, default) for variable, flags, _, default in rows] == [
        (setting.variable, ", ".join(setting.flags), setting.default_text) for setting in TABLE
    ]
    for (_, _, values, _), setting in zip(rows, TABLE, strict=True):
        for spelling in re.findall(r"\bauto\b|\bcuda\b|\bhip\b|\bsim\b|-1|\b0\b|\b1\b|`[^`]+`", values):
            if "above 0" in values and spelling == "0":
                continue
            setting.parse(spelling.strip("`"))


@pytest.mark.parametrize("target", sorted(set(re.findall(r"^ {4}make (\w+)", README, re.MULTILINE))))
def test_the_commands_exist(target):
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{target}:.*## ", makefile, re.MULTILINE)
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_extras_exist():
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {name for name in re.findall(r"`\[([\w-]+)\]`", README)} == set(extras)


def test_the_files_it_points_to_are_there():
    for path in re.findall(r"\]\((\w[\w./]*\.md)\)", README):
        assert (ROOT / path).exists(), path


def test_it_fits_on_a_screen():
    assert len(README.splitlines()) <= 80
