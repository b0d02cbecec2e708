"""Unfinished imports: one user's share of the disk, their number, and what is dropped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rgpu.server.node.store import spool
from rgpu.server.node.store.spool import ImportSpool, Room, refusal
from rgpu.session.errors import LimitReached, UsageError

GIB = 1 << 30


@pytest.mark.parametrize(("room", "more", "begins", "why"), [
    (Room(0, 0, 0, 100 * GIB), 100, True, ""), (Room(3, 0, 0, 100 * GIB), 100, True, ""),
    (Room(4, 0, 0, 100 * GIB), 100, True, "4 imports"), (Room(4, 0, 0, 100 * GIB), 100, False, ""),
    (Room(0, 0, 0, GIB), 1, True, "the node's disk has"), (Room(1, 25 * GIB, 25 * GIB, 75 * GIB), 1, False, "hold"),
    (Room(1, 24 * GIB, 25 * GIB, 75 * GIB), GIB, False, "")])
def test_the_decision(room: Room, more: int, begins: bool, why: str) -> None:
    said = refusal(room, more, begins)
    assert said.startswith("") and why in said and bool(said) == bool(why)


def test_pieces_follow_each_other_and_old_ones_are_dropped(tmp_path: Path) -> None:
    kept, number = ImportSpool(tmp_path / "imports"), "0" * 32
    assert kept.append("tag", number, 0, b"abc") == 3 and kept.append("tag", number, 3, b"de") == 5
    for offset, data in ((4, b"x"), (6, b"x"), (5, bytes(spool.PIECE + 1))):
        with pytest.raises(UsageError):
            kept.append("tag", number, offset, data)
    with pytest.raises(UsageError):
        kept.append("tag", "../../etc/passwd", 0, b"x")
    for other in range(1, 4):
        kept.append("tag", f"{other:032x}", 0, b"x")
    with pytest.raises(LimitReached, match="unfinished"):
        kept.append("tag", "f" * 32, 0, b"x")
    kept.append("other", "f" * 32, 0, b"x")
    os.utime(kept.path("tag", number), (1, 1))
    kept.append("tag", "f" * 32, 0, b"x")
    assert not kept.path("tag", number).exists()
