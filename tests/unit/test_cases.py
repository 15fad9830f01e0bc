"""docs/cases.md names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_case_has_tests_and_they_exist() -> None:
    lines = (ROOT / "docs/cases.md").read_text().splitlines()
    rows = [line.split("|")[1:-1] for line in lines if re.match(r"\| \d", line)]
    assert len(rows) > 20
    for case, _, named in rows:
        tests = [test.strip().split("::") for test in named.split(",")]
        for file, name in tests:
            tree = ast.parse((ROOT / "tests" / file).read_text())
            names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
            assert name in names, f"case {case.strip()}: {file} has no {name}"
