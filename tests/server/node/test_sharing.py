"""Whom a node lets open what a session exported: decided by the records, whatever a token says."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest

from rgpu.server.node.sessions.held import HeldSessions
from rgpu.server.node.sharing import SharedMemory
from rgpu.session.errors import PoolUnavailable, Refused, RgpuError
from rgpu.session.objects import handle_tokens
from rgpu.session.objects.handle_tokens import Token, TokenKind


def token_of(session: str) -> bytes:
    return handle_tokens.encode(Token(TokenKind.MEMORY, bytes(16), handle_tokens.session_digest(session), 4096, 512))


class Worker:
    """Notes what the daemon asks of it."""

    def __init__(self, session: str, pid: int) -> None:
        self.session, self.pid, self.closed = session, pid, asyncio.Event()
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def request(self, do: str, *, fds: tuple[int, ...] = (), **values: Any) -> dict[str, Any]:
        assert all(os.fstat(fd) for fd in fds) and len(fds) == (do != "share_denied")
        self.asked.append((do, values))
        return {}


class Node:
    """Sessions a, b of user u on cpu:0; c of another user; d on another device."""

    def __init__(self, failing: RgpuError | None = None) -> None:
        self.held, self.told, self.failing = HeldSessions("node"), list[tuple[str, dict[str, Any]]](), failing
        self.workers = {name: Worker(name, pid) for pid, name in enumerate("abcd", 10)}
        self.held.running.update(self.workers)  # type: ignore[arg-type]
        self.held.epochs.update(dict.fromkeys("abcd", 3))
        records = SimpleNamespace(record=self.record)
        self.sharing = SharedMemory(self.held, records, self.ask, lambda record: record.user)  # type: ignore[arg-type]

    async def record(self, name: str) -> Any:
        return SimpleNamespace(user="other" if name == "c" else "u", device="cpu:1" if name == "d" else "cpu:0+cpu:2")

    async def ask(self, verb: str, args: dict[str, Any]) -> dict[str, Any]:
        self.told.append((verb, args))
        if self.failing:
            raise self.failing
        return {}

    def open(self, session: str, token: Any, pid: int | None = None) -> Node:
        values = {"pid": self.workers[session].pid if pid is None else pid, "number": 7, "token": token}
        asyncio.run(self.sharing.open(session, values))
        return self

    def denied(self, session: str) -> list[str]:
        return [values["reason"] for do, values in self.workers[session].asked if do == "share_denied"]


def test_both_records_say_so_before_both_workers_get_an_end() -> None:
    before = len(os.listdir("/proc/self/fd"))
    node = Node().open("b", token_of("a"))
    assert [(verb, args["session"], args["peer"], args["epoch"]) for verb, args in node.told] == [
        ("session.shares", "a", "b", 3), ("session.shares", "b", "a", 3)]
    assert node.workers["b"].asked == [("share_link", {"number": 7, "peer": "a"})]
    assert node.workers["a"].asked == [("share_serve", {"peer": "b"})]
    node.open("b", token_of("a")).open("a", token_of("b"))
    assert len(node.told) == 2, "it is on record"
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("session", "token", "why"), [
    ("c", token_of("a"), "another user's"), ("a", token_of("c"), "another user's"), ("d", token_of("a"), "cpu:1"),
    ("a", token_of("a"), "own"), ("a", token_of("elsewhere"), "no session on this node"), ("a", bytes(63), "64 bytes"),
    ("a", "text", "64 bytes"), ("a", bytes(64), "no session on this node")])
def test_others_are_denied(session: str, token: Any, why: str) -> None:
    node = Node().open(session, token)
    (reason,) = node.denied(session)
    assert why in reason and node.told == []
    assert all(do == "share_denied" for worker in node.workers.values() for do, _ in worker.asked)


def test_a_worker_that_owns_nothing_is_not_answered() -> None:
    node = Node().open("b", token_of("a"), pid=99)
    assert all(not worker.asked for worker in node.workers.values())


@pytest.mark.parametrize("error", [Refused("it is moving"), PoolUnavailable("nobody leads")])
def test_nothing_is_given_where_the_records_cannot_say_so(error: RgpuError) -> None:
    node = Node(error).open("b", token_of("a"))
    assert all(not worker.asked for worker in node.workers.values()), "the worker asks again"
