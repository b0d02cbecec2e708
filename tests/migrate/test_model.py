"""Every interleaving of the three roles of a move: lost, repeated and late messages, crashes, two leaders.

The world below holds the real role tables, the real :func:`settle`, and an
abstract registry record. Messages stay in a set for ever: each may be delivered
at any time, any number of times, or never. Every party may stop at any step and
go on later (it is simply not scheduled), or die. Writes to the registry may
succeed with their answer lost. A second leader may take over at any time while
the first one goes on believing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from rgpu.migrate.machine import Event, Machine
from rgpu.migrate.records import MoveRecord, SessionRecord
from rgpu.migrate.roles import (
    COORDINATOR,
    DESTINATION,
    ENDS,
    SETTLE_EVENTS,
    SOURCE,
    CoordinatorRole,
    DestinationRole,
    SourceRole,
)
from rgpu.migrate.settle import Holding, settle

LATE = 1e9  #: a time after every deadline


@dataclass(frozen=True)
class Registry:
    """The session's record. ``owner``: a (source), b (destination), c (recovered elsewhere)."""

    owner: str = "a"
    epoch: int = 1
    move: str = "none"  #: none, preparing, ready, committed, aborted
    leader: int = 0

    def record(self) -> SessionRecord:
        moving = self.move in ("preparing", "ready")
        move = None if self.move == "none" else MoveRecord(
            id="m", source="a", destination="b", destination_incarnation=7, device="cpu:0", state=self.move)
        return SessionRecord(name="s", state="moving" if moving else "running", owner=self.owner, incarnation=7,
                             epoch=self.epoch, quota=1, agent="", device="cpu:0", move=move)


@dataclass(frozen=True)
class Leader:
    """``todo``: commands not yet executed. ``read``: the record its next write is based on."""

    role: CoordinatorRole = CoordinatorRole()
    todo: tuple[str, ...] = ()


@dataclass(frozen=True)
class World:
    registry: Registry = Registry()
    source: SourceRole | None = SourceRole()  #: None: dead
    destination: DestinationRole | None = DestinationRole()
    leaders: tuple[Leader, Leader | None] = (Leader(CoordinatorRole("checking")), None)
    messages: frozenset[str] = frozenset()
    offered: bool = False  #: history, for the invariants: the source told somebody
    committed: bool = False
    complete: bool = False  #: the destination has what the source sent in its last pause
    unknown: int = 2  #: answers of the registry that may still be lost
    deaths: int = 2
    recoveries: int = 1

    def send(self, *messages: str) -> World:
        return replace(self, messages=self.messages | set(messages))


def slim(role):
    """Times and reasons distinguish no behaviour here."""
    changes = {"reason": ""}
    for name in ("deadline", "max_downtime"):
        if hasattr(role, name):
            changes[name] = 0.0
    if isinstance(role, SourceRole):
        changes.update(rounds=min(role.rounds, 2), pages=0, before=0)
    return replace(role, **changes)


# -- the registry's transactions: what ownership.py decides, on the abstract record ---------------


def transaction(world: World, who: int, command: str) -> tuple[World, str]:
    """A leader's write: the world after it and the answer."""
    r = world.registry
    if r.leader != who:
        return world, "fenced"
    if command == "write_begin" and r.move == "none" and r.owner == "a":
        return replace(world, registry=replace(r, move="preparing")), "written"
    if command == "write_ready" and r.move == "preparing":
        return replace(world, registry=replace(r, move="ready")), "written"
    if command == "write_commit" and r.move == "ready":
        if world.destination is None:
            return world, "refused"  # its node's record is gone, or of another incarnation
        after = replace(r, move="committed", owner="b", epoch=r.epoch + 1)
        return replace(world, registry=after, committed=True), "written"
    if command == "write_abort" and r.move in ("preparing", "ready"):
        return replace(world, registry=replace(r, move="aborted")), "written"
    return world, "conflict"


def leader_steps(world: World, who: int) -> Iterator[tuple[str, World]]:
    leader = world.leaders[who]
    if leader is None:
        return
    name = f"leader{who}"

    def after(world: World, event: str) -> World:
        step = COORDINATOR.step(leader.role, Event(event))
        assert not step.stale, f"{leader.role.state} has no row for {event}"
        new = Leader(slim(step.role), tuple(c.do for c in step.commands))
        leaders = (new, world.leaders[1]) if who == 0 else (world.leaders[0], new)
        return replace(world, leaders=leaders)

    if not leader.todo:
        if leader.role.state == "checking":
            yield f"{name} passed", after(world, "passed")
        return
    command = leader.todo[0]
    if command.startswith("write_") and command != "write_clear":
        changed, answer = transaction(world, who, command)
        yield f"{name} {command}: {answer}", after(changed, answer)
        if world.unknown and answer != "fenced":
            lost = replace(changed, unknown=world.unknown - 1)
            yield f"{name} {command}: {answer}, answer lost", after(lost, "unknown")
            yield f"{name} {command}: request lost", after(replace(world, unknown=world.unknown - 1), "unknown")
    elif command == "read_record":
        move, owner = world.registry.move, world.registry.owner
        over = move == "none" or owner == "c"
        yield f"{name} reads {move}", after(world, "says_over" if over else f"says_{move}")
    elif command == "command_receive":
        sent = world.send(f"receive{who}")
        if f"received{who}" in world.messages:
            yield f"{name} hears received", after(sent, "received")
        yield f"{name} gives up receive", after(sent, "failed")
        if sent != world:
            yield f"{name} asks to receive", sent
    elif command == "command_send":
        sent = world.send(f"send{who}")
        for event in ("offered", "failed"):
            if f"{event}{who}" in world.messages:
                yield f"{name} hears {event}", after(sent, event)
        yield f"{name} gives up send", after(sent, "failed")
        if sent != world:
            yield f"{name} sends", sent
    elif command == "settle":
        yield f"{name} settles", after(world.send(f"settle{who}"), "settled")
    else:  # write_clear, finish: nothing that the model looks at
        new = replace(leader, todo=leader.todo[1:])
        leaders = (new, world.leaders[1]) if who == 0 else (world.leaders[0], new)
        yield f"{name} {command}", replace(world, leaders=leaders)


# -- the two workers --------------------------------------------------------------------------------


def source_do(world: World, event: str, now: float = 0.0, pages: int = 0) -> World | None:
    """The world after an event at the source; None where it changes nothing."""
    role = world.source
    assert role is not None
    step = SOURCE.step(role, Event(event, now=now, pages=pages))
    if step.stale:
        return None
    world = replace(world, source=slim(step.role))
    for command in step.commands:
        if command.do == "report_offered":
            world = replace(world.send("offered0"), offered=True)
        elif command.do == "report_failed":
            world = world.send("failed0")
        elif command.do == "send_rest":
            world = world.send("last" if role.replay else "rest")
        elif command.do == "send_cut":
            world = world.send("cut")
        elif command.do == "write_abort":
            pass  # a step of its own below: state withdrawing
    return world


def source_steps(world: World) -> Iterator[tuple[str, World]]:
    role = world.source
    if role is None:
        return
    moves: list[tuple[str, World | None]] = []
    if "send0" in world.messages:
        moves.append(("source takes send", source_do(world, "send")))
    if role.state == "copying":
        moves += [("source round", source_do(world, "round_done", pages=1)),
                  ("source fails", source_do(world, "failed"))]
    if role.state == "copying":
        moves.append(("source chooses a replay", source_do(world, "replay")))
    if role.state == "cutting":
        moves += [("source cuts", source_do(world, "cut")), ("source cannot cut", source_do(world, "failed")),
                  ("source does not drain for a cut", source_do(world, "tick", LATE))]
    if role.state == "streaming":
        moves.append(("source cannot stream", source_do(world, "failed")))
        if "cut_verified" in world.messages:
            moves.append(("source hears that the cut is verified", source_do(world, "cut_verified")))
    if role.state == "replaying":
        moves += [("source is caught up with", source_do(world, "caught_up")),
                  ("source gives the replay up", source_do(world, "failed"))]
    if role.state == "pausing":
        moves += [("source drained", source_do(world, "drained")),
                  ("source does not drain", source_do(world, "tick", LATE))]
    if role.state == "sending":
        moves += [("source fails", source_do(world, "failed"))]
        if "verified" in world.messages:
            moves.append(("source hears verified", source_do(world, "verified")))
    if role.state == "offered":
        moves.append(("source withdraws", source_do(world, "tick", LATE)))
    if role.state == "withdrawing":
        open_move = world.registry.move in ("preparing", "ready") and world.registry.owner == "a"
        after = replace(world, registry=replace(world.registry, move="aborted")) if open_move else world
        moves.append(("source aborts", source_do(after, "abort_won" if open_move else "abort_lost")))
        if world.unknown:
            less = world.unknown - 1
            moves += [("source aborts, answer lost", source_do(replace(after, unknown=less), "abort_unknown")),
                      ("source aborts, request lost", source_do(replace(world, unknown=less), "abort_unknown"))]
    asked = role.state == "asking" or world.messages & {"settle0", "settle1"}
    if asked:
        holding = Holding("a", 7, "paused" if role.paused else "running", 1, "m")
        action = settle(world.registry.record(), holding).action
        moves.append((f"source reads: {action}", source_do(world, SETTLE_EVENTS[action])))
    yield from ((name, after) for name, after in moves if after is not None)


def destination_do(world: World, event: str, now: float = 0.0) -> World | None:
    role = world.destination
    assert role is not None
    step = DESTINATION.step(role, Event(event, now=now))
    if step.stale:
        return None
    world = replace(world, destination=slim(step.role))
    for command in step.commands:
        if command.do == "prepare":
            world = world.send("received0")
        elif command.do == "report_verified":
            world = world.send("verified")
        elif command.do == "report_cut_verified":
            world = world.send("cut_verified")
    return world


def destination_steps(world: World) -> Iterator[tuple[str, World]]:
    role = world.destination
    if role is None:
        return
    moves: list[tuple[str, World | None]] = []
    if "receive0" in world.messages:
        moves.append(("destination takes receive", destination_do(world, "receive")))
    if role.state == "receiving":
        moves += [("destination hears nothing", destination_do(world, "tick", LATE))]
        if "rest" in world.messages:
            moves.append(("destination has all", destination_do(replace(world, complete=True), "state_arrived")))
        if "cut" in world.messages:
            moves.append(("destination has the cut", destination_do(world, "cut_arrived")))
    if role.state == "replaying":
        moves += [("destination's replay fails", destination_do(world, "failed")),
                  ("destination hears nothing in a replay", destination_do(world, "tick", LATE))]
        if "last" in world.messages:
            last = replace(world, complete=True)
            moves.append(("destination compares", destination_do(last, "last_arrived")))
    if role.state in ("rebuilding_cut", "repairing"):
        moves += [("destination has it right", destination_do(world, "rebuilt")),
                  ("destination cannot get it right", destination_do(world, "failed"))]
    if role.state == "rebuilding":
        moves += [("destination rebuilt", destination_do(world, "rebuilt")),
                  ("destination cannot rebuild", destination_do(world, "failed"))]
    if world.messages & {"settle0", "settle1"} or role.state == "verified":
        holds = "running" if role.state == "active" else "incoming"
        action = settle(world.registry.record(), Holding("b", 7, holds, 2, "m")).action
        moves.append((f"destination reads: {action}", destination_do(world, SETTLE_EVENTS[action])))
    yield from ((name, after) for name, after in moves if after is not None)


def accidents(world: World) -> Iterator[tuple[str, World]]:
    """Deaths, an election, a recovery to a third node (also of a source that only seems dead)."""
    if world.deaths:
        fewer = replace(world, deaths=world.deaths - 1)
        if world.source is not None and world.source.state != "forgotten":
            yield "source dies", replace(fewer, source=None)
        if world.destination is not None and world.destination.state not in ("idle", "discarded"):
            yield "destination dies", replace(fewer, destination=None)
        if world.leaders[0].role.state not in ENDS:
            dead = Leader(CoordinatorRole("fenced"))
            yield "leader0 dies", replace(fewer, leaders=(dead, world.leaders[1]))
    if world.leaders[1] is None and world.registry.move != "none":
        second = Leader(CoordinatorRole("asking"), ("read_record",))
        yield "an election", replace(world, leaders=(world.leaders[0], second),
                                     registry=replace(world.registry, leader=1))
    if world.recoveries and world.registry.owner != "c":
        r = world.registry
        move = "aborted" if r.move in ("preparing", "ready") else r.move
        after = replace(r, owner="c", epoch=r.epoch + 1, move=move)
        yield "recovered at c", replace(world, recoveries=0, registry=after)


def steps(world: World) -> Iterator[tuple[str, World]]:
    yield from leader_steps(world, 0)
    yield from leader_steps(world, 1)
    yield from source_steps(world)
    yield from destination_steps(world)
    yield from accidents(world)


# -- what must hold in every state --------------------------------------------------------------------


def broken(world: World) -> str | None:
    """The invariant that this world breaks."""
    r, source, destination = world.registry, world.source, world.destination
    source_runs = source is not None and not source.paused and source.state != "forgotten"
    active = destination is not None and destination.state == "active"
    if active and source_runs:
        return "two owners run"  # whatever the epochs: the move itself never makes two
    if active and not world.committed:
        return "the destination serves without a commit"
    if active and not world.complete:
        return "the destination serves an old cut"
    if r.owner == "b" and source_runs:
        return "the source runs after the commit"
    if r.owner == "b" and not world.offered:
        return "committed what was never offered"
    if source is not None and source.state == "forgotten" and r.owner == "a":
        return "the owner forgot its session"
    if destination is not None and destination.state == "discarded" and r.owner == "b":
        return "the new owner discarded its session"
    if world.offered and source_runs and r.owner == "a" and r.move == "ready":
        return "an offered source runs while the record may still be committed"
    return None


def settled(world: World) -> str | None:
    """Let a leader finish without further accidents: who runs in the end?"""
    for _ in range(200):
        for who in (1, 0):
            if world.registry.leader == who and world.leaders[who] is not None:
                following = next(calm(leader_steps(world, who)), None)
                if following is not None:
                    break
        else:
            following = None
        following = following or next(calm(source_steps(world), "reads", "aborts"), None) \
            or next(calm(destination_steps(world), "reads"), None)
        if following is None or following == world:
            break
        world = following
    runs = []
    if world.source is not None and not world.source.paused and world.source.state != "forgotten":
        runs.append("a")
    if world.destination is not None and world.destination.state == "active":
        runs.append("b")
    owner, dead = world.registry.owner, {"a": world.source is None, "b": world.destination is None}
    if world.registry.move in ("preparing", "ready"):
        return f"the move is left {world.registry.move}"
    if owner == "c":  # what still runs here is at a lower epoch: the agent refuses it (OWNERSHIP 1)
        return None if len(runs) < 2 else f"{runs} both run"
    expected = [] if dead[owner] else [owner]
    return None if runs == expected else f"{runs} run; the record says {owner} (dead: {dead})"


def calm(moves: Iterator[tuple[str, World]], *only: str) -> Iterator[World]:
    for name, world in moves:
        if " lost" not in name and (not only or any(word in name for word in only)):
            yield world


def explore(start: World) -> tuple[list[World], int]:
    """Breadth first over everything reachable; (worlds, transitions). Fails with the shortest trace."""
    parents: dict[World, tuple[World, str] | None] = {start: None}
    queue, transitions = deque([start]), 0

    def trace(world: World) -> str:
        lines = []
        at = parents[world]
        while at is not None:
            world, name = at
            lines.append(name)
            at = parents[world]
        return "\n  ".join(reversed(lines))

    while queue:
        world = queue.popleft()
        problem = broken(world)
        assert problem is None, f"{problem} after:\n  {trace(world)}"
        for name, following in steps(world):
            transitions += 1
            if following not in parents:
                parents[following] = (world, name)
                queue.append(following)
    alone = [world for world in parents if world.leaders[1] is not None or world.leaders[0].role.state not in ENDS]
    for world in alone[:: max(1, len(alone) // 20_000)]:
        if world.leaders[world.registry.leader].role.state == "fenced":
            continue  # that leader died: its successor is in another state of the exploration
        problem = settled(world)
        assert problem is None, f"{problem}, though nothing more went wrong, after:\n  {trace(world)}"
    return list(parents), transitions


def test_no_interleaving_makes_two_owners(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    worlds, transitions = explore(World())
    with capsys.disabled():
        print(f"\nmodel of a move: {len(worlds)} states, {transitions} transitions, {time.monotonic() - began:.1f} s")
    _covers(SOURCE, {world.source.state for world in worlds if world.source})
    _covers(DESTINATION, {world.destination.state for world in worlds if world.destination})
    _covers(COORDINATOR, {leader.role.state for world in worlds for leader in world.leaders if leader})


def _covers(table: Machine, seen: set[str]) -> None:
    """An exploration that never gets somewhere proves nothing about it."""
    assert table.states - seen <= {"idle", "checking", "refused"}, table.states - seen


@pytest.mark.parametrize("state, event, target", [
    ("offered", "failed", "running"),  # a source that resumes on a broken link after its offer
    ("asking", "settle_wait", "running"),  # ... or on an undecided record
])
def test_the_model_finds_a_broken_table(state: str, event: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of the checker: a table with a wrong row is caught."""
    from rgpu.migrate import machine, roles

    rows = [row for row in roles.SOURCE.rows if (row.state, row.event) != (state, event)]
    rows.append(machine.Row(state, event, target, ("resume",), "wrong on purpose"))
    if event == "failed":
        rows.append(machine.Row("offered", "tick", target, ("resume",), "wrong on purpose"))
        rows = [row for row in rows if (row.state, row.event, row.next) != ("offered", "tick", "withdrawing")]
    broken_table = machine.Machine(tuple(rows), roles.SOURCE._guards, roles.SOURCE._note)
    monkeypatch.setattr("tests.migrate.test_model.SOURCE", broken_table)
    with pytest.raises(AssertionError, match="after:"):
        explore(World(deaths=0))


def test_the_model_finds_a_cut_that_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A destination that takes a verified cut for the session is caught."""
    from rgpu.migrate import machine, roles

    rows = [row for row in roles.DESTINATION.rows if (row.state, row.event) != ("rebuilding_cut", "rebuilt")]
    rows.append(machine.Row("rebuilding_cut", "rebuilt", "verified", ("report_cut_verified", "report_verified"),
                            "wrong on purpose"))
    table = machine.Machine(tuple(rows), roles.DESTINATION._guards, roles.DESTINATION._note)
    monkeypatch.setattr("tests.migrate.test_model.DESTINATION", table)
    with pytest.raises(AssertionError, match="serves an old cut"):
        explore(World(deaths=0))


def test_every_row_of_every_table_is_reachable_by_name() -> None:
    """No row names a state that nothing leads to, no state but the ends is a dead end."""
    starts = {"idle", "checking"}
    for table in (SOURCE, DESTINATION, COORDINATOR):
        reached = {row.next for row in table.rows} | starts
        assert {row.state for row in table.rows} <= reached
        ends = table.states - {row.state for row in table.rows}
        assert ends <= ENDS | {"running", "forgotten", "active", "discarded"}
