"""Results as an exit code, a JSON document and a JUnit file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from pyxdev.checks.check import Result, Verdict

# What a process ends with; the first that applies.
FAILED, USAGE, INCONCLUSIVE, NO_DEVICE = 1, 2, 3, 4


def exit_code(results: Sequence[Result]) -> int:
    """0: all passed, or were waived with a reason."""
    verdicts = {result.verdict for result in results}
    if Verdict.FAIL in verdicts:
        return FAILED
    return INCONCLUSIVE if Verdict.INCONCLUSIVE in verdicts or not verdicts else 0


def document(results: Sequence[Result], environment: dict[str, Any]) -> dict[str, Any]:
    return {
        "version": 1,
        "environment": environment,
        "checks": [result.as_dict() for result in results],
        "exit_code": exit_code(results),
    }


def junit(results: Sequence[Result], environment: dict[str, Any]) -> str:
    """One test case per result. INCONCLUSIVE is an error there, WAIVED is skipped."""
    count = {verdict: sum(result.verdict == verdict for result in results) for verdict in Verdict}
    suite = ElementTree.Element(
        "testsuite",
        name="pyxdev validate",
        tests=str(len(results)),
        failures=str(count[Verdict.FAIL]),
        errors=str(count[Verdict.INCONCLUSIVE]),
        skipped=str(count[Verdict.WAIVED]),
    )
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in environment.items():
        ElementTree.SubElement(properties, "property", name=name, value=str(value))
    kinds = {Verdict.FAIL: "failure", Verdict.INCONCLUSIVE: "error", Verdict.WAIVED: "skipped"}
    for result in results:
        name = " ".join(part for part in (result.key, result.pair, str(result.figures.get("path", ""))) if part)
        case = ElementTree.SubElement(suite, "testcase", classname="pyxdev.checks", name=name)
        if result.verdict in kinds:
            entry = ElementTree.SubElement(case, kinds[result.verdict], message=_printable(result.reason))
            entry.text = _printable(result.hint)
        output = ElementTree.SubElement(case, "system-out")
        output.text = _printable("\n".join(f"{name}: {value}" for name, value in result.figures.items()))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _printable(text: str) -> str:
    """XML has no way to write most control characters."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)
