"""Link and NUMA node of a device, from a sysfs of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from checked import ask, by_pair

from pyxdev.checks import Verdict, sysfs, timing


def device(root: Path, pci: str, **files: object) -> None:
    folder = root / pci
    folder.mkdir(parents=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")


def test_a_link_trained_down(tmp_path: Path) -> None:
    device(
        tmp_path,
        "0000:3b:00.0",
        current_link_speed="8.0 GT/s PCIe",
        current_link_width=4,
        max_link_speed="32.0 GT/s PCIe",
        max_link_width=16,
        numa_node=1,
    )
    place = sysfs.place("0000:3B:00.0", tmp_path)
    assert place.link == "gen3 x4 of gen5 x16"
    assert place.numa_node == 1
    assert place.payload == pytest.approx(3.43, abs=0.01)


@pytest.mark.parametrize(
    ("speed", "generation"),
    [("2.5 GT/s PCIe", 1), ("5.0 GT/s PCIe", 2), ("16.0 GT/s PCIe", 4), ("64.0 GT/s PCIe", 6), ("Unknown", 0), ("", 0)],
)
def test_speeds(tmp_path: Path, speed: str, generation: int) -> None:
    device(tmp_path, "0000:01:00.0", current_link_speed=speed, current_link_width=16)
    assert sysfs.place("0000:01:00.0", tmp_path).generation == generation


def test_what_is_not_told_is_unknown(tmp_path: Path) -> None:
    device(tmp_path, "0000:01:00.0", current_link_width="n/a", numa_node=-1)
    assert sysfs.place("0000:01:00.0", tmp_path) == sysfs.Place()
    assert sysfs.place("", tmp_path) == sysfs.place("0000:02:00.0", tmp_path) == sysfs.Place()
    assert sysfs.Place().link == ""


def test_a_leg_below_its_link_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "place", lambda pci: sysfs.Place(5, 16, 5, 16, 0, 54.8))
    legs = timing.Legs()
    results = ask(legs)
    assert by_pair(results, Verdict.INCONCLUSIVE) == {"0", "1"}
    assert "a gen5 x16 link carries 54.8" in results[0].reason
    monkeypatch.setattr(timing, "place", lambda pci: sysfs.Place(4, 16, 4, 16, 0, 27.4))
    assert by_pair(ask(legs), Verdict.PASS) == {"0", "1", ""}
