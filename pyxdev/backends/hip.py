"""HIP devices: entry points of AMD's HIP library, found through hip-python or by name and handed to native/hip.c."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from pyxdev._native import Driver, hip_driver, hip_symbols
from pyxdev.errors import BackendUnavailable

log = logging.getLogger("pyxdev")

# The library to use, whatever else is there.
LIBRARY_VARIABLE = "PYXDEV_HIP_LIBRARY"

OLDEST = (5, 3)  # the first with hipLaunchHostFunc

# The runtime filters by the first, then by the second or, where that is not set or empty, by the third; each list
# counts within what the one before left over.
VISIBLE = ROCR, HIP, CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"


def driver() -> Driver:
    """The HIP driver, not yet opened.

    Raises BackendUnavailable without a HIP library, or with one older than HIP 5.3.
    """
    return hip_driver(resolve())


def resolve() -> dict[str, int]:
    """Address by name of every entry point that native/hip.c asks for. Raises as driver() does."""
    library, path = _load()
    found: dict[str, int] = {}
    missing: list[str] = []
    for name, _, optional in hip_symbols():
        try:
            address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        except AttributeError:
            address = None
        if address:
            found[name] = address
        elif not optional:
            missing.append(name)
    version = _version(library)
    if missing or (version and version < OLDEST):
        known = f"HIP {version[0]}.{version[1]}" if version else "of an unknown version"
        lacks = f" and lacks {', '.join(missing)}" if missing else ""
        raise BackendUnavailable(f"{path} is {known}{lacks}; HIP {OLDEST[0]}.{OLDEST[1]} or newer is needed")
    return found


def version() -> tuple[int, int] | None:
    """(major, minor) of the library in use. Raises BackendUnavailable."""
    return _version(_load()[0])


def _load() -> tuple[ctypes.CDLL, str]:
    tried: list[str] = []
    for path, source in _candidates():
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            tried.append(f"{path} ({source}): {error}")
            continue
        log.info("HIP library %s (%s)", path, source)
        return library, path
    raise BackendUnavailable(
        "the HIP backend needs the HIP library of ROCm, and finds none; hip-python (pip install 'pyxdev[hip]') or "
        f"{LIBRARY_VARIABLE} can say where it is. Tried: {'; '.join(tried)}"
    )


def _candidates() -> Iterator[tuple[str, str]]:
    """(path, where it comes from), best first. Two copies of the library in one process would not know of each other's
    streams and memory, so one that is loaded already, PyTorch's say, comes before what could be loaded."""
    wanted = os.environ.get(LIBRARY_VARIABLE)
    if wanted:
        yield wanted, LIBRARY_VARIABLE
        return
    for path in loaded_copies():
        yield path, "already loaded"
    known = _path_of_hip_python()
    if known:
        yield known, "hip-python"
    for name in ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"):
        yield name, "the loader's search path"
        yield f"{os.environ.get('ROCM_PATH') or '/opt/rocm'}/lib/{name}", "ROCm's folder"


def loaded_copies() -> list[str]:
    """The HIP libraries in this process, in order of address."""
    maps = Path("/proc/self/maps").read_text("utf-8", "surrogateescape")
    paths = (line.split(maxsplit=5)[5] for line in maps.splitlines() if "/" in line)
    return list(dict.fromkeys(path for path in paths if path.rpartition("/")[2].startswith("libamdhip64.so")))


def _path_of_hip_python() -> str | None:
    """Where hip-python would load the library from; None without hip-python."""
    try:
        from rocm.bindings.util.paths import get_library_path  # 10 and later
    except ImportError:
        try:
            from hip import chip  # 6 and 7
        except ImportError:
            return None
        return os.fsdecode(chip.DLL)
    return os.fsdecode(get_library_path("amdhip64"))


def _version(library: ctypes.CDLL) -> tuple[int, int] | None:
    """(major, minor); None where the library does not tell, which leaves no error behind."""
    number = ctypes.c_int(0)
    try:
        code = library.hipRuntimeGetVersion(ctypes.byref(number))
        if code != 0:
            library.hipGetLastError()
    except AttributeError:
        return None
    return (number.value // 10_000_000, number.value // 100_000 % 100) if code == 0 else None


def hidden(environ: Mapping[str, str]) -> str:
    """What hides devices, as text for an error; empty if nothing does."""
    lists = [f"{name}={environ[name]!r}" for name in VISIBLE if name in environ]
    return ", ".join([*lists, *map_devices(environ)])


def map_devices(environ: Mapping[str, str], count: int | None = None) -> list[str]:
    """What each device of ours is to the lists of visible devices, for people: "device 0 is 1 of HIP_VISIBLE_DEVICES,
    which is 4 of ROCR_VISIBLE_DEVICES". count: how many devices there are, where that is known.

    Never used to choose a device: the runtime does that. As it reads them, an empty list of HIP's or CUDA's hides
    nothing, an empty one of ROCR's hides all.
    """
    inner = next((name for name in (HIP, CUDA) if environ.get(name)), None)
    names = [name for name in (inner, ROCR) if name is not None and name in environ]
    notes = [f"{name} is empty, which hides nothing" for name in (HIP, CUDA) if environ.get(name) == ""]
    if not names:
        return notes
    lines = []
    for device, entry in enumerate(_entries(environ[names[0]])[:count]):
        line = f"device {device} is {entry} of {names[0]}"
        if len(names) == 2 and entry.isdecimal():
            outer = _entries(environ[ROCR])
            inside = int(entry) < len(outer)
            line += f", which is {outer[int(entry)]} of {ROCR}" if inside else f", beyond the {len(outer)} of {ROCR}"
        lines.append(line)
    return [*notes, *(lines or [f"{names[0]} leaves none"])]


def _entries(text: str) -> list[str]:
    """The entries of a list of devices, each once; -1 ends it."""
    entries = [entry.strip() for entry in text.split(",")]
    end = next((index for index, entry in enumerate(entries) if entry in ("", "-1")), len(entries))
    return list(dict.fromkeys(entries[:end]))
