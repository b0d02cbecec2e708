"""Is every row of the three tables needed, and held by the model? Mutants of each, and what kills them.

    python -m tests.support.move_model.mutants [--sample N] [--seed S] [TABLE …]

A mutant is a table with one row changed: another target, a command dropped, or a
command replaced by another one. Up to the row in question it is the table that
ships, so it is explored from worlds in which that row is taken next: a broken
invariant, an event without a row, or a world that never comes to its end kills
it. Exit status 1 when one survives.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rgpu.migrate.move.machine import Row
from tests.support.move_model.exploring import Witnesses, begin, explore
from tests.support.move_model.world import TABLES, Broken, World

#: What the rows' witnesses are looked for in; together every row is taken.
STARTS = (begin("copy", deaths=0, unknown=1, breaks=0, recoveries=0),
          begin("auto", deaths=0, unknown=0, breaks=0, recoveries=1),
          begin("copy", deaths=1, unknown=0, breaks=0, recoveries=1))
MOST = 600  #: worlds behind a witness
LONG = 15_000  #: behind all of them, for one that has survived that


@dataclass(frozen=True)
class Mutant:
    """``row`` of ``table`` as it ships, and what is there instead."""

    table: str
    row: Row
    instead: Row
    what: str  #: target, drop or replace

    def __str__(self) -> str:
        guard = f" [{self.row.guard}]" if self.row.guard else ""
        return (f"{self.table}: {self.row.state} --{self.row.event}{guard}--> {self.row.next} "
                f"({', '.join(self.row.commands)}) becomes {self.instead.next} ({', '.join(self.instead.commands)})")


def mutants(seed: int = 0) -> Iterator[Mutant]:
    """One of each kind for each row, and for each of its commands."""
    chance = random.Random(seed)
    for table, machine in TABLES.items():
        states, commands = sorted(machine.states - {"idle"}), sorted(machine.commands)
        for row in machine.rows:
            other = chance.choice([state for state in states if state != row.next])
            yield Mutant(table, row, replace(row, next=other), "target")
            for at, command in enumerate(row.commands):
                before, behind = row.commands[:at], row.commands[at + 1:]
                yield Mutant(table, row, replace(row, commands=before + behind), "drop")
                others = [one for one in commands if one != command]
                if others:
                    replaced = (*before, chance.choice(others), *behind)
                    yield Mutant(table, row, replace(row, commands=replaced), "replace")


def witnesses() -> Witnesses:
    """Worlds before each row of the tables that ship."""
    found: Witnesses = {}
    for start in STARTS:
        for row, worlds in explore(start, continuations=1)[2].items():
            found.setdefault(row, []).extend(worlds)
    return found


def killed(mutant: Mutant, worlds: Sequence[World]) -> str:
    """What kills it; empty: it survives."""
    machine = TABLES[mutant.table]
    TABLES[mutant.table] = machine.with_rows(mutant.instead if row is mutant.row else row for row in machine.rows)
    try:
        for world in worlds:
            explore(world, most=MOST, continuations=30)
        explore(*worlds, most=LONG, continuations=1000)
    except AssertionError as error:
        return str(error).partition(" after:")[0]
    except Broken as error:
        return str(error)
    finally:
        TABLES[mutant.table] = machine
    return ""


def run(chosen: Sequence[Mutant]) -> list[Mutant]:
    """Kill them, print a table of it; those that survive."""
    known = witnesses()
    score: Counter[tuple[str, str, bool]] = Counter()
    alive = []
    for mutant in chosen:
        why = killed(mutant, known.get((mutant.table, mutant.row), ()))
        score[mutant.table, mutant.what, bool(why)] += 1
        if not why:
            alive.append(mutant)
            print(f"survives: {mutant}", flush=True)
    print("| table | mutation | mutants | killed |\n|---|---|---|---|")
    for table in TABLES:
        for what in ("target", "drop", "replace"):
            dead, alive_too = score[table, what, True], score[table, what, False]
            print(f"| {table} | {what} | {dead + alive_too} | {dead} |")
    return alive


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sample", type=int, default=0, help="so many of them, by chance")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("tables", nargs="*", help="source, destination, coordinator; all by default")
    options = parser.parse_args()
    chosen = [mutant for mutant in mutants(options.seed) if not options.tables or mutant.table in options.tables]
    if options.sample:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    began = time.monotonic()
    alive = run(chosen)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} killed, seed {options.seed}, {time.monotonic() - began:.0f} s")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
