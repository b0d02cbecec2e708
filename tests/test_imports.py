"""Tests import what they share from tests/support: no test module is imported, and no product test needs bench."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
#: Folders whose modules may import ``bench``, and why.
MAY_IMPORT_BENCH = {"tests/bench": "the tests of bench itself"}


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names that a module imports, at whatever place; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def offenders(root: Path) -> list[str]:
    """Return ``file: name`` for each import below ``root``/tests that breaks a rule of the module docstring."""
    found = []
    for path in sorted((root / "tests").rglob("*.py")):
        file = path.relative_to(root).as_posix()
        may = any(file.startswith(f"{folder}/") for folder in MAY_IMPORT_BENCH)
        for name in imported(ast.parse(path.read_text(encoding="utf-8"))):
            parts = name.split(".")
            of_test = parts[0] in ("", "tests") and any(part.startswith("test_") for part in parts)
            if of_test or parts[0] == "bench" and not may:
                found.append(f"{file}: {name}")
    return found


def test_no_test_module_is_imported_and_no_product_test_needs_bench() -> None:
    assert offenders(TESTS.parent) == []


def test_offenders_are_found(tmp_path: Path) -> None:
    (tmp_path / "tests" / "bench").mkdir(parents=True)
    (tmp_path / "tests" / "bench" / "test_b.py").write_text("import bench.moves\nfrom tests.test_a import x\n")
    (tmp_path / "tests" / "test_a.py").write_text("def f():\n    from bench import moves\nfrom tests import test_b\n"
                                                  "from tests.support.eventually import eventually\n")
    assert offenders(tmp_path) == ["tests/bench/test_b.py: tests.test_a.x", "tests/test_a.py: tests.test_b",
                                   "tests/test_a.py: bench.moves"]
