"""Every interleaving of the three tables of a move, as they ship: see :mod:`tests.support.move_model`."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from rgpu.migrate.move.machine import Row
from tests.support.move_model import mutants
from tests.support.move_model.exploring import begin, broken, explore, settled, watching
from tests.support.move_model.model import steps
from tests.support.move_model.world import TABLES, World

#: Explored whole in the long run: each kind of accident, in both modes, and what `auto` adds.
WHOLE = [begin("copy", deaths=1, unknown=1, breaks=1, recoveries=1),
         begin("copy", deaths=2, unknown=0, breaks=0, recoveries=0),
         begin("copy", deaths=0, unknown=2, breaks=0, recoveries=0),
         begin("replay", deaths=1, unknown=0, breaks=0, recoveries=0),
         begin("replay", deaths=0, unknown=1, breaks=1, recoveries=0),
         begin("auto", deaths=0, unknown=0, breaks=0, recoveries=1)]
WALKS, LONGEST = 400, 160


def shown(start: World, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    worlds, transitions, _ = explore(start)
    with capsys.disabled():
        print(f"\nmodel of a move by {start.source.role.mode if start.source else ''}, deaths {start.deaths}, unknown "
              f"{start.unknown}, breaks {start.breaks}, recoveries {start.recoveries}: {len(worlds)} states, "
              f"{transitions} transitions, {time.monotonic() - began:.1f} s")


def test_no_interleaving_makes_two_owners(capsys: pytest.CaptureFixture[str]) -> None:
    """By copy, with an election at any time and one death; the rest by chance below, and whole in `make sweep`."""
    shown(begin("copy", deaths=1, unknown=0, breaks=0, recoveries=0), capsys)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("start", WHOLE, ids=lambda start: (
    f"{start.source.role.mode}-{start.deaths}{start.unknown}{start.breaks}{start.recoveries}"))
def test_no_interleaving_with_accidents(start: World, capsys: pytest.CaptureFixture[str]) -> None:
    shown(start, capsys)


def walk(chance: random.Random, number: int) -> Iterator[tuple[World, str]]:
    """One history by chance: (the world, what led to it)."""
    budget = {what: chance.randint(0, most) for what, most in
              (("deaths", 2), ("unknown", 2), ("breaks", 1), ("recoveries", 1))}
    world = begin(("auto", "copy", "replay")[number % 3], **budget)
    for _ in range(LONGEST):
        following = list(steps(world))
        if not following:
            return
        good = [step for step in following if step[2] and step[1] != world]
        name, world, _ = chance.choice(good if good and chance.random() < 0.93 else following)
        yield world, name


def test_random_histories() -> None:
    """Up to two deaths, two lost answers, a broken link, a recovery and an election in one move, in every mode.

    They take nearly every row; those that they miss are taken in the mutants' run.
    """
    chance, ends, taken = random.Random(22), set(), set()
    with watching(taken):
        for number in range(WALKS):
            story: list[str] = []
            for world, name in walk(chance, number):
                story.append(name)
                assert broken(world) is None, f"{broken(world)} after:\n  " + "\n  ".join(story)
                if chance.random() < 0.05:
                    stuck = settled(world)
                    assert stuck is None, f"{stuck}, though nothing more went wrong, after:\n  " + "\n  ".join(story)
            ends.add((world.registry.owner, world.committed))
    assert {("a", False), ("b", True), ("c", False)} <= ends
    every = {(name, row) for name, machine in TABLES.items() for row in machine.rows}
    missed = {f"{name}: {row.state} {row.event} [{row.guard}]" for name, row in every - taken}
    assert len(missed) <= len(every) // 6, missed


@pytest.mark.parametrize(("table", "state", "event", "instead", "finds"), [
    ("source", "offered", "tick", ("running", ("resume",)), "an offered source runs|two owners|runs after the commit"),
    ("source", "asking", "reconcile_wait", ("running", ("resume",)), "offered source runs|two owners|after the commit"),
    ("source", "offering", "promised", ("offered", ("report_offered",)), "nobody looks at the clock"),
    ("source", "pausing", "drained", ("offering", ("offer",)), "new owner discarded|old cut|did not move"),
    pytest.param("destination", "rebuilding", "rebuilt", ("finishing", ("finish_replay",)),
                 "did not move|stays|is left", marks=pytest.mark.slow),
    pytest.param("destination", "repairing", "repaired", ("verified", ("report_verified",)), "a replay's answers",
                 marks=pytest.mark.slow),
    ("coordinator", "asking", "says_preparing", ("readying", ("write_ready",)), "never offered|after the commit"),
])
def test_the_model_finds_a_broken_table(table: str, state: str, event: str, instead: tuple[str, tuple[str, ...]],
                                        finds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of the checker: a table with a wrong row is caught, by what is wrong with it."""
    rows = [row for row in TABLES[table].rows if (row.state, row.event) != (state, event)]
    rows.append(Row(state, event, instead[0], instead[1], "wrong on purpose"))
    monkeypatch.setitem(TABLES, table, TABLES[table].with_rows(rows))
    start = begin("replay" if table == "destination" else "copy", deaths=0, breaks=0, recoveries=0,
                  unknown=int(state == "asking"))
    with pytest.raises(AssertionError, match=finds):
        explore(start)


def test_some_mutants_are_killed(capsys: pytest.CaptureFixture[str]) -> None:
    """A seeded sample of all rows that a move by copy takes; whole below."""
    known = explore(begin("copy", deaths=0, unknown=0, breaks=0, recoveries=0), continuations=1)[2]
    possible = [mutant for mutant in mutants.mutants() if (mutant.table, mutant.row) in known]
    chosen = random.Random(7).sample(possible, 24)
    alive = [mutant for mutant in chosen if not mutants.killed(mutant, known[mutant.table, mutant.row])]
    assert not alive, "\n".join(map(str, alive))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_mutant_is_killed(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        alive = mutants.run(list(mutants.mutants()))
    assert not alive, "\n".join(map(str, alive))
