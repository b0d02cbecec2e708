"""Checkpoints as things, on a real pool: verbs, what counts, damage in the store, carrying to another pool."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rgpu.session.errors import AlreadyExists, Corrupt, NotFound, Refused, StoreDenied, StoreUnreachable
from tests.support.eventually import eventually
from tests.support.pools.pool import LocalPool, VerbError


@pytest.fixture
def small(tmp_path: Path) -> Iterator[LocalPool]:
    with LocalPool(tmp_path, nodes=1, lease=8.0) as running:
        yield running


def users(pool: LocalPool) -> Path:
    found = list((pool.folder / "pool" / "images" / "users").iterdir())
    assert len(found) == 1
    return found[0]


def fails(kind: Any, pool: LocalPool, *verb: str) -> str:
    with pytest.raises(VerbError) as caught:
        pool.rgpu(*verb)
    assert caught.value.code == kind.exit_code, caught.value.text
    return caught.value.text


def running_again(pool: LocalPool, name: str, epoch: int) -> dict[str, Any]:
    def running() -> dict[str, Any]:
        row = pool.session(name)
        return row if row["epoch"] >= epoch and row["state"] == "running" else {}

    return eventually(running, lambda: pool.session(name), 60, every=0.2)


def test_checkpoints_are_listed_shown_checked_and_kept_in_order(small: LocalPool) -> None:
    pool = small
    program = pool.heat("listed", steps=2_000_000)  # it is killed when all is seen
    program.wait_lines(2)
    taken = [pool.rgpu("checkpoint", "listed") for _ in range(2)]
    first, last = taken[0]["image"], taken[-1]["image"]
    rows = {row["image"]: row for row in pool.rgpu("image", "ls")}
    assert rows[last]["named"] is True and rows[last]["session"] == "listed"
    assert rows[last]["position"] == taken[-1]["position"] and not rows[last]["error"]
    shown = pool.rgpu("image", "show", last)
    assert shown["named"] and shown["base"] == first and shown["facts"]["quota"] > 0
    checked = pool.rgpu("image", "verify", last)
    assert checked["pages"] == taken[-1]["pages"]
    fails(Refused, pool, "image", "rm", last)
    if rows[first]["named"] is False:
        assert pool.rgpu("image", "rm", first)["image"] == first
        fails(NotFound, pool, "image", "show", first)
    assert pool.rgpu("image", "verify", last)["pages"] == checked["pages"], "what it was built on may go"
    dry = pool.rgpu("image", "gc", "--keep-last", "1", "--grace", "0", "--dry-run")
    assert dry["dry_run"] and not dry["blocked"]
    for _ in range(4):
        newest = pool.rgpu("checkpoint", "listed")["image"]
    pool.rgpu("image", "gc", "--keep-last", "1", "--grace", "0")
    left = [row["image"] for row in pool.rgpu("image", "ls", "listed")]
    assert newest in left and len(left) <= 3
    for name in left:
        pool.rgpu("image", "verify", name)
    assert pool.rgpu("checkpoint", "listed", "--no-wait") == {"session": "listed", "waited": False}
    eventually(lambda: pool.rgpu("image", "ls", "listed")[0]["image"] != newest, "nobody took the checkpoint", 30)
    pool.rgpu("kill", "listed")
    assert not pool.rgpu("image", "gc", "--ended", "1h")["images"]
    assert pool.rgpu("image", "gc", "--ended", "0", "--grace", "0")["images"]
    assert pool.rgpu("image", "ls") == []


def kill_worker(pool: LocalPool, name: str) -> None:
    os.kill(int(pool.session(name)["worker_pid"]), signal.SIGKILL)


def test_the_newest_good_checkpoint_is_used_and_the_bad_one_named(small: LocalPool,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    pool = small
    monkeypatch.setitem(pool.environment, "RGPU_RESIDENT", "off")  # `rgpu run` is its own agent, which is stopped
    program = pool.heat("healed", steps=6000)
    program.wait_lines(2)
    os.kill(program.process.pid, signal.SIGSTOP)  # both checkpoints stand at one position: the journal follows either
    time.sleep(1.0)
    good, bad = (pool.rgpu("checkpoint", "healed") for _ in range(2))
    assert good["position"] == bad["position"]
    damaged = users(pool) / "images" / f"{bad['image']}.image"
    damaged.write_bytes(damaged.read_bytes()[:-3])
    assert "has" in fails(Corrupt, pool, "image", "verify", bad["image"])
    kill_worker(pool, "healed")
    os.kill(program.process.pid, signal.SIGCONT)
    row = running_again(pool, "healed", 2)
    assert row["epoch"] >= 2
    assert bad["image"] in pool.logs() and "a checkpoint is bad" in pool.logs()
    assert program.finish()
    assert pool.rgpu("image", "verify", good["image"])["pages"] > 0, "nothing older is harmed"


def test_a_checkpoint_goes_to_another_pool(small: LocalPool, tmp_path: Path) -> None:
    pool = small
    program = pool.heat("carried", steps=20000)
    program.wait_lines(2)
    checkpoint = pool.rgpu("checkpoint", "carried")
    file = tmp_path / "carried.rgpu"
    told = pool.rgpu("image", "export", checkpoint["image"], str(file))
    assert told["bytes"] == file.stat().st_size and file.stat().st_mode & 0o077 == 0
    fails(AlreadyExists, pool, "image", "export", checkpoint["image"], str(file))
    pool.rgpu("kill", "carried")
    with LocalPool(tmp_path / "other", nodes=1) as other:
        brought = other.rgpu("image", "import", str(file), "--name", "brought")
        assert brought["position"] == checkpoint["position"] and brought["session"] == "carried"
        assert other.rgpu("image", "verify", "brought")["pages"] == checkpoint["pages"]
        assert other.rgpu("image", "ls")[0]["named"] is False
        data = bytearray(file.read_bytes())
        data[len(data) // 3] ^= 4
        broken = tmp_path / "broken.rgpu"
        broken.write_bytes(data)
        fails(Corrupt, other, "image", "import", str(broken), "--name", "broken")
        assert [row["image"] for row in other.rgpu("image", "ls")] == ["brought"]
        fails(NotFound, other, "restore", "brought")


def test_a_store_without_credentials_is_refused_at_the_start(tmp_path: Path) -> None:
    pool = LocalPool(tmp_path, nodes=1)
    for name in list(pool.environment):
        if name.startswith("AWS_"):
            del pool.environment[name]
    with pytest.raises(VerbError) as caught:
        pool.rgpu("up", "--nodes", "1", "--detach", "--store", "s3://bucket/prefix?endpoint=http://127.0.0.1:9")
    assert "AWS_ACCESS_KEY_ID" in caught.value.text, caught.value.text
    assert StoreDenied.exit_code


# -- an object store -------------------------------------------------------------------
def environment_of(pid: int) -> dict[str, str]:
    fields = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(field.decode().split("=", 1) for field in fields if b"=" in field)


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone may read a worker's environment")
def test_sessions_recover_from_an_object_store_and_workers_have_no_credentials(tmp_path: Path) -> None:
    pytest.importorskip("moto.server", reason="moto is not installed")
    from tests.support.checkpoint.moto_server import MotoServer

    with MotoServer() as server:
        address = server.bucket("pool")
        pool = LocalPool(tmp_path, nodes=2, lease=8.0)
        pool.environment.update(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="very secret", RGPU_STORE=address)
        with pool:
            program = pool.heat("objects", steps=2_000_000)  # it is stopped when all is seen
            program.wait_lines(2)
            checkpoint = pool.rgpu("checkpoint", "objects")
            assert pool.rgpu("image", "verify", checkpoint["image"])["pages"] == checkpoint["pages"]
            row = pool.session("objects")
            worker = environment_of(int(row["worker_pid"]))
            assert not [name for name in worker if name.startswith("AWS_")] and "very secret" not in str(worker)
            assert not list((tmp_path / "pool").glob("images/*")), "nothing beside the store"
            kill_worker(pool, "objects")
            running_again(pool, "objects", 2)
            server.stop()  # the store goes: the session runs on, and a checkpoint says why it fails
            assert "does not answer" in fails(StoreUnreachable, pool, "checkpoint", "objects")
            program.wait_lines(len(program.lines) + 3)
            assert pool.session("objects")["state"] == "running"
