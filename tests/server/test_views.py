"""What `rgpu ps` shows of a session that lived on several nodes."""

from __future__ import annotations

from itertools import permutations
from typing import Any

from rgpu.server.pool_verbs import newest_views

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
