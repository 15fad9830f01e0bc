"""CUDA devices: entry points of NVIDIA's driver, resolved by cuda-python and handed to native/cuda.c."""

from __future__ import annotations

from collections.abc import Mapping

from pyxdev._native import Driver, cuda_driver, cuda_symbols
from pyxdev.errors import BackendUnavailable

# Asks for the functions whose stream 0 is the legacy one, whatever CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM says.
LEGACY_STREAM = 1

VISIBLE = ("CUDA_VISIBLE_DEVICES",)  # NVIDIA's driver filters by it


def driver() -> Driver:
    """The CUDA driver, not yet opened.

    Raises BackendUnavailable without cuda-python, without NVIDIA's driver, or with one older than CUDA 12.0.
    """
    return cuda_driver(resolve())


def resolve() -> dict[str, int]:
    """Address by base name of every entry point that native/cuda.c asks for. Raises as driver() does."""
    try:
        from cuda.bindings import driver as api
    except ImportError as error:
        raise BackendUnavailable(
            f"the CUDA backend needs cuda-python 12.8 or newer: pip install 'pyxdev[cuda]' ({error})"
        ) from error
    found: dict[str, int] = {}
    for name, version, optional in cuda_symbols():
        try:
            # A version above the driver's own is an error; a name it does not know is address 0.
            result, address, _ = api.cuGetProcAddress(name.encode(), version, LEGACY_STREAM)
        except RuntimeError as error:
            raise BackendUnavailable(
                "cuda-python is installed, but there is no libcuda.so.1 of NVIDIA's driver, for CUDA 12.0 or newer: "
                f"{error}"
            ) from error
        if int(result) == 0 and address:
            found[name] = address
        elif not optional:
            raise BackendUnavailable(
                f"NVIDIA's driver has no {name} of CUDA {version // 1000}.{version % 1000 // 10}; "
                "a driver for CUDA 12.0 or newer is needed"
            )
    return found


def hidden(environ: Mapping[str, str]) -> str:
    """What hides devices, as text for an error; empty if nothing does."""
    return ", ".join(f"{name}={environ[name]!r}" for name in VISIBLE if name in environ)


def map_devices(environ: Mapping[str, str], count: int | None = None) -> list[str]:
    """What each device of ours is to CUDA_VISIBLE_DEVICES, for people. count: how many devices there are. The driver
    ends the list at the first entry that it does not know."""
    entries = environ.get(VISIBLE[0], "").split(",")[:count]
    return [
        f"device {device} is {entry.strip()} of {VISIBLE[0]}" for device, entry in enumerate(entries) if entry.strip()
    ]
