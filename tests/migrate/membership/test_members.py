"""Invitations and keys on record: used once, by one host, in time; nothing but the leader writes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rgpu.link.invitations import new_pair
from rgpu.link.keys import AuthorizedKeys, KeyPair
from rgpu.migrate.records.keys import HISTORY, INVITATIONS, KEYS
from rgpu.migrate.records.schema import OF_HOST
from rgpu.migrate.registry.base import Change, Delete
from rgpu.server.node.pool.keyring import Keyring
from rgpu.session.errors import AlreadyExists, AuthenticationFailed, Fenced, NotFound, Refused, UsageError
from tests.support.leader.pool import World, run

PAIR, NODE, OTHER = new_pair(), KeyPair.create("node", "x"), KeyPair.create("node", "x")


async def invite(world: World, host: str = "", seconds: float = 60.0) -> None:
    await world.coordinator.members.invite(PAIR.name, PAIR.public, host=host, seconds=seconds)


def test_one_host_joins_and_may_ask_again(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await invite(world)
        members = world.coordinator.members
        made = await members.join(PAIR.public, "x", NODE.public)
        await world.take_over()  # the leader that took it is gone, its answer lost
        assert await world.coordinator.members.join(PAIR.public, "x", NODE.public) == made
        with pytest.raises(AuthenticationFailed, match="used already"):
            await world.coordinator.members.join(PAIR.public, "y", OTHER.public)
        with pytest.raises(Fenced):
            await members.invite("late", new_pair().public)
        assert len((await world.registry.list(KEYS)).entries) == 1
        assert len((await world.registry.list(f"{HISTORY}{OF_HOST}x/@")).entries) == 2

    run(tmp_path, test)


def test_who_may_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(world: World) -> None:
        members = world.coordinator.members
        with pytest.raises(AuthenticationFailed, match="no such invitation"):
            await members.join(PAIR.public, "x", NODE.public)
        await invite(world, host="x")
        with pytest.raises(AuthenticationFailed, match="for x, not for y"):
            await members.join(PAIR.public, "y", NODE.public)
        for bad in ("", "../x", "a b", "é"):
            with pytest.raises(UsageError):
                await members.join(PAIR.public, bad, NODE.public)
        for seconds in (0.0, -1.0, 1e9):
            with pytest.raises(UsageError):
                await members.invite("other", PAIR.public, seconds=seconds)
        await members.join(PAIR.public, "x", NODE.public)
        second = new_pair()
        await members.invite(second.name, second.public)
        with pytest.raises(AlreadyExists, match="another key"):
            await members.join(second.public, "x", OTHER.public)
        now = world.coordinator.term.clock.wall()
        monkeypatch.setattr(world.coordinator.term.clock, "wall", lambda: now + 61)
        third = new_pair()
        with pytest.raises(AuthenticationFailed, match="expired"):
            await members.join(PAIR.public, "x", NODE.public)
        await members.invite(third.name, third.public)
        await world.coordinator.prune()
        left = [entry.key for entry in (await world.registry.list(INVITATIONS)).entries]
        assert left == sorted([INVITATIONS + second.name, INVITATIONS + third.name]), "the expired one is forgotten"

    run(tmp_path, test)


def test_a_user_logs_in_once_by_a_key_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(world: World) -> None:
        members = world.coordinator.members
        for role, name in (("root", "anna"), ("user", ""), ("user", "../a"), ("user", "node-a"), ("operator", "a b")):
            with pytest.raises(UsageError):
                await members.invite("bad", PAIR.public, role=role, member=name)
        await members.invite(PAIR.name, PAIR.public, role="operator", member="anna")
        key, other = KeyPair.create("operator", "anna"), KeyPair.create("operator", "anna")
        with pytest.raises(AuthenticationFailed, match=r"for the operator anna, who uses it by `rgpu login`"):
            await members.join(PAIR.public, "x", NODE.public)
        made = await members.login(PAIR.public, key.public)
        assert (made.name, made.role, made.public, made.origin) == ("anna", "operator", key.public, "")
        await world.take_over()  # its answer was lost
        members = world.coordinator.members
        assert await members.login(PAIR.public, key.public) == made
        with pytest.raises(AuthenticationFailed, match="good for one login"):
            await members.login(PAIR.public, other.public)
        with pytest.raises(AlreadyExists, match="keys revoke anna"):
            await members.invite("again", new_pair().public, role="user", member="anna")
        hosts = new_pair()
        await members.invite(hosts.name, hosts.public, host="x")
        with pytest.raises(AuthenticationFailed, match="is for a host"):
            await members.login(hosts.public, key.public)
        late = new_pair()
        await members.invite(late.name, late.public, role="user", member="bob", seconds=60.0)
        now = world.coordinator.term.clock.wall()
        monkeypatch.setattr(world.coordinator.term.clock, "wall", lambda: now + 61)
        with pytest.raises(AuthenticationFailed, match="expired"):
            await members.login(late.public, KeyPair.create("user", "bob").public)
        assert [entry.key for entry in (await world.registry.list(KEYS)).entries] == [f"{KEYS}anna"]

    run(tmp_path, test)


def test_two_invitations_of_one_name_let_one_in(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        members = world.coordinator.members
        pairs = [new_pair(), new_pair()]
        for pair in pairs:
            await members.invite(pair.name, pair.public, role="user", member="anna")
        outcomes = await asyncio.gather(*(members.login(pair.public, KeyPair.create("user", "anna").public)
                                          for pair in pairs), return_exceptions=True)
        assert sorted(type(one).__name__ for one in outcomes) == ["AlreadyExists", "KeyRecord"], outcomes

    run(tmp_path, test)


def test_a_host_with_sessions_or_a_daemon_is_not_forgotten(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        members = world.coordinator.members
        with pytest.raises(NotFound):
            await members.remove("nobody")
        await world.coordinator.cordon("a", "ready")
        await world.session("s")
        with pytest.raises(Refused, match="has sessions still: s"):
            await members.remove("a")
        await world.coordinator.end("s")
        with pytest.raises(Refused, match="stop it first"):
            await members.remove("a")
        await world.pool.kill("a")
        await members.remove("a")
        await world.coordinator.hosts.note_loss("a")  # the watch's word of it comes a moment later
        with pytest.raises(NotFound):
            await world.coordinator.cordon("a", "ready")
        await world.coordinator.hosts.note_loss("a")  # the leader looks a moment after the record went
        with pytest.raises(NotFound):
            await members.remove("a")
        assert await world.coordinator.hosts.all() == [], "what was removed is not lost afterwards"

    run(tmp_path, test)


def test_every_node_lets_in_what_is_on_record(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        first, second = AuthorizedKeys(tmp_path / "one"), AuthorizedKeys(tmp_path / "two")
        alice, bob = KeyPair.create("user", "alice"), KeyPair.create("user", "bob")
        first.add(alice.public_key())
        rings = [Keyring(keys, world.registry) for keys in (first, second)]
        for ring in rings:
            await ring.start()
        running = [asyncio.ensure_future(ring.run()) for ring in rings]

        async def until(keys: AuthorizedKeys, public: str, role: str | None) -> None:
            for _ in range(400):
                found = keys.find(public)
                if (found.role if found else None) == role:
                    return
                await asyncio.sleep(0.02)
            raise AssertionError(f"{keys.find(public)}, not {role}")

        await until(second, alice.public, "user")
        first.add(bob.public_key())  # `rgpu keys create`, in the folder of the first
        await until(second, bob.public, "user")
        first.remove("alice")
        await until(second, alice.public, None)
        await invite(world)
        await until(second, PAIR.public, "invited")
        await world.coordinator.members.join(PAIR.public, "x", NODE.public)
        await until(first, NODE.public, "node")
        await world.coordinator.revoking.revoke("node-x")
        await until(first, NODE.public, None)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        again = Keyring(first, world.registry)  # restarted: what was taken off does not come back
        await again.start()
        assert second.find(alice.public) is None and second.find(NODE.public) is None

    run(tmp_path, test)


def test_who_is_taken_off_while_a_watch_begins_is_let_in_no_more(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the reading of the record and the start of the watch, which takes a while over a network."""
    async def test(world: World) -> None:
        await invite(world)
        keys = AuthorizedKeys(tmp_path / "keys")
        keyring, real, taken_off = Keyring(keys, world.registry), world.registry.watch, asyncio.Event()
        await keyring.start()
        assert keys.find(PAIR.public) is not None

        async def slow(prefix: str, *revision: int) -> AsyncIterator[Change]:
            while keyring._changed.is_set():  # it was told to read, and has read
                await asyncio.sleep(0.01)
            if prefix == INVITATIONS and not taken_off.is_set():
                await asyncio.sleep(0.1)
                await world.registry.txn([], [Delete(INVITATIONS + PAIR.name)])
                taken_off.set()
            async for change in real(prefix, *revision):
                yield change

        monkeypatch.setattr(world.registry, "watch", slow)
        running = asyncio.ensure_future(keyring.run())
        await asyncio.wait_for(taken_off.wait(), 20)
        for _ in range(500):
            if keys.find(PAIR.public) is None:
                break
            await asyncio.sleep(0.02)
        assert keys.find(PAIR.public) is None
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run(tmp_path, test)
