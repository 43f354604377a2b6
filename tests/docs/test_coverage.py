"""Each row of docs/coverage.md ends in a test that exists, a reason, or what is missing."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/coverage.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip()[1:-1].split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|") and not line.endswith(("| here | outcome |", "|---|"))
]
CITED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
OUTCOMES = ("shown by a test", "declined", "not yet")


def outcome_of(row: list[str]) -> str:
    """One of OUTCOMES; anything else is an error of the page."""
    last = row[-1]
    if CITED.fullmatch(last):
        return "shown by a test"
    if match := re.fullmatch(r"declined because (.+)", last):
        assert len(match[1].split()) > 5, f"no reason: {row}"
        return "declined"
    match = re.fullmatch(r"not yet: (.+)", last)
    assert match, f"neither a test, nor `declined because ...`, nor `not yet: ...`: {row}"
    return "not yet"


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_every_row_has_an_outcome_and_its_test_exists(row):
    assert len(row) == 3 and row[0]
    if outcome_of(row) == "shown by a test":
        file, name = CITED.fullmatch(row[-1]).groups()
        assert (ROOT / file).is_file() and name in names_in(file), f"no such test: {row[-1]}"
        assert row[1], f"what is here instead? {row}"


def test_no_row_stands_twice():
    assert [row for row, count in Counter(map(tuple, ROWS)).items() if count > 1] == []


def test_the_page_counts_its_rows():
    counts = Counter(map(outcome_of, ROWS))
    stated = re.search(r"(\d+) rows: (\d+) shown by a test, (\d+) declined, (\d+) not yet", PAGE)
    assert stated and [int(number) for number in stated.groups()] == [len(ROWS), *(counts[name] for name in OUTCOMES)]
