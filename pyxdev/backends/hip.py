"""HIP devices. The driver is not written yet."""

from __future__ import annotations

from typing import NoReturn

from pyxdev.errors import BackendUnavailable

VISIBLE_DEVICES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def driver() -> NoReturn:
    """Raises BackendUnavailable: there is no HIP driver yet."""
    raise BackendUnavailable("the HIP backend is not written yet")
