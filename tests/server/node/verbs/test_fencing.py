"""A node obeys no leader that is over, also after its own restart (OWNERSHIP 6)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rgpu.server.node.verbs.node_verbs import NodeVerbs
from rgpu.session.errors import Fenced


class Node:
    """Every verb that a leader may command, done by counting."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.listeners: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        async def verb(**args: Any) -> dict[str, Any]:
            self.done.append(name)
            return {"number": len(self.done)}

        return verb


def test_lower_revisions_are_refused_and_a_repeated_command_is_answered_once() -> None:
    async def test() -> None:
        node = Node()
        daemon: Any = SimpleNamespace(node=node, adopting=Node(), host="a",
                                      metrics=SimpleNamespace(command=lambda *args: None))
        verbs = NodeVerbs(daemon)
        verbs.highest_leader = 7  # as a daemon that starts reads it from the registry
        for verb in ("worker.start", "session.drop", "worker.forget", "move.send"):
            with pytest.raises(Fenced, match="leader revision 6; a has seen 7"):
                await verbs.perform(verb, {"session": "s"}, leader=6, command_id="old")
        assert node.done == []
        first = await verbs.perform("session.drop", {"session": "s", "reason": ""}, leader=7, command_id="7-1")
        assert await verbs.perform("session.drop", {"session": "s", "reason": ""}, leader=7, command_id="7-1") == first
        await verbs.perform("session.drop", {"session": "s", "reason": ""}, leader=9, command_id="9-1")
        with pytest.raises(Fenced):
            await verbs.perform("session.drop", {"session": "s", "reason": ""}, leader=7, command_id="7-2")
        assert len(node.done) == 2

    asyncio.run(test())


def test_who_listens_hears_and_is_forgotten() -> None:
    async def test() -> None:
        node, heard = Node(), []
        daemon: Any = SimpleNamespace(node=node, adopting=Node(), host="a",
                                      metrics=SimpleNamespace(command=lambda *args: None))
        verbs = NodeVerbs(daemon)
        send = node.__getattr__("move_send")

        async def move_send(**args: Any) -> dict[str, Any]:
            node.listeners["s"]({"round": 1})
            return dict(await send(**args))

        verbs._verbs["move.send"] = move_send
        await verbs.perform("move.send", {"session": "s"}, leader=1, command_id="1-1", on_progress=heard.append)
        assert heard == [{"round": 1}] and node.listeners == {}

    asyncio.run(test())
