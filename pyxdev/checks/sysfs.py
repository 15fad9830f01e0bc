"""Link width and generation and the NUMA node of a device, from sysfs by PCI id. Nothing is ever written there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/bus/pci/devices")

# GT/s per lane: generation and payload in GB/s per lane, after line coding (8b/10b up to generation 2, then 128b/130b;
# 6 uses flits) and about 13 % for packet headers.
_GENERATIONS = {
    "2.5": (1, 0.25 * 0.87),
    "5.0": (2, 0.5 * 0.87),
    "8.0": (3, 0.985 * 0.87),
    "16.0": (4, 1.969 * 0.87),
    "32.0": (5, 3.938 * 0.87),
    "64.0": (6, 7.563 * 0.87),
}


@dataclass(frozen=True)
class Place:
    """Where a device sits. Generation and lanes are 0 and numa_node -1 where sysfs does not tell."""

    generation: int = 0
    lanes: int = 0
    max_generation: int = 0
    max_lanes: int = 0
    numa_node: int = -1
    payload: float = 0.0  # GB/s of the link as it is now, one way

    @property
    def link(self) -> str:
        """ "gen5 x16", "gen1 x4 of gen4 x16", or "" if unknown."""
        if not self.generation or not self.lanes:
            return ""
        text = f"gen{self.generation} x{self.lanes}"
        best = self.max_generation, self.max_lanes
        return text if best in ((0, 0), (self.generation, self.lanes)) else f"{text} of gen{best[0]} x{best[1]}"


def place(pci: str, root: Path = ROOT) -> Place:
    """pci: as the driver spells it, "0000:3b:00.0" in any case, or empty."""
    folder = root / pci.lower()
    if not pci or not folder.is_dir():
        return Place()
    generation, rate = _speed(folder / "current_link_speed")
    lanes = _number(folder / "current_link_width")
    return Place(
        generation,
        lanes,
        _speed(folder / "max_link_speed")[0],
        _number(folder / "max_link_width"),
        _number(folder / "numa_node", -1),
        rate * lanes,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path, unknown: int = 0) -> int:
    text = _read(path)
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else unknown


def _speed(path: Path) -> tuple[int, float]:
    """(generation, payload in GB/s per lane) of "32.0 GT/s PCIe"."""
    found = re.match(r"([0-9]+(?:\.[0-9]+)?) GT/s", _read(path))
    if not found:
        return 0, 0.0
    return _GENERATIONS.get(f"{float(found[1]):.1f}", (0, 0.0))
