"""Bulk through shared memory: it is used, nothing depends on it, and it comes and goes with the host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rgpu.link.local import shared
from tests.support.eventually import eventually
from tests.support.pools.pool import LocalPool
from tests.support.pools.staged import Staged

ROUNDS, MIB = 18, 3
TOTAL = ROUNDS * (MIB << 20)
AWAY = "node-c"  #: a node that is on another host, as far as it knows


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    folder = tmp_path_factory.mktemp("hosts")
    pool = LocalPool(folder, nodes=3, lease=8.0)
    pool.environment[shared.HOST_VARIABLE] = f"{AWAY}=elsewhere"
    pool.environment["RGPU_COPY_THREADS"] = "2"  # as on a machine with more processors than these have
    with pool as running:
        yield running


def begin(pool: LocalPool, folder: Path, name: str, *options: str, host: str = "node-a") -> Staged:
    return Staged(pool, folder, "bulk", ROUNDS, MIB, name=name, options=("--host", host, *options))


def through(pool: LocalPool, folder: Path, name: str, *options: str, host: str = "node-a"
            ) -> tuple[str, dict[str, Any]]:
    """Run undisturbed: the digest, and the session's row."""
    staged = begin(pool, folder, name, *options, host=host)
    staged.open(1, 2)
    digest = staged.finish()
    return digest, pool.session(name)


@pytest.fixture(scope="module")
def digest(hosts: LocalPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a run over TCP alone."""
    found, row = through(hosts, tmp_path_factory.mktemp("tcp"), "over-tcp", "--same-host", "off")
    assert row["shared_bytes_to_device"] == row["shared_bytes_from_device"] == 0
    assert row["same_host"] == "not asked for"
    return found


@pytest.mark.parametrize("recover", ["on", "off"])
def test_long_copies_go_through_memory(hosts: LocalPool, digest: str, tmp_path: Path, recover: str) -> None:
    found, row = through(hosts, tmp_path, f"shared-{recover}", "--recover", recover)
    assert found == digest
    # The first segments and answers may come before the memory was mapped on the other side.
    assert row["shared_bytes_to_device"] > TOTAL / 2 and row["shared_bytes_from_device"] > TOTAL / 2, row


def test_another_host_gets_them_over_tcp(hosts: LocalPool, digest: str, tmp_path: Path) -> None:
    found, row = through(hosts, tmp_path, "far-away", host=AWAY)
    assert found == digest
    assert row["shared_bytes_to_device"] == row["shared_bytes_from_device"] == 0
    assert "another host" in row["same_host"]


def shared_now(pool: LocalPool, name: str) -> tuple[int, int]:
    row = pool.session(name)
    return row["shared_bytes_to_device"] or 0, row["shared_bytes_from_device"] or 0


@pytest.mark.timeout(300)
def test_moves_away_and_back(hosts: LocalPool, digest: str, tmp_path: Path) -> None:
    staged = begin(hosts, tmp_path, "wanders")
    staged.reach(1)
    assert hosts.rgpu("migrate", "wanders", AWAY)["outcome"] == "committed"
    before = wait_told(hosts, "wanders")
    staged.open(1)
    staged.reach(2)
    assert wait_told(hosts, "wanders") == before and before[0] > 0 and before[1] > 0
    assert hosts.rgpu("migrate", "wanders", "node-b")["outcome"] == "committed"
    staged.open(2)
    assert staged.finish() == digest
    after = shared_now(hosts, "wanders")
    assert after[0] > before[0] and after[1] > before[1]


def wait_told(pool: LocalPool, name: str) -> tuple[int, int]:
    """The counters, when the agent has told the worker that it is attached to (once a second)."""
    eventually(lambda: pool.session(name)["shared_bytes_to_device"] is not None, within=20, every=0.2)
    time.sleep(2.5)
    return shared_now(pool, name)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["kill", "checkpoint"])
def test_outlives_its_worker(hosts: LocalPool, digest: str, tmp_path: Path, how: str) -> None:
    staged = begin(hosts, tmp_path, f"dies-{how}")
    staged.disturb(1, how)
    staged.disturb(2, "kill")
    assert staged.finish() == digest
    row = hosts.session(f"dies-{how}")
    assert row["shared_bytes_to_device"] > 0 and row["divergences"] == 0, row


@pytest.mark.timeout(300)
def test_killed_in_the_middle_of_copies(hosts: LocalPool, digest: str, tmp_path: Path) -> None:
    """Not at a gate: payloads and answers are on their way."""
    staged = begin(hosts, tmp_path, "dies-anywhere")
    staged.killed_between_gates()
    assert staged.finish() == digest
    assert hosts.session("dies-anywhere")["divergences"] == 0


def test_the_journal_keeps_what_was_named(hosts: LocalPool, digest: str, tmp_path: Path) -> None:
    """A journal so small that its segments are used again and again, spilled while they are read."""
    found, row = through(hosts, tmp_path, "small-journal", "--journal-limit", "256MiB")
    assert found == digest and row["shared_bytes_to_device"] > 0
    found, row = through(hosts, tmp_path, "tiny-journal", "--journal-limit", "16MiB", "--recover", "off")
    assert found == digest and row["shared_bytes_to_device"] == 0  # no segment fits into half of it
