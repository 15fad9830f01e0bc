"""Every setting: precedence, the closed list of spellings, and errors that say where a value came from."""

import argparse
import dataclasses
import os
import re

import pytest

from pyxdev.errors import SettingError
from pyxdev.settings import TABLE, HostStage, Settings, add_flags, resolve

NAMES = [setting.name for setting in TABLE]
BY_NAME = {setting.name: setting for setting in TABLE}

SPELLINGS = ["", " ", "1 ", " 1", "1\n", "1, 0>1=0", "9" * 40, "\udc80"]
SPELLINGS += "auto AUTO Auto true True off on yes None nan inf -1 0 00 -0 +1 --1 1 1x 0x1 1e1 1_0 ٣ １ 2 64".split()
SPELLINGS += "1.0 0.5 .5 1. 0.0 -0.5 1024 1024.1 1025 1,5 cuda CUDA sim hip rocm staged".split()
SPELLINGS += "1,0>3=0 auto,0>1=1,1>0=0 0,0>1=auto 0>3=0 1, ,1 1,,0>1=0 1,0>0=1 1,0>1=0,0>1=1 1,0>1 1,0>1=2".split()
SPELLINGS += "1,00>1=0 1,-1>1=0 1;0>3=0 1,٣>1=0 1,0>99999=0".split()

ACCEPTED = {
    "backend": {"auto", "cuda", "hip", "sim"},
    "host_stage": {"auto", "0", "1", "1,0>3=0", "auto,0>1=1,1>0=0", "0,0>1=auto"},
    "tile_mb": {"auto", "1", "2", "64", "1024", "1.0", "0.5"},
    "gate": {"0", "1"},
    "force_sync": {"0", "1"},
    "threads_load": {"-1", "1", "2", "64", "1024"},
    "async_uploads": {"0", "1"},
    "sim_check": {"0", "1"},
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", SPELLINGS)
def test_the_list_of_spellings_is_closed(name, text):
    setting = BY_NAME[name]
    sources = {
        f"argument {name}": ({name: text}, {}, {}),
        f"flag {setting.flags[-1]}": ({}, {name: text}, {}),
        f"variable {setting.variable}": ({}, {}, {setting.variable: text}),
    }
    for source, (arguments, flags, environ) in sources.items():
        if text in ACCEPTED[name]:
            assert isinstance(resolve(arguments, flags, environ), Settings)
            continue
        with pytest.raises(SettingError) as caught:
            resolve(arguments, flags, environ)
        message = str(caught.value)
        assert message.startswith(f"{name}: the {source} is ")
        assert repr(text)[:100] in message
        assert setting.allowed in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("backend", 0),
        ("backend", ["sim"]),
        ("host_stage", 2),
        ("host_stage", -1),
        ("host_stage", True),
        ("host_stage", 1.0),
        ("host_stage", {}),
        ("tile_mb", 0),
        ("tile_mb", -1),
        ("tile_mb", 0.0),
        ("tile_mb", -0.5),
        ("tile_mb", float("nan")),
        ("tile_mb", float("inf")),
        ("tile_mb", 1024.0001),
        ("tile_mb", 1025),
        ("tile_mb", True),
        ("gate", 2),
        ("gate", -1),
        ("gate", 1.0),
        ("force_sync", []),
        ("threads_load", 0),
        ("threads_load", -2),
        ("threads_load", 10**6),
        ("threads_load", True),
        ("threads_load", 4.0),
        ("async_uploads", b"1"),
    ],
)
def test_arguments_of_other_types_and_ranges_are_refused(name, value):
    with pytest.raises(SettingError, match=re.escape(f"{name}: the argument {name} is {value!r}; allowed: ")):
        resolve({name: value}, environ={})


def test_arguments_may_have_their_own_type():
    settings = resolve(
        {
            "host_stage": 1,
            "tile_mb": 0.25,
            "gate": False,
            "force_sync": 1,
            "threads_load": -1,
            "async_uploads": True,
        },
        environ={},
    )
    assert settings == Settings(
        host_stage=HostStage("staged"), tile_mb=0.25, gate=False, force_sync=True, threads_load=-1, async_uploads=True
    )
    stage = HostStage("direct", {(0, 1): "staged"})
    assert resolve({"host_stage": stage}, environ={}).host_stage is stage


def test_the_defaults_of_the_table_are_those_of_the_class():
    assert resolve({}, environ={}) == Settings()
    assert [field.name for field in dataclasses.fields(Settings)] == NAMES
    for setting in TABLE:
        assert getattr(Settings(), setting.name) == setting.default
        if setting.name != "async_uploads":
            assert setting.parse(setting.default_text) == setting.default


@pytest.mark.parametrize("setting", TABLE, ids=NAMES)
def test_argument_beats_flag_beats_variable_beats_default(setting):
    first, second = sorted(ACCEPTED[setting.name])[:2]
    a, b = setting.parse(first), setting.parse(second)
    assert a != b

    def value(argument, flag, variable):
        return getattr(resolve({setting.name: argument}, {setting.name: flag}, variable), setting.name)

    assert value(None, None, {}) == setting.default
    assert value(None, None, {setting.variable: first}) == a
    assert value(None, second, {setting.variable: first}) == b
    assert value(first, second, {setting.variable: second}) == a
    # What is beaten is not read: it cannot be an error either.
    assert value(first, "garbage", {setting.variable: "garbage"}) == a


def test_off_as_an_argument_beats_a_variable_that_is_on():
    assert resolve({"gate": False}, environ={"PYXDEV_ACTXFER_GATE": "1"}).gate is False
    assert resolve({"host_stage": 0}, environ={"PYXDEV_HOST_STAGE": "1"}).host_stage.default == "direct"


def test_host_stage_answers_for_every_ordered_pair():
    stage = resolve({}, environ={"PYXDEV_HOST_STAGE": "1,0>3=0,3>0=auto"}).host_stage
    assert stage.mode(0, 3) == "direct"
    assert stage.mode(3, 0) == "auto"
    assert stage.mode(0, 1) == stage.mode(1, 3) == "staged"
    assert str(stage) == "1,0>3=0,3>0=auto"
    assert str(HostStage()) == "auto"


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("auto", 0), ("1", 1 << 20), ("0.5", 1 << 19), ("1024", 1 << 30), ("0.000000000000000000000000000001", 1)],
)
def test_a_tile_has_at_least_one_byte(text, bytes_):
    assert resolve({"tile_mb": text}, environ={}).tile_bytes == bytes_


def test_uploads_are_asynchronous_where_the_backend_says_so():
    assert [Settings().for_backend(name).async_uploads for name in ("cuda", "hip", "sim")] == [True, False, True]
    assert Settings(async_uploads=True).for_backend("hip").async_uploads is True
    assert Settings(async_uploads=False).for_backend("cuda").async_uploads is False
    assert Settings(gate=False).for_backend("sim") == Settings(backend="sim", gate=False, async_uploads=True)


def test_an_unknown_setting_is_named():
    with pytest.raises(SettingError, match="'hoststage' is no setting; there are backend, host_stage"):
        resolve({"hoststage": 1})


def test_the_environment_is_read_at_each_call_and_never_written(monkeypatch):
    monkeypatch.setenv("PYXDEV_THREADS_LOAD", "7")
    before = dict(os.environ)
    assert resolve({}).threads_load == 7
    monkeypatch.setenv("PYXDEV_THREADS_LOAD", "9")
    assert resolve({}).threads_load == 9
    before["PYXDEV_THREADS_LOAD"] = "9"
    assert dict(os.environ) == before


def test_every_flag_takes_a_value_and_is_kept_as_text():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    assert all(value is None for value in vars(parser.parse_args([])).values())
    namespace = parser.parse_args(["-hs", "1,0>1=0", "-tl", "-1", "--gate", "0", "--tile-mb=0.5"])
    settings = resolve({}, vars(namespace), {})
    assert settings == Settings(
        host_stage=HostStage("staged", {(0, 1): "direct"}), threads_load=-1, gate=False, tile_mb=0.5
    )
    with pytest.raises(SystemExit):
        parser.parse_args(["--gate"])
    text = parser.format_help()
    for setting in TABLE:
        assert setting.variable in text
        assert all(flag in text for flag in setting.flags)


def test_flags_can_be_chosen_and_other_options_are_not_read():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    add_flags(parser, "backend", "threads_load")
    namespace = parser.parse_args(["--backend", "sim", "--json"])
    assert set(vars(namespace)) == {"json", "backend", "threads_load"}
    assert resolve({}, vars(namespace), {}) == Settings(backend="sim")
