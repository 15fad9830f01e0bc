"""CUDA devices: entry points of NVIDIA's driver, resolved by cuda-python and handed to native/cuda.c."""

from __future__ import annotations

from collections.abc import Mapping

from pyxdev._native import Driver, cuda_driver, cuda_symbols
from pyxdev.errors import BackendUnavailable

# Asks for the functions whose stream 0 is the legacy one, whatever CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM says.
LEGACY_STREAM = 1


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
    return f"CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']!r}" if "CUDA_VISIBLE_DEVICES" in environ else ""
