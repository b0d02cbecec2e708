"""`--max-downtime` holds between offer and commit: the leader is killed there, and nobody else leads for seconds.

The source competes for the record by itself. What it wrote down of its offer and of what followed (effects) says how
long the program stood still for it; the record's history says who decided. Whole in `make sweep`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from rgpu.session.effects import Kind
from tests.support.effects.collect import histories
from tests.support.eventually import eventually
from tests.support.pools.fire import HEAT, Fire
from tests.support.pools.pool import ROOT
from tests.support.pools.sweep import SWEEP

LEASE = 10.0  #: seconds: no other leader is elected for about so long
PROMISE = 0.5 if SWEEP else 1.5  #: seconds; a loaded machine may need longer for the last pause itself
TRIES = 6
#: Each step of the leader once the source has offered, in their order.
BEFORE = ("command_send.done", "write_ready", "write_ready.done", "write_commit")
BEHIND = ("write_commit.done", "reconcile", "reconcile.done", "write_clear", "write_clear.done")


@pytest.fixture(scope="module")
def expected(heat_digest: Callable[..., str]) -> str:
    """The digest of an undisturbed run."""
    return heat_digest(**HEAT)


class Promised(Fire):
    """Source, destination and leader are three nodes; what every worker did is written down."""

    def __init__(self, point: str) -> None:
        super().__init__(point, f"mover.{point}:kill", lease=LEASE)
        self.effects = self.folder / "effects"
        self.pool.environment["RGPU_EFFECTS"] = str(self.effects)
        self.destination = ""

    def place(self) -> tuple[str, ...]:
        def led() -> list[dict[str, Any]]:
            found = self.pool.living()
            return found if any(row["leader"] for row in found) else []

        nodes = eventually(led, "nobody leads", 30)
        source, self.destination = [row["host"] for row in nodes if not row["leader"]]
        return "--host", source

    def move(self) -> None:
        """Until one came so far: a stop that takes too long by itself is given up before the offer."""
        self.arm()
        for _ in range(TRIES):
            with subprocess.Popen(
                    [sys.executable, "-m", "rgpu.cli.main", "migrate", "fire", self.destination, "--mode", "copy",
                     "--max-downtime", str(PROMISE), "-o", "json"], env=self.pool.environment, cwd=ROOT,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as move:
                while move.poll() is None:
                    if list(self.folder.glob("fault.*.fired")):
                        self.outcome.fired = True
                        self._wait_served()
                        move.kill()
                        return
                    time.sleep(0.02)
        raise AssertionError("the step was not reached: nothing was tested")

    def _wait_served(self) -> None:
        eventually(lambda: self.gap() is not None, "the session stands still", 60, every=0.05)

    def gap(self) -> float | None:
        """Seconds from the last offer until somebody served the session again; None: nobody yet."""
        offered, went_on = 0, []
        for history in histories(self.effects).get("fire", []):
            for effect in history.effects:
                if effect.kind is Kind.OFFERED:
                    offered = max(offered, effect.when)
                elif effect.kind in (Kind.RESUMED, Kind.ACTIVE):
                    went_on.append(effect.when)
        later = [when for when in went_on if when > offered]
        return (min(later) - offered) / 1e9 if offered and later else None


def decisions(fire: Fire) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = fire.pool.rgpu("history", "fire")
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("point", BEFORE + BEHIND if SWEEP else ["write_commit.done"])
def test_a_promise_under_a_dead_leader(point: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Promised(point) as fire:
        fire.move()
        gap = fire.gap()
        assert gap is not None, "nobody offered anything"
        with capsys.disabled():
            print(f"\nleader killed at {point}: served again {gap:.3f} s after the offer, {PROMISE} s were promised")
        story = decisions(fire)
        tries = [number for number, row in enumerate(story) if row["decision"] == "begin_move"]
        decided = [row for row in story[tries[-1]:] if row["decision"] in ("commit", "abort")]  # earlier ones gave up
        assert len(decided) == 1, "the record was decided once"
        if point in BEFORE:
            assert decided[0]["decision"] == "abort" and "no commit came within the promised" in decided[0]["reason"]
            assert fire.pool.session("fire")["epoch"] == 1
        else:
            assert decided[0]["decision"] == "commit"
        # Before a next leader can have been elected: it was nobody but the two workers and their daemons.
        assert gap < PROMISE + LEASE / 2, "somebody else had to decide it"
        fire.survive(expected, workers=False)  # a killed daemon leaves its own workers, of which there are none here


