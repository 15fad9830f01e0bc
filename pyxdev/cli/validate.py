"""pyxdev validate: asks this machine whether its copies and waits can be trusted."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pyxdev.checks import CHECKS, Check, Level, Result, Verdict, report, select
from pyxdev.checks.runner import Runner, Target, Unopened
from pyxdev.settings import add_flags, resolve

LEVELS = {Level.QUICK: "--quick", Level.NORMAL: "", Level.FULL: "--full"}
FEW = 6  # results alike that are shown one by one
COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.WAIVED: "dim", Verdict.INCONCLUSIVE: "yellow"}
EPILOG = """exit codes: 0 all passed, or waived with a reason; 1 wrong data, wrong order or another broken promise;
2 usage; 3 inconclusive or hung; 4 no device. Nothing of the machine is changed."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "validate", help="checks whether copies and waits between the devices can be trusted", epilog=EPILOG
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, level = parser.add_argument, parser.add_mutually_exclusive_group()
    level.add_argument("--quick", dest="level", action="store_const", const=Level.QUICK, help="takes seconds")
    level.add_argument("--full", dest="level", action="store_const", const=Level.FULL, help="large copies, more rounds")
    parser.set_defaults(level=Level.NORMAL)
    add("--list", action="store_true", help="shows the checks, and what each proves")
    add("-k", dest="names", metavar="TEXT", action="append", default=[], help="only checks with TEXT in their key")
    add("--devices", metavar="0,1", type=_devices, help="only these devices")
    add("--seed", type=int, default=1, help="of the data written (default 1)")
    add("--deadline", type=_seconds, metavar="S", help="seconds for each check, instead of its own")
    add("--json", action="store_true", help="one JSON document instead of the table")
    add("--junit", type=Path, metavar="FILE", help="writes a JUnit file as well")
    add("--profile", metavar="NAME", help="simulated machine: a name, or a file")
    add_flags(parser, "backend")


def _devices(text: str) -> list[int]:
    devices = [int(part) for part in text.split(",")]
    if len(set(devices)) != len(devices) or min(devices) < 0:
        raise ValueError
    return devices


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError
    return seconds


def run(arguments: argparse.Namespace) -> int:
    """The exit code. Raises SettingError for a wrong value of a setting."""
    checks = select(arguments.names, arguments.level)
    errors = Console(stderr=True, soft_wrap=True)
    if arguments.names and not checks:
        known = ", ".join(check.key for check in CHECKS)
        errors.print(escape(f"pyxdev validate: no check matches {' or '.join(arguments.names)}; there are {known}"))
        return report.USAGE
    if arguments.list:
        _print_list(checks)
        return 0
    backend = resolve({}, vars(arguments)).backend
    target = Target(backend, arguments.profile, arguments.level, arguments.seed, arguments.devices)
    runner = Runner(target, arguments.deadline)
    try:
        runner.open()
        if bad := [device for device in arguments.devices or [] if device >= len(runner.environment["devices"])]:
            count = len(runner.environment["devices"])
            errors.print(f"pyxdev validate: there is no device {bad[0]}; there are {count}, from 0 on")
            return report.USAGE
        results = _show(runner, checks, arguments.json)
    except Unopened as failure:
        errors.print(escape(f"pyxdev validate: {failure}"))
        if failure.kind in ("hung", "crashed"):
            return report.INCONCLUSIVE
        return report.NO_DEVICE if failure.kind in ("NoDevice", "BackendUnavailable") else report.USAGE
    finally:
        runner.close()
    if arguments.junit:
        arguments.junit.write_text(report.junit(results, runner.environment))
    if arguments.json:
        print_json(report.document(results, runner.environment))
    return report.exit_code(results)


def print_json(document: object) -> None:
    Console(soft_wrap=True, highlight=False, markup=False, emoji=False).print(json.dumps(document, indent=1))


def _show(runner: Runner, checks: list[Check], quiet: bool) -> list[Result]:
    """Runs the checks; a table grows as they end, unless quiet."""
    if quiet:
        return list(runner.run(checks))
    console = Console()
    names = [f"{index} {device['name']}" for index, device in enumerate(runner.environment["devices"])]
    console.print(escape(f"{runner.environment['backend']}: {', '.join(names)}"), highlight=False)
    results: list[Result] = []
    with console.status("", spinner="line") as status:
        for check in checks:
            status.update(check.key)
            found = list(runner.run([check]))
            results += found
            console.print(_rows(found))
    console.print(_summary(results))
    return results


def _rows(results: list[Result]) -> Table:
    """One row a result; many results that say the same share one."""
    table = Table.grid(padding=(0, 2))
    table.add_column(width=13)
    table.add_column(width=16)
    table.add_column(width=6)
    table.add_column(overflow="fold")
    groups: dict[tuple[object, ...], list[Result]] = {}
    for result in results:
        groups.setdefault((result.verdict, result.reason, result.hint), []).append(result)
    for alike in groups.values():
        few = len(alike) <= FEW
        for result in alike if few else alike[:1]:
            text = escape(result.reason) or (f"[dim]{escape(_figures(result))}[/]" if few else "")
            if result.hint:
                text += f"\n[cyan]{escape(result.hint)}[/]"
            colour = COLOURS[result.verdict]
            which = result.pair if few else f"{len({result.pair for result in alike})} x"
            table.add_row(f"[{colour}]{result.verdict}[/]", result.key, which, text)
    return table


def _figures(result: Result) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in result.figures.items() if value != "")


def _summary(results: list[Result]) -> str:
    counts = [(verdict, sum(result.verdict == verdict for result in results)) for verdict in Verdict]
    return ", ".join(f"[{COLOURS[verdict]}]{count} {verdict}[/]" for verdict, count in counts if count)


def _print_list(checks: list[Check]) -> None:
    table = Table("key", "asks", "a PASS proves", "needs", "from", box=None, padding=(0, 2, 0, 0))
    for check in checks:
        table.add_row(check.key, check.description, check.proves, check.requires, LEVELS[check.level])
    Console().print(table)
