"""The gate: whose a session is, by its record, by its request, by the key that an earlier version wrote alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rgpu.link.control import Request, actor_of
from rgpu.link.control.access import Actor
from rgpu.link.keys import AuthorizedKeys, KeyPair, PublicKey
from rgpu.migrate.leader.term.decisions import acting
from rgpu.migrate.records.keys import queue_key, session_key
from rgpu.migrate.records.ownership import Held
from rgpu.migrate.records.schema import Failure, QueueRecord, SessionRecord, decode, encode
from rgpu.server.node.verbs import gate as gates
from rgpu.server.node.verbs.gate import Gate
from rgpu.session.errors import AuthenticationFailed, NotPermitted

ALICE, LAPTOP, BOB, ROOT = (KeyPair.create(role, name, user).public_key() for role, name, user in (
    ("user", "alice", ""), ("user", "laptop", "alice"), ("user", "bob", ""), ("operator", "root", "")))
NODE_A, NODE_B = (Actor("node", f"node-{host}") for host in ("a", "b"))


def session(name: str, user: str = "", agent: str = "", **values: Any) -> SessionRecord:
    return SessionRecord(**{"name": name, "state": "running", "owner": "a", "incarnation": 1, "epoch": 1, "quota": 1,
                            "agent": agent, "device": "cpu:0", "user": user, **values})


class World:
    """Records and keys, and a gate before them."""

    def __init__(self, folder: Path, *records: SessionRecord | QueueRecord) -> None:
        self.records = {r.name: r for r in records if isinstance(r, SessionRecord)}
        self.requests = {queue_key(r.name): r for r in records if isinstance(r, QueueRecord)}
        self.registry, self.keys = self, AuthorizedKeys(folder / "authorized")
        for key in (ALICE, LAPTOP, BOB, ROOT):
            self.keys.add(key)
        self.gate = Gate(self.keys, self)  # type: ignore[arg-type]

    async def find(self, name: str) -> Held | None:
        return Held(self.records[name], 1) if name in self.records else None

    async def sessions(self) -> list[SessionRecord]:
        return list(self.records.values())

    async def waiting(self) -> list[QueueRecord]:
        return list(self.requests.values())

    async def get(self, key: str) -> Any:
        return SimpleNamespace(key=key, value=encode(self.requests[key])) if key in self.requests else None

    async def guarded(self, verb: str, actor: Actor, **args: Any) -> str:
        """Have the leader's verb done; on whose word it was."""
        async def do(args: dict[str, Any], actor: Actor, progress: Any) -> dict[str, Any]:
            return {"by": acting.get()}

        return str((await self.gate.guard({verb: do})[verb](args, actor, lambda values: None))["by"])


def test_the_leaders_verbs_are_for_owners_and_operators(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path, session("s", "alice"), QueueRecord(name="q", quota=1, user="bob"))
        assert await world.guarded("session.kill", actor_of(ALICE), session="s") == "alice"
        assert await world.guarded("session.kill", actor_of(LAPTOP), session="s") == "alice (laptop)"
        assert await world.guarded("session.kill", actor_of(ROOT), session="s") == "root"
        assert await world.guarded("session.kill", actor_of(BOB), session="q") == "bob"
        assert await world.guarded("session.kill", actor_of(BOB), session="no such") == "bob"
        assert acting.get() == ""
        for actor, name in ((BOB, "s"), (ALICE, "q"), (LAPTOP, "q")):
            with pytest.raises(NotPermitted, match="belongs to"):
                await world.guarded("session.kill", actor_of(actor), session=name)

    asyncio.run(test())


def test_a_node_speaks_of_what_it_has_or_lost(tmp_path: Path) -> None:
    async def test() -> None:
        lost = [Failure(host="b", device="cpu:0", epoch=1)]
        world = World(tmp_path, session("s", "alice"), session("t", "alice", failures=lost, epoch=2))
        assert await world.guarded("session.end", NODE_A, session="s") == "node-a"
        assert await world.guarded("session.end", NODE_B, session="t") == "node-b", "it had it when the program ended"
        with pytest.raises(NotPermitted, match="not one of the sessions of node-b"):
            await world.guarded("session.end", NODE_B, session="s")
        await world.guarded("worker.died", NODE_A, session="s", host="a")
        with pytest.raises(NotPermitted):
            await world.guarded("worker.died", NODE_A, session="t", host="b")  # in another's name
        with pytest.raises(AuthenticationFailed):
            await world.guarded("worker.died", actor_of(ROOT), session="s", host="a")

    asyncio.run(test())


def test_records_of_the_previous_version_belong_to_the_user_of_their_key(tmp_path: Path) -> None:
    async def test() -> None:
        fields = msgspec.to_builtins(session("old", agent=LAPTOP.public))
        del fields["user"]
        old = decode(msgspec.msgpack.encode(fields), SessionRecord, session_key("old"))
        world = World(tmp_path, old, session("orphan", agent=KeyPair.create("user", "gone").public))
        assert world.gate.user_of(old) == "alice"
        assert await world.guarded("session.kill", actor_of(ALICE), session="old") == "alice"
        with pytest.raises(NotPermitted):
            await world.guarded("session.kill", actor_of(BOB), session="old")
        with pytest.raises(NotPermitted, match="nobody that the pool knows"):
            await world.guarded("session.kill", actor_of(ALICE), session="orphan")
        assert await world.guarded("session.kill", actor_of(ROOT), session="orphan") == "root"

    asyncio.run(test())


def test_what_is_seen_is_ones_own(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path, session("s", "alice"), session("t", "bob"), QueueRecord(name="q", quota=1, user="bob"))
        sees = {}
        for actor, everybody in ((actor_of(LAPTOP), True), (actor_of(BOB), False), (actor_of(ROOT), True),
                                 (actor_of(ROOT), False), (NODE_A, False)):
            seen = await world.gate.seen(actor, everybody)
            sees[actor.name, everybody] = "".join(name for name in "stq" if seen(name))
        assert sees == {("laptop", True): "s", ("bob", False): "tq", ("root", True): "stq", ("root", False): "",
                        ("node-a", False): "stq"}

    asyncio.run(test())


def test_all_users_are_for_operators(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(tmp_path)

        async def ask(key: PublicKey, args: dict[str, Any]) -> None:
            await world.gate.admit(Request("session.list", args, key.role, key.name, key.public, 0, 0, "",
                                           lambda values: asyncio.sleep(0), key.holder))

        await ask(ALICE, {"all": True})
        await ask(ROOT, {"all_users": True})
        with pytest.raises(NotPermitted, match="for operators"):
            await ask(ALICE, {"all_users": True})

    asyncio.run(test())


def test_a_leader_takes_no_nodes_word_for_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(gates, "KNOWN_SECONDS", 0.3)
        world = World(tmp_path)
        assert await world.gate.actor(LAPTOP.public) == Actor("user", "laptop", "alice", LAPTOP.public)
        fresh = KeyPair.create("user", "fresh").public_key()
        found = asyncio.ensure_future(world.gate.actor(fresh.public))
        await asyncio.sleep(0.15)
        world.keys.on_record = {fresh.public: fresh}  # it was made in another node's folder a moment ago
        assert (await found).user == "fresh"
        with pytest.raises(AuthenticationFailed, match="does not know this key"):
            await world.gate.actor(KeyPair.create("operator", "mallory").public)

    asyncio.run(test())
