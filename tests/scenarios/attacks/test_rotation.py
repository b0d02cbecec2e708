"""Another secret for a real pool: its sessions notice nothing, and what was made with the old one is refused."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rgpu.link.control.control_client import ControlClient
from rgpu.link.data import proofs, tickets
from rgpu.link.data.frames import client_preamble, connect
from rgpu.link.keys import Endpoint, KeyPair, PoolFiles
from rgpu.link.secrets import PoolSecrets
from rgpu.session.errors import AuthenticationFailed, Refused, RgpuError
from tests.support.attacks.measuring import Asker
from tests.support.eventually import eventually
from tests.support.pools.pool import ROOT, LocalPool, Program, VerbError

STEPS, SIZE = 3000, 32


class Rotated:
    """A pool of two nodes in one folder, and a third one, ``node-x``, that joined with a folder of its own."""

    def __init__(self, pool: LocalPool) -> None:
        self.pool, self.files = pool, PoolFiles(pool.folder / "pool")
        self.theirs = PoolFiles(pool.folder / "joined")
        self.daemon: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        """The daemon of ``node-x``; returns once it is in the pool."""
        with open(self.pool.folder / "node-x.log", "ab") as log:
            self.daemon = subprocess.Popen(
                [sys.executable, "-m", "rgpu.cli.main", "server", "--pool", str(self.theirs.root), "--host", "node-x",
                 "--lease", str(self.pool.lease), "--coordinator", "never", "--store", str(self.files.root / "images"),
                 *options], env=self.pool.environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        eventually(lambda: self.there("node-x"), within=120)

    def stop(self, number: int = signal.SIGKILL) -> None:
        """End it; returns once the pool does not count on it any more."""
        assert self.daemon is not None
        self.daemon.send_signal(number)
        self.daemon.wait(60)
        eventually(lambda: not self.there("node-x"), within=120)

    def there(self, host: str) -> bool:
        return any(row["host"] == host for row in self.pool.living())

    def status(self) -> dict[str, Any]:
        return dict(self.pool.rgpu("keys", "rotate", "--status"))

    def settled(self, number: int) -> None:
        eventually(lambda: (found := self.status())["phase"] == "settled" and found["secret"] == number, within=120)

    def taken(self, session: str, granted: Any) -> bool:
        """Whether the session's owner takes that ticket."""
        with Asker(self.pool).client() as client:
            host, port = client.call("session.owner", {"session": session, "epoch": 0}, timeout=30)["address"]
        sock = connect((host, int(port)))
        try:
            client_preamble(sock, "lane", granted.ticket, granted.secret, session)
            return True
        except AuthenticationFailed as refused:
            assert "made by this pool" in refused.message
            return False
        finally:
            sock.close()

    def stolen(self, session: str) -> list[tickets.Granted]:
        """Tickets for the session's owner as its agents make them, with keys that are let in and are not its agent's;
        and that agent's for another node."""
        owner = self.key_of(self.pool.session(session)["host"])
        other = KeyPair.load(self.theirs.node_key_path("node-x"))
        operator, user = (KeyPair.load(self.files.key_path(role)) for role in ("operator", "user"))
        posing = replace(operator, public=user.public)  # names the agent, and has not its secret half
        return [*(proofs.prove(pair, owner, session) for pair in (other, operator, posing)),
                proofs.prove(user, other.public, session)]

    def key_of(self, host: str) -> str:
        return KeyPair.load(self.files.node_key_path(host)).public

    def nobody_else_attaches(self, session: str, made: list[tickets.Granted]) -> None:
        with Asker(self.pool).client() as client:
            host, port = client.call("session.owner", {"session": session, "epoch": 0}, timeout=30)["address"]
        own = proofs.prove(KeyPair.load(self.files.key_path("user")), self.key_of(self.pool.session(session)["host"]),
                           session)
        for number, granted in enumerate([own, *made]):
            sock = connect((host, int(port)))
            try:
                client_preamble(sock, "lane", granted.ticket, granted.secret, session)
                assert granted is own, f"ticket {number} was taken"
            except AuthenticationFailed as refused:
                assert granted is not own, refused.message
            finally:
                sock.close()

    def forged(self, session: str, secret: bytes) -> tickets.Granted:
        """A ticket as a host makes it that has the pool's secret."""
        return tickets.issue(secret, session, KeyPair.load(self.files.key_path("user")).public, "calls")


@pytest.fixture
def rotated(tmp_path: Path) -> Iterator[Rotated]:
    with LocalPool(tmp_path, nodes=2, lease=8.0) as pool:
        found = Rotated(pool)
        try:
            yield found
        finally:
            if found.daemon is not None:
                found.daemon.kill()
                found.daemon.wait()


def heat(pool: LocalPool, name: str, rest: float, host: str = "") -> Program:
    return pool.heat(name, n=SIZE, steps=STEPS, rest=rest, options=("--host", host) if host else ())


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_sessions_notice_nothing_and_the_old_secret_opens_nothing(rotated: Rotated) -> None:
    pool = rotated.pool
    rotated.start("--join", pool.rgpu("keys", "invite", "--host", "node-x")["token"])
    undisturbed = heat(pool, "undisturbed", rest=0).finish()
    programs = {name: heat(pool, name, 2.0, host) for name, host in
                (("one", "node-a"), ("two", "node-b"), ("three", "node-x"), ("four", "node-a"))}
    for program in programs.values():
        program.wait_lines(2, 120)
    Asker(pool).create("idle")  # as the previous version asks
    image = pool.rgpu("checkpoint", "one")["image"]
    old = rotated.files.secret()
    was = rotated.forged("idle", old)
    before = {name: pool.session(name) for name in programs}
    assert rotated.taken("idle", was) and rotated.status()["phase"] == "settled"
    # Whoever has the pool's secret, and the key of any other node, makes no ticket of a session whose agent proves its
    # own key; nor does another user of the pool.
    rotated.nobody_else_attaches("one", [rotated.forged("one", old), *rotated.stolen("one")])

    found = pool.rgpu("keys", "rotate", "--overlap", "15s")
    assert found["phase"] in ("overlap", "settled") and found["secret"] == 2, found
    assert found["hosts"] == {"node-a": True, "node-b": True, "node-x": True}
    if found["phase"] == "overlap":
        assert found["until"] > time.time() - 15 and rotated.taken("idle", was), "an agent's ticket is good meanwhile"
        with pytest.raises(VerbError) as again:
            pool.rgpu("keys", "rotate")
        assert again.value.code == Refused.exit_code and "--finish" in again.value.text
    rotated.settled(2)
    # A node drops it by its own clock at the latest a look later.
    eventually(lambda: not rotated.taken("idle", was))
    eventually(lambda: all(list(PoolSecrets(files).marks()) == [2] for files in (rotated.theirs, rotated.files)))
    new = PoolSecrets(rotated.theirs)
    assert new.marks() == PoolSecrets(rotated.files).marks()
    assert not rotated.taken("idle", rotated.forged("idle", old))
    assert rotated.taken("idle", rotated.forged("idle", new.secret(2, new.marks()[2])))

    # Nobody was moved, recovered or attached anew; and what needs a ticket now gets another one by itself.
    for name in programs:
        assert (pool.session(name)["epoch"], pool.session(name)["worker_pid"]) == \
            (before[name]["epoch"], before[name]["worker_pid"])
    assert pool.rgpu("image", "verify", image)["pages"] > 0
    assert pool.rgpu("restore", image, timeout=180)["session"] == "one"
    pool.rgpu("migrate", "two", "node-x")
    pool.rgpu("migrate", "three", "node-b")
    later = pool.rgpu("checkpoint", "two")["image"]
    assert pool.rgpu("image", "verify", later)["pages"] > 0
    assert {name: program.finish(300) for name, program in programs.items()} == dict.fromkeys(programs, undisturbed)

    secret = new.secret(2, new.marks()[2])
    stored = b"".join(path.read_bytes() for path in rotated.files.root.glob("registry.db*"))
    logged = "".join(path.read_text(errors="replace") for path in pool.folder.rglob("*") if path.is_file()
                     and path.suffix in (".log", ".jsonl"))
    assert secret not in stored and secret.hex().encode() not in stored and secret.hex() not in logged
    story = [line["reason"] for line in pool.rgpu("history", "-n", "1000") if line["decision"] == "rotate"]
    assert len(story) == 3, story
    assert '"verb": "pool.secret", "outcome": "ok"' in logged, "who was given it stands in the audit log"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_none_of_twenty_sessions_notices(tmp_path: Path) -> None:
    with LocalPool(tmp_path, nodes=2, lease=30.0) as pool:
        files, count = PoolFiles(tmp_path / "pool"), 20
        over, ticks = tmp_path / "over", ROOT / "tests/scenarios/programs/ticks.py"
        programs = {f"s{number}": pool.run(sys.executable, str(ticks), str(over), "0.5", name=f"s{number}",
                                           options=("--memory", "16MiB")) for number in range(count)}
        before = {name: pool.wait_state(name, "running", 600) for name in programs}
        assert pool.rgpu("keys", "rotate", "--overlap", "5s", timeout=180)["secret"] == 2
        eventually(lambda: dict(pool.rgpu("keys", "rotate", "--status"))["phase"] == "settled", within=300)
        eventually(lambda: list(PoolSecrets(files).marks()) == [2], within=120)
        for name in programs:
            now = pool.session(name)
            assert (now["epoch"], now["worker_pid"]) == (before[name]["epoch"], before[name]["worker_pid"]), name
        other = "node-b" if before["s0"]["host"] == "node-a" else "node-a"
        pool.rgpu("migrate", "s0", other, timeout=180)  # attaches anew, with the old secret gone
        over.touch()
        for name, program in programs.items():
            program.process.wait(300)
            said = dict(line.split() for line in program.lines if line.startswith(("mirror ", "digest ")))
            assert len(said) == 2 and said["mirror"] == said["digest"], (name, program.lines, program.errors[-5:])


@pytest.mark.timeout(900)
def test_hosts_that_were_down_get_it_and_hosts_that_left_do_not(rotated: Rotated) -> None:
    pool = rotated.pool
    rotated.start("--join", pool.rgpu("keys", "invite", "--host", "node-x")["token"])
    rotated.stop()
    assert pool.rgpu("keys", "rotate", "--overlap", "0s")["hosts"] == {"node-a": True, "node-b": True}
    rotated.settled(2)
    assert list(PoolSecrets(rotated.theirs).marks()) == [1]
    rotated.start()
    assert PoolSecrets(rotated.theirs).marks() == PoolSecrets(rotated.files).marks()
    program = heat(pool, "there", 0.2, "node-x")
    program.wait_lines(2, 120)

    # A host that left, and everybody who is no node, is given nothing.
    pool.rgpu("migrate", "there", "node-a")
    pool.rgpu("leave", "node-x", timeout=180)
    assert rotated.daemon is not None and rotated.daemon.wait(60) == 0
    assert pool.rgpu("keys", "rotate", "--overlap", "30m")["phase"] == "overlap"
    assert pool.rgpu("keys", "rotate", "--finish")["phase"] in ("overlap", "settled")
    rotated.settled(3)
    record = PoolSecrets(rotated.files)
    left = KeyPair.load(rotated.theirs.node_key_path("node-x"))
    nodes = [Endpoint(e.address, e.public, e.host) for e in rotated.files.read_description().endpoints]
    for role, pair in (("left", left), ("user", KeyPair.load(rotated.files.key_path("user"))),
                       ("operator", KeyPair.load(rotated.files.key_path("operator")))):
        for node in nodes:
            if node.host == "node-x":
                continue
            with ControlClient(pair, [node]) as client, pytest.raises(RgpuError) as refused:
                client.call("pool.secret", {"number": 3, "mark": record.marks()[3]}, timeout=15)
            assert isinstance(refused.value, AuthenticationFailed), f"{role}: {refused.value}"
    assert len(program.finish(300)) == 64
