"""What `rgpu ps` shows of a session that lived on several nodes."""

from __future__ import annotations

from itertools import permutations
from typing import Any

from rgpu.server.node.verbs.views import last_words, newest_views, views_of

Views = dict[str, dict[str, Any]]


def test_a_node_s_memory_of_a_session_does_not_hide_where_it_lives() -> None:
    remembered: Views = {"s": {"worker_pid": None, "epoch": 2, "memory_bytes": 0}}
    living: Views = {"s": {"worker_pid": 7, "epoch": 3}, "t": {"worker_pid": 8, "epoch": 1}}
    deposed: Views = {"s": {"worker_pid": 6, "epoch": 2}}
    silent: Views = {}
    for nodes in permutations([remembered, living, deposed, silent]):
        found = newest_views(nodes)
        assert found["s"]["worker_pid"] == 7 and found["t"]["worker_pid"] == 8
    for nodes in permutations([remembered, {"s": {"worker_pid": None, "epoch": 3, "position": 9}}]):
        assert newest_views(nodes)["s"]["epoch"] == 3, "of ended ones the last"


def test_an_agent_s_last_words_come_with_the_view_of_whatever_node() -> None:
    ended = {"sessions": {"s": {"worker_pid": None, "epoch": 1, "stats": {}}}}
    leader = {"sessions": {}, "last_words": {"s": {"pid": 7, "calls": 2001}, "gone": {"pid": 8, "calls": 3}}}
    for infos in permutations([ended, leader, {}]):
        found = views_of(infos)
        assert found["s"]["epoch"] == 1 and found["s"]["last_words"]["calls"] == 2001
        assert found["gone"] == {"last_words": {"pid": 8, "calls": 3}}


def test_last_words_from_outside_are_numbers_and_short_texts() -> None:
    assert last_words({"calls": 3, "same_host": "x" * 1000, "deep": {"a": 1}}) == {"calls": 3, "same_host": "x" * 300}
    assert last_words("not a map") == {} and len(last_words({str(i): i for i in range(1000)})) == 64
