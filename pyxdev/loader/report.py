"""How a load went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DeviceReport:
    """Bytes read to one device, how many of them past the page cache, and the seconds from the call until its first
    tile and its last byte were read and handed over."""

    device: int
    nbytes: int
    direct: int
    first: float
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def source(self) -> str:
        """Where its bytes came from: "warm" (the page cache), "cold" (direct reads), "33% cold", or "" without any."""
        if not self.nbytes or not self.direct:
            return "warm" if self.nbytes else ""
        return "cold" if self.direct == self.nbytes else f"{self.direct / self.nbytes:.0%} cold"


@dataclass(frozen=True)
class Report:
    """How a load went. `seconds` runs from the call until the last byte was on its device, `setup` until the first
    read; `reading` and `waiting` are what all threads together spent in reads, and waiting for free tiles and uploads;
    `pinned` counts bytes of page-locked memory, 0 where there was none to be had."""

    tensors: int
    seconds: float
    setup: float
    reading: float
    waiting: float
    threads: int
    pinned: int
    async_uploads: bool
    devices: tuple[DeviceReport, ...]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.devices)

    @property
    def direct(self) -> int:
        """Bytes that were read past the page cache."""
        return sum(one.direct for one in self.devices)

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def first(self) -> float:
        """Seconds until the first tile of any device was read and handed over."""
        return min((one.first for one in self.devices if one.nbytes), default=0.0)

    @property
    def limit(self) -> str:
        """What took most of the time."""
        if self.setup > self.seconds / 2:
            return "set-up: headers, memory, page-locking"
        if self.nbytes and not self.pinned:
            return "uploads from memory that is not page-locked"
        if self.waiting > self.reading:
            return "the devices: threads waited for uploads"
        if self.direct > self.nbytes / 2:
            return "the disk: direct reads"
        return f"copies out of the page cache by {self.threads} thread{'s' if self.threads > 1 else ''}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON; seconds, bytes and bytes a second."""
        return {
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "seconds": self.seconds,
            "setup": self.setup,
            "first": self.first,
            "reading": self.reading,
            "waiting": self.waiting,
            "rate": self.rate,
            "direct": self.direct,
            "threads": self.threads,
            "pinned": self.pinned,
            "async_uploads": self.async_uploads,
            "limit": self.limit,
            "devices": [
                {
                    "device": one.device,
                    "bytes": one.nbytes,
                    "direct": one.direct,
                    "first": one.first,
                    "seconds": one.seconds,
                    "rate": one.rate,
                }
                for one in self.devices
            ],
        }
