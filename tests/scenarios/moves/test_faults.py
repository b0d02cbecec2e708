"""Whoever breaks while a move stands at a step: the program ends well, and one worker has the session.

Every actor × kill or freeze × every step, a leader whose lease runs out at each, and both data links × how they fail ×
the steps with bytes under way. Whole in `make sweep` (its table goes to bench/results/), a seeded sample in `make
test`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.pools import faults
from tests.support.pools.fault_cases import ACTOR_CASES, LAPSE_CASES, LINK_CASES
from tests.support.pools.faults import FROZEN, HOLD, STALLED, Disturbance, break_actor
from tests.support.pools.fire import HEAT, MOVES, Outcome
from tests.support.pools.pool import ROOT
from tests.support.pools.sweep import SWEEP, sample
from tests.support.pools.table import record

LONG_HOLD = 6.0  #: s; a leader's lease runs out meanwhile, and another node is elected


@pytest.fixture
def tabled() -> Iterator[list[Outcome]]:
    """In a sweep, what is put here gets a row in the day's table."""
    outcomes: list[Outcome] = []
    yield outcomes
    for outcome in outcomes if SWEEP else ():
        record("fault-sweep", ACTOR_CASES + LAPSE_CASES + LINK_CASES, outcome)


@pytest.fixture(scope="module")
def expected(heat_digest: Callable[..., str]) -> str:
    """The digest of an undisturbed run."""
    return heat_digest(**HEAT)


@pytest.mark.parametrize("case", sample(ACTOR_CASES, 2, seed=11) + (LAPSE_CASES if SWEEP else []))
def test_an_actor_breaks(case: str, expected: str, tabled: list[Outcome]) -> None:
    point, actor, how = case.split("/")
    with Disturbance(case, point) as fire:
        tabled.append(fire.outcome)
        fire.arm()
        move = fire.move_into_fault()
        thaw = break_actor(fire, actor, how)
        if how == "freeze":
            time.sleep(FROZEN)
            thaw()
        fire.finish_move(move)
        fire.check(expected)


@pytest.mark.parametrize("case", sample(LINK_CASES, 1, seed=12))
def test_a_link_breaks_at_a_step(case: str, expected: str, tabled: list[Outcome]) -> None:
    """Before the commit the agent's link is the source's and the pages' the destination's; after it both are there."""
    point, link, mode = case.split("/")
    with Disturbance(case, point, proxied=True) as fire:
        tabled.append(fire.outcome)
        proxy = fire.pool.proxies[fire.source if link == "agent link" else fire.destination]
        fire.arm()
        move = fire.move_into_fault()
        proxy.set(mode)
        time.sleep(STALLED if mode == "stall" else HOLD + 0.5)
        proxy.set("pass")
        fire.finish_move(move)
        fire.check(expected)


def test_the_leader_changes_while_the_agents_link_breaks(expected: str) -> None:
    """Nobody dies; the next leader undoes the move while the destination's worker starts, and takes the next one."""
    with Disturbance("daemon.receive/agent link/flip", "daemon.receive", proxied=True, hold=LONG_HOLD) as fire:
        fire.arm()
        move = fire.move_into_fault()
        proxy = fire.pool.proxies[fire.source]
        proxy.set("flip")
        fire.depose()
        fire.finish_move(move)
        assert fire.outcome.move.startswith(("exit 11", "exit 15", "exit 18")), fire.outcome.move
        assert "by leader revision" not in fire.outcome.move
        assert proxy.hit.wait(30), "nothing of the program passed the link"
        for _ in range(MOVES):  # the machine may be busy enough for another change
            fire.look()
            fire.finish_move(fire.start_move())
            if fire.outcome.move == "committed":
                break
        else:
            raise AssertionError(fire.outcome.move)
        fire.check(expected)


def test_every_point_is_reached() -> None:
    """Names of points that no code has would make this sweep a sham."""
    files = [path for folder in ("server", "migrate") for path in (ROOT / "rgpu" / folder).rglob("*.py")]
    source = "".join(path.read_text() for path in files)
    for point in faults.POINTS:
        head, _, tail = point.partition(".")
        if head == "mover":
            assert f"def do_{tail.removesuffix('.done')}(" in source, point
        elif head == "daemon":
            assert f'action == "{tail}"' in source or f'"{point}"' in source, point
        else:
            assert f'fault("{point}")' in source, point
