"""What was found out about pairs of devices, kept on disk, so that the next process need not try again.

One JSON file below $XDG_CACHE_HOME (~/.cache). An entry is for one machine as it is now: the devices in their order,
the driver, the boot (firmware and IOMMU settings change only with one) and the variables that hide devices. Simulated
devices are never kept. A file that cannot be read or written costs time and a log line, nothing else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyxdev._native import Runtime

log = logging.getLogger("pyxdev")

FORMAT = 1
MACHINES = 8  # remembered; the one used longest ago goes first
VISIBLE = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
)
TOLD_BY_SYSTEM = ("/proc/sys/kernel/random/boot_id", "/sys/module/nvidia/version", "/sys/module/amdgpu/version")

Entry = dict[str, Any]


def path(environ: Mapping[str, str] = os.environ) -> Path:
    """The file; relative values of XDG_CACHE_HOME are not followed, as its specification says."""
    home = environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "pyxdev" / "pairs.json"


def machine(runtime: Runtime, environ: Mapping[str, str] = os.environ) -> str | None:
    """What entries of this machine are kept under; None where devices cannot be told apart for sure."""
    infos = [runtime.device_info(device) for device in range(runtime.device_count)]
    if runtime.backend == "sim" or not all(info.uuid for info in infos):
        return None
    parts = [
        FORMAT,
        runtime.backend,
        [(info.uuid, info.pci) for info in infos],
        [environ.get(name) for name in VISIBLE],
        [_read(Path(name)) for name in TOLD_BY_SYSTEM],
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def load(key: str | None, file: Path) -> dict[str, Entry]:
    """Entries by pair, "0>1"."""
    if key is None:
        return {}
    entries = _document(file)["machines"].get(key, {})
    return {pair: entry for pair, entry in entries.items() if isinstance(entry, dict)}


def store(key: str | None, file: Path, pair: str, entry: Entry) -> None:
    """Adds or replaces one entry; what other processes have stored meanwhile stays."""
    if key is None:
        return
    document = _document(file)
    machines = document["machines"]
    machines[key] = {**machines.pop(key, {}), pair: entry}  # at the end: used last
    for oldest in list(machines)[:-MACHINES]:
        del machines[oldest]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        with os.fdopen(descriptor, "w") as out:
            json.dump(document, out, indent=1)
        os.replace(name, file)
    except OSError as error:
        log.info("what was found out about devices %s is not kept: %s", pair, error)


def _document(file: Path) -> dict[str, Any]:
    empty: dict[str, Any] = {"format": FORMAT, "machines": {}}
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        return empty
    except (OSError, ValueError) as error:
        log.info("%s is not used: %s", file, error)
        return empty
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("machines"), dict):
        log.info("%s is not used: it is of another format", file)
        return empty
    return found


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
