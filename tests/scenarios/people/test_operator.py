"""An operator's bad day: wrong devices, keys that must go, a full disk, and what the history says of it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rgpu.link.control.control_client import ControlClient
from rgpu.link.keys import KeyPair, PoolFiles
from rgpu.session.errors import AuthenticationFailed, MoveFailed, PoolUnavailable, Refused
from tests.support.eventually import eventually
from tests.support.pools import verbs
from tests.support.pools.pool import ROOT, LocalPool, VerbError


def rgpu(pool: LocalPool, *verb: str) -> subprocess.CompletedProcess[str]:
    return verbs.run(verb, pool.environment, 90)


@pytest.mark.timeout(180)
def test_a_wrong_device_is_told_and_no_error_of_an_earlier_run(tmp_path: Path) -> None:
    environ = {**os.environ, "RGPU_POOL": str(tmp_path / "pool"), "RGPU_CONFIG": "", "RGPU_SPARES": "0",
               "PYTHONPATH": str(ROOT)}

    def up(device: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "rgpu.cli.main", "up", "--device", device, "--detach"], cwd=ROOT,
                              env=environ, capture_output=True, text=True, timeout=90)

    try:
        for device, said in (("cpu:x", "unknown device 'cpu:x'"), ("tpu", "unknown device 'tpu'")):
            done = up(device)
            (line,) = done.stderr.splitlines()
            assert done.returncode == PoolUnavailable.exit_code and said in line and "{" not in line, done.stderr
        assert up("cpu").returncode == 0
    finally:
        subprocess.run([sys.executable, "-m", "rgpu.cli.main", "down"], cwd=ROOT, env=environ, timeout=90)


@pytest.mark.timeout(240)
def test_a_revoked_key_is_let_in_by_no_node_when_the_verb_returns(tmp_path: Path) -> None:
    with LocalPool(tmp_path, nodes=3) as pool:
        files = PoolFiles(tmp_path / "pool")
        pair = KeyPair.load(Path(pool.rgpu("keys", "create", "--role", "user", "guest")["path"]))
        nodes = files.read_description().endpoints

        def let_in() -> list[bool]:
            found = []
            for node in nodes:
                with ControlClient(pair, [node]) as client:
                    try:
                        client.call("pool.ping", {}, timeout=5)
                        found.append(True)
                    except (AuthenticationFailed, PoolUnavailable):
                        found.append(False)
            return found

        eventually(lambda: let_in() == [True] * 3)
        gone = pool.rgpu("keys", "revoke", "guest")
        assert gone["revoked"] == "guest" and not gone["silent"] and not gone["not_yet"] and gone["holds"]
        assert let_in() == [False] * 3
        near = rgpu(pool, "keys", "revoke", "opertor")
        assert near.returncode == 3 and "did you mean 'operator'?" in near.stderr
        last = rgpu(pool, "keys", "revoke", "operator")
        assert last.returncode == Refused.exit_code and "last operator" in last.stderr and "--yes" in last.stderr
        assert any(key["name"] == "operator" for key in pool.rgpu("keys", "list"))
        pool.rgpu("keys", "create", "--role", "operator", "second")
        eventually(lambda: any(key["name"] == "second" for key in pool.rgpu("keys", "list")))


@pytest.mark.timeout(240)
def test_a_move_says_who_asked_and_what_the_registry_did_not_take(fresh_pool: LocalPool) -> None:
    """A full disk, as the leader meets it: its writes of the registry's file fail."""
    pool = fresh_pool
    program = pool.heat("h", steps=2000000, options=("--host", "node-a"))
    program.wait_lines(2)
    assert pool.rgpu("migrate", "h", "node-b")["outcome"] == "committed"
    (begun,) = [event for event in pool.rgpu("history", "h") if event["decision"] == "begin_move"]
    assert begun["reason"].startswith("asked for: to cpu:0 of node-b") and "fragments" not in begun["reason"]
    program.wait_lines(len(program.lines) + 2)

    leader = next(node for node in pool.living() if node["leader"])
    target = next(node["host"] for node in pool.living() if node["host"] != "node-b")
    log = pool.folder / "pool" / "nodes" / leader["host"] / "server.log"
    before = resource.prlimit(leader["pid"], resource.RLIMIT_FSIZE)
    full = log.stat().st_size + (64 << 10)  # its log is still taken
    database = max((pool.folder / "pool").glob("registry*"), key=lambda path: path.stat().st_size)
    assert database.stat().st_size > full, f"{database} is too small to be refused"
    resource.prlimit(leader["pid"], resource.RLIMIT_FSIZE, (full, before[1]))
    try:
        with pytest.raises(VerbError) as failed:
            pool.rgpu("migrate", "h", target)
    finally:
        resource.prlimit(leader["pid"], resource.RLIMIT_FSIZE, before)
    assert "started on" not in failed.value.text and "moved from" not in failed.value.text, failed.value.text
    assert failed.value.code in (MoveFailed.exit_code, PoolUnavailable.exit_code), failed.value.text
    assert "registry" in failed.value.text and ("full" in failed.value.text or "I/O" in failed.value.text)
    program.wait_lines(len(program.lines) + 2)
    assert pool.session("h")["state"] == "running"
