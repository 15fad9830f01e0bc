"""Simulated devices: machine profiles, checked and turned into numbers for the driver.

A profile is a TOML file; docs/simulator.md lists its keys. Whatever it leaves out comes from default.toml.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from pyxdev import settings
from pyxdev._native import HOST, SimDriver, sim_driver, sim_faults
from pyxdev.errors import SettingError

Machine = dict[str, Any]

_ROUTES = {"link": 0, "host": 1}
_UNPEERED = {"refused": 0, "blocks": 1}


def driver(machine: Mapping[str, Any] | str | None = None, *, check: bool | None = None) -> SimDriver:
    """A driver of simulated devices.

    machine: the name of a profile, the path of a profile file, or a mapping of changes to one: {"profile": "default",
    "device": {"count": 2}, "run": {"seed": 7}}. check: watch the order of all accesses, unless the machine says itself
    whether to; None: as the setting sim_check says. Raises SettingError.
    """
    whole = resolve(machine)
    if "check" not in whole["run"]:
        whole["run"] = {**whole["run"], "check": settings.resolve({}).sim_check if check is None else check}
    return sim_driver(lower(whole))


VISIBLE = ()  # no variable hides simulated devices


def hidden(environ: Mapping[str, str]) -> str:
    """Empty."""
    return ""


def map_devices(environ: Mapping[str, str], count: int | None = None) -> list[str]:
    """Empty."""
    return []


def profiles() -> list[str]:
    """The names of the profiles that come with pyxdev."""
    folder = files("pyxdev") / "profiles"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def resolve(machine: Mapping[str, Any] | str | None = None) -> Machine:
    """The whole machine, checked: every section and key of default.toml, with `profile` its name."""
    changes: Mapping[str, Any] = {}
    if machine is None:
        name = "default"
    elif isinstance(machine, str):
        name = machine
    elif isinstance(machine, Mapping):
        changes = {key: value for key, value in machine.items() if key != "profile"}
        name = machine.get("profile", "default")
    else:
        raise SettingError(f"machine is {machine!r}; allowed: a profile's name, a path, or a mapping of changes")
    base = _check(_read_known("default"), "default.toml")
    named = base if name == "default" else _merge(base, _check(*_read(name)))
    whole = _merge(named, _check(changes, "machine"))
    _check_devices(whole, name if not changes else f"machine on {name}")
    whole["profile"] = Path(name).stem
    return whole


# ---- files -----------------------------------------------------------------------------------------------------------


def _read_known(name: str) -> Mapping[str, Any]:
    return tomllib.loads((files("pyxdev") / "profiles" / f"{name}.toml").read_text("utf-8"))


def _read(name: object) -> tuple[Mapping[str, Any], str]:
    known = profiles()
    if name in known:
        return _read_known(str(name)), f"{name}.toml"
    if not isinstance(name, str) or not ("/" in name or name.endswith(".toml")):
        raise SettingError(f"profile is {name!r}; allowed: {', '.join(known)}, or the path of a .toml file")
    try:
        return tomllib.loads(Path(name).read_text("utf-8")), name
    except OSError as error:
        raise SettingError(f"profile {name}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"profile {name}: not a TOML file: {error}") from error


# ---- what is allowed -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rule:
    allowed: str
    accepts: Callable[[Any], bool]


def _text(most: int) -> _Rule:
    return _Rule(f"text of 1 to {most} characters", lambda value: isinstance(value, str) and 0 < len(value) <= most)


def _whole(low: int, high: int) -> _Rule:
    return _Rule(
        f"a whole number from {low} to {high}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high,
    )


def _number(low: float, high: float) -> _Rule:
    return _Rule(
        f"a number from {low:g} to {high:g}",
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high,
    )


def _choice(*words: str) -> _Rule:
    return _Rule(", ".join(words), lambda value: isinstance(value, str) and value in words)


def _is_list_of_devices(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)


_DEVICES = _Rule("a list of device numbers", _is_list_of_devices)
_GROUPS = _Rule(
    '"all", "none" or a list of lists of device numbers',
    lambda value: (
        value in ("all", "none")
        if isinstance(value, str)
        else isinstance(value, list | tuple) and all(map(_is_list_of_devices, value))
    ),
)
_PAIRS = _Rule(
    "a list of [device, device]",
    lambda value: isinstance(value, list | tuple) and all(_is_list_of_devices(i) and len(i) == 2 for i in value),
)
_FLAG = _Rule("true or false", lambda value: isinstance(value, bool))
_PLACE = _Rule(
    'a device number, "host" or "any"',
    lambda value: value in ("host", "any") or (isinstance(value, int) and not isinstance(value, bool) and value >= 0),
)
_RATE = _number(1e-3, 1e6)
_TIME = _number(0, 1e9)

_ONE_DEVICE = {
    "name": _text(127),
    "arch": _text(23),
    "memory_gib": _number(1e-6, 1e6),
    "memory_gb_s": _RATE,
    "to_device_gb_s": _RATE,
    "to_host_gb_s": _RATE,
    "latency_us": _TIME,
    "integrated": _FLAG,
}
_ONE_PAIR = {"capable": _FLAG, "route": _choice(*_ROUTES), "gb_s": _RATE, "latency_us": _TIME}
_SECTIONS: dict[str, dict[str, _Rule]] = {
    "device": {"count": _whole(1, 1024), **_ONE_DEVICE},
    "host": {"pinned_gib": _number(0, 1e6), "bus_gb_s": _number(0, 1e6), "hop_us": _TIME},
    "peer": {
        "groups": _GROUPS,
        **{key: rule for key, rule in _ONE_PAIR.items() if key != "capable"},
        "limit": _whole(-1, 1024),
        "unpeered": _choice(*_UNPEERED),
        "unpeered_gb_s": _RATE,
    },
    "calls_us": {name: _TIME for name in ("copy", "fill", "launch", "record", "wait", "query", "sync", "alloc")},
    "run": {
        "seed": _whole(0, 2**64 - 1),
        "jitter": _number(0, 1000),
        "delay_us": _TIME,
        "check": _FLAG,
        "trace": _FLAG,
    },
}
_LISTS: dict[str, dict[str, _Rule]] = {
    "other": {"devices": _DEVICES, **_ONE_DEVICE},
    "pair": {"pairs": _PAIRS, **_ONE_PAIR},
    "fault": {
        "kind": _choice(*sim_faults()),
        "from": _PLACE,
        "to": _PLACE,
        "first": _whole(1, 2**63),
        "count": _whole(0, 2**63),
        "value": _whole(0, 2**63),
    },
}
_NEEDED = {"other": "devices", "pair": "pairs", "fault": "kind"}


def _check(given: Mapping[str, Any], source: str) -> Machine:
    checked: Machine = {}
    for name, section in given.items():
        if name == "summary":
            checked[name] = _check_value(section, _text(200), f"{source}: summary")
        elif name in _SECTIONS:
            checked[name] = _check_section(section, _SECTIONS[name], f"{source}: {name}")
        elif name in _LISTS:
            if not isinstance(section, list | tuple):
                raise SettingError(f"{source}: {name} is {section!r}; allowed: a list of tables")
            checked[name] = [_check_entry(entry, name, f"{source}: {name}[{i}]") for i, entry in enumerate(section)]
        else:
            raise SettingError(f"{source}: {name} is unknown; allowed: summary, {', '.join([*_SECTIONS, *_LISTS])}")
    return checked


def _check_entry(given: object, name: str, where: str) -> Machine:
    checked = _check_section(given, _LISTS[name], where)
    if _NEEDED[name] not in checked:
        raise SettingError(f"{where} has no {_NEEDED[name]}; allowed: {_LISTS[name][_NEEDED[name]].allowed}")
    return checked


def _check_section(given: object, rules: Mapping[str, _Rule], where: str) -> Machine:
    if not isinstance(given, Mapping):
        raise SettingError(f"{where} is {given!r}; allowed: a table of {', '.join(rules)}")
    for key in given:
        if key not in rules:
            raise SettingError(f"{where}.{key} is unknown; allowed: {', '.join(rules)}")
    return {key: _check_value(value, rules[key], f"{where}.{key}") for key, value in given.items()}


def _check_value(value: Any, rule: _Rule, where: str) -> Any:
    if not rule.accepts(value):
        raise SettingError(f"{where} is {value!r}; allowed: {rule.allowed}")
    return value


def _check_devices(machine: Machine, source: str) -> None:
    """Every device number that a section names is there."""
    count = machine["device"]["count"]
    peer = machine["peer"]
    named = {
        "peer.groups": [] if isinstance(peer["groups"], str) else peer["groups"],
        "other.devices": [other["devices"] for other in machine.get("other", [])],
        "pair.pairs": [pair for table in machine.get("pair", []) for pair in table["pairs"]],
        "fault": [[fault.get(side, "any") for side in ("from", "to")] for fault in machine.get("fault", [])],
    }
    for where, lists in named.items():
        for device in (device for devices in lists for device in devices):
            if not isinstance(device, str) and not 0 <= device < count:
                raise SettingError(f"{source}: {where} names device {device}; allowed: 0 to {count - 1}")


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Machine:
    """Sections are merged key by key; lists and plain values are replaced."""
    merged = dict(base)
    for name, value in changes.items():
        merged[name] = {**base.get(name, {}), **value} if isinstance(value, Mapping) else value
    return merged


# ---- numbers for the driver ------------------------------------------------------------------------------------------


def _bytes(gib: float) -> int:
    return round(gib * 2**30)


def _rate(gb_s: float) -> int:
    return round(gb_s * 1e9)


def _ns(us: float) -> int:
    return round(us * 1e3)


def lower(machine: Machine) -> dict[str, Any]:
    """A resolved machine as the driver takes it: bytes, bytes a second, nanoseconds, one entry for each device and each
    ordered pair."""
    count = machine["device"]["count"]
    devices = [{key: machine["device"][key] for key in _ONE_DEVICE} for _ in range(count)]
    for other in machine.get("other", []):
        for device in other["devices"]:
            devices[device].update({key: value for key, value in other.items() if key != "devices"})
    peer, host, run = machine["peer"], machine["host"], machine["run"]
    return {
        "devices": [
            {
                "name": device["name"],
                "arch": device["arch"],
                "memory": _bytes(device["memory_gib"]),
                "memory_rate": _rate(device["memory_gb_s"]),
                "up_rate": _rate(device["to_device_gb_s"]),
                "down_rate": _rate(device["to_host_gb_s"]),
                "latency": _ns(device["latency_us"]),
                "integrated": device["integrated"],
            }
            for device in devices
        ],
        "peers": [
            {
                "capable": pair["capable"],
                "route": _ROUTES[pair["route"]],
                "rate": _rate(pair["gb_s"]),
                "latency": _ns(pair["latency_us"]),
            }
            for pair in _pairs(machine)
        ],
        "peer_limit": peer["limit"],
        "unpeered": _UNPEERED[peer["unpeered"]],
        "pinned": _bytes(host["pinned_gib"]),
        "bus_rate": _rate(host["bus_gb_s"]),
        "hop": _ns(host["hop_us"]),
        "costs": {name: _ns(us) for name, us in machine["calls_us"].items()},
        "seed": run["seed"],
        "jitter": round(run["jitter"] * 1000),
        "delay": _ns(run["delay_us"]),
        "faults": _faults(machine),
        "check": run.get("check", False),
        "trace": run["trace"],
    }


def _pairs(machine: Machine) -> list[Machine]:
    """For each ordered pair, (0, 0), (0, 1), ...; without peer access a copy goes over the host, if it is let."""
    count, peer = machine["device"]["count"], machine["peer"]
    groups = {"all": [range(count)], "none": []}[peer["groups"]] if isinstance(peer["groups"], str) else peer["groups"]
    capable = {(a, b) for group in groups for a in group for b in group if a != b}
    pairs: dict[tuple[int, int], Machine] = {}
    for src in range(count):
        for dst in range(count):
            pairs[src, dst] = {key: peer[key] for key in ("route", "gb_s", "latency_us")}
            pairs[src, dst]["capable"] = (src, dst) in capable
    for table in machine.get("pair", []):
        for src, dst in table["pairs"]:
            pairs[src, dst].update({key: value for key, value in table.items() if key != "pairs"})
    for pair in pairs.values():
        if not pair["capable"]:
            pair.update(route="host", gb_s=peer["unpeered_gb_s"])
    return list(pairs.values())


def _place(name: int | str) -> int:
    return {"host": HOST, "any": -2}[name] if isinstance(name, str) else name


def _faults(machine: Machine) -> list[Machine]:
    kinds = sim_faults()
    return [
        {
            "kind": kinds.index(fault["kind"]),
            "from": _place(fault.get("from", "any")),
            "to": _place(fault.get("to", "any")),
            "first": fault.get("first", 1),
            "count": fault.get("count", 0),
            "value": fault.get("value", 0),
        }
        for fault in machine.get("fault", [])
    ]
