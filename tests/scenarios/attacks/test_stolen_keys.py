"""Who stole the key of a node: commands in the name of a leader who was never elected (OWNERSHIP 6)."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rgpu.link.control.control_client import ControlClient
from rgpu.link.keys import KeyPair, PoolFiles
from rgpu.session.errors import AuthenticationFailed, Fenced, RgpuError
from tests.support.eventually import eventually
from tests.support.pools.pool import LocalPool, VerbError

NEVER = 2**62  #: a leader revision that no election had


class Thief:
    """Has the key of one node of a pool, and commands others with it."""

    def __init__(self, pool: LocalPool) -> None:
        self.pool, self.files = pool, PoolFiles(pool.folder / "pool")
        self.leader = self.find_leader()
        self.stolen = next(host for host in ("node-c", "node-b") if host != self.leader)

    def find_leader(self) -> str:
        """The host that leads."""
        return next((row["host"] for row in self.pool.rgpu("nodes") if row["leader"]), "")

    def revision(self) -> int:
        """The true leader's revision."""
        return int(self.pool.rgpu("pool", "status")["leader_revision"])

    def client(self, host: str, key: str = "") -> ControlClient:
        """To ``host``, with the stolen key or that of node ``key``."""
        endpoint = next(e for e in self.files.read_description().endpoints if e.host == host)
        return ControlClient(KeyPair.load(self.files.node_key_path(key or self.stolen)), [endpoint])

    @staticmethod
    def command(client: ControlClient, verb: str, args: dict[str, Any], leader: int) -> Any:
        """Have a node do it."""
        return client.call("node.command", {"verb": verb, "args": args}, timeout=30, leader=leader)

    def audit(self, host: str) -> list[dict[str, Any]]:
        """The refusals in that node's audit log."""
        path = self.files.node_directory(host) / "audit.jsonl"
        return [line for line in map(json.loads, path.read_text().splitlines()) if line["outcome"] != "ok"]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LocalPool]:
    with LocalPool(tmp_path, nodes=3, lease=4.0) as pool:
        yield pool


def harm(session: str) -> dict[str, dict[str, Any]]:
    """Commands that would end, or tell of, a session."""
    return {"session.drop": {"session": session, "reason": "harm"},
            "worker.forget": {"session": session, "epoch": 2**40},
            "worker.start": {"session": session, "epoch": 2**40, "quota": 1, "device": "cpu:0"},
            "worker.describe": {"session": session},
            "keys.forget": {"keys": {"0" * 40: "operator"}}}


def test_a_leader_who_was_never_elected_is_refused_and_the_real_one_goes_on(pool: LocalPool) -> None:
    program = pool.heat("victim", steps=1_000_000, rest=0.1)
    program.wait_lines(2)
    row, thief = pool.session("victim"), Thief(pool)
    true = thief.revision()
    others = [host for host in ("node-a", "node-b", "node-c") if host != thief.stolen]
    for host in others:
        with thief.client(host) as client, thief.client(host, key=thief.leader) as leaders:
            for verb, args in harm("victim").items():
                for leader in (NEVER, 2**63 - 1, true + 1, true):
                    with pytest.raises(AuthenticationFailed):
                        thief.command(client, verb, args, leader)
                for leader in (0, true - 1):
                    with pytest.raises(Fenced):
                        thief.command(client, verb, args, leader)
                with pytest.raises(AuthenticationFailed):  # a number that was never given, from the leader's own key
                    thief.command(leaders, verb, args, NEVER)
            for args in ({"forget": ["victim"]}, {"own": {"victim": 2**40}}, {"cluster": "mine", "revision": 1}):
                with pytest.raises(AuthenticationFailed, match="pool adopt"):  # nothing is mended here
                    thief.command(client, "node.adopt", args, NEVER)
            # What a node is asked without a leader does not move its fence either.
            thief.command(client, "node.holdings", {}, NEVER)
    for host in others:
        lines = thief.audit(host)
        for verb in harm("victim"):
            found = [line for line in lines if line["verb"] == verb and line["outcome"] == AuthenticationFailed.code]
            assert found, f"{verb} on {host} is not in its audit log"
            assert {line["name"] for line in found} == {f"node-{thief.stolen}", f"node-{thief.leader}"}
            assert all("election" in line["reason"] or "elected" in line["reason"] for line in found)
    # The real leader's commands go on, on each node: moves there, and the end.
    now = pool.session("victim")
    assert (now["epoch"], now["worker_pid"]) == (row["epoch"], row["worker_pid"])
    for host in sorted({"node-a", "node-b", "node-c"} - {row["host"]}):
        assert pool.rgpu("migrate", "victim", host)["to"] == host
        program.wait_lines(len(program.lines) + 2)
    assert thief.revision() == true
    pool.rgpu("kill", "victim", "--yes")
    assert pool.ends("victim", 30)


def test_the_next_leader_is_obeyed_and_the_one_before_is_not(pool: LocalPool) -> None:
    thief = Thief(pool)
    before, was = thief.revision(), thief.leader
    pids = {row["host"]: row["pid"] for row in pool.rgpu("nodes")}
    os.kill(pids[was], signal.SIGKILL)
    left = sorted({"node-a", "node-b", "node-c"} - {was})

    def next_leader() -> str:
        try:
            found = thief.find_leader()
        except VerbError:  # nobody leads for a moment
            return ""
        return found if found in left else ""

    new = eventually(next_leader)
    other = next(host for host in left if host != new)
    program = pool.heat("afterwards", steps=200, options=("--host", other))
    assert len(program.finish()) == 64
    for leader, key in ((before, was), (thief.revision(), was), (NEVER, new)):
        with thief.client(other, key=key) as client, pytest.raises(RgpuError) as refused:
            thief.command(client, "session.drop", {"session": "afterwards"}, leader)
        assert isinstance(refused.value, Fenced if leader == before else AuthenticationFailed)
