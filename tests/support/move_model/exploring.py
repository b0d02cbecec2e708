"""Explores the world of a move (:mod:`.world`, :mod:`.model`): what must hold in every state, and how each goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rgpu.migrate.move.machine import Event, Row
from rgpu.migrate.move.options import MoveOptions
from rgpu.migrate.move.source import role_for
from tests.support.move_model.destination_side import destination_steps
from tests.support.move_model.leader_side import leader_steps
from tests.support.move_model.model import steps
from tests.support.move_model.source_side import source_steps
from tests.support.move_model.world import CLOCK, TABLES, Broken, Source, Step, World

# -- what must hold in every state --------------------------------------------------------------------


def source_runs(world: World) -> bool:
    return world.source is not None and not world.source.gone and not world.source.pauses


def broken(world: World) -> str | None:
    """The invariant that this world breaks."""
    r, source, destination = world.registry, world.source, world.destination
    active = destination is not None and destination.serves
    runs = source_runs(world)
    if active and runs:
        return "two owners run"  # whatever the epochs: the move itself never makes two
    if active and not world.committed:
        return "the destination serves without a commit"
    if active and destination is not None and destination.knows != "all":
        return "the destination serves an old cut"
    if r.owner == "b" and runs:
        return "the source runs after the commit"
    if r.owner == "b" and not world.offered:
        return "committed what was never offered"
    if source is not None and source.gone and r.owner == "a":
        return "the owner forgot its session"
    if destination is not None and destination.gone and r.owner == "b":
        return "the new owner discarded its session"
    if world.offered and runs and r.owner == "a" and r.move == "ready":
        return "an offered source runs while the record may still be committed"
    for who, leader in enumerate(world.leaders):
        if leader is not None and not says_right(world, who):
            return f"a leader says {leader.role.state} of a move that is {r.move}"
    return None


def says_right(world: World, who: int) -> bool:
    """Whether a leader that has ended tells whoever asked how it went."""
    leader, r = world.leaders[who], world.registry
    assert leader is not None
    match leader.role.state:
        case "committed":
            return world.committed
        case "aborted":
            return not world.committed and (r.move in ("aborted", "none") or r.owner == "c")
        case "refused":
            return r.move == "none"
        case "over":
            return r.move == "none" or r.owner == "c"
        case "fenced":
            return r.leader != who
    return True


def leads(world: World) -> bool:
    """Whether the elected leader lives."""
    leader = world.leaders[world.registry.leader]
    return leader is not None and (bool(leader.todo) or leader.role.state not in ("dead", "fenced", "refused"))


def settled(world: World) -> str | None:
    """Let everybody go on without further accidents: who runs in the end? An undisturbed move ends well."""
    led, fair = leads(world), world.fair
    for _ in range(300):
        following = next((after for _, after, good in calm_steps(world, led) if good and after != world), None)
        if following is None:
            break
        world = following
    if world.registry.move in ("preparing", "ready") and led:
        return f"the move is left {world.registry.move}"
    if led and world.registry.move != "none" and world.registry.owner != "c" and (fair or leaders_cleared(world)):
        return f"the move stays on record, {world.registry.move}"
    ends = TABLES["coordinator"].ends | {"dead"}
    if any(leader is not None and not leader.todo and leader.role.state not in ends for leader in world.leaders):
        return "a leader is neither at it nor at its end"
    if fair and not world.committed:
        return "nothing went wrong, and the session did not move"
    source, destination = world.source, world.destination
    if source is not None and source.role.state not in TABLES["source"].ends | {"idle"}:
        return f"the source stays {source.role.state} ({source.todo})"
    if destination is not None and destination.todo and led:
        return f"the destination stays {destination.role.state} ({destination.todo})"
    return _who(world, led)


def leaders_cleared(world: World) -> bool:
    leader = world.leaders[world.registry.leader]
    return leader is not None and leader.role.state in ("committed", "aborted") and not any(
        message.startswith("reconcile") for message in world.messages) and world.leaders[1] is None \
        and not world.uncleared \
        and world.allowed == (world.unknown, world.deaths, world.recoveries)


def _who(world: World, led: bool) -> str | None:
    runs = ["a"] if source_runs(world) else []
    runs += ["b"] if world.destination is not None and world.destination.serves else []
    owner = world.registry.owner
    if owner == "c":  # what still runs here is at a lower epoch: the agent refuses it (OWNERSHIP 1)
        return None if len(runs) < 2 else f"{runs} both run"
    gone = world.source is None if owner == "a" else world.destination is None
    expected = [] if gone else [owner]
    return None if runs == expected else f"{runs} run; the record says {owner} (dead: {gone}, led: {led})"


def calm_steps(world: World, led: bool) -> Iterator[Step]:
    """The leader first, if there is one; time passes when nothing else happens."""
    if led:
        yield from leader_steps(world, world.registry.leader)
    at_the_source = list(source_steps(world))
    yield from (step for step in at_the_source if step[0] != CLOCK)
    yield from destination_steps(world)
    yield from (step for step in at_the_source if step[0] == CLOCK)


# -- exploring -------------------------------------------------------------------------------------------

#: (table, row): worlds from which a step takes it
Witnesses = dict[tuple[str, Row], list[World]]
WITNESSES = 12  #: of each row


def begin(mode: str = "auto", **budget: int) -> World:
    """A world before a move. ``budget``: what may go wrong in it, see :class:`World`."""
    world = World(source=Source(role=role_for(MoveOptions(mode=mode))), **budget)
    return replace(world, allowed=(world.unknown, world.deaths, world.recoveries))


def explore(*starts: World, most: int = 10**9, continuations: int = 2_000) -> tuple[list[World], int, Witnesses]:
    """Breadth first over everything reachable; (worlds, transitions, which rows were taken from where).

    Fails with the shortest trace. A calm continuation is tried from some of the worlds, evenly spread.
    """
    parents: dict[World, tuple[World, str] | None] = dict.fromkeys(starts)
    queue, transitions = deque(starts), 0
    witnesses: Witnesses = {}

    def trace(world: World) -> str:
        lines = []
        at = parents[world]
        while at is not None:
            world, name = at
            lines.append(name)
            at = parents[world]
        return "\n  ".join(reversed(lines))

    taken: set[tuple[str, Row]] = set()
    with watching(taken):
        while queue and len(parents) < most:
            world = queue.popleft()
            problem = broken(world)
            assert problem is None, f"{problem} after:\n  {trace(world)}"
            taken.clear()
            try:
                for name, following, _ in steps(world):
                    transitions += 1
                    if following not in parents:
                        parents[following] = (world, name)
                        queue.append(following)
            except Broken as error:
                raise AssertionError(f"{error} after:\n  {trace(world)}") from error
            for row in taken:
                if len(found_at := witnesses.setdefault(row, [])) < WITNESSES:
                    found_at.append(world)
    every = list(parents)
    for world in every[:: max(1, len(every) // continuations)]:
        try:
            problem = settled(world)
        except Broken as error:
            problem = str(error)
        assert problem is None, f"{problem}, though nothing more went wrong, after:\n  {trace(world)}"
    return every, transitions, witnesses


@contextmanager
def watching(taken: set[tuple[str, Row]]) -> Iterator[None]:
    """Rows that are taken inside are put into ``taken``."""
    machines = dict(TABLES)

    class Watched:
        def __init__(self, name: str) -> None:
            self.name, self.ends, self.states = name, machines[name].ends, machines[name].states

        def step(self, role: Any, event: Event) -> Any:
            result = machines[self.name].step(role, event)
            if result.row is not None:
                taken.add((self.name, result.row))
            return result

    TABLES.update({name: Watched(name) for name in machines})  # type: ignore[misc]
    try:
        yield
    finally:
        TABLES.update(machines)
