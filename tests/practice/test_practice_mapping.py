"""README.md of this folder names the tests of every case: they exist, and none is left out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

CASES = {
    *(
        "B05",
        "B06",
        "B07",
        "B09",
        "B11",
        "B12",
        "B13",
        "B16",
        "B19",
        "B20",
        "B21",
        "B23",
        "B25",
        "B29",
        "B30",
    ),
    *("B32", "B33", "B35", "B36", "B41", "B42", "B43", "B47", "B48", "R1", "R2", "R3", "R7"),
}


def mapping(tests: Path) -> dict[str, list[str]]:
    """The tests that stand beside each case."""
    lines = (tests / "practice" / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split("|") for line in lines if re.match(r"\| [BR]\d+ \|", line)]
    return {row[1].strip(): re.findall(r"`([\w/]+\.py::\w+)`", row[3]) for row in rows}


def written_in(file: Path) -> dict[str, str]:
    """The tests of a file, each with its docstring; read, not imported."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return {
        node.name: ast.get_docstring(node) or ""
        for node in body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.fixture
def tests(repo_root: Path) -> Path:
    return repo_root / "tests"


def test_every_named_test_exists(tests: Path) -> None:
    found = mapping(tests)
    assert found.keys() == CASES
    for case, names in found.items():
        assert names, case
        for name in names:
            file, test = name.split("::")
            assert (tests / file).is_file(), (case, name)
            assert test in written_in(tests / file), (case, name)


def test_every_test_of_this_folder_stands_with_its_cases(tests: Path) -> None:
    named: dict[str, set[str]] = {}
    for case, names in mapping(tests).items():
        for name in names:
            named.setdefault(name, set()).add(case)
    for file in sorted((tests / "practice").glob("test_practice_*.py")):
        if file.name == Path(__file__).name:
            continue
        for test, text in written_in(file).items():
            cases = set(re.findall(r"\bB\d\d\b", text.partition(":")[0]))
            assert named.get(f"practice/{file.name}::{test}", set()) == cases, (file.name, test)
