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
    found = [name for name in shape.shape()["folders_over_15"] if name.startswith(("rgpu", "bench"))]
    assert found == []


def test_every_room_says_what_it_is_for(shape: ModuleType) -> None:
    page = shape.rooms()
    assert [line for line in page.splitlines() if line.startswith("| `") and line.endswith("|  |")] == []
    assert shape.PAGE.read_text(encoding="utf-8") == page, "run .ci/shape --rooms"


def test_cycles_are_found(shape: ModuleType) -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": {"f"}, "f": {"e"}}
    assert shape.cycles(edges) == [["a", "b", "c"], ["e", "f"]]
