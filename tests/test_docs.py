"""The documentation holds together: links lead somewhere, every page is reachable, code names pages that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
README = ROOT / "README.md"
PAGES = sorted({README, *ROOT.glob("*.md"), *DOCS, ROOT / "bench" / "results" / "current" / "README.md"})
LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]*(?:\([^()\s]*\)[^()\s]*)*)\)")
FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"\bdocs/[\w/.-]*\w\.md\b")
#: Where code, scripts and settings name pages.
CODE = ("rgpu", "tests", "bench", "examples", "packaging", ".ci", "Makefile", "pyproject.toml", "CMakeLists.txt")
SUFFIXES = {"", ".py", ".cpp", ".hpp", ".cu", ".txt", ".toml", ".service"}
MOST_LINES = 120  #: of the README
MOST_FILES = 15  #: in one folder of docs


def name(path: Path) -> str:
    """Return ``path`` from the checkout's root on, for messages and test ids."""
    return path.relative_to(ROOT).as_posix()


@cache
def prose(path: Path) -> str:
    """Return the text of a page without its code blocks and code spans."""
    return re.sub(r"`[^`\n]*`", lambda span: "x" * len(span[0]), FENCE.sub("", path.read_text(encoding="utf-8")))


@cache
def anchors(path: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, made as GitHub makes them."""
    found: dict[str, int] = {}
    made = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        count = found.get(slug, 0)
        found[slug] = count + 1
        made.add(f"{slug}-{count}" if count else slug)
    return frozenset(made)


def links(path: Path) -> Iterator[tuple[str, Path, str]]:
    """Yield each relative link of a page: as written, the file it names, and its anchor or ""."""
    for target in LINK.findall(prose(path)):
        if not re.match(r"[a-z][a-z0-9+.-]*:", target):
            file, _, anchor = unquote(target).partition("#")
            yield target, (path.parent / file).resolve() if file else path, anchor


def broken(path: Path) -> list[str]:
    """Return the relative links of a page that lead nowhere."""
    wrong = []
    for target, file, anchor in links(path):
        if not file.exists():
            wrong.append(f"{target}: no such file")
        elif anchor and (file.suffix != ".md" or anchor not in anchors(file)):
            wrong.append(f"{target}: no such heading")
    return wrong


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    assert broken(path) == []


def test_every_page_is_reachable() -> None:
    found, ahead = set(), [README, ROOT / "docs" / "index.md"]
    while ahead:
        page = ahead.pop()
        if page not in found and page.suffix == ".md" and page.is_file():
            found.add(page)
            ahead += [file for _, file, _ in links(page)]
    assert [name(page) for page in DOCS if page not in found] == []


def test_pages_named_in_code_exist() -> None:
    starts = [ROOT / start for start in CODE]
    files = [path for start in starts for path in (start.rglob("*") if start.is_dir() else [start])
             if path.is_file() and path.suffix in SUFFIXES and "results" not in path.parts]
    named = [(path, page) for path in files
             for page in NAMED.findall(path.read_text(encoding="utf-8", errors="ignore"))]
    wrong = [f"{name(path)}: {page}" for path, page in named if not (ROOT / page).is_file()]
    assert len(files) > 300 and wrong == []


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_every_result_is_listed() -> None:
    folder = ROOT / "bench" / "results" / "current"
    listed = {file for _, file, _ in links(folder / "README.md")}
    assert [path.name for path in sorted(folder.iterdir()) if path.name != "README.md" and path not in listed] == []


def test_no_folder_is_crowded() -> None:
    folders = {page.parent for page in DOCS}
    assert {name(folder): count for folder in folders
            if (count := sum(path.is_file() for path in folder.iterdir())) > MOST_FILES} == {}


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A heading: `x` (1)\n\n```\n# none\n```\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md#a-heading-x-1) [b](other.md#none)\n[c](gone.md) [d](https://x.org/) `[e](gone.md)`\n")
    assert broken(page) == ["other.md#none: no such heading", "gone.md: no such file"]
