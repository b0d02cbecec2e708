"""Docstrings of the package, as `.ci/docstrings` checks them: none new is missing or weak, and the check sees each."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def check() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("docstrings", str(ROOT / ".ci" / "docstrings"))
    spec = importlib.util.spec_from_loader("docstrings", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_no_file_has_more_exceptions_than_are_written_down(check: ModuleType) -> None:
    counts = Counter(file for file, _, _ in check.findings(check.sources()))
    assert check.verdict(counts, check.allowed()) == ([], []), "see .ci/docstrings --list; fewer: run it with --write"


@pytest.mark.parametrize("text, wrong", [
    ("Return the position.", []), ("The position of the last call.", []), ("Whether calls are left.", []),
    ("`rgpu run`: a program with its calls elsewhere.", []), (None, ["has no docstring"]),
    ("Of a drained device.", ["begins with 'Of': a fragment"]), ("For reading.", ["begins with 'For': a fragment"]),
    ("Return the position", ["has a first sentence without an end"]),
    ("returns the position.", ["does not begin with a capital"]),
    ("Give it to whoever asks.", ["says 'whoever'"]), ("Nodes may not lead.", ["says 'may not'"])])
def test_weak_docstrings_are_found(check: ModuleType, text: str | None, wrong: list[str]) -> None:
    assert check.weaknesses(text) == wrong


def test_what_needs_a_docstring_and_what_does_not(check: ModuleType) -> None:
    base = 'class Base:\n    """A base."""\n    def said(self):\n        """Say it."""\n'
    other = ('"""A module."""\nclass One(Base):\n    """One."""\n    def said(self): pass\n    def unsaid(self): pass\n'
             '    @property\n    def short(self):\n        return 1\n    def _own(self): pass\ndef _private(): pass\n')
    found = check.findings({"base.py": ast.parse(base), "other.py": ast.parse(other)})
    assert found == [("base.py", 1, "the module has no docstring"), ("other.py", 5, "One.unsaid has no docstring")]


def test_counts_may_shrink_only(check: ModuleType) -> None:
    assert check.verdict(Counter({"a": 2, "b": 1}), {"a": 1, "b": 1}) == (["a"], [])
    assert check.verdict(Counter({"b": 1}), {"a": 1, "b": 1}) == ([], ["a"])
