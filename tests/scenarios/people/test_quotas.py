"""Users' quotas by real daemons and programs: limits hit, the queue, who may set and see, the leader's death."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import rgpu
from rgpu.session.errors import AuthenticationFailed, LimitReached, NotFound, NotPermitted, UsageError
from tests.support.eventually import eventually
from tests.support.pools import verbs
from tests.support.pools.pool import LocalPool, Program, VerbError
from tests.support.pools.staged import line

GIB = 1 << 30
SLEEPS = (sys.executable, "-c", "import time; time.sleep(600)")


class Users:
    """A pool with the users ``user`` (its folder's own key) and ``alice``, who has a client's folder of her own."""

    def __init__(self, pool: LocalPool) -> None:
        self.pool = pool
        root = pool.folder / "pool"
        pool.rgpu("keys", "create", "--role", "user", "alice")
        self.alices = pool.folder / "client-alice"
        (self.alices / "keys").mkdir(parents=True, mode=0o700)
        shutil.copy(root / "pool.json", self.alices / "pool.json")
        shutil.copy(root / "keys" / "alice.key", self.alices / "keys" / "user.key")

    def run(self, name: str, *options: str, alice: bool = True) -> Program:
        """A program that holds its session until it is stopped."""
        where = ("--pool", str(self.alices)) if alice else ()
        return self.pool.run(*SLEEPS, name=name, options=(*where, *options))

    def holds(self, name: str, *options: str, alice: bool = True) -> Program:
        """:meth:`run`, once its session runs."""
        program = self.run(name, *options, alice=alice)
        eventually(lambda: self.row(name).get("state") == "running" or program.process.poll() is not None)
        assert program.process.poll() is None, program.errors
        return program

    def row(self, name: str) -> dict[str, Any]:
        return next((row for row in self.pool.rgpu("ps", "--all-users") if row["session"] == name), {})

    def quota(self, user: str = "alice") -> dict[str, Any]:
        found: dict[str, Any] = self.pool.rgpu("quota", "show", user, "--operator")["quotas"][0]
        return found

    def leader(self) -> str | None:
        return next((row["host"] for row in self.pool.rgpu("nodes") if row["leader"]), None)


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Users]:
    with LocalPool(tmp_path_factory.mktemp("quotas"), nodes=2, lease=4.0) as pool:
        yield Users(pool)


@pytest.fixture(autouse=True)
def nothing_left(users: Users) -> Iterator[None]:
    yield
    for program in users.pool.programs:
        program.stop()
    for words in (("alice",), ("user",), ("--default",)):
        try:
            users.pool.rgpu("quota", "unset", *words)
        except VerbError as error:
            assert error.code == NotFound.exit_code
    eventually(lambda: not users.pool.rgpu("ps", "--all-users"))


def refused(program: Program) -> str:
    """What the user was told, and by which exit status."""
    assert program.process.wait(60) == LimitReached.exit_code, program.errors
    eventually(lambda: bool(program.errors))
    return "\n".join(program.errors)


def test_limits_are_hit_by_their_user_alone(users: Users) -> None:
    told = users.pool.rgpu("quota", "set", "alice", "--sessions", "2", "--memory", "3GiB")
    assert told["limits"] == {"sessions": 2, "memory": 3 * GIB, "gpus": None, "queued": None,
                              "checkpoints": None} and told["notes"] == []
    users.holds("one", "--memory", "1GiB")
    assert "alice may have 3 GiB of device memory at a time and has 1 GiB of device memory; this asks for 2560 MiB" in \
        refused(users.run("large", "--memory", "2560MiB"))
    assert "may have 3 GiB of device memory, and this asks for 4 GiB of device memory: ask for less with --memory" in \
        refused(users.run("never", "--memory", "4GiB", "--queue"))
    users.holds("two", "--memory", "2GiB")
    users.holds("others", "--memory", "4GiB", alice=False)
    assert "alice may have 2 sessions at a time and has 2 sessions" in refused(users.run("three", "--memory", "1MiB"))
    with rgpu.Pool(users.alices) as pool, pytest.raises(rgpu.LimitReached) as caught:
        pool.run(list(SLEEPS), name="four", memory="1MiB")
    assert [caught.value.detail[name] for name in ("limit", "used", "most")] == ["sessions", 2, 2]
    row = users.quota()
    assert row["use"] == {"sessions": 2, "memory": 3 * GIB, "gpus": 0, "queued": 0, "checkpoints": 0}
    assert row["over"] == []
    story = users.pool.rgpu("history", "three", "--operator")
    assert [(event["decision"], event["user"]) for event in story] == [("refuse", "alice")]


def test_a_request_waits_with_the_reason_and_a_raised_quota_lets_it_in(users: Users) -> None:
    users.pool.rgpu("quota", "set", "alice", "--sessions", "1", "--queued", "1")
    users.holds("one")
    waits = users.run("waits", "--queue")
    eventually(lambda: users.row("waits").get("position"))
    row = users.row("waits")
    assert row["state"] == "queued" and row["user"] == "alice"
    assert "alice may have 1 session at a time and has 1 session; this asks for 1 session" in row["note"]
    assert "1 place in the queue at a time and has 1" in refused(users.run("fourth", "--queue"))
    users.holds("others", alice=False)
    users.pool.rgpu("quota", "set", "alice", "--sessions", "2")
    eventually(lambda: users.row("waits").get("state") == "running")
    assert users.quota()["own"] == {"sessions": 2, "queued": 1} and waits.process.poll() is None
    eventually(lambda: any("may have 1 session at a time" in line for line in waits.errors))


def test_everybody_s_limits_and_shares_of_gpus(users: Users) -> None:
    told = users.pool.rgpu("quota", "set", "--default", "--gpus", "0.5", "--sessions", "1")
    assert told["user"] is None and told["limits"]["gpus"] == 0.5
    assert told["notes"] == ["a session that asks for --memory alone counts no share of a GPU: limit memory as well"]
    users.pool.rgpu("quota", "set", "alice", "--gpus", "1", "--sessions", "unlimited")
    users.holds("half", "--gpus", "0.5")
    assert "alice may have 1 GPU at a time and has 0.5 GPUs; this asks for 0.6 GPUs" in \
        refused(users.run("more", "--gpus", "0.6"))
    assert "user may have 0.5 GPUs, and this asks for 1 GPU: ask for less with --gpus" in \
        refused(users.run("whole", "--gpus", "1", alice=False))
    users.holds("others", "--gpus", "0.5", alice=False)
    assert "user may have 1 session at a time" in refused(users.run("others-2", alice=False))
    users.pool.rgpu("quota", "set", "alice", "--gpus", "default")
    assert users.quota()["limits"]["gpus"] == 0.5 and users.quota()["own"] == {"sessions": None}


def test_a_lowered_quota_ends_nothing_and_says_so_and_the_session_is_moved(users: Users) -> None:
    users.holds("one", "--host", "node-a")
    users.holds("two")
    told = users.pool.rgpu("quota", "set", "alice", "--sessions", "1")
    assert told["notes"] == ["alice has 2 sessions and may have 1 session: nothing is ended, and a session more is not "
                             "let in until that is below"] == users.quota()["over"]
    assert users.pool.rgpu("migrate", "one", "node-b", "--operator")["outcome"] == "committed"
    assert [users.row(name)["state"] for name in ("one", "two")] == ["running", "running"]


def test_checkpoints_take_no_more_of_the_store_than_their_user_may_have(users: Users) -> None:
    """Asked for, automatic, imported; others, and the sessions, are as they were; what is removed makes room."""
    pool, alice = users.pool, ("--pool", str(users.alices))
    released, archive = pool.folder / "released-checkpoints", pool.folder / "first.rgpu"
    first = pool.run(*line("uploads", 3, released), name="first", options=alice)
    other = pool.run(*line("uploads", 3, released), name="other")
    eventually(lambda: {users.row(name).get("state") for name in ("first", "other")} == {"running"})
    first.wait_lines(1)
    other.wait_lines(1)
    image = pool.rgpu("checkpoint", "first", *alice)["image"]
    used = users.quota()["use"]["checkpoints"]
    assert used == pool.rgpu("quota", "show", *alice)["quotas"][0]["use"]["checkpoints"] > 500 << 10
    listed = sum(row["stored"] + row["manifest_bytes"] for row in pool.rgpu("image", "ls", *alice))
    assert 0 <= used - listed < 4096, "and the heads and ends of packs"
    pool.rgpu("image", "export", image, str(archive), *alice)
    most = used + (100 << 10)
    pool.rgpu("quota", "set", "alice", "--checkpoints", str(most))

    second = pool.run(*line("uploads", 6, released), name="second", options=(*alice, "--checkpoint-every", "1"))
    eventually(lambda: "no checkpoint can be written (alice may have" in str(users.row("second").get("note")),
               lambda: (users.row("second"), second.errors))
    for words in (("checkpoint", "second"), ("image", "import", str(archive), "--name", "copy")):
        with pytest.raises(VerbError, match="; this one adds more than the 100 KiB of checkpoints that are left: "
                                            "remove some .`rgpu image rm") as caught:
            pool.rgpu(*words, *alice)
        assert caught.value.code == LimitReached.exit_code
    assert users.quota()["use"]["checkpoints"] == used and users.row("second")["state"] == "running"
    assert [row["image"] for row in pool.rgpu("image", "ls", *alice)] == [image]
    told = [event for event in pool.rgpu("history", "second", *alice) if event["decision"] == "refuse_checkpoint"]
    assert len(told) == 1 and "the session runs on" in told[0]["reason"] and told[0]["user"] == "alice"
    pool.rgpu("checkpoint", "other")
    pool.rgpu("image", "import", str(archive), "--name", "copy")

    (note,) = pool.rgpu("quota", "set", "alice", "--checkpoints", "1KiB")["notes"]
    assert "a checkpoint more is not let in until that is below" in note
    with pytest.raises(VerbError, match="alice may have 1 KiB of checkpoints at a time and has .* KiB of check.*: rem"):
        pool.rgpu("checkpoint", "first", *alice)
    pool.rgpu("quota", "set", "alice", "--checkpoints", str(most))
    first.stop()
    eventually(lambda: not users.row("first"))
    assert pool.rgpu("image", "gc", "--ended", "0s", *alice)["images"] == [image]
    assert users.quota()["use"]["checkpoints"] == 0, "packs that wait for their collection do not count"
    assert pool.rgpu("checkpoint", "second", *alice)["session"] == "second"
    released.touch()
    assert [second.process.wait(60), other.process.wait(60)] == [0, 0], (second.errors, other.errors)
    eventually(lambda: not pool.rgpu("ps", "--all-users"))
    pool.rgpu("image", "gc", "--ended", "0s", "--operator")


def test_operators_set_and_a_user_sees_the_own_alone(users: Users) -> None:
    pool, folder = users.pool, ("--pool", str(users.alices))
    pool.rgpu("quota", "set", "alice", "--sessions", "7")
    pool.rgpu("quota", "set", "user", "--sessions", "8")
    assert [row["user"] for row in pool.rgpu("quota", "show", *folder)["quotas"]] == ["alice"]
    assert pool.rgpu("quota", "show", "alice", *folder)["quotas"][0]["limits"]["sessions"] == 7
    own = pool.folder / "alice-as-operator"
    shutil.copytree(users.alices, own)
    shutil.copy(own / "keys" / "user.key", own / "keys" / "operator.key")
    for words in (("user",), ("--all-users",)):
        with pytest.raises(VerbError) as caught:
            pool.rgpu("quota", "show", *words, "--operator", "--pool", str(own))
        assert caught.value.code == NotPermitted.exit_code, caught.value.text
    for words in (("set", "alice", "--sessions", "99"), ("unset", "alice"), ("set", "--default", "--memory", "1TiB")):
        with pytest.raises(VerbError) as caught:
            pool.rgpu("quota", *words, "--pool", str(own))
        assert caught.value.code == AuthenticationFailed.exit_code, caught.value.text
    assert users.quota()["limits"]["sessions"] == 7
    assert {"alice", "user", "operator"} <= {row["user"] for row in pool.rgpu("quota", "show", "--all-users")["quotas"]}
    lines = [json.loads(line) for path in (pool.folder / "pool" / "nodes").glob("*/audit.jsonl")
             for line in path.read_text().splitlines()]
    done = [line for line in lines if line["verb"] == "quota.set" and line["outcome"] == "ok"]
    assert done and done[-1]["name"] == "operator" and done[-1]["about"]["user"] == "user"
    assert "'sessions': 8" in done[-1]["about"]["limits"]
    assert any(line["verb"] == "quota.set" and line["outcome"] == "authentication_failed" and line["name"] == "alice"
               for line in lines)
    told = [event for event in pool.rgpu("history", "--operator") if event["decision"] == "quota_set"]
    assert told and told[-1]["actor"] == "operator" and told[-1]["user"] == "user"
    seen = {event["user"] for event in pool.rgpu("history", *folder) if event["decision"] == "quota_set"}
    assert "alice" in seen and "user" not in seen, "whose quota it is, and nobody else"


@pytest.mark.parametrize("words", [
    (), ("alice",), ("--default",), ("--sessions", "1"), ("alice", "--default", "--sessions", "1"),
    ("alice", "--sessions", "-1"), ("alice", "--sessions", "1.5"), ("alice", "--sessions", "many"),
    ("alice", "--memory", "lots"), ("alice", "--memory", "99999999999T"), ("alice", "--gpus", "nan"),
    ("alice", "--gpus", "-2"), ("alice", "--gpus", "0.001"), ("alice", "--queued", "9999999999"),
    ("alice", "--checkpoints", "-1MiB"),
    ("../x", "--sessions", "1"), ("@default", "--sessions", "1"), ("a b", "--sessions", "1"),
    ("\x1b[2Jx", "--sessions", "1"), ("x" * 64, "--sessions", "1")], ids=repr)
def test_arguments_that_make_no_sense_change_nothing(users: Users, words: tuple[str, ...]) -> None:
    with pytest.raises(VerbError) as caught:
        users.pool.rgpu("quota", "set", *words)
    assert caught.value.code == UsageError.exit_code and "\x1b" not in caught.value.text
    assert users.pool.rgpu("quota", "show", "--all-users")["default"] == dict.fromkeys(
        ("checkpoints", "gpus", "memory", "queued", "sessions"))
    assert all(row["own"] == {} for row in users.pool.rgpu("quota", "show", "--all-users")["quotas"])


def test_a_user_that_has_no_key_is_told(users: Users) -> None:
    (note,) = users.pool.rgpu("quota", "set", "alcie", "--sessions", "1")["notes"]
    assert note.startswith("no key of a user alcie is let in")
    users.pool.rgpu("quota", "unset", "alcie")
    with pytest.raises(VerbError, match="alcie: no quota is set"):
        users.pool.rgpu("quota", "unset", "alcie")


def test_tables(users: Users) -> None:
    """What a person reads."""
    users.pool.rgpu("quota", "set", "alice", "--sessions", "4", "--memory", "16GiB")
    done = verbs.run(("quota", "show", "alice", "--operator"), users.pool.environment, 60)
    head, line, everybody = done.stdout.splitlines()
    assert head.split() == ["USER", "SESSIONS", "MEMORY", "GPUS", "QUEUED", "CHECKPOINTS", "OWN"]
    assert line.split("  ")[0] == "alice" and "0 of 4" in line and "of 16.0 GiB" in line and "memory,sessions" in line
    assert everybody == "everybody may have: no limits"


def test_quotas_outlive_the_leader(users: Users) -> None:
    """Last: it kills a node."""
    users.pool.rgpu("quota", "set", "alice", "--sessions", "1", "--queued", "1")
    before = users.leader()
    other = next(row["host"] for row in users.pool.rgpu("nodes") if row["host"] != before)
    users.holds("one", "--host", other)
    users.run("waits", "--queue")
    eventually(lambda: users.row("waits").get("position"))
    os.kill(next(row["pid"] for row in users.pool.rgpu("nodes") if row["host"] == before), signal.SIGKILL)
    eventually(lambda: users.leader() == other, within=60)
    assert users.quota()["limits"]["sessions"] == 1
    eventually(lambda: "may have 1 session at a time and has 1" in str(users.row("waits").get("note")))
    assert "1 place in the queue" in refused(users.run("more", "--queue"))
    users.pool.rgpu("quota", "set", "alice", "--sessions", "2")
    eventually(lambda: users.row("waits").get("state") == "running")
