"""Every variable and flag of pyxdev, in one table with one strict parser.

Argument beats flag beats variable beats default. resolve() reads them, once, when a runtime opens; nothing is read at
import, and os.environ is never written. A spelling outside of the table raises SettingError: no silent default.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, Self

from pyxdev.errors import SettingError

Mode = Literal["auto", "direct", "staged"]

MAX_TILE_MB = 1024
MAX_THREADS = 1024
MIB = 1 << 20

_MODES: dict[str, Mode] = {"auto": "auto", "0": "direct", "1": "staged"}
_MODE_TEXT: dict[Mode, str] = {mode: text for text, mode in _MODES.items()}
_PAIR = re.compile(r"(0|[1-9][0-9]{0,3})>(0|[1-9][0-9]{0,3})=(auto|0|1)")
_DECIMAL = re.compile(r"(0|[1-9][0-9]{0,3})(\.[0-9]{1,30})?")
_COUNT = re.compile(r"-1|[1-9][0-9]{0,3}")


@dataclass(frozen=True)
class HostStage:
    """Whether copies between devices go through pinned host memory: a mode for every ordered pair, and exceptions."""

    default: Mode = "auto"
    pairs: Mapping[tuple[int, int], Mode] = field(default_factory=dict)

    def mode(self, src: int, dst: int) -> Mode:
        """The mode of copies from device src to device dst."""
        return self.pairs.get((src, dst), self.default)

    def __str__(self) -> str:
        """As the variable spells it: "1,0>3=0"."""
        pairs = [f"{src}>{dst}={_MODE_TEXT[mode]}" for (src, dst), mode in self.pairs.items()]
        return ",".join([_MODE_TEXT[self.default], *pairs])


# A parser takes what was given (text, or the argument's own type) and raises ValueError for anything not allowed.


def _text(given: object) -> str:
    if isinstance(given, int) and not isinstance(given, bool):
        return str(given)
    if not isinstance(given, str):
        raise ValueError
    return given


def _backend(given: object) -> str:
    if given not in ("auto", "cuda", "hip", "sim"):
        raise ValueError
    return given


def _host_stage(given: object) -> HostStage:
    if isinstance(given, HostStage):
        return given
    default, *rest = _text(given).split(",")
    if default not in _MODES:
        raise ValueError
    pairs: dict[tuple[int, int], Mode] = {}
    for text in rest:
        found = _PAIR.fullmatch(text)
        if not found:
            raise ValueError
        pair = int(found[1]), int(found[2])
        if pair[0] == pair[1] or pair in pairs:
            raise ValueError
        pairs[pair] = _MODES[found[3]]
    return HostStage(_MODES[default], MappingProxyType(pairs))


def _tile_mb(given: object) -> float | None:
    if given == "auto":
        return None
    if not isinstance(given, float):
        text = _text(given)
        if not _DECIMAL.fullmatch(text):
            raise ValueError
        given = float(text)
    if not 0 < given <= MAX_TILE_MB:
        raise ValueError
    return given


def _switch(given: object) -> bool:
    if isinstance(given, bool):
        return given
    text = _text(given)
    if text not in ("0", "1"):
        raise ValueError
    return text == "1"


def _threads(given: object) -> int:
    text = _text(given)
    if not _COUNT.fullmatch(text) or int(text) > MAX_THREADS:
        raise ValueError
    return int(text)


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    name: str
    variable: str
    flags: tuple[str, ...]
    parse: Callable[[object], Any]
    allowed: str
    default: Any
    default_text: str
    help: str


TABLE: tuple[Setting, ...] = (
    Setting(
        "backend",
        "PYXDEV_BACKEND",
        ("--backend",),
        _backend,
        "auto, cuda, hip or sim",
        "auto",
        "auto",
        "what the devices are; auto: CUDA if it has a device, else HIP, else simulated devices with a warning",
    ),
    Setting(
        "host_stage",
        "PYXDEV_HOST_STAGE",
        ("-hs", "--host-stage"),
        _host_stage,
        "auto, 0 (direct) or 1 (staged), then exceptions for ordered pairs of different devices, each once: 1,0>3=0",
        HostStage(),
        "auto",
        "the way of copies between devices: direct, or staged through pinned host memory",
    ),
    Setting(
        "tile_mb",
        "PYXDEV_HOST_STAGE_TILE_MB",
        ("--tile-mb",),
        _tile_mb,
        f"auto, or a decimal number (MiB) above 0 and at most {MAX_TILE_MB}",
        None,
        "auto",
        "tile size of staged copies in MiB; auto: fitted to the copy",
    ),
    Setting(
        "gate",
        "PYXDEV_ACTXFER_GATE",
        ("--gate",),
        _switch,
        "0 or 1",
        True,
        "1",
        "0: copies do not wait until their destination is free (results are then not promised)",
    ),
    Setting(
        "force_sync",
        "PYXDEV_FORCE_XDEV_SYNC",
        ("--force-sync",),
        _switch,
        "0 or 1",
        False,
        "0",
        "1: the host does the waits between devices; 0: a probe decides whether the devices can",
    ),
    Setting(
        "threads_load",
        "PYXDEV_THREADS_LOAD",
        ("-tl", "--threads-load"),
        _threads,
        f"1 (one after the other), a number up to {MAX_THREADS}, or -1 (as many as help)",
        4,
        "4",
        "threads that load a model",
    ),
    Setting(
        "async_uploads",
        "PYXDEV_ASYNC_UPLOADS",
        ("--async-uploads",),
        _switch,
        "0 or 1",
        None,
        "CUDA 1, HIP 0, simulated 1",
        "0: a loading thread waits for its upload before it reads on",
    ),
    Setting(
        "sim_check",
        "PYXDEV_SIM_CHECK",
        ("--sim-check",),
        _switch,
        "0 or 1",
        False,
        "0",
        "1: simulated devices check that every two operations on the same bytes are ordered",
    ),
)

_ASYNC_UPLOADS = {"cuda": True, "hip": False, "sim": True}


@dataclass(frozen=True)
class Settings:
    """The settings of one runtime. resolve() makes them; the attributes are the names of the table."""

    backend: str = "auto"
    host_stage: HostStage = field(default_factory=HostStage)
    tile_mb: float | None = None  # MiB; None: fitted to the copy
    gate: bool = True
    force_sync: bool = False
    threads_load: int = 4
    async_uploads: bool | None = None  # None: the backend's default
    sim_check: bool = False

    @property
    def tile_bytes(self) -> int:
        """As a link takes it: at least one byte, or 0 for "fitted to the copy"."""
        return 0 if self.tile_mb is None else math.ceil(self.tile_mb * MIB)

    def for_backend(self, backend: str) -> Self:
        """The same with the backend chosen, and with what depends on the backend decided."""
        uploads = _ASYNC_UPLOADS[backend] if self.async_uploads is None else self.async_uploads
        return replace(self, backend=backend, async_uploads=uploads)


def resolve(
    arguments: Mapping[str, object],
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Settings from arguments, flags and variables, in this order of precedence, then the defaults.

    arguments: by name; None means "not given", anything else is text as in a variable or the setting's own type.
    flags: texts by name, as vars() of a namespace filled by add_flags(); names of other options in it are not read.
    environ: os.environ unless given.

    Raises SettingError for a name that is no setting and for a value that is not allowed.
    """
    unknown = sorted(arguments.keys() - {setting.name for setting in TABLE})
    if unknown:
        raise SettingError(f"{unknown[0]!r} is no setting; there are {', '.join(setting.name for setting in TABLE)}")
    flags = {} if flags is None else flags
    environ = os.environ if environ is None else environ
    values = {}
    for setting in TABLE:
        for source, given in (
            (f"argument {setting.name}", arguments.get(setting.name)),
            (f"flag {setting.flags[-1]}", flags.get(setting.name)),
            (f"variable {setting.variable}", environ.get(setting.variable)),
        ):
            if given is not None:
                values[setting.name] = _parse(setting, source, given)
                break
    return Settings(**values)


def _parse(setting: Setting, source: str, given: object) -> Any:
    try:
        return setting.parse(given)
    except ValueError:
        value = repr(given)
        value = value if len(value) <= 100 else value[:100] + "..."
        raise SettingError(f"{setting.name}: the {source} is {value}; allowed: {setting.allowed}") from None


def add_flags(parser: argparse.ArgumentParser, *names: str) -> None:
    """Adds the flags of the settings named (all without names). Every flag takes a value, kept as text for resolve(),
    None when it is not given."""
    group = parser.add_argument_group("settings", "a flag beats its variable, which beats the default")
    for setting in TABLE:
        if not names or setting.name in names:
            note = f"{setting.help}. Allowed: {setting.allowed}. Default: {setting.default_text} [{setting.variable}]"
            group.add_argument(*setting.flags, dest=setting.name, metavar="VALUE", help=note.replace("%", "%%"))
