"""Which control addresses an agent knows, as replies, the worker and the pool's description name them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rgpu.client.run import known_nodes
from rgpu.client.run.known_nodes import LEAST, PAUSES, REFRESH_SECONDS, KnownNodes
from rgpu.client.run.pool_requests import PoolRequests
from rgpu.link.keys import Endpoint, KeyPair
from rgpu.session.errors import AuthenticationFailed, Corrupt, NotFound, PoolUnavailable, Refused

KEYS = {host: KeyPair.create("node", host).public for host in "abcd"}


def at(host: str, port: int) -> Endpoint:
    return Endpoint(f"tcp://10.0.0.1:{port}", KEYS[host], host)


def raw(*endpoints: Endpoint) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(endpoint) for endpoint in endpoints]


def test_a_reply_replaces_what_was_known() -> None:
    nodes = KnownNodes([at("a", 1)])
    nodes.named(raw(at("a", 2), at("b", 2), at("c", 2)), 0.0)
    assert nodes.endpoints == [at("a", 2), at("b", 2), at("c", 2)]
    nodes.named(raw(at("d", 3), at("b", 3), at("c", 3)), 0.0)
    assert nodes.endpoints == [at("d", 3), at("b", 3), at("c", 3)], "a node that left is still known"


def test_a_reply_that_names_few_is_filled_up_with_those_known_before() -> None:
    nodes = KnownNodes([at("a", 1), at("b", 1), at("c", 1), at("d", 1)])
    nodes.named(raw(at("c", 2)), 0.0)
    assert nodes.endpoints == [at("c", 2), at("a", 1), at("b", 1)]
    assert len(nodes.endpoints) == LEAST


@pytest.mark.parametrize("named", [None, [], "tcp://x", [1, {"address": 1, "public": KEYS["a"]}],
                                   [{"address": "tcp://10.0.0.1:9", "public": "no key"}], [{"public": KEYS["a"]}]])
def test_a_reply_that_names_none_changes_nothing(named: Any) -> None:
    nodes = KnownNodes([at("a", 1)])
    nodes.named(named, 0.0)
    assert nodes.endpoints == [at("a", 1)]


def test_the_worker_names_only_nodes_whose_key_is_known() -> None:
    nodes = KnownNodes([at("a", 1), at("b", 1)])
    assert nodes.told("tcp://10.0.0.1:7", KEYS["b"])
    assert nodes.endpoints == [at("a", 1), at("b", 7)]
    for address, public in (("tcp://10.0.0.1:8", KEYS["c"]), ("ipc:///x", KEYS["a"]), (None, KEYS["a"]), ("tcp://", 3)):
        assert not nodes.told(address, public)
    assert nodes.endpoints == [at("a", 1), at("b", 7)]


def test_the_description_names_others_and_is_asked_in_vain_less_and_less() -> None:
    described = [at("a", 1), at("a", 2)]
    nodes = KnownNodes([at("a", 1)], lambda: described)
    now = 100.0
    for pause in PAUSES[1:]:
        assert nodes.described(now) == [at("a", 2)]
        nodes.in_vain([at("a", 2)], now)
        assert nodes.described(now + pause - 0.01) == []
        now += pause
    described.append(at("b", 3))
    nodes.in_vain([at("a", 2)], now)
    assert nodes.described(now) == [at("a", 2), at("b", 3)], "what stands there newly is asked at once"
    nodes.answered([at("a", 2), at("b", 3)])
    assert nodes.endpoints == [at("a", 2), at("b", 3)]
    assert nodes.described(now) == [at("a", 1)]


@pytest.mark.parametrize("error", [NotFound("gone"), Corrupt("broken"), PermissionError("no")])
def test_a_description_that_cannot_be_read_names_nobody(error: Exception) -> None:
    def unreadable() -> list[Endpoint]:
        raise error

    nodes = KnownNodes([at("a", 1)], unreadable)
    assert nodes.described(0.0) == [] and nodes.endpoints == [at("a", 1)]


def test_nodes_are_asked_for_when_no_reply_named_them_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_nodes, "_spread", lambda seconds: seconds)
    nodes = KnownNodes([at("a", 1)], now=0.0)
    assert not nodes.refresh_due(REFRESH_SECONDS - 1)
    assert nodes.refresh_due(REFRESH_SECONDS) and not nodes.refresh_due(REFRESH_SECONDS), "once, of all its sessions"
    nodes.named(raw(at("a", 2)), 2 * REFRESH_SECONDS - 1)
    assert not nodes.refresh_due(2 * REFRESH_SECONDS)
    assert nodes.refresh_due(3 * REFRESH_SECONDS)


class Pool:
    """What stands at addresses: a node, another service, nothing. Clients of it ask as a ControlClient does."""

    def __init__(self) -> None:
        self.nodes: dict[Endpoint, Callable[[], Any]] = {}
        self.asked: list[Endpoint] = []

    def client(self, keys: KeyPair, endpoints: list[Endpoint]) -> PoolClient:
        return PoolClient(self, endpoints)

    def names_all(self) -> dict[str, Any]:
        return {"endpoints": raw(*self.nodes)}


class PoolClient:
    def __init__(self, pool: Pool, endpoints: list[Endpoint]) -> None:
        self.pool, self.endpoints = pool, endpoints

    def refresh(self, endpoints: list[Endpoint]) -> None:
        self.endpoints = list(endpoints)

    def call(self, verb: str, args: dict[str, Any], timeout: float, **more: Any) -> Any:
        for endpoint in self.endpoints:
            self.pool.asked.append(endpoint)
            if endpoint in self.pool.nodes:
                return self.pool.nodes[endpoint]()
        raise PoolUnavailable("no node of the pool answers")

    def close(self) -> None:
        pass


def desk_of(pool: Pool, known: list[Endpoint], described: list[Endpoint]) -> PoolRequests:
    return PoolRequests(KeyPair.create("user", "u"), known, pool.client, lambda: list(described))


def test_the_pool_is_found_at_what_its_description_names_now() -> None:
    pool, described = Pool(), [at("a", 1), at("b", 1)]
    requests = desk_of(pool, list(described), described)
    with pytest.raises(PoolUnavailable):
        requests.call("pool.ping", {})
    described[:] = [at("a", 2), at("b", 2)]
    pool.nodes = {at("a", 2): pool.names_all, at("b", 2): pool.names_all}
    requests.call("pool.ping", {})
    assert requests.nodes.endpoints[:2] == [at("a", 2), at("b", 2)]
    pool.asked.clear()
    requests.call("pool.ping", {})
    assert pool.asked == [at("a", 2)], "nobody is asked at the old addresses any more"


def test_a_reply_counts_more_than_the_description_that_led_to_it() -> None:
    """A copied description may be right of one node and wrong of another."""
    pool = Pool()
    pool.nodes = {at("a", 3): pool.names_all, at("b", 2): pool.names_all}
    requests = desk_of(pool, [at("a", 1)], [at("a", 2), at("b", 2)])
    requests.call("pool.ping", {})
    assert requests.nodes.endpoints == [at("a", 3), at("b", 2)]


def test_an_error_that_a_node_answers_with_says_where_it_is() -> None:
    def refuse() -> Any:
        raise Refused("no")

    pool = Pool()
    pool.nodes = {at("a", 2): refuse}
    requests = desk_of(pool, [at("a", 1)], [at("a", 2)])
    with pytest.raises(Refused):
        requests.call("session.create", {})
    assert at("a", 2) in requests.nodes.endpoints


def test_another_service_at_an_old_port_is_not_taken_for_the_pool() -> None:
    def not_let_in() -> Any:
        raise AuthenticationFailed("does not know this key")

    pool = Pool()
    pool.nodes = {at("a", 1): not_let_in, at("a", 2): lambda: {"host": "a"}}
    requests = desk_of(pool, [at("a", 1)], [at("a", 2)])
    assert requests.call("pool.ping", {}) == {"host": "a"}


def test_a_description_asked_in_vain_hides_nothing_that_a_known_node_said() -> None:
    def went_back() -> Any:
        raise PoolUnavailable("its registry went back", reason="went back")

    pool = Pool()
    pool.nodes = {at("a", 1): went_back}
    requests = desk_of(pool, [at("a", 1)], [at("a", 2)])
    for _ in range(2):
        with pytest.raises(PoolUnavailable, match="went back"):
            requests.call("pool.ping", {})
    assert pool.asked.count(at("a", 2)) == 1, "it was asked again at once"


def test_known_nodes_stay_few_however_often_all_of_them_move() -> None:
    chance, nodes = random.Random(4), KnownNodes([at("a", 1)])
    for port in range(2, 400):
        hosts = chance.sample("abcd", chance.randint(1, 4))
        chance.choice((lambda: nodes.named(raw(*(at(host, port) for host in hosts)), 0.0),  # noqa: B023
                       lambda: nodes.answered([at(host, port) for host in hosts]),  # noqa: B023
                       lambda: nodes.told(at(hosts[0], port).address, KEYS[hosts[0]])))()  # noqa: B023
        known = nodes.endpoints
        assert 1 <= len(known) <= 4 + LEAST and len({endpoint.public for endpoint in known}) == len(known), known
