"""The devices that a command works on: the flags that choose them, and opening them."""

from __future__ import annotations

import argparse

from pyxdev import backends, settings
from pyxdev._native import Runtime
from pyxdev.errors import NoDevice

Choice = int | list[int] | None  # how many devices, or which; None: all there are


def add_flags(parser: argparse.ArgumentParser, *names: str) -> None:
    """--json, --profile, --backend, and the flags of the settings named."""
    parser.add_argument("--json", action="store_true", help="JSON instead of the table")
    parser.add_argument("--profile", metavar="NAME", help="the simulated machine: a name, or a file")
    settings.add_flags(parser, "backend", *names)


def add_devices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", metavar="N", type=devices, help="how many, or which: 4, or 0,2 (default: all)")


def devices(text: str) -> Choice:
    """The type of --devices: "4" is a number of devices, "0,2" are ordinals."""
    if "," not in text:
        return count(text)
    ordinals = [whole(part) for part in text.split(",") if part]
    if len(set(ordinals)) != len(ordinals):
        raise argparse.ArgumentTypeError(f"{text!r} names a device twice")
    return ordinals


def count(text: str) -> int:
    """The type of a flag that counts something."""
    number = whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return number


def whole(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def shares(text: str) -> list[float]:
    """The type of --tensor-split: "3,1" are shares. What they may be, the loader knows."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers like 3,1") from None


def open_runtime(arguments: argparse.Namespace, choice: Choice = None) -> Runtime:
    """The machine of the flags. Simulated devices are as many as are asked for, unless --profile says what they are.

    Raises NoDevice where there are fewer, and what pyxdev.backends.open() raises.
    """
    chosen = settings.resolve({}, vars(arguments))
    runtime = backends.open(settings=chosen, machine=arguments.profile)
    there, backend = runtime.device_count, runtime.backend
    wanted = 1 if choice is None else choice if isinstance(choice, int) else max(choice) + 1
    if wanted <= there:
        return runtime
    runtime.close()
    if backend == "sim" and arguments.profile is None:
        return backends.open("sim", settings=chosen, machine={"device": {"count": wanted}})
    what = f"{choice} devices are" if isinstance(choice, int) else f"device {wanted - 1} is"
    raise NoDevice(f"{what} asked for; there are {there} ({backend})")


def ordinals(choice: Choice, runtime: Runtime) -> list[int]:
    """The devices chosen, of a runtime that has them."""
    if isinstance(choice, list):
        return choice
    return list(range(runtime.device_count if choice is None else choice))
