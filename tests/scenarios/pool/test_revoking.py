"""Keys taken away from a real pool: at once, on every node, for good, with what they run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rgpu.link.control.control_client import ControlClient
from rgpu.link.keys import KeyPair, PoolFiles
from rgpu.session.errors import AuthenticationFailed, PoolUnavailable
from tests.support.eventually import eventually
from tests.support.pools.pool import EXAMPLES, HELD, ROOT, LocalPool, Program, VerbError

HOLDS_SECONDS = 2.0


class Users:
    """A pool, and users with folders of their own."""

    def __init__(self, pool: LocalPool) -> None:
        self.pool, self.files = pool, PoolFiles(pool.folder / "pool")

    def make(self, name: str, role: str = "user") -> Path:
        """A client's folder with a new key; it is let in everywhere."""
        self.pool.rgpu("keys", "create", "--role", role, name)
        folder = self.pool.folder / f"client-{name}"
        (folder / "keys").mkdir(parents=True, mode=0o700)
        shutil.copy(self.files.description_path, folder / "pool.json")
        shutil.copy(self.files.root / "keys" / f"{name}.key", folder / "keys" / f"{role}.key")
        eventually(lambda: all(self.lets_in(name).values()), within=10, every=0.1)
        return folder

    def lets_in(self, name: str, seconds: float = 3.0) -> dict[str, bool]:
        """Which node answers that key; one that does not answer at all is left out."""
        found = {}
        for endpoint in self.files.read_description().endpoints:
            key = KeyPair.load(self.files.root / "keys" / f"{name}.key")
            with ControlClient(key, [endpoint], connect_timeout=1) as client:
                try:
                    client.call("pool.ping", timeout=seconds)
                    found[endpoint.host] = True
                except AuthenticationFailed:
                    found[endpoint.host] = False
                except PoolUnavailable:
                    continue
        return found

    def run(self, folder: Path, name: str) -> Program:
        """A program that lasts, under the key in that folder."""
        never = str(self.pool.folder / "never released")
        command = [sys.executable, "-W", "ignore", str(HELD), never, "0", "0.1", str(EXAMPLES / "heat.py"), "--n", "96",
                   "--steps", "1000000", "--report", "50"]
        there: Any = SimpleNamespace(environment={**self.pool.environment, "RGPU_POOL": str(folder)})
        program = Program(there, command, name, ())
        self.pool.programs.append(program)
        program.wait_lines(2)
        return program

    def restart(self, host: str) -> None:
        """kill -9 of a daemon, and another one in its folder."""
        pid = self.pool.node(host)["pid"]
        os.kill(pid, signal.SIGKILL)
        with open(self.pool.folder / f"{host}.again.log", "ab") as log:
            subprocess.Popen([sys.executable, "-m", "rgpu.cli.main", "server", "--host", host, "--lease",
                              str(self.pool.lease)], env=self.pool.environment, cwd=ROOT, stdin=subprocess.DEVNULL,
                             stdout=log, stderr=log, start_new_session=True)
        eventually(lambda: self.pool.node(host)["pid"] not in (None, pid), self.pool.logs, 60, every=0.2)


@pytest.fixture
def users(tmp_path: Path) -> Any:
    with LocalPool(tmp_path, nodes=2, lease=8.0) as pool:
        yield Users(pool)


def test_it_holds_everywhere_and_ends_what_the_key_runs(users: Users) -> None:
    pool = users.pool
    other = users.run(users.files.root, "not-annas")
    annas = users.run(users.make("anna"), "annas")
    operator, nodes = KeyPair.load(users.files.key_path("operator")), users.files.read_description().endpoints
    with ControlClient(operator, nodes) as client:
        began = time.monotonic()
        told = client.call("keys.revoke", {"name": "anna"}, timeout=30)
        took = time.monotonic() - began
    assert told["holds"] == ["node-a", "node-b"] and not told["not_yet"] and told["sessions"] == ["annas"]
    assert users.lets_in("anna") == {"node-a": False, "node-b": False}
    assert took <= HOLDS_SECONDS, f"it took {took:.1f} s"
    row = next(row for row in pool.rgpu("ps", "-a", "--all-users") if row["session"] == "annas")
    assert row["state"] == "ended" and "revoked" in row["reason"]
    assert annas.process.wait(30) != 0
    assert pool.session("not-annas")["state"] == "running" and other.process.poll() is None
    assert "anna" not in [key["name"] for key in pool.rgpu("keys", "list")]
    # Files that are left over, or put back, count no more: neither now, nor after a restart, nor on record.
    pair = KeyPair.load(users.files.root / "keys" / "anna.key")
    pair.public_key().save(users.files.authorized.directory / "anna.pub")
    users.restart("node-b")
    (users.files.authorized.directory / "revoked.json").unlink()  # the record knows as well
    pair.public_key().save(users.files.authorized.directory / "anna.pub")
    users.restart("node-a")
    assert users.lets_in("anna") == {"node-a": False, "node-b": False}
    assert "anna" not in [key["name"] for key in pool.rgpu("keys", "list")]
    assert pool.session("not-annas")["state"] in ("running", "recovering") and other.process.poll() is None


def test_a_node_that_does_not_answer_is_named_and_follows(users: Users) -> None:
    users.make("bert")
    leader = next(row for row in users.pool.rgpu("nodes") if row["leader"])
    other = next(row for row in users.pool.rgpu("nodes") if not row["leader"])
    os.kill(other["pid"], signal.SIGSTOP)
    try:
        with pytest.raises(VerbError) as caught:
            users.pool.rgpu("keys", "revoke", "bert")
        assert caught.value.code == PoolUnavailable.exit_code and f"not yet on {other['host']}" in caught.value.text
    finally:
        os.kill(other["pid"], signal.SIGCONT)
    time.sleep(HOLDS_SECONDS)
    assert users.lets_in("bert") == {leader["host"]: False, other["host"]: False}


def test_a_checkpoint_first_and_the_last_operator(users: Users) -> None:
    pool = users.pool
    users.run(users.make("carl"), "carls")
    done = pool.rgpu("keys", "revoke", "carl", "--checkpoint")
    assert done["revoked"] == "carl" and done["sessions"] == ["carls"]
    row = next(row for row in pool.rgpu("ps", "-a", "--all-users") if row["session"] == "carls")
    assert row["state"] == "ended" and "checkpoint carls-e1" in row["reason"]
    with pytest.raises(VerbError) as caught:
        pool.rgpu("keys", "revoke", "operator")
    assert caught.value.code == 5 and "last operator" in caught.value.text
    assert all(users.lets_in("operator").values())
    users.make("dora", "operator")
    pool.rgpu("keys", "revoke", "operator")
    assert not any(users.lets_in("operator").values())
    with pytest.raises(VerbError) as caught:
        pool.rgpu("keys", "revoke", "dora", "--pool", str(pool.folder / "client-dora"))
    assert "last operator" in caught.value.text
    with pytest.raises(VerbError, match="no key is named .nobody."):
        pool.rgpu("keys", "revoke", "nobody", "--pool", str(pool.folder / "client-dora"))
    shutil.copy(pool.folder / "client-dora" / "keys" / "operator.key", users.files.key_path("operator"))


def test_of_a_pool_that_does_not_run(users: Users) -> None:
    users.make("emil")
    users.pool.rgpu("down")
    with pytest.raises(VerbError) as caught:
        users.pool.rgpu("keys", "revoke", "emil")
    assert caught.value.code == PoolUnavailable.exit_code and "does not run" in caught.value.text
    users.pool.rgpu("up", "--nodes", "2", "--device", "cpu", "--lease", "8", "--detach")
    assert users.lets_in("emil") == {"node-a": False, "node-b": False}
    assert "emil" not in [key["name"] for key in users.pool.rgpu("keys", "list")]
