"""Does `pyxdev validate` notice when a wait is missing? Builds the runtime with one wait taken out at a time and asks.

    python tests/hardware/mutants.py --backend cuda
    python tests/hardware/mutants.py --backend cuda --devices 0     one device will do: it is both ends then

The waits are those of tests/unit/test_mutations_native.py. Needs `python setup.py build_ext --inplace` beforehand and
links its objects again. Prints one JSON line for each: what was taken out, and which checks said FAIL (on which pairs).
Exit code 1 if a mutant of a copy was not noticed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "unit"))

from test_mutations_native import MUTATIONS  # noqa: E402

CHECKS = ("link-waits", "slot-reuse", "staged-data", "many-small")
COMPILE = ["cc", "-std=c11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-fvisibility=hidden", f"-I{ROOT / 'native'}", "-c"]


def objects() -> dict[str, Path]:
    """Object files of the last build in place, by source name."""
    folders = sorted(ROOT.glob("build/temp.*"), key=lambda folder: folder.stat().st_mtime)
    if not folders:
        raise SystemExit("nothing is built: python setup.py build_ext --inplace")
    found = {str(path.relative_to(folders[-1]).with_suffix("")): path for path in folders[-1].rglob("*.o")}
    return {name: path for name, path in found.items() if name.startswith("native/") or name.endswith("/_native")}


def package(folder: Path, replaced: dict[str, Path]) -> None:
    """A copy of the package in the folder, as links, with an extension of these objects."""
    inside = folder / "pyxdev"
    inside.mkdir()
    for path in (ROOT / "pyxdev").iterdir():
        if not path.name.startswith("_native.c"):  # _native.c and _native.cpython-...so
            (inside / path.name).symlink_to(path)
    name = "_native" + str(sysconfig.get_config_var("EXT_SUFFIX"))
    command = ["cc", "-shared", "-o", str(inside / name), *map(str, replaced.values()), "-lpthread", "-lm"]
    subprocess.run(command, check=True)


def ask(folder: Path, backend: str, devices: str) -> list[dict[str, str]]:
    names = [part for check in CHECKS for part in ("-k", check)]
    code = (
        "import argparse, sys; from pyxdev.cli import validate; p = argparse.ArgumentParser(); "
        "validate.add_arguments(p); sys.exit(validate.run(p.parse_args()))"
    )
    command = [sys.executable, "-c", code, "--quick", "--json", "--backend", backend, "--devices", devices, *names]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    if not done.stdout:
        raise SystemExit(done.stderr)
    return list(json.loads(done.stdout)["checks"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="sim")
    parser.add_argument("--devices", default="0,1")
    given = parser.parse_args()
    built, missed = objects(), 0
    rows = [("nothing", "", "", "", ""), *(row for row in MUTATIONS if row[0].startswith(("direct", "staged")))]
    for name, file, line, instead, _ in rows:
        with tempfile.TemporaryDirectory() as temporary:
            folder, replaced = Path(temporary), dict(built)
            if file:
                text = (ROOT / "native" / file).read_text()
                assert text.count(line) == 1, f"{file} has changed: {name}"
                source = folder / file
                source.write_text(text.replace(line, instead))
                replaced[f"native/{source.stem}"] = source.with_suffix(".o")
                subprocess.run([*COMPILE, str(source), "-o", str(source.with_suffix(".o"))], check=True)
            package(folder, replaced)
            results = ask(folder, given.backend, given.devices)
        failed = [f"{result['key']} {result['pair']}" for result in results if result["verdict"] == "FAIL"]
        other = [f"{result['key']} {result['pair']}" for result in results if result["verdict"] == "INCONCLUSIVE"]
        print(json.dumps({"taken_out": name, "noticed_by": failed, "no_answer": other}), flush=True)
        missed += bool(failed) != bool(file)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
