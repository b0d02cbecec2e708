"""`.ci/docs`: what becomes of links in the copy that the site is built from, in a tree of its own."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def script(tmp_path: Path) -> ModuleType:
    (tmp_path / ".ci").mkdir()
    copy = shutil.copy(ROOT / ".ci" / "docs", tmp_path / ".ci" / "docs")
    loader = importlib.machinery.SourceFileLoader("site_script", str(copy))
    spec = importlib.util.spec_from_loader("site_script", loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def write(root: Path, **pages: str) -> None:
    for name, text in pages.items():
        path = root / name.replace("__", "/").replace("_md", ".md").replace("_json", ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_links_lead_to_copies(tmp_path: Path, script: ModuleType) -> None:
    write(tmp_path, docs__users__a_md="[c](../../CHANGELOG.md#b) [f](../../bench/x.json) [d](../../bench) [u](https://x.y)\n"
          "```\n[in code](none.md)\n```\n", CHANGELOG_md="[a](docs/" "users/a.md)\n", bench__x_json="{}")
    site = script.Site()
    site.copy(tmp_path / "docs" / "users" / "a.md")
    copy = tmp_path / "build" / "site-source"
    assert not site.broken and (copy / "files" / "bench" / "x.json").read_text() == "{}"
    assert (copy / "users" / "a.md").read_text() == (
        "[c](../project/changelog.md#b) [f](../files/bench/x.json) d [u](https://x.y)\n```\n[in code](none.md)\n```\n")
    assert (copy / "project" / "changelog.md").read_text() == "[a](../users/a.md)\n"


def test_missing_files_are_named(tmp_path: Path, script: ModuleType) -> None:
    write(tmp_path, docs__index_md="# T\n\n[a](b.md) and [out](../../outside.md)\n")
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert str(stopped.value) == ("docs/index.md:3: no such file: b.md\n"
                                  "docs/index.md:3: no such file: ../../outside.md")
