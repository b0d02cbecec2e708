"""A pool of three hosts against a real etcd: sessions outlive whatever happens to hosts, and nothing happens by itself.

Whole in `make sweep`: 40 sessions for five minutes, hosts drained, killed, cut off, sent away and joined again at
random (seeded), the coordinator killed each 20 s; and the same without faults, which must have no failover. In
`make test` some sessions for half a minute. Every program ends with the digest of what it worked out itself, and the
effects of all processes keep the rules of tests/support/effects/check.py.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rgpu.session.errors import RgpuError
from tests.support.effects.collect import RecordFollower, judge
from tests.support.pools.hosts import NAMES, HostsPool, Network, unavailable
from tests.support.pools.pool import ROOT, VerbError
from tests.support.pools.sweep import SWEEP
from tests.support.registry.etcd_cluster import EtcdCluster, needs_etcd

pytestmark = [needs_etcd, pytest.mark.timeout(1500)]

#: Between two faults by which sessions are lost, s: they are brought back meanwhile.
CALM_BETWEEN = 32.0
#: Decisions that mean that something was taken for lost.
FAILOVERS = ("lost", "recover", "fail", "lose", "abort")


@pytest.fixture
def network() -> Iterator[Network]:
    if reason := unavailable():
        text = f"THREE HOSTS ARE NOT TESTED HERE: {reason}; run as root where `ip netns add` works"
        warnings.warn(text, stacklevel=1)  # stands in pytest's summary even where skips are not listed
        pytest.skip(text)
    with Network() as made:
        yield made


class Fate:
    """What happens to hosts, one thing after the other, in a thread; and the coordinator's deaths in another."""

    def __init__(self, pool: HostsPool, seed: int, coordinator_each: float) -> None:
        self.pool = pool
        self.counts: Counter[str] = Counter()
        self.errors: list[BaseException] = []
        self._chance = random.Random(seed)
        self._each = coordinator_each
        self._stop = threading.Event()
        self._away = {host: threading.Lock() for host in NAMES}  #: held while a host is on its way out or back
        self._membership = threading.Lock()  #: held while a host leaves and joins: that needs one leader throughout
        self._lossy = 0.0
        self._threads = [threading.Thread(target=self._guarded, args=(work,), daemon=True)
                         for work in (self._things, self._coordinators)]

    def __enter__(self) -> Fate:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(240)
        if error[0] is None:
            assert not self.errors, self.errors

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the test fails with it
            self.errors.append(error)

    def _things(self) -> None:
        kinds = [self._drain, self._kill, self._cut, self._leave, self._kill]
        bag: list[Callable[[str], None]] = []
        while not self._stop.wait(self._chance.uniform(2.0, 6.0)):
            bag = bag or self._chance.sample(kinds, len(kinds))  # each of them, again and again
            bag.pop()(self._chance.choice(NAMES))

    def _coordinators(self) -> None:
        """kill -9 of the daemon that leads; it is started again at once and adopts its workers."""
        while not self._stop.wait(self._each):
            with self._membership:
                leader = ""
                with contextlib.suppress(RgpuError):
                    leader = self.pool.ask("pool.status")["leader"] or ""
                if not leader:
                    continue
                with self._away[leader]:
                    self.pool.kill(leader, everything=False)
                    self.counts["coordinators killed"] += 1
                    self._back(leader)

    def _back(self, host: str) -> None:
        self.pool.start_daemon(host)
        self.pool.wait_ready(host)

    def _drain(self, host: str) -> None:
        """Emptied, and open again; what cannot leave in time stays."""
        self.counts["drains asked for"] += 1
        with contextlib.suppress(VerbError):
            self.pool.rgpu("drain", host, "--timeout", "60s", timeout=150)
            self.counts["hosts drained"] += 1
        self._eventually("uncordon", host)

    def _kill(self, host: str) -> None:
        """The whole host; it returns after its lease, or before."""
        seconds = self._chance.choice((1.0, 12.0))
        if self._calm():
            with self._away[host]:
                self.pool.kill(host, everything=True)
                self.counts["hosts killed"] += 1
                self._stop.wait(seconds)
                self._back(host)

    def _calm(self) -> bool:
        """Wait until sessions may be lost again; False when the end comes first."""
        if self._stop.wait(max(0.0, self._lossy + CALM_BETWEEN - time.monotonic())):
            return False
        self._lossy = time.monotonic()
        return True

    def _cut(self, host: str) -> None:
        """Its cable is pulled: everything on it runs on, and nobody hears of it."""
        seconds = self._chance.choice((2.0, 15.0))
        if self._calm():
            with self._away[host]:
                self.pool.network.cut(host, True)
                self.counts["hosts cut off"] += 1
                self._stop.wait(seconds)
                self.pool.network.cut(host, False)
                self.pool.wait_ready(host)

    def _leave(self, host: str) -> None:
        """For good, and another host of that name joins by a new invitation; the operator's own host stays."""
        if host == NAMES[0]:
            host = self._chance.choice(NAMES[1:])
        with self._membership, self._away[host]:
            try:
                self.pool.rgpu("leave", host, "--timeout", "60s", timeout=180)
            except VerbError:
                if self.pool.servers[host].poll() is not None:  # stopped, and not forgotten
                    self._back(host)
                self._eventually("uncordon", host)  # not everything could be moved
                return
            self.pool.servers[host].wait(60)
            self.counts["hosts left"] += 1
            self.pool.join(host)
            self.counts["hosts joined"] += 1

    def _eventually(self, *verb: str) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                self.pool.rgpu(*verb)
                return
            except VerbError:
                assert time.monotonic() < deadline, verb
                time.sleep(1.0)


def decisions(pool: HostsPool, started: float) -> Counter[str]:
    """What was decided about sessions and hosts since then, by name."""
    deadline = time.monotonic() + 60
    while True:
        try:
            events = pool.ask("pool.history", {"limit": 2000})["events"]
            return Counter(event["decision"] for event in events if event["when"] >= started)
        except RgpuError:
            assert time.monotonic() < deadline
            time.sleep(0.5)


def run(tmp_path: Path, network: Network, *, sessions: int, seconds: float, seed: int = 0,
        coordinator_each: float = 20.0) -> tuple[Counter[str], Counter[str]]:
    """Sessions on three hosts for so long; returns what was done to hosts, and what was decided. Seed 0: no faults."""
    names = [f"s{number:02d}" for number in range(sessions)]
    with EtcdCluster(tmp_path / "etcd", host=network.address) as cluster:
        follower = RecordFollower(cluster.address("hosts"))
        try:
            with HostsPool(tmp_path, network, cluster) as pool:
                programs = []
                for begin in range(0, sessions, 4):  # a few at a time: each is three processes
                    fresh = [pool.ticks(name, 0.4) for name in names[begin:begin + 4]]
                    for program in fresh:
                        program.wait_lines(1, 120)
                    programs += fresh
                started = time.time()
                fate = Fate(pool, seed, coordinator_each)
                if seed:
                    with fate:
                        time.sleep(seconds)
                else:
                    time.sleep(seconds)
                told = decisions(pool, started)
                pool.released.touch()
                right = 0
                for program in programs:
                    digest = program.finish(240)
                    assert f"mirror {digest}" in program.lines, f"{program.name}: another digest"
                    right += 1
                follower.wait_ended(names, 120)
        finally:
            follower.close()
        found = judge(pool.effects, follower, names)
        report(seed, seconds, right, fate.counts, told, len(found))
        assert not found, "\n".join(f"{name}: {violation.rule}: {violation.text}" for name, violation in found[:20])
        return fate.counts, told


def report(seed: int, seconds: float, right: int, done: Counter[str], told: Counter[str], violations: int) -> None:
    text = (f"three hosts, {right} sessions, {seconds:.0f} s, seed {seed}: all digests right, {violations} violations; "
            f"done: {dict(sorted(done.items()))}; decided: {dict(sorted(told.items()))}")
    print(text)
    if SWEEP:
        folder = Path(os.environ.get("RGPU_SWEEP_OUT", ROOT / "bench" / "results"))
        with open(folder / f"{time.strftime('%Y-%m-%d')}-hosts.txt", "a") as file:
            file.write(text + "\n")


@pytest.mark.slow
def test_five_minutes_of_trouble(tmp_path: Path, network: Network) -> None:
    done, told = run(tmp_path, network, sessions=40, seconds=300, seed=1)
    for what in ("coordinators killed", "drains asked for", "hosts killed", "hosts cut off", "hosts joined"):
        assert done[what], f"no {what}: {done}"
    assert done["hosts drained"] + done["hosts left"], f"no host was emptied: {done}"  # those that leave are, too
    assert told["commit"] and told["recover"], told


@pytest.mark.slow
def test_left_alone_nothing_fails_over(tmp_path: Path, network: Network) -> None:
    _, told = run(tmp_path, network, sessions=40, seconds=300)
    assert not {name: told[name] for name in FAILOVERS if told[name]}, told
    assert told["elect"] == 0, "the leader stayed"


@pytest.mark.slow
def test_some_trouble(tmp_path: Path, network: Network) -> None:
    done, told = run(tmp_path, network, sessions=4, seconds=35, seed=2, coordinator_each=12.0)
    assert done["coordinators killed"] and sum(done.values()) >= 2, done
    assert told["elect"], told


@pytest.mark.slow
def test_left_alone_for_a_moment(tmp_path: Path, network: Network) -> None:
    _, told = run(tmp_path, network, sessions=3, seconds=8)
    assert not {name: told[name] for name in FAILOVERS if told[name]}, told
