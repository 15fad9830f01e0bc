"""python -m pyxdev.report.machine: the machine, its software and the settings, as one JSON document."""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from pyxdev import backends
from pyxdev._native import Runtime
from pyxdev.backends import hip
from pyxdev.checks.sysfs import place
from pyxdev.cli import machine
from pyxdev.cli.output import print_json
from pyxdev.errors import Error

PACKAGES = (
    "pyxdev", "numpy", "cuda-python", "cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc", "hip-python",
    "rocm-bindings-hip", "torch", "cupy", "numba", "triton", "transformers", "safetensors",
)  # fmt: skip
DRIVERS = {
    "nvidia": "/sys/module/nvidia/version",
    "amdgpu": "/sys/module/amdgpu/version",
    "rocm": "/opt/rocm/.info/version",
}
_PCI = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def collect(asked: argparse.Namespace, root: Path = Path("/")) -> dict[str, Any]:
    """Everything; what the devices tell is missing where they cannot be opened, with the reason."""
    told = {
        "python": platform.python_version(),
        "free_threaded": not getattr(sys, "_is_gil_enabled", lambda: True)(),
        "packages": packages(),
        "system": {"name": system(root), "kernel": platform.release(), "libc": " ".join(platform.libc_ver())},
        "drivers": {name: text for name, path in DRIVERS.items() if (text := read(root / path[1:]))},
        "iommu_groups": len(listed(root / "sys/kernel/iommu_groups")),
        "processors": processors(root),
        "memory": memory(root / "proc/meminfo", "MemTotal"),
        "numa": numa(root),
        "xgmi": xgmi(root),
        "variables": {name: text for name, text in sorted(os.environ.items()) if name.startswith("PYXDEV_")},
    }
    try:
        with machine.open_runtime(asked) as runtime:
            variables, lines = backends.visible(runtime.backend, runtime.device_count)
            told |= {
                "backend": runtime.backend,
                "runtime": version(runtime.backend),
                "devices": [device(runtime, number, root) for number in range(runtime.device_count)],
                "settings": {name: str(value) for name, value in vars(runtime.settings).items()},
                "visible": {"variables": variables, "devices": lines},
            }
    except Error as error:
        told["error"] = f"{type(error).__name__}: {error}"
    return told


def packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def version(backend: str) -> str:
    """Of the vendor's runtime library."""
    if backend == "hip":
        found = hip.version()
        return f"HIP {found[0]}.{found[1]}" if found else "HIP of an unknown version"
    if backend == "cuda":
        from cuda.bindings import driver

        code, number = driver.cuDriverGetVersion()
        return f"CUDA {number // 1000}.{number % 1000 // 10}" if int(code) == 0 else "CUDA of an unknown version"
    return "simulated"


def device(runtime: Runtime, number: int, root: Path) -> dict[str, Any]:
    info = runtime.device_info(number)
    at = place(info.pci, root / "sys/bus/pci/devices")
    return {
        "device": number, "name": info.name, "arch": info.arch, "memory": info.memory, "integrated": info.integrated,
        "copy_engines": info.copy_engines, "pci": info.pci, "link": at.link, "numa_node": at.numa_node,
        "bridges": bridges(info.pci, root),
    }  # fmt: skip


def bridges(pci: str, root: Path) -> list[str]:
    """The PCI addresses between the root and the device; those that two devices share are on the way between them."""
    try:
        way = os.readlink(root / "sys/bus/pci/devices" / pci) if pci else ""
    except OSError:
        return []
    return [part for part in way.split("/")[:-1] if _PCI.fullmatch(part)]


def processors(root: Path) -> dict[str, Any]:
    models = re.findall(r"^model name\s*: (.*)$", read(root / "proc/cpuinfo"), re.MULTILINE)
    return {"model": models[0] if models else "", "count": os.cpu_count(), "usable": len(os.sched_getaffinity(0))}


def numa(root: Path) -> dict[str, Any]:
    """Processors and bytes of memory of each node."""
    nodes = [path for path in listed(root / "sys/devices/system/node") if re.fullmatch(r"node[0-9]+", path.name)]
    return {
        path.name[4:]: {"cpus": read(path / "cpulist"), "memory": memory(path / "meminfo", "MemTotal")}
        for path in nodes
    }


def xgmi(root: Path) -> list[dict[str, int]]:
    """AMD's own links between GPUs, as the kernel tells them: nodes, and MB/s."""
    links = []
    for path in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*/io_links/*/properties")):
        told = dict(re.findall(r"^(\w+) ([0-9]+)$", read(path), re.MULTILINE))
        if told.get("type") == "11":
            names = {"from": "node_from", "to": "node_to", "max_mb_s": "max_bandwidth"}
            links.append({ours: int(told.get(theirs, 0)) for ours, theirs in names.items()})
    return links


def system(root: Path) -> str:
    found = re.search(r'^PRETTY_NAME="?(.*?)"?$', read(root / "etc/os-release"), re.MULTILINE)
    return found[1] if found else ""


def memory(path: Path, name: str) -> int:
    """Bytes, from a line of kB."""
    found = re.search(rf"{name}:\s+([0-9]+) kB", read(path))
    return int(found[1]) * 1024 if found else 0


def read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def listed(path: Path) -> list[Path]:
    return sorted(_children(path))


def _children(path: Path) -> Iterator[Path]:
    try:
        yield from path.iterdir()
    except OSError:
        return


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    machine.add_flags(parser, "backend")
    print_json(collect(parser.parse_args()))
