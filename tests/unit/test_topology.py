"""Paths are chosen by what was verified and measured, the reason is told, and what was found is kept."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from checked import fault, machine

from pyxdev import probe, topology, verdicts
from pyxdev._native import FaultDriver, Runtime
from pyxdev.backends import sim
from pyxdev.checks.child import Session
from pyxdev.errors import DriverError, NoPeerAccess
from pyxdev.probe import Speed
from pyxdev.settings import HostStage
from pyxdev.topology import Pair, choose, crossover

AUTO, DIRECT, STAGED = HostStage("auto"), HostStage("direct"), HostStage("staged")


@contextmanager
def opened(*faults: dict[str, Any], **options: Any) -> Iterator[Runtime]:
    with Runtime(sim.driver(machine(*faults, **options))) as runtime:
        yield runtime
        assert not runtime.live().any(), runtime.live()


def chosen(src: int, dst: int, *faults: dict[str, Any], mode: HostStage = AUTO, **options: Any) -> Pair:
    with opened(*faults, **options) as runtime:
        return choose(runtime, src, dst, mode)


# ---- what is chosen --------------------------------------------------------------------------------------------------


def test_a_verified_pair_that_is_faster_is_direct() -> None:
    pair = chosen(0, 1)
    assert (pair.path, pair.peer, pair.verdict, pair.waits) == ("direct", "yes", "verified", "work")
    assert all(speed.direct > speed.staged > 0 for speed in pair.speeds)
    assert pair.leg > 1e9
    assert pair.why == "direct copies arrived as sent, faster than staged ones"


@pytest.mark.parametrize("kind", ["drop", "zero", "mirror", "flip", "truncate", "swap"])
def test_one_direction_that_loses_data_is_staged_and_the_other_is_direct(kind: str) -> None:
    """Field cases 1 and 2."""
    wrong = fault(kind, 0, 1, value=1 << 20)
    pair = chosen(0, 1, wrong)
    assert (pair.path, pair.peer, pair.verdict) == ("staged", "yes", "wrong data")
    assert "wrong ones" in pair.why
    assert all(speed.direct == 0 for speed in pair.speeds)
    assert chosen(1, 0, wrong).path == "direct"


def test_a_pair_without_peer_access_is_staged() -> None:
    pair = chosen(0, 1, peer={"groups": "none"})
    assert (pair.path, pair.peer, pair.verdict) == ("staged", "no", "not tried")
    assert "no peer access" in pair.why


def test_one_way_access() -> None:
    """Field case 3."""
    one_way: dict[str, Any] = {"peer": {"groups": "none"}, "pair": [{"pairs": [[1, 0]], "capable": True}]}
    assert chosen(0, 1, **one_way).path == "staged"
    assert chosen(1, 0, **one_way).path == "direct"


def test_more_peers_than_the_driver_takes() -> None:
    """Field case 6."""
    with opened(devices=4, peer={"limit": 2}) as runtime:
        pairs = [choose(runtime, 0, dst, AUTO) for dst in (1, 2, 3)]
    assert [pair.path for pair in pairs] == ["direct", "direct", "staged"]
    assert (pairs[2].peer, pairs[2].why) == ("not enabled", "the driver's limit of peers is reached")


def test_access_that_is_refused_is_no_exception() -> None:
    pair = chosen(0, 1, fault("enable_fails", 0, 1))
    assert (pair.path, pair.peer) == ("staged", "not enabled")
    assert "enabling peer access failed" in pair.why


def test_already_enabled_is_enabled() -> None:
    """Field case 7."""
    assert chosen(0, 1, fault("already_enabled", 0, 1)).path == "direct"


def test_a_copy_that_hangs_is_inconclusive_and_staged() -> None:
    pair = chosen(0, 1, fault("hang_copy", 0, 1))
    assert (pair.path, pair.verdict) == ("staged", "inconclusive")
    assert "more than 10 s" in pair.why


def test_direct_that_is_slower_than_staged_is_staged() -> None:
    slow = {"peer": {"gb_s": 1, "latency_us": 500}}
    pair = chosen(0, 1, **slow)
    assert (pair.path, pair.verdict) == ("staged", "verified")


def test_direct_that_is_slower_for_large_copies_only() -> None:
    pair = chosen(0, 1, peer={"gb_s": 5})
    assert pair.path == "by_size"
    assert (pair.direct_from, pair.direct_to) == (0, 262144)
    assert pair.why.endswith("faster than staged ones below 262144 bytes")
    with opened(peer={"gb_s": 5}) as runtime:
        link = runtime.link(0, 1, **choose(runtime, 0, 1, AUTO).link_options())
        assert (link.path(100_000), link.path(1 << 20)) == ("direct", "staged")
        link.close()


def test_asked_for_is_done_or_refused() -> None:
    assert chosen(0, 1, fault("drop", 0, 1), mode=DIRECT).why == "asked for"
    assert chosen(0, 1, mode=STAGED).path == "staged"
    with opened(peer={"groups": "none"}) as runtime, pytest.raises(NoPeerAccess, match="device 0 to device 1"):
        choose(runtime, 0, 1, DIRECT)


def test_one_device_copies_within_itself() -> None:
    with opened() as runtime:
        before = runtime.clock()
        assert choose(runtime, 1, 1, AUTO).path == "direct"
        assert runtime.clock() == before  # nothing was tried


def test_a_pair_is_tried_once_and_others_not_at_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pyxdev")
    with opened(devices=3) as runtime:
        first = choose(runtime, 0, 1, AUTO)
        after = runtime.clock()
        assert choose(runtime, 0, 1, AUTO) is first
        assert runtime.clock() == after
        assert list(topology.topology(runtime)) == [(0, 1, "auto")]
        assert choose(runtime, 0, 1, AUTO, fresh=True) is not first
    lines = [record.getMessage() for record in caplog.records if "copies from device" in record.getMessage()]
    assert len(lines) == 2
    assert lines[0].startswith("copies from device 0 to device 1: direct; host_stage auto (auto), peer access yes")
    assert "GB/s for 1048576 bytes" in lines[0]


# ---- waits -----------------------------------------------------------------------------------------------------------


def test_waits_that_do_not_wait_are_seen_in_data_and_the_host_waits_instead(caplog: pytest.LogCaptureFixture) -> None:
    """Field case 22."""
    with opened(fault("ignore_wait", 0, 1)) as runtime:
        assert choose(runtime, 1, 0, AUTO).waits == "work"
        assert not runtime.force_sync
        assert choose(runtime, 0, 1, AUTO).waits == "do not work"
        assert runtime.force_sync
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "device 1 do not wait for events of device 0" in line


def test_a_producer_that_is_not_slow_is_inconclusive() -> None:
    """Downloads that take no time: leaving the wait out is not seen either."""
    fast = {"device": {"count": 2, "to_host_gb_s": 1e6, "latency_us": 0}}
    with Runtime(sim.driver({**fast, "host": {"bus_gb_s": 0}})) as runtime:
        assert choose(runtime, 0, 1, AUTO).waits == "inconclusive"
        assert not runtime.force_sync


def test_forced_waits_are_not_probed() -> None:
    with Runtime(sim.driver(machine()), force_sync=True) as runtime:
        assert choose(runtime, 0, 1, AUTO).waits == "not tried"
        assert runtime.force_sync


# ---- a probe that fails half way -------------------------------------------------------------------------------------


PROBES: dict[str, Callable[[Runtime], Any]] = {
    "verify": lambda runtime: probe.verify(runtime, 0, 1),
    "waits": lambda runtime: probe.waits(runtime, 0, 1),
    "leg": lambda runtime: probe.leg(runtime, 0, 1),
    "speeds": lambda runtime: probe.speeds(runtime, 0, 1, direct=True),
}


@pytest.mark.parametrize("name", PROBES)
def test_nothing_is_closed_while_a_stream_may_use_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever driver call fails. The vendors' own frees wait, and simulated ones do too; ours must not need that."""
    idle: list[bool] = []
    reached: list[bool] = []

    class Watched(probe._Tools):
        def callback(self, close: Any, *args: Any, **options: Any) -> Any:
            def closing() -> None:
                reached.append(fault.calls >= at)
                fault.arm(0)
                idle.extend(stream.idle() for stream in self._streams if not stream.closed)
                close(*args, **options)

            return super().callback(closing)

    monkeypatch.setattr(probe, "_Tools", Watched)
    monkeypatch.setattr(probe, "VERIFIED", ((70_000, 0xA5),))
    monkeypatch.setattr(probe, "REPEATS", 1)
    for at in itertools.count(1):
        reached.clear()
        fault = FaultDriver(sim.driver(machine()))
        with Runtime(fault) as runtime:
            fault.arm(at)
            with suppress(DriverError):
                PROBES[name](runtime)
            assert not runtime.live().any(), f"call {at} left {runtime.live()}"
        assert all(idle), f"call {at} failed, and something was closed in use"
        if reached and not reached[0]:
            break
    assert at > 20


# ---- the crossover ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wins", "expected"),
    [
        ("DDDD", ("direct", 0, 0)),
        ("SSSS", ("staged", 0, 0)),
        ("DDSS", ("by_size", 0, 1 << 15)),
        ("SDDD", ("by_size", 1 << 11, 0)),
        ("SDDS", ("by_size", 1 << 11, 1 << 19)),
        ("DSDD", ("by_size", 0, 1 << 11)),
        ("", ("direct", 0, 0)),
    ],
)
def test_crossover(wins: str, expected: tuple[str, int, int]) -> None:
    sizes = (1 << 9, 1 << 13, 1 << 17, 1 << 21)
    speeds = [Speed(nbytes, 20 if win == "D" else 5, 10) for nbytes, win in zip(sizes, wins, strict=False)]
    assert crossover(speeds) == expected


def test_direct_may_be_a_little_slower() -> None:
    assert crossover([Speed(4096, 9.6, 10)])[0] == "direct"
    assert crossover([Speed(4096, 9.4, 10)])[0] == "staged"


# ---- kept on disk ----------------------------------------------------------------------------------------------------


class Card:
    """A runtime of devices with identities, as far as verdicts.py looks."""

    backend = "cuda"

    def __init__(self, *uuids: str) -> None:
        self.uuids = uuids
        self.device_count = len(uuids)

    def device_info(self, device: int) -> Any:
        return SimpleNamespace(uuid=self.uuids[device], pci=f"0000:0{device}:00.0")


def key(*uuids: str, **environ: str) -> str | None:
    return verdicts.machine(cast(Runtime, Card(*uuids)), environ)


def test_the_key_of_a_machine() -> None:
    assert key("A", "B") == key("A", "B")
    others = [key("B", "A"), key("A"), key("A", "B", CUDA_VISIBLE_DEVICES="1,0"), key("A", "B", HIP_VISIBLE_DEVICES="")]
    assert len({key("A", "B"), *others}) == 5
    assert key("A", "") is None
    with opened() as runtime:
        assert verdicts.machine(runtime) is None


def test_entries_are_found_again_and_others_kept(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "pairs.json"
    verdicts.store("one", file, "0>1", {"verdict": "verified"})
    verdicts.store("one", file, "1>0", {"verdict": "wrong data"})
    verdicts.store("two", file, "0>1", {"verdict": "inconclusive"})
    assert verdicts.load("one", file) == {"0>1": {"verdict": "verified"}, "1>0": {"verdict": "wrong data"}}
    assert verdicts.load("three", file) == verdicts.load(None, file) == {}
    assert [entry.name for entry in file.parent.iterdir()] == ["pairs.json"]


def test_only_so_many_machines_are_remembered(tmp_path: Path) -> None:
    file = tmp_path / "pairs.json"
    for number in range(verdicts.MACHINES + 3):
        verdicts.store(f"machine {number}", file, "0>1", {})
    verdicts.store("machine 4", file, "1>0", {})
    kept = list(json.loads(file.read_text())["machines"])
    assert len(kept) == verdicts.MACHINES
    assert kept[-1] == "machine 4"
    assert "machine 2" not in kept


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 99, "machines": {}}', '{"format": 1, "machines": 3}', "\0"]
)
def test_a_damaged_file_is_not_used_and_then_replaced(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pyxdev")
    file = tmp_path / "pairs.json"
    file.write_text(text)
    assert verdicts.load("one", file) == {}
    assert "is not used" in caplog.text
    verdicts.store("one", file, "0>1", {"a": 1})
    assert verdicts.load("one", file) == {"0>1": {"a": 1}}


def test_a_folder_that_cannot_be_written_is_a_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pyxdev")
    (tmp_path / "file").write_text("")
    verdicts.store("one", tmp_path / "file" / "pairs.json", "0>1", {})
    assert "not kept" in caplog.text


def test_where_the_file_is(tmp_path: Path) -> None:
    assert verdicts.path({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "pyxdev" / "pairs.json"
    for unset in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert verdicts.path(unset) == Path.home() / ".cache" / "pyxdev" / "pairs.json"


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Simulated devices that are kept as if they were real."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(verdicts, "machine", lambda runtime: "this machine")
    return verdicts.path()


def test_the_next_process_tries_nothing(kept: Path) -> None:
    first = chosen(0, 1)
    with opened(fault("drop", 0, 1)) as runtime:  # would be wrong if it were tried
        before = runtime.clock()
        assert choose(runtime, 0, 1, AUTO) == first
        assert runtime.clock() - before < 1e-3
        assert choose(runtime, 0, 1, AUTO, fresh=True).verdict == "wrong data"
    assert chosen(0, 1).verdict == "wrong data"
    assert chosen(1, 0).verdict == "verified"


def test_a_pair_first_staged_on_request_is_verified_later(kept: Path) -> None:
    assert chosen(0, 1, mode=STAGED).verdict == "not tried"
    assert chosen(0, 1).verdict == "verified"


def test_waits_that_do_not_work_are_remembered(kept: Path) -> None:
    chosen(0, 1, fault("ignore_wait", 0, 1))
    with opened() as runtime:
        choose(runtime, 0, 1, AUTO)
        assert runtime.force_sync


def test_what_validate_finds_wrong_is_staged(kept: Path) -> None:
    """Also where the quick look at a pair is not enough to see it."""
    with Runtime(sim.driver(machine(fault("overrun", 0, 1)))) as runtime:
        assert choose(runtime, 0, 1, AUTO).path == "direct"
        order = {"registry": "pyxdev.checks", "level": 0, "seed": 1, "devices": None, "patience": 10.0}
        session = Session(runtime, order)
        assert "FAIL" in [answer.get("verdict") for answer in session.answer("direct-data")]
        assert [answer.get("verdict") for answer in session.answer("staged-data")] == ["PASS", "PASS", None]
    pair = chosen(0, 1)
    assert (pair.path, pair.verdict) == ("staged", "wrong data")
    assert pair.why.startswith("pyxdev validate, direct-data: direct, 1 bytes from offset 0")
    assert chosen(1, 0).path == "direct"


def test_an_entry_of_another_make_is_tried_again(kept: Path) -> None:
    verdicts.store("this machine", kept, "0>1", {"verdict": "verified"})
    assert chosen(0, 1).speeds
