"""Runs one check on a simulated machine in this process."""

from __future__ import annotations

from typing import Any

from pyxdev._native import Runtime
from pyxdev.backends import sim
from pyxdev.checks import Check, Level, Result, Verdict
from pyxdev.checks.child import run_check
from pyxdev.checks.kernels import open_kernels
from pyxdev.checks.rig import Rig

Place = int | str


def fault(kind: str, src: Place = "any", dst: Place = "any", **more: int) -> dict[str, Any]:
    """One fault of a machine file: from src to dst, each a device, "host" or "any"."""
    return {"kind": kind, "from": src, "to": dst, **more}


def machine(
    *faults: dict[str, Any], devices: int = 2, seed: int = 1, jitter: float = 0, **sections: Any
) -> dict[str, Any]:
    return {"device": {"count": devices}, "run": {"seed": seed, "jitter": jitter}, "fault": list(faults), **sections}


def ask(
    check: Check,
    *faults: dict[str, Any],
    level: Level = Level.QUICK,
    patience: float = 10.0,
    watch: bool = False,
    asked: tuple[int, ...] | None = None,
    **machine_options: Any,
) -> list[Result]:
    """Results on a machine with these faults; it must leave nothing alive.

    watch: with the ordering checker on. asked: these devices only.
    """
    with Runtime(sim.driver(machine(*faults, **machine_options), check=watch)) as runtime:
        kernels = open_kernels(runtime)
        with Rig(runtime, kernels, level=level, devices=asked, patience=patience) as rig:
            results = list(run_check(check, rig))
        assert not runtime.live().any(), runtime.live()
    return results


def by_pair(results: list[Result], verdict: Verdict) -> set[str]:
    """The pairs with this verdict."""
    return {result.pair for result in results if result.verdict == verdict}


def verdicts(results: list[Result]) -> set[Verdict]:
    return {result.verdict for result in results}
