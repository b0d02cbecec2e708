"""What really happened under faults, checked: no accept, cut or publication at a lower epoch, every answer once.

Ten storms of a minute each in `make sweep`, with a table in bench/results/; a short one in `make test`. The rules are
those of tests/support/effects/check.py, whose own tests forge a bad history for each of them.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from rgpu.session.effects import Kind
from tests.support.effects.collect import RecordFollower, histories, judge
from tests.support.pools.pool import ROOT, Program
from tests.support.pools.storm import Storm, StormPool
from tests.support.pools.sweep import SWEEP
from tests.support.registry.etcd_cluster import EtcdCluster, needs_etcd

pytestmark = [needs_etcd, pytest.mark.timeout(600)]

SESSIONS = ["one", "two", "three"]


def written(folder: Path) -> Counter[str]:
    """How much there was to check, by kind."""
    counts: Counter[str] = Counter()
    for found in histories(folder).values():
        for history in found:
            counts[f"{history.header.who}s"] += 1
            for effect in history.effects:
                counts[effect.kind.name.lower()] += 1
                if effect.kind is Kind.APPLIED:
                    counts["calls"] += effect.last - effect.first + 1
    return counts


def table(seed: int, seconds: float, storm: Storm, counts: Counter[str], epochs: int, found: int) -> None:
    """A row for each storm."""
    did = ", ".join(f"{number} {name}" for name, number in sorted(storm.counts.items()))
    text = (f"seed {seed:3d}  {seconds:4.0f} s  violations {found}  epochs {epochs:3d}  workers "
            f"{counts['workers']:3d}  calls {counts['calls']:6d}  accepted {counts['accepted']:6d}  cuts "
            f"{counts['cut']:3d}  publications {counts['publishing']:3d}  {did}")
    print(text)
    if SWEEP:
        folder = Path(os.environ.get("RGPU_SWEEP_OUT", ROOT / "bench" / "results"))
        with open(folder / f"{time.strftime('%Y-%m-%d')}-effects.txt", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(text + "\n")


def ended_right(program: Program) -> None:
    """Its device held what it had worked out by itself."""
    digest = program.finish(180)
    assert f"mirror {digest}" in program.lines, program.lines[-3:]


def weather(tmp_path: Path, seed: int, seconds: float) -> tuple[Storm, Counter[str]]:
    """A storm over three sessions; every program ends right, and no rule is broken."""
    with EtcdCluster(tmp_path / "etcd", size=3) as cluster:
        follower = RecordFollower(cluster.address("storm"))
        try:
            with StormPool(tmp_path, cluster) as pool:
                programs = [pool.ticks(name) for name in SESSIONS]
                for program in programs:
                    program.wait_lines(1)
                storm = Storm(pool, SESSIONS, seed)
                storm.rage(seconds)
                storm.calm()
                pool.released.touch()
                for program in programs:
                    ended_right(program)
                follower.wait_ended(SESSIONS)
        finally:
            follower.close()
        found = judge(pool.effects, follower, SESSIONS)
        counts = written(pool.effects)
        epochs = sum(follower.changes[name][-1].epoch for name in SESSIONS)
        table(seed, seconds, storm, counts, epochs, len(found))
        assert not found, "\n".join(f"{name}: {violation.rule}: {violation.text}" for name, violation in found[:20])
        assert counts["accepted"] > 50 and counts["agents"] == len(SESSIONS), f"nothing was checked: {counts}"
        return storm, counts


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_effects_in_a_storm(tmp_path: Path, seed: int) -> None:
    storm, counts = weather(tmp_path, seed, 60.0)
    assert storm.counts["move done"] and counts["publishing"] and counts["rebuilt"], f"{storm.counts} {counts}"


def test_effects_for_a_moment(tmp_path: Path) -> None:
    """The same for some seconds."""
    storm, counts = weather(tmp_path, 4, 12.0)
    assert sum(storm.counts.values()) >= 3, storm.counts
