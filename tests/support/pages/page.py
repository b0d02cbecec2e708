"""A page's command blocks, and the machine that each is for, as a reader finds them.

A block is a fence ```` ```sh ````; the paragraph before it begins with whose it is: "On node-a: …", "On each host, …",
"On your laptop, …", or its last sentence does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[3] / "docs"
_FENCE = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_WHERE = re.compile(r"(?:.*[.][*]* )?On ([^,:.]+)")


@dataclass(frozen=True)
class Block:
    """``where``: the words after "On"; ``line``: of the page, for messages."""

    where: str
    commands: str
    page: str
    line: int


def blocks(page: str, section: str = "") -> list[Block]:
    """The blocks of ``docs/PAGE``, or of its section with that heading; one that says not whose it is has where ""."""
    text = (DOCS / page).read_text(encoding="utf-8")
    begin, end = 0, len(text)
    if section:
        heading = re.search(rf"^(#+) {re.escape(section)}$", text, re.MULTILINE)
        assert heading, f"{page} has no section {section!r}"
        begin = heading.end()
        after = re.search(rf"^#{{1,{len(heading[1])}}} ", text[begin:], re.MULTILINE)
        end = begin + after.start() if after else end
    found = []
    for fence in _FENCE.finditer(text, begin, end):
        before = text[begin:fence.start()].strip().rpartition("\n\n")[2]
        where = _WHERE.match(" ".join(before.split()))
        found.append(Block(where[1].strip() if where else "", fence[1], page, text.count("\n", 0, fence.start()) + 1))
    return found
