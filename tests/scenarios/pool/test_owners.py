"""Users of one pool against each other: every verb of the table on another user's session, asked of real daemons."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rgpu.link.control.access import rule
from rgpu.link.control.control_client import ControlClient
from rgpu.link.control.verbs import TABLE, VERBS, On
from rgpu.link.keys import Endpoint, KeyPair, PoolFiles
from rgpu.session.errors import AlreadyExists, AuthenticationFailed, NotPermitted, RgpuError
from tests.support.eventually import eventually
from tests.support.pools.pool import LocalPool, Program, VerbError

VICTIM = "victims-secret-run"


class Attack:
    """A pool of two nodes with a session of the user ``user``, and the key of another user, ``mallory``."""

    def __init__(self, pool: LocalPool) -> None:
        self.pool = pool
        self.files = PoolFiles(pool.folder / "pool")
        self.program: Program = pool.heat(VICTIM, steps=1_000_000, rest=0.1)
        self.program.wait_lines(2)
        self.image = pool.rgpu("checkpoint", VICTIM)["image"]
        pool.rgpu("keys", "create", "--role", "user", "mallory")
        self.endpoints = {e.host: e for e in self.files.read_description().endpoints}
        self.leader = next(row["host"] for row in pool.rgpu("nodes") if row["leader"])

    def client(self, host: str, key: str = "mallory") -> ControlClient:
        """Of one node alone."""
        return ControlClient(KeyPair.load(self.files.root / "keys" / f"{key}.key"), [self.endpoints[host]])

    def ask(self, host: str, verb: str, args: dict[str, Any], key: str = "mallory") -> Any:
        with self.client(host, key) as client:
            return client.call(verb, args, timeout=15)

    def audit(self, *hosts: str) -> list[dict[str, Any]]:
        """Every line of the audit logs."""
        return [json.loads(line) for host in hosts or self.endpoints
                for line in (self.files.root / "nodes" / host / "audit.jsonl").read_text().splitlines()]

    def arguments(self) -> dict[str, Any]:
        """What any verb may need to do harm to the victim."""
        other = next(host for host in self.endpoints if host != self.pool.session(VICTIM)["host"])
        return {"session": VICTIM, "image": self.image, "host": other, "name": "mallory", "epoch": 1, "seconds": 100.0,
                "lines": 10, "all": True, "limit": 2000, "since": 0, "wait": 0.0, "move": "", "state": "cordoned",
                "paused": True, "region": 0, "start": 0, "count": 1, "keep_last": 0, "ended": 0.0, "grace": 0.0,
                "reason": "harm", "program": {"pid": self.pool.session(VICTIM)["pid"], "host": ""},
                "own": {VICTIM: 9}, "forget": [VICTIM], "quota": 1, "device": "cpu:0", "kind": "cut", "values": {},
                "id": "1", "offset": 0, "data": b"", "public": "0" * 40}


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attack]:
    with LocalPool(tmp_path_factory.mktemp("owners"), nodes=2, lease=8.0) as pool:
        yield Attack(pool)


@pytest.mark.parametrize("verb", [verb for verb in TABLE if rule(verb, "user") == "no" or rule(verb, "user") == "own"
                                  and verb.on in (On.SESSION, On.CHECKPOINT)], ids=lambda verb: verb.name)
def test_every_verb_on_anothers_is_refused_and_in_the_audit(attack: Attack, verb: Any) -> None:
    """Asked of the node that leads, and of one that passes it on."""
    args = attack.arguments()
    for host in attack.endpoints:
        expected = NotPermitted if "user" in verb.roles else AuthenticationFailed
        with pytest.raises(AuthenticationFailed) as caught:
            attack.ask(host, verb.name, args)
        assert type(caught.value) is expected and caught.value.message
        found = [line for line in attack.audit(host) if line["verb"] == verb.name and line["name"] == "mallory"]
        assert found and found[-1]["outcome"] == expected.code, f"no word of it in the audit of {host}"
        assert found[-1]["peer"] == "127.0.0.1" and len(found[-1]["key"]) == 40 and found[-1]["reason"]
    if "user" in verb.roles and verb.answers.value == "leader":
        passed = [line for line in attack.audit(attack.leader) if line["verb"] == verb.name and line.get("via")]
        assert passed and passed[-1]["name"] == "mallory", "the leader knows who asked, and by which node"
    assert attack.program.process.poll() is None and attack.pool.session(VICTIM)["state"] == "running"


@pytest.mark.parametrize("verb", [verb for verb in TABLE if rule(verb, "user") == "own" and verb.on is On.LIST
                                  or rule(verb, "user") == "yes"], ids=lambda verb: verb.name)
def test_no_list_shows_anothers(attack: Attack, verb: Any) -> None:
    args = {**attack.arguments(), "session": None}
    for host in attack.endpoints:
        if verb.name == "session.create":
            with pytest.raises(AlreadyExists):
                attack.ask(host, verb.name, {"name": VICTIM, "memory": 1 << 20})
            continue
        if verb.name == "pool.history":  # about one session it is refused instead
            with pytest.raises(NotPermitted):
                attack.ask(host, verb.name, {"session": VICTIM, "limit": 100})
            args["host"] = None
        try:
            shown = repr(attack.ask(host, verb.name, args))
        except RgpuError as error:
            shown = repr(error.as_dict())
        assert VICTIM not in shown and attack.image not in shown, verb.name


def test_one_sees_ones_own_and_operators_all(attack: Attack) -> None:
    assert [row["session"] for row in attack.ask(attack.leader, "session.list", {})["sessions"]] == []
    with pytest.raises(NotPermitted):
        attack.ask(attack.leader, "session.list", {"all_users": True})
    own = attack.pool.rgpu("ps")
    assert [(row["session"], row["user"]) for row in own] == [(VICTIM, "user")]
    assert [row["session"] for row in attack.pool.rgpu("ps", "--all-users")] == [VICTIM]
    mine = attack.pool.folder / "operators"
    shutil.copytree(attack.files.root / "keys", mine / "keys")
    shutil.copy(attack.files.root / "pool.json", mine / "pool.json")
    shutil.copy(mine / "keys" / "operator.key", mine / "keys" / "user.key")  # one whose only key is an operator's
    assert attack.pool.rgpu("ps", "--pool", str(mine)) == []
    assert [row["session"] for row in attack.pool.rgpu("ps", "--all-users", "--pool", str(mine))] == [VICTIM]
    assert attack.pool.rgpu("describe", VICTIM, "--pool", str(mine))["user"] == "user"


def test_a_node_does_not_speak_for_others_sessions(attack: Attack) -> None:
    """With a node's key, taken from a host: a session of another host is not ended by it, nor reported dead."""
    row = attack.pool.session(VICTIM)
    owner, other = row["host"], next(host for host in attack.endpoints if host != row["host"])
    key = KeyPair.load(attack.files.node_key_path(other))
    for verb, args in (("session.end", {"session": VICTIM, "reason": "harm"}),
                       ("worker.died", {"session": VICTIM, "host": owner, "epoch": row["epoch"], "reason": "harm"}),
                       ("worker.died", {"session": VICTIM, "host": other, "epoch": row["epoch"], "reason": "harm"})):
        with ControlClient(key, [attack.endpoints[attack.leader]]) as client, pytest.raises(NotPermitted):
            client.call("node.command", {"verb": verb, "args": args, "public": ""}, timeout=15)
        line = [line for line in attack.audit(attack.leader) if line["verb"] == verb][-1]
        assert line["outcome"] == "not_permitted" and line["name"] == f"node-{other}"
    unknown = KeyPair.create("operator", "mallory").public
    with ControlClient(key, [attack.endpoints[attack.leader]]) as client, pytest.raises(AuthenticationFailed):
        message = {"verb": "session.kill", "args": {"session": VICTIM}, "public": unknown}
        client.call("node.command", message, timeout=15)
    assert attack.pool.session(VICTIM)["state"] == "running"


def test_a_stranger_is_in_the_audit(attack: Attack) -> None:
    stranger = KeyPair.create("operator", "stranger")
    endpoint: Endpoint = attack.endpoints[attack.leader]
    with ControlClient(stranger, [endpoint], connect_timeout=1) as client, pytest.raises(AuthenticationFailed):
        client.call("pool.ping", timeout=3)
    eventually(lambda: any(line["key"] == stranger.public and line["verb"] == "connect"
                           for line in attack.audit(attack.leader)), within=5, every=0.1)


def test_an_operator_acts_and_it_is_told_who(attack: Attack) -> None:
    """Last: it ends the victim's session."""
    pool = attack.pool
    row = pool.session(VICTIM)
    other = next(host for host in attack.endpoints if host != row["host"])
    pool.rgpu("migrate", VICTIM, other, "--operator")
    assert pool.rgpu("logs", VICTIM, "--operator")["lines"] is not None
    pool.rgpu("kill", VICTIM, "--operator")
    story = {event["decision"]: event for event in pool.rgpu("history", VICTIM)}
    assert story["create"]["actor"] == "user" and story["create"]["user"] == "user"
    assert story["begin_move"]["actor"] == story["end"]["actor"] == "operator"
    lines = [line for line in attack.audit(attack.leader) if line["outcome"] == "ok" and line["name"] == "operator"]
    assert {"session.migrate", "session.kill"} <= {line["verb"] for line in lines}
    commands = [line for line in attack.audit() if line["verb"].startswith("move.") and line["role"] == "node"]
    assert commands and all(line["for"] == "operator" for line in commands), "on whose word the leader commanded"
    with pytest.raises(VerbError) as caught:
        pool.rgpu("history", VICTIM, "--pool", str(_folder_of(attack, "mallory")))
    assert "belongs to user" in caught.value.text and caught.value.code == NotPermitted.exit_code


def _folder_of(attack: Attack, key: str) -> Path:
    """A client's folder: the pool's description, and one key."""
    folder = attack.pool.folder / f"client-{key}"
    (folder / "keys").mkdir(parents=True, mode=0o700)
    shutil.copy(attack.files.root / "pool.json", folder / "pool.json")
    shutil.copy(attack.files.root / "keys" / f"{key}.key", folder / "keys" / "user.key")
    return folder


def test_the_table_is_whole() -> None:
    """No verb that a user could ask for is left out above."""
    tested = {verb.name for verb in TABLE if rule(verb, "user") in ("no", "own", "yes")}
    assert tested == set(VERBS)
