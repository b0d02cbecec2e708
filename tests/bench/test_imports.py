"""Benchmarks, examples and programs for a GPU import only names that exist: most of them run on no machine of CI."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for folder in ("bench", "examples", "tests/gpu") for path in (ROOT / folder).rglob("*.py"))


def missing(path: Path) -> list[str]:
    """Names that a file imports from the package, and that it does not have."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "rgpu":
            for name in node.names:
                try:
                    if not hasattr(importlib.import_module(node.module or ""), name.name):
                        importlib.import_module(f"{node.module}.{name.name}")
                except ModuleNotFoundError as error:
                    found.append(f"line {node.lineno}: {error}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_imported_exists(path: Path) -> None:
    assert missing(path) == []
