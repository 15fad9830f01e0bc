"""The command `pyxdev`: one module for each of its commands, with add_parser() and run()."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from rich.console import Console

from pyxdev.errors import Error

COMMANDS = ("devices", "validate", "load", "demo", "bench", "report")
USAGE = 2  # exit code of wrong arguments and of every pyxdev.Error
INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    whole = Parser(prog="pyxdev", description="Keeps every GPU of a machine busy.")
    whole.add_argument("-v", "--verbose", action="store_true", help="tells what is chosen, and why, on standard error")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        import_module(f"pyxdev.cli.{name}").add_parser(commands)
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0, what the command says, 2 for an error, 130 for Ctrl-C."""
    given = parser().parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.INFO if given.verbose else logging.WARNING)
    try:
        return int(given.run(given))
    except KeyboardInterrupt:
        return INTERRUPTED
    except Error as error:
        line = " ".join(str(error).split())
        errors = Console(file=sys.stderr, soft_wrap=True, highlight=False, markup=False, emoji=False)
        errors.print(f"pyxdev {given.command}: {line}")
        return USAGE
