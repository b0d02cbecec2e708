"""Keys taken away by the leader: told everywhere, what they run ended, also by the leader after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rgpu.link.keys import AuthorizedKeys, KeyPair
from rgpu.link.revoked import RevokedKeys
from rgpu.migrate.records.keys import member_key
from rgpu.migrate.records.schema import KeyRecord, encode
from rgpu.migrate.registry.base import Put
from rgpu.server.node.pool.keyring import Keyring
from rgpu.session.errors import AlreadyExists, AuthenticationFailed, Corrupt, NotFound, Refused
from tests.support.leader.pool import GIB, World, run

ANNA, BERT, ROOT = (KeyPair.create(role, name) for role, name in
                    (("user", "anna"), ("user", "bert"), ("operator", "root")))


async def known(world: World, *pairs: KeyPair) -> None:
    for pair in pairs:
        record: Any = KeyRecord(name=pair.name, role=pair.role, public=pair.public)  # type: ignore[arg-type]
        await world.registry.txn([], [Put(member_key(pair.name), encode(record))])


async def states(world: World) -> dict[str, str]:
    return {held.record.name: held.record.state for held in await world.coordinator.records.sessions()}


def test_it_is_told_everywhere_and_what_it_runs_ends(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await known(world, ANNA, BERT, ROOT)
        for name, pair in (("a1", ANNA), ("a2", ANNA), ("b", BERT)):
            await world.coordinator.create_session(name, quota=GIB, agent=pair.public)
        told = await world.coordinator.revoking.revoke("anna")
        assert told["keys"] == [ANNA.public] and told["sessions"] == ["a1", "a2"] and not told["not_yet"]
        assert told["holds"] == sorted(world.pool.nodes)
        assert all(node.forgotten == ["anna"] for node in world.pool.nodes.values())
        assert await states(world) == {"a1": "ended", "a2": "ended", "b": "running"}
        with pytest.raises(NotFound):
            await world.coordinator.revoking.revoke("anna")
        again = await world.coordinator.revoking.revoke("anna", public=ANNA.public)  # a file of it was left over
        assert again["keys"] == [ANNA.public] and not again["sessions"]

    run(tmp_path, test)


def test_the_next_leader_ends_what_is_left(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await known(world, ANNA, ROOT)
        await world.coordinator.create_session("a", quota=GIB, agent=ANNA.public)
        assert await world.coordinator.revoking._write("anna", "", False, False)  # and there the leader dies
        await world.take_over()
        coordinator = world.coordinator
        await coordinator.revoking.tick(await coordinator.records.sessions())
        await coordinator.tasks.idle()
        assert await states(world) == {"a": "ended"}

    run(tmp_path, test)


def test_the_last_operator(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await known(world, ANNA, ROOT)
        revoke = world.coordinator.revoking.revoke
        with pytest.raises(Refused, match="last operator") as caught:
            await revoke("root", operators=["root"])
        assert caught.value.detail["reason"] == "last operator"
        other = KeyPair.create("operator", "second")
        await known(world, other)
        await revoke("root")
        await revoke("second", operators=["second", "third"])  # one that is not on record yet
        await known(world, ROOT)  # put back by hand: it is revoked all the same
        await known(world, KeyPair.create("operator", "fourth"))
        with pytest.raises(Refused, match="last operator"):
            await revoke("fourth")
        assert (await revoke("fourth", last=True))["name"] == "fourth"

    run(tmp_path, test)


def test_files_left_over_count_no_more(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        first, second = AuthorizedKeys(tmp_path / "first"), AuthorizedKeys(tmp_path / "second")
        for keys in (first, second):
            keys.add(ANNA.public_key())
        await Keyring(first, world.registry).start()
        await world.coordinator.revoking.revoke("anna")
        late = Keyring(second, world.registry)  # it was down meanwhile
        await late.start()
        assert second.find(ANNA.public) is None and not (second.directory / "anna.pub").exists()
        ANNA.public_key().save(second.directory / "anna.pub")
        again = AuthorizedKeys(second.directory)
        assert again.find(ANNA.public) is None and ANNA.public_key() not in again.all(), "before the record is read"
        await Keyring(again, world.registry).start()
        assert await world.registry.get(member_key("anna")) is None, "nor does it come back on record"
        with pytest.raises((AuthenticationFailed, AlreadyExists)):
            await world.coordinator.members.join(ANNA.public, "x", ANNA.public)

    run(tmp_path, test)


def test_a_record_that_was_set_back_is_told_again(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        keys, other = AuthorizedKeys(tmp_path / "first"), AuthorizedKeys(tmp_path / "other")
        keys.revoke({ANNA.public: "anna"})
        await known(world, ANNA)  # the registry is as it was before
        await Keyring(keys, world.registry).start()
        await Keyring(other, world.registry).start()
        assert keys.find(ANNA.public) is None and other.find(ANNA.public) is None

    run(tmp_path, test)


def test_a_host_whose_key_was_revoked_does_not_start(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        keys = AuthorizedKeys(tmp_path / "keys")
        keys.revoke({ANNA.public: "node-x"})
        with pytest.raises(AuthenticationFailed, match="join by an invitation"):
            await Keyring(keys, world.registry, ANNA.public).start()

    run(tmp_path, test)


def test_a_list_that_cannot_be_read_is_no_list(tmp_path: Path) -> None:
    keys = RevokedKeys(tmp_path)
    assert keys.add({ANNA.public: "anna"}) and not keys.add({ANNA.public: "anna"})
    assert RevokedKeys(tmp_path).names() == {} and (tmp_path / "revoked.json").stat().st_mode & 0o777 == 0o600
    for data in (b"", b"{", b"[]", b'{"keys": 3}', b'{"keys": {}, "rgpu_revoked": 2}'):
        (tmp_path / "revoked.json").write_bytes(data)
        with pytest.raises(Corrupt):
            RevokedKeys(tmp_path).read()
