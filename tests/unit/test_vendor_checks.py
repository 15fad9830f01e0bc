"""The checks' kernels through the vendors' real Python packages, over stand-ins that know three kernels by name."""

from __future__ import annotations

import pytest
from vendor_child import FAKES, ROCM, build_fakes, run


@pytest.fixture(scope="module", autouse=True)
def fakes() -> None:
    build_fakes()


CODE = """
from pyxdev import backends
from pyxdev.checks import CHECKS, Level, Verdict, kernels
from pyxdev.checks.child import run_check
from pyxdev.checks.rig import Rig

archs = []
kernels._nvrtc = kernels._hiprtc = lambda compiler, arch: archs.append(arch) or b"\\x7fELF and no more"
wanted = ("device-data", "direct-data", "event-rules", "event-order", "host-calls", "peer-kernels")
with backends.open(BACKEND) as runtime:
    found = kernels.open_kernels(runtime)
    assert archs == ["sm_90"] or BACKEND == "hip", archs  # once for two devices of one kind
    for check in (check for check in CHECKS if check.key in wanted):
        with Rig(runtime, found, level=Level.QUICK) as rig:
            results = list(run_check(check, rig))
        assert results, check.key
        bad = [result for result in results if result.verdict != Verdict.PASS]
        assert not bad, bad
    found.close()
"""


@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_checks_pass_over_the_stand_in(backend: str) -> None:
    run(f"BACKEND = {backend!r}{CODE}", FAKES, ROCM)


def test_a_refused_launch_is_an_error() -> None:
    run(
        """
from pyxdev import backends
from pyxdev.checks import kernels

kernels._nvrtc = lambda compiler, arch: b"no image"
with backends.open("cuda") as runtime:
    stream = runtime.stream(1)
    found = kernels.open_kernels(runtime)
    raises(errors.DriverError, lambda: found.fill(stream, 0, 8, 1, 0), "cuModuleLoadData")
    found.close()
    stream.close()
""",
        FAKES,
    )


def test_without_a_compiler_the_message_says_what_to_install() -> None:
    run(
        """
from pyxdev import backends
from pyxdev.checks import kernels

with backends.open("cuda") as runtime:
    try:
        kernels.open_kernels(runtime).close()
    except errors.BackendUnavailable as error:
        assert "NVRTC" in str(error), error
""",
        FAKES,
    )
