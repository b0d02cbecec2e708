"""The audit log: what stands in it, how it is rotated, and that nobody pushes the past out of it."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from rgpu.link.control.access import Actor
from rgpu.server.node.verbs.audit import REPEATED_SECONDS, Audit
from rgpu.session.errors import NotPermitted

ALICE = Actor("user", "alice-laptop", "alice", "A" * 40)


class Clock:
    """Seconds that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_changes_and_refusals_with_key_and_peer(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit.jsonl", "node-a")
    audit.done("session.kill", {"session": "s", "reason": "done"}, ALICE, "10.0.0.9", "ok", "")
    audit.done("session.describe", {"session": "s"}, ALICE, "10.0.0.9", "ok", "")
    audit.done("session.describe", {"session": "t"}, ALICE, "10.0.0.9", "not_permitted", "t belongs to bob")
    audit.done("session.migrate", {"session": "s", "host": "x"}, ALICE, "10.0.0.9", "not_found", "no host x")
    audit.done("image.import", {"id": "1", "offset": 0}, ALICE, "10.0.0.9", "ok", "")
    kill, describe, migrate = lines(tmp_path / "audit.jsonl")
    assert kill["when"].endswith("+00:00") and kill["node"] == "node-a"
    assert {name: kill[name] for name in ("verb", "outcome", "role", "user", "name", "key", "peer", "about")} == {
        "verb": "session.kill", "outcome": "ok", "role": "user", "user": "alice", "name": "alice-laptop",
        "key": "A" * 40, "peer": "10.0.0.9", "about": {"session": "s", "reason": "done"}}
    assert describe["outcome"] == "not_permitted" and "bob" in describe["reason"]
    assert migrate["outcome"] == "not_found" and migrate["about"] == {"session": "s", "host": "x"}
    assert os.stat(tmp_path / "audit.jsonl").st_mode & 0o777 == 0o600


def test_what_a_leader_does_for_another_node_says_which(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit.jsonl", "node-a")
    with audit.of("session.kill", {"session": "s"}, ALICE, "10.0.0.2", via="node-b"):
        pass
    with pytest.raises(NotPermitted), audit.of("session.kill", {"session": "t"}, ALICE, "10.0.0.2", via="node-b"):
        raise NotPermitted("it belongs to bob")
    assert [(line["outcome"], line["via"]) for line in lines(tmp_path / "audit.jsonl")] == [
        ("ok", "node-b"), ("not_permitted", "node-b")]


def test_full_files_are_kept_and_the_oldest_goes(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit.jsonl", "node-a", file_bytes=2000, kept=3)
    for number in range(60):
        audit.done("session.kill", {"session": f"s{number}"}, ALICE, "p", "ok", "")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2", "audit.jsonl.3"]
    assert all(path.stat().st_size <= 2000 for path in tmp_path.iterdir())
    kept = [line["about"]["session"] for name in (*names[:0:-1], names[0]) for line in lines(tmp_path / name)]
    assert kept == [f"s{number}" for number in range(60 - len(kept), 60)], "in order, without a gap"


def test_who_knocks_again_and_again_is_counted(tmp_path: Path) -> None:
    clock = Clock()
    audit = Audit(tmp_path / "audit.jsonl", "node-a", clock=clock)
    for _ in range(5000):
        audit.stranger("10.6.6.6", "M" * 40)
        audit.done("pool.pause", {}, ALICE, "p", "authentication_failed", "role operator")
    assert len(lines(tmp_path / "audit.jsonl")) == 2
    clock.now += REPEATED_SECONDS + 1
    audit.done("session.kill", {"session": "s"}, ALICE, "p", "ok", "")
    found = lines(tmp_path / "audit.jsonl")
    assert sorted((line["verb"], line.get("repeated")) for line in found[2:4]) == [
        ("connect", 4999), ("pool.pause", 4999)] and found[4]["verb"] == "session.kill"
    for number in range(3000):  # each with a key of its own
        audit.stranger("10.6.6.6", f"{number:040d}")
    audit.close()
    assert len(lines(tmp_path / "audit.jsonl")) == 5 + 3000


def test_texts_of_strangers_are_short_and_harmless(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit.jsonl", "node-a")
    nested = {"a": {"b": {"c": "\n"}}}
    audit.done("session.kill", {"session": "\x1b]0;owned\x07" * 500, "reason": nested, "name": 2**70},
               ALICE, "p", "ok", "")
    data = (tmp_path / "audit.jsonl").read_bytes()
    assert data.count(b"\n") == 1 and b"\x1b" not in data and len(data) < 2000 and lines(tmp_path / "audit.jsonl")


def test_many_threads_write_whole_lines(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit.jsonl", "node-a", file_bytes=20_000, kept=50)

    def work(who: int) -> None:
        for number in range(100):
            audit.done("session.kill", {"session": f"{who}-{number}"}, ALICE, "p", "ok", "")

    threads = [threading.Thread(target=work, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {line["about"]["session"] for path in tmp_path.iterdir() for line in lines(path)}
    assert len(found) == 400


def test_a_folder_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    Audit(tmp_path / "gone" / "audit.jsonl", "node-a").done("session.kill", {"session": "s"}, ALICE, "p", "ok", "")
