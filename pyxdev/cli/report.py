"""pyxdev report: everything that an owner of a machine can tell us about it, in one archive without personal data."""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import subprocess
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from pyxdev.cli import machine
from pyxdev.cli.output import console, print_json, print_table, size
from pyxdev.errors import InvalidArgument
from pyxdev.report import parts
from pyxdev.report.parts import Outcome, Part
from pyxdev.report.privacy import Privacy

COLUMNS = ("part", "state", ">seconds", "files", "shows")
EPILOG = """exit codes: 0 every part ran, whatever it found; 1 a part failed, which is in the archive; 2 there is no
archive. Not in it: user and host names, home folders, addresses, serial numbers, UUIDs, other variables than PYXDEV_*
and those that hide devices. Full: some minutes on two GPUs, at most an hour; writes 1 GiB to the temporary
folder for a while. Nothing of the machine is changed, and nothing is sent."""
README = """# A report of pyxdev {name}

Made on {date} by `pyxdev report{flags}`. docs/amd.md of pyxdev says what each result decides.
manifest.json has the same list with commands, exit codes and times.

{list}
User and host names, home folders, network addresses, serial numbers and UUIDs have been taken out: `[user]`, `[host]`,
`~`, `[address]`, `[uuid]`. `[here]`, `[python]` and `[pyxdev]` stand for folders. Of the environment there are only
variables that begin with PYXDEV_ and the lists of visible devices. Read it before you send it: all of it is text.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "report", help="validate, the benches and the machine in one archive to send in", epilog=EPILOG
    )
    parser.add_argument("--quick", action="store_true", help="a minute instead of several: fewer checks, less data")
    parser.add_argument("--out", type=Path, metavar="FILE.zip", help="(pyxdev-report-DATE-TIME.zip)")
    machine.add_flags(parser, "backend")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """1 where a part failed. Raises InvalidArgument where the archive cannot be written."""
    now = datetime.datetime.now()
    path = arguments.out or Path(f"pyxdev-report-{now:%Y%m%d-%H%M%S}.zip")
    try:
        file = path.open("xb")
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be written: {error.strerror}") from None
    done = False
    try:
        with file:
            privacy = Privacy.of_this_machine()
            outcomes = collect(arguments, privacy)
            texts = archive(outcomes, privacy, arguments.quick, now.date())
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
                for name, text in texts.items():
                    packed.writestr(name, text)
        done = True
    finally:
        if not done:
            path.unlink()
    if arguments.json:
        print_json({"archive": str(path), **json.loads(texts["manifest.json"])})
    else:
        show(path, outcomes)
    return 1 if any(outcome.state == "failed" for outcome in outcomes) else 0


def collect(arguments: argparse.Namespace, privacy: Privacy) -> list[Outcome]:
    """Runs one part after the other."""
    flags = {"--backend": arguments.backend, "--profile": arguments.profile}
    target = [text for flag, value in flags.items() if value for text in (flag, value)]
    outcomes = [attempt(parts.first_part(target), privacy, arguments.json)]
    for part in parts.further_parts(target, arguments.quick, outcomes[0].document):
        outcomes.append(attempt(part, privacy, arguments.json))
    return outcomes


def attempt(part: Part, privacy: Privacy, quiet: bool) -> Outcome:
    if quiet:
        return parts.run(part, privacy)
    with console().status(part.name, spinner="line"):
        outcome = parts.run(part, privacy)
    told = f"{outcome.state}: {outcome.why}" if outcome.why else f"{outcome.state} in {outcome.seconds:.1f} s"
    console().print(f"{part.name}: {told}")
    return outcome


def archive(outcomes: Sequence[Outcome], privacy: Privacy, quick: bool, date: datetime.date) -> dict[str, str]:
    """The files of the archive, by name."""
    told = [privacy.document(outcome.as_dict()) for outcome in outcomes]
    which = {"pyxdev": version(), "commit": commit()}
    manifest = {"version": 1, **which, "date": date.isoformat(), "quick": quick, "parts": told}
    lines = [
        f"* {', '.join(one['files']) or one['part']}: {one['shows']}"
        + (f" ({one['state']}: {one['why']})" if one["why"] else "")
        for one in told
    ]
    name = " ".join(filter(None, which.values()))
    readme = README.format(name=name, date=date, flags=" --quick" if quick else "", list="\n".join(lines) + "\n")
    texts = {"README.md": readme, "manifest.json": json.dumps(manifest, indent=1) + "\n"}
    for outcome in outcomes:
        texts |= outcome.files
    return texts


def _remark(told: dict[str, Any]) -> str:
    return f" ({told['state']}: {told['why']})" if told["why"] else ""


def version() -> str:
    """Empty where pyxdev is used without being installed."""
    try:
        return metadata.version("pyxdev")
    except metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """Of the checkout that this is, "+" after it if files differ; empty where git cannot tell."""
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"]
    if (root / ".git").exists() and shutil.which("git"):
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode == 0:
            return found.stdout.strip()
    return ""


def show(path: Path, outcomes: Sequence[Outcome]) -> None:
    rows = [
        (one.part.name, one.state, f"{one.seconds:.1f}", ", ".join(one.files), one.why or one.part.shows)
        for one in outcomes
    ]
    print_table(COLUMNS, rows, f"{path}, {size(path.stat().st_size)}")
    console().print(f"The archive is {path.resolve()}; README.md in it says what each file is. Nothing has been sent.")
