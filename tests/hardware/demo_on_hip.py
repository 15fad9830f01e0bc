"""The demo on the HIP backend of a machine with NVIDIA GPUs, through the stand-in libamdhip64.so of tests/fakes.

    make fakes; python tests/hardware/demo_on_hip.py            every GPU; one GPU has two stages on it
    python tests/hardware/demo_on_hip.py --backend sim          the same script on simulated devices

torch is a CUDA build there, and refuses memory that says it is HIP's. So two things are not as on an AMD machine:
arrays of HIP devices tell DLPack that they are CUDA's, and torch's build is not asked for. All else is the way it is
there: resolver, HIP driver, executor, loader, torch adapter.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROCM = ROOT / "build" / "fakes" / "rocm"
LABEL = "HIP interface over CUDA devices: says nothing about AMD timing, ordering or coherence"
KDLCUDA = 2  # dlpack.h


def with_stand_in() -> None:
    """Starts this process again with the stand-in where the loader looks, unless it is there."""
    library = ROCM / "lib" / "libamdhip64.so"
    if os.environ.get("PYXDEV_HIP_LIBRARY") == str(library):
        return
    if not library.exists():
        sys.exit(f"{library} is not there: make fakes")
    os.environ["PYXDEV_HIP_LIBRARY"] = str(library)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.execv(sys.executable, [sys.executable, *sys.argv])


def pass_for_cuda() -> None:
    """What a CUDA build of torch needs to see."""
    from pyxdev import _native, adapters

    _native.DLPACK_DEVICE["hip"] = KDLCUDA
    adapters.torch_is_for = lambda torch: "hip"


def pytest_configure() -> None:
    """As a plugin of pytest: PYTHONPATH=tests/hardware pytest -p demo_on_hip tests/conformance/test_torch_stages.py
    --pyxdev-backend=hip, with the stand-in where the loader looks."""
    pass_for_cuda()


def in_two() -> None:
    """The pipeline's stages are halves of the model on one device; the run that it is compared with is not cut."""
    from pyxdev.demo import stages

    whole, asked = stages._layers, []

    def cut(weights: Any, config: Any) -> Any:
        ((device, layers),) = whole(weights, config)
        asked.append(device)
        middle = layers.stop // 2
        return [(device, layers)] if len(asked) == 1 else [(device, layers[:middle]), (device, layers[middle:])]

    stages._layers = cut


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("hip", "sim"), default="hip")
    parser.add_argument("--devices", type=int, help="at most so many (all)")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--prompt", help="(the demo's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the outcome as well")
    given = parser.parse_args()
    if given.backend == "hip":
        with_stand_in()
        pass_for_cuda()
        if importlib.util.find_spec("torch") is None:
            sys.exit("torch is not installed")
    return run(given)


def run(given: argparse.Namespace) -> int:
    from pyxdev import backends
    from pyxdev.cli.demo import COLUMNS, cells, document
    from pyxdev.cli.output import console, print_table
    from pyxdev.demo import run as demo
    from pyxdev.demo.prompt import PROMPT
    from pyxdev.settings import HostStage

    out = console()
    with backends.open(given.backend) as runtime:
        names = [runtime.device_info(device).name for device in range(runtime.device_count)]
        devices = [*range(len(names))][: given.devices]
        paths = [HostStage("staged"), HostStage("direct")]
        if len(devices) == 1:
            in_two()
            load, devices, paths = demo.load, [0, 0], [HostStage("direct")]
            demo.load = lambda path, _, **options: load(path, [0], **options)
        work = demo.Work(given.prompt or PROMPT, 64, given.tokens)
        outcome = demo.run(runtime, devices, paths, work)
        live = runtime.live()
    label = LABEL if given.backend == "hip" else "simulated devices"
    out.print(label)
    out.print(f"devices {devices} of {', '.join(names)}; {outcome.text.strip()!r}")
    print_table(COLUMNS, map(cells, outcome.rows), f"{label.partition(':')[0]}: tokens of the prompt a second")
    apart = f"{outcome.difference:g} apart from one stage on one device, {outcome.tolerance:g} allowed"
    out.print(f"logits {'agree' if outcome.logits_agree else 'DIFFER'}: {apart}; left open: {live or 'nothing'}")
    if given.json:
        given.json.write_text(json.dumps({"label": label, "devices": names} | document(outcome), indent=1) + "\n")
    return 0 if outcome.logits_agree and len(outcome.rows) == len(paths) else 1


if __name__ == "__main__":
    sys.exit(main())
