"""Long copies over the lanes of a data link: the same bytes, whatever becomes of worker, link or session."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rgpu.client.data_link.agent_lanes import WAIT_SECONDS
from tests.support.pools.faults import WatchedPool
from tests.support.pools.fire import OTHER
from tests.support.pools.pool import LocalPool
from tests.support.pools.staged import Staged

ROUNDS, MIB, LANES = 18, 6, 3


@pytest.fixture(scope="module")
def lanes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedPool]:
    """Three nodes, their data ports behind proxies; lanes as on a machine with more processors than this may have."""
    pool = WatchedPool(tmp_path_factory.mktemp("lanes"), lease=8.0, proxied=True)
    pool.environment |= {"RGPU_LANES": str(LANES), "RGPU_COPY_THREADS": "2"}
    with pool as running:
        yield running


def begin(pool: LocalPool, folder: Path, name: str, *options: str) -> Staged:
    return Staged(pool, folder, "bulk", ROUNDS, MIB, name=name,
                  options=("--host", "node-a", "--same-host", "off", *options))


def opened(pool: LocalPool, session: str) -> list[int]:
    """How many lanes the session's agent opened, each time."""
    return [entry["lanes"] for path in pool.folder.rglob("*.log") for line in path.read_text().splitlines()
            if '"long messages go over lanes"' in line and (entry := json.loads(line))["session"] == session]


@pytest.fixture(scope="module")
def digest(lanes: WatchedPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a run over the link alone."""
    lanes.environment["RGPU_LANES"] = "0"
    staged = begin(lanes, tmp_path_factory.mktemp("alone"), "alone")
    staged.open(1, 2)
    found = staged.finish()
    lanes.environment["RGPU_LANES"] = str(LANES)
    assert not opened(lanes, "alone")
    return found


@pytest.mark.parametrize("recover", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_long_copies_go_over_lanes(lanes: WatchedPool, digest: str, tmp_path: Path, recover: str) -> None:
    staged = begin(lanes, tmp_path, f"lanes-{recover}", "--recover", recover)
    staged.open(1, 2)
    assert staged.finish() == digest
    assert opened(lanes, f"lanes-{recover}") == [LANES]


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_slow_link_is_not_a_broken_one(lanes: WatchedPool, digest: str, tmp_path: Path) -> None:
    """A long message takes longer than a silent link would be waited for: nothing is opened anew."""
    staged = begin(lanes, tmp_path, "slow")
    host = staged.reach(1)["host"]
    staged.open(1)
    staged.reach(2)
    lanes.proxies[host].set("slow out")
    staged.open(2)
    assert lanes.proxies[host].hit.wait(30)
    time.sleep(2.5 * WAIT_SECONDS)
    lanes.proxies[host].set("pass")
    assert staged.finish() == digest
    assert opened(lanes, "slow") == [LANES]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", [pytest.param("kill", marks=pytest.mark.slow), "checkpoint"])
def test_a_worker_dies(lanes: WatchedPool, digest: str, tmp_path: Path, how: str) -> None:
    """Each link opens lanes of its own."""
    name = f"dies-{how}"
    staged = begin(lanes, tmp_path, name)
    staged.disturb(1, how)
    staged.disturb(2, "kill")
    assert staged.finish() == digest
    assert len(found := opened(lanes, name)) >= 2 and set(found) == {LANES} and lanes.session(name)["divergences"] == 0


@pytest.mark.timeout(300)
def test_a_worker_dies_in_the_middle_of_copies(lanes: WatchedPool, digest: str, tmp_path: Path) -> None:
    staged = begin(lanes, tmp_path, "anywhere")
    staged.killed_between_gates()
    assert staged.finish() == digest
    assert lanes.session("anywhere")["divergences"] == 0


@pytest.mark.timeout(300)
def test_moves_and_cuts_in_the_middle_of_copies(lanes: WatchedPool, digest: str, tmp_path: Path) -> None:
    staged = begin(lanes, tmp_path, "wanders")
    row = staged.reach(1)
    staged.open(1)
    assert lanes.rgpu("migrate", "wanders", OTHER[row["host"]])["outcome"] == "committed"
    host = lanes.session("wanders")["host"]
    staged.reach(2)
    staged.open(2)
    for behaviour in ("drop", "pass"):
        lanes.proxies[host].set(behaviour)
    assert staged.finish() == digest
    assert lanes.session("wanders")["divergences"] == 0
