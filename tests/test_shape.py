"""The shape of the tree as `.ci/shape` measures it: sizes of rooms, and the page that describes them."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def shape() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("shape", str(ROOT / ".ci" / "shape"))
    spec = importlib.util.spec_from_loader("shape", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_rooms_are_small(shape: ModuleType) -> None:
    found = [name for name in shape.shape()["folders_over_15"] if name.startswith(("rgpu", "bench", "tests"))]
    assert found == []


def test_every_room_says_what_it_is_for(shape: ModuleType) -> None:
    page = shape.rooms()
    assert [line for line in page.splitlines() if line.startswith("| `") and line.endswith("|  |")] == []
    assert shape.PAGE.read_text(encoding="utf-8") == page, "run .ci/shape --rooms"


def test_no_modules_import_each_other(shape: ModuleType) -> None:
    """Imports inside functions and for types alone count, too."""
    assert shape.cycles(shape.imports(shape.modules())) == []


def test_cycles_are_found(shape: ModuleType) -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": {"f"}, "f": {"e"}}
    assert shape.cycles(edges) == [["a", "b", "c"], ["e", "f"]]


def test_every_station_of_the_paths_exists_and_is_named_by_its_neighbour(shape: ModuleType) -> None:
    paths = shape.stations()
    assert set(paths) == {"kernel launch", "node command", "death of a worker"}
    assert {name: shape.untrue(path) for name, path in paths.items()} == dict.fromkeys(paths, [])
    assert all(2 <= count <= len(paths[name]) for name, count in shape.hops().items())


def test_a_station_that_is_gone_is_named(shape: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class A:\n    def one(self):\n        self.b.two()\n")
    (tmp_path / "b.py").write_text("class B:\n    def two(self):\n        pass\n\n\ndef three():\n    pass\n")
    (tmp_path / "c.cpp").write_text("int four(int x) {\n  return table[x];\n}\n")
    monkeypatch.setattr(shape, "ROOT", tmp_path)
    assert shape.untrue([("a.py", "A.one", ""), ("b.py", "B.two", "")]) == []
    assert shape.untrue([("a.py", "A.gone", ""), ("b.py", "B.two", "")]) == ["a.py has no function A.gone"]
    assert shape.untrue([("a.py", "A.one", ""), ("b.py", "three", "")]) == [
        "neither a.py:A.one nor b.py:three names the other"]
    assert shape.untrue([("c.cpp", "four", "table"), ("b.py", "three", "")]) == ["b.py does not contain 'table'"]
