"""The backend switch: which devices a runtime drives."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from pyxdev._native import Driver, Runtime
from pyxdev.errors import BackendUnavailable, InvalidArgument, NoDevice
from pyxdev.settings import Settings, resolve

log = logging.getLogger("pyxdev")


def open(
    backend: str | None = None, *, settings: Settings | None = None, machine: Mapping[str, Any] | str | None = None
) -> Runtime:
    """Opens a runtime on "cuda", "hip" or "sim" devices; "auto" takes CUDA if it has a device, else HIP, else simulated
    devices with one warning. What was picked, and why, goes to the logger "pyxdev".

    settings: as pyxdev.settings.resolve() makes them, read from the environment unless given; backend beats them.
    machine: the simulated machine, see pyxdev.backends.sim; with it "auto" means "sim". The runtime keeps its settings,
    with the backend's defaults filled in, as `.settings`.

    Raises BackendUnavailable (a package, a library or a driver is missing; the message says which), NoDevice (all is
    there but a device), SettingError.
    """
    if settings is None:
        settings = resolve({"backend": backend})
    elif backend is not None:
        settings = replace(settings, backend=resolve({"backend": backend}).backend)
    wanted = settings.backend
    if machine is not None:
        if wanted not in ("auto", "sim"):
            raise InvalidArgument(f"machine describes simulated devices, but the backend is {wanted!r}")
        wanted = "sim"
    runtime = _open_first(settings) if wanted == "auto" else _open(wanted, settings, machine)
    runtime.settings = settings.for_backend(runtime.backend)
    names = sorted({runtime.device_info(device).name for device in range(runtime.device_count)})
    log.info("backend %s: %d devices (%s)", runtime.backend, runtime.device_count, ", ".join(names))
    return runtime


def visible(backend: str, count: int | None = None) -> tuple[dict[str, str], list[str]]:
    """The variables that hide devices of this backend, as they are set, and what each device is to them, for people.
    count: how many devices there are, where that is known."""
    module = import_module(f"pyxdev.backends.{backend}")
    return {name: os.environ[name] for name in module.VISIBLE if name in os.environ}, module.map_devices(
        os.environ, count
    )


def _open_first(settings: Settings) -> Runtime:
    reasons: list[str] = []
    for name, vendor in (("cuda", "CUDA"), ("hip", "HIP")):
        try:
            runtime = _open(name, settings)
        except (BackendUnavailable, NoDevice) as error:
            reasons.append(f"no {vendor} device: {error}")
            continue
        log.info("backend auto takes %s%s", name, "".join(f"; {reason}" for reason in reasons))
        return runtime
    runtime = _open("sim", settings)
    log.warning("no GPU can be used, so the devices are simulated and so are all times (%s)", "; ".join(reasons))
    return runtime


def _open(name: str, settings: Settings, machine: Mapping[str, Any] | str | None = None) -> Runtime:
    module = import_module(f"pyxdev.backends.{name}")
    driver: Driver = module.driver(machine, check=settings.sim_check) if name == "sim" else module.driver()
    try:
        return Runtime(driver, force_sync=settings.force_sync)
    except NoDevice as error:
        hidden: str = module.hidden(os.environ)
        if not hidden:
            raise
        raise NoDevice(f"{error}; {hidden}", status=error.status, code=error.code, operation=error.operation) from None
