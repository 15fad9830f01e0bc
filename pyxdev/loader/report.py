"""How a load went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DeviceReport:
    """Bytes read to one device, and the seconds until its last byte was read and handed over."""

    device: int
    nbytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Report:
    """How a load went. `seconds` runs from the call until the last byte was on its device, `setup` until the first
    read; `direct` counts bytes that were read past the page cache, `pinned` bytes of page-locked memory."""

    tensors: int
    nbytes: int
    seconds: float
    setup: float
    direct: int
    threads: int
    pinned: int
    async_uploads: bool
    devices: tuple[DeviceReport, ...]

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON; seconds, bytes and bytes a second."""
        return {
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "seconds": self.seconds,
            "setup": self.setup,
            "rate": self.rate,
            "direct": self.direct,
            "threads": self.threads,
            "pinned": self.pinned,
            "async_uploads": self.async_uploads,
            "devices": [
                {"device": one.device, "bytes": one.nbytes, "seconds": one.seconds, "rate": one.rate}
                for one in self.devices
            ],
        }
