"""The control link: keys and roles, answers and errors, lost answers and repeated commands."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rgpu.link.control import AsyncControlClient, CommandLog, ControlClient
from rgpu.link.control.access import check
from rgpu.link.control.verbs import TABLE, VERBS
from rgpu.link.keys import Endpoint, KeyPair, PoolFiles
from rgpu.session.errors import (
    AuthenticationFailed,
    Fenced,
    NotFound,
    PoolUnavailable,
    Refused,
    RgpuError,
    UnknownOutcome,
)
from tests.support.control_node import Node


@pytest.fixture
def pool(tmp_path: Path) -> PoolFiles:
    pool = PoolFiles(tmp_path / "pool")
    pool.create()
    return pool


@pytest.fixture
def node(pool: PoolFiles) -> Iterator[Node]:
    node = Node(pool)
    yield node
    node.stop()


@pytest.fixture
def client(pool: PoolFiles, node: Node) -> Iterator[ControlClient]:
    with ControlClient(KeyPair.load(pool.key_path("user")), [node.endpoint], connect_timeout=1) as client:
        yield client


def test_who_asks_is_known(client: ControlClient) -> None:
    assert client.call("pool.ping", epoch=4, leader=9) == {"name": "user", "role": "user", "epoch": 4, "leader": 9}


def test_a_missing_role_is_refused(client: ControlClient, node: Node, pool: PoolFiles) -> None:
    with pytest.raises(AuthenticationFailed, match="role node"):
        client.call("move.settle")
    with ControlClient(node.keys, [node.endpoint]) as other:
        assert other.call("move.settle")["role"] == "node"
        with pytest.raises(AuthenticationFailed):
            other.call("session.kill")


def test_an_unknown_key_is_refused(node: Node) -> None:
    with ControlClient(KeyPair.create("operator", "mallory"), [node.endpoint], connect_timeout=1) as client, \
            pytest.raises(AuthenticationFailed, match="does not know this key"):
        client.call("pool.ping", timeout=3)


def test_a_key_that_was_taken_away_counts_no_more(client: ControlClient, pool: PoolFiles) -> None:
    client.call("pool.ping")
    pool.authorized.remove("user")
    with pytest.raises(AuthenticationFailed):
        client.call("pool.ping")


def test_a_node_with_another_key_is_not_believed(pool: PoolFiles, node: Node) -> None:
    imposter = Endpoint(node.endpoint.address, KeyPair.create("node", "x").public)
    with ControlClient(KeyPair.load(pool.key_path("user")), [imposter], connect_timeout=0.3) as client, \
            pytest.raises(PoolUnavailable):
        client.call("pool.ping", timeout=1)


def test_errors_arrive_as_they_were(client: ControlClient) -> None:
    with pytest.raises(Fenced) as caught:
        client.call("session.kill")
    assert caught.value.detail == {"epoch": 3, "path": "/x"}
    with pytest.raises(RgpuError, match="ZeroDivisionError"):
        client.call("session.list")
    with pytest.raises(NotFound):
        client.call("no.such.verb")
    with pytest.raises(Refused):
        client.call("session.describe")


def test_progress_keeps_a_call_alive(client: ControlClient) -> None:
    seen: list[dict[str, Any]] = []
    assert client.call("session.migrate", timeout=1.5, on_progress=seen.append) == {"outcome": "done"}  # 2 s in all
    assert [entry["step"] for entry in seen] == [0, 1, 2, 3]


def test_the_next_endpoint_is_tried_and_remembered(pool: PoolFiles, node: Node) -> None:
    dead = Endpoint("tcp://127.0.0.1:9", node.keys.public)
    with ControlClient(KeyPair.load(pool.key_path("user")), [dead, node.endpoint], connect_timeout=1.5) as client:
        assert client.call("pool.ping")["name"] == "user"
        assert client.endpoints[0] == node.endpoint
    with ControlClient(KeyPair.load(pool.key_path("user")), [dead], connect_timeout=0.2) as client, \
            pytest.raises(PoolUnavailable, match="rgpu up"):
        client.call("pool.ping")


def test_who_did_not_answer_is_tried_last(pool: PoolFiles, node: Node) -> None:
    """A call has time for two of them: those behind have their turn in the next one."""
    dead = [Endpoint(f"tcp://127.0.0.1:{port}", node.keys.public) for port in (9, 10, 11, 12)]
    with ControlClient(KeyPair.load(pool.key_path("user")), [*dead, node.endpoint], connect_timeout=0.8) as client:
        for _ in range(2):
            with pytest.raises(PoolUnavailable):
                client.call("pool.ping", timeout=1.6)
            client.refresh([*dead, node.endpoint])
        assert client.call("pool.ping", timeout=1.6)["name"] == "user"


def test_no_connection_is_kept_to_an_address_that_is_known_no_more(pool: PoolFiles, node: Node, client: ControlClient
                                                                   ) -> None:
    assert client.call("pool.ping")["name"]
    (before,) = client._peers
    client.refresh([Endpoint("tcp://127.0.0.1:9", node.keys.public)])
    with pytest.raises(PoolUnavailable):
        client.call("pool.ping", timeout=0.3)
    assert before not in client._peers


def test_a_connection_that_is_lost_just_before_a_request_is_no_wait_without_end(
        client: ControlClient, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library keeps a sender waiting for a connection; a program that had ended was held by that (seen once)."""
    assert client.call("pool.ping")["name"]
    node.run(node.server.stop())
    (peer,) = client._peers.values()
    assert peer.receive(5.0) is None and not peer._connected
    monkeypatch.setattr(peer, "wait_connected", lambda timeout: True)
    with pytest.raises(PoolUnavailable, match="answers"):
        client.call("pool.ping", timeout=0.3)


def test_a_lost_answer(client: ControlClient) -> None:
    with pytest.raises(PoolUnavailable):
        client.call("pool.ping", {"sleep": 2}, timeout=0.2)
    with pytest.raises(UnknownOutcome):
        client.call("session.create", {"sleep": 4}, timeout=1.5)
    assert client.call("pool.ping")["name"] == "user"  # a late answer is nobody's


def test_a_repeated_command_is_not_done_again(client: ControlClient, node: Node) -> None:
    first = client.call("session.create", command="c1")
    assert client.call("session.create", command="c1") == first == {"number": 1}
    assert client.call("session.create", command="c2") == {"number": 2}
    assert client.call("session.create") == {"number": 3}


def test_the_asynchronous_client(pool: PoolFiles, node: Node) -> None:
    async def talk() -> None:
        client = AsyncControlClient(pool.add_node("b"), node.endpoint)
        try:
            replies = await asyncio.gather(*(client.call("pool.ping", epoch=n) for n in range(20)))
            assert [reply["epoch"] for reply in replies] == list(range(20))
            with pytest.raises(AuthenticationFailed):
                await client.call("session.kill")
            with pytest.raises(PoolUnavailable):
                await client.call("pool.ping", {"sleep": 1}, timeout=0.1)
        finally:
            await client.close()
        gone = AsyncControlClient(pool.add_node("b"), Endpoint("tcp://127.0.0.1:9", node.keys.public))
        with pytest.raises(PoolUnavailable):
            await gone.call("pool.ping", timeout=0.2)
        await gone.close()

    asyncio.run(talk())


def test_the_command_log() -> None:
    async def scenario() -> None:
        log, runs = CommandLog(limit=3), 0

        async def work() -> int:
            nonlocal runs
            runs += 1
            await asyncio.sleep(0.01)
            if runs == 2:
                raise Refused("no")
            return runs

        assert await asyncio.gather(log.run("a", "1", work), log.run("a", "1", work)) == [1, 1]
        for _ in range(2):
            with pytest.raises(Refused):
                await log.run("b", "1", work)
        assert runs == 2
        waiting = asyncio.ensure_future(log.run("a", "2", work))
        await asyncio.sleep(0)
        waiting.cancel()
        assert await log.run("a", "2", work) == 3  # the command went on without its caller
        for number in range(10):
            await log.run("c", str(number), work)
        assert len(log) <= 2 + 1 + 4  # of each owner its own: nobody's are forgotten for another's

    asyncio.run(scenario())


def test_the_table_of_verbs() -> None:
    assert len(VERBS) == len(TABLE)
    roles = {"user", "node", "operator", "invited", "web"}
    assert all(verb.roles <= roles and verb.roles and verb.doc for verb in TABLE)
    assert all("operator" in verb.roles for verb in TABLE if "user" in verb.roles)
    for verb in TABLE:
        for role in verb.roles:
            assert check(verb.name, role) is verb
    with pytest.raises(AuthenticationFailed):
        check("worker.start", "operator")
