"""Everything that SPECIFICATION.md names exists: tests by name, figures as files; promises are shown from outside."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "SPECIFICATION.md").read_text()
TESTS = sorted(set(re.findall(r"`(tests/[\w/.]+\.py)::(\w+)`", TEXT)))
FIGURES = sorted(set(re.findall(r"`(bench/results/[\w./-]+)`", TEXT)))
HEADS = ("| what dies", "| promise")
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith(HEADS)]


@pytest.mark.parametrize(("path", "name"), TESTS)
def test_a_named_test_exists(path: str, name: str) -> None:
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path} has no {name}"


@pytest.mark.parametrize("path", FIGURES)
def test_a_named_figure_exists(path: str) -> None:
    assert (ROOT / path).is_file()


#: Sections each of whose rows is shown by real processes, not by a method that only its test calls.
FROM_OUTSIDE = ("What survives what", "Exactly once")


def rows_of(section: str) -> list[str]:
    text = TEXT.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(HEADS)]


@pytest.mark.parametrize("row", [row for section in FROM_OUTSIDE for row in rows_of(section)],
                         ids=lambda row: row[2:40])
def test_a_promise_is_shown_from_outside(row: str) -> None:
    assert re.search(r"`tests/(scenarios|gpu)/[\w/.]+::|`bench/results/", row), row


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:40])
def test_each_promise_is_shown_or_said_not_to_be(row: str) -> None:
    assert re.search(r"`tests/|`bench/results/|not yet measured", row), row


def test_there_is_something_to_check() -> None:
    assert len(TESTS) > 25 and len(FIGURES) >= 4 and len(ROWS) > 30 and all(
        len(rows_of(section)) > 8 for section in FROM_OUTSIDE)
