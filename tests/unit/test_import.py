"""Importing pyxdev: silent, without any vendor's package, without reading a setting or touching a device."""

import inspect
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import pyxdev
from pyxdev.settings import TABLE

VENDORS = ("cuda", "hip", "rocm", "torch", "cupy", "numba", "jax")


def run(program, *options, **variables):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYXDEV_")} | variables
    command = [sys.executable, "-W", "error", *options, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environ)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_it_is_silent_and_loads_no_vendor_package():
    loaded = run("import pyxdev, sys; print(*sys.modules)").split()
    assert "pyxdev" in loaded
    assert not {name.partition(".")[0] for name in loaded} & set(VENDORS)


def test_it_opens_no_library_of_a_vendor_no_device_and_no_thread():
    program = """
import os, sys
before = dict(os.environ)
import pyxdev
with open("/proc/self/maps") as file:
    maps = file.read()
for library in ("libcuda", "libamdhip64", "libnvidia", "libcudart"):
    assert library not in maps, library
places = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
files = [os.readlink(place) for place in places if os.path.exists(place)]
assert not [name for name in files if "nvidia" in name or "kfd" in name or "dri" in name.split("/")], files
assert dict(os.environ) == before
"""
    assert run(program) == ""


def test_a_setting_is_not_read_at_import():
    assert run("import pyxdev", PYXDEV_BACKEND="nonsense", PYXDEV_THREADS_LOAD="many") == ""


def test_every_public_name_is_there_and_documented():
    assert len(set(pyxdev.__all__)) == len(pyxdev.__all__)
    for name in pyxdev.__all__:
        thing = getattr(pyxdev, name)
        if name == "HOST":
            continue
        assert inspect.getdoc(thing), name
        members = vars(thing) if inspect.isclass(thing) else {}
        for member, value in members.items():
            attribute = isinstance(value, types.GetSetDescriptorType)
            if not member.startswith("_") and (callable(value) or isinstance(value, property)) and not attribute:
                assert inspect.getdoc(value), f"{name}.{member}"


@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_without_the_vendor_packages_simulated_devices_work_and_the_others_say_what_is_missing(backend):
    program = f"""
import sys
for name in {VENDORS!r}:
    sys.modules[name] = None
import pyxdev
from pyxdev import backends, errors
with backends.open("sim") as runtime:
    assert runtime.device_count > 0
try:
    backends.open("{backend}")
except errors.BackendUnavailable as error:
    print(error)
"""
    assert backend in run(program).lower()


def test_a_child_of_a_fork_may_use_what_was_only_imported():
    program = """
import os
import pyxdev
from pyxdev import backends
child = os.fork()
with backends.open("sim") as runtime:
    assert runtime.device_count > 0
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    assert run(program) == ""


def test_the_command_says_how_it_is_used():
    shown = subprocess.run(
        [sys.executable, "-W", "error", "-m", "pyxdev", "--help"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    for word in ("devices", "demo", "load", "bench"):
        assert word in shown.stdout


def test_the_sources_name_no_variable_that_the_table_of_settings_does_not_have():
    root = Path(__file__).resolve().parents[2]
    known = {setting.variable for setting in TABLE} | {"PYXDEV_HIP_LIBRARY", "PYXDEV_SIM_CHECK"}
    used = {}
    for path in [*root.glob("pyxdev/**/*.py"), *root.glob("native/**/*.c"), root / "README.md"]:
        for name in re.findall(r"\bPYXDEV_[A-Z_]+", path.read_text()):
            used.setdefault(name, path.name)
    assert set(used) <= known, {name: used[name] for name in set(used) - known}
