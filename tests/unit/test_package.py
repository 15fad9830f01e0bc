"""What a source distribution holds: all that a build and the tests need, and nothing that was generated."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Directory, patterns of files that must be in it.
NEEDED = {
    "native": ["*.c", "*.h", "sim/*.c", "sim/*.h"],
    "pyxdev": ["**/*.py", "*.pyx", "*.pxd", "*.pxi", "*.pyi", "py.typed", "profiles/*.toml"],
    "tests": ["c/*.c", "c/*.h", "c/Makefile", "fakes/*.c", "fakes/Makefile", "conformance/*.py", "unit/*.py"],
    "examples": ["*.py"],
    ".": ["README.md", "CHANGELOG.md", "LICENSE", "Makefile", "MANIFEST.in", "pyproject.toml", "setup.py"],
}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The names in a source distribution made now, without its top directory."""
    out = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", out, "sdist", "--dist-dir", out]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    (archive,) = out.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        return {name.partition("/")[2] for name in tar.getnames()}


@pytest.mark.parametrize("folder", NEEDED)
def test_all_sources_are_in(sdist, folder):
    wanted = {str(path.relative_to(ROOT)) for text in NEEDED[folder] for path in (ROOT / folder).glob(text)}
    assert wanted
    assert not wanted - sdist


def test_nothing_generated_is_in(sdist):
    assert not [name for name in sdist if name.endswith((".so", ".o", ".pyc", "_native.c")) or "build/" in name]
