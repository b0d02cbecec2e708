"""What may happen at a leader: its writes to the registry and its commands, whose answers may get lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rgpu.migrate.move.machine import Event
from tests.support.move_model.destination_side import destination_reads
from tests.support.move_model.source_side import source_reads
from tests.support.move_model.world import TABLES, WRITES, Leader, Step, World, dead, need


def transaction(world: World, who: int, command: str) -> tuple[World, str]:
    """A leader's write: the world after it and the answer."""
    r = world.registry
    if r.leader != who:
        return world, "fenced"
    if command == "write_begin" and r.move == "none" and r.owner == "a":
        return replace(world, registry=replace(r, move="preparing")), "written"
    if command == "write_begin":
        return world, "refused"
    if r.owner == "c" and command != "write_clear":
        return world, "refused"  # the epoch is another
    if command == "write_ready" and r.move == "preparing":
        return replace(world, registry=replace(r, move="ready")), "written"
    if command == "write_commit" and r.move == "ready":
        if world.destination is None or world.destination.gone:
            return world, "refused"  # its node's record is gone, or of another incarnation
        after = replace(r, move="committed", owner="b", epoch=r.epoch + 1)
        return replace(world, registry=after, committed=True), "written"
    if command == "write_abort" and r.move in ("preparing", "ready"):
        return replace(world, registry=replace(r, move="aborted")), "written"
    if command == "write_clear" and r.move in ("committed", "aborted") and r.owner != "c":
        return replace(world, registry=replace(r, move="none")), "written"
    return world, "conflict"


def leader_steps(world: World, who: int) -> Iterator[Step]:
    leader = world.leaders[who]
    if leader is None or not leader.todo:
        return
    name, command = f"leader{who}", leader.todo[0]

    def put(world: World, new: Leader) -> World:
        return replace(world, leaders=(new, world.leaders[1]) if who == 0 else (world.leaders[0], new))

    def after(world: World, event: str) -> World:
        if leader.todo[1:]:  # the last event of a row's commands counts
            return put(world, replace(leader, todo=leader.todo[1:]))
        step = TABLES["coordinator"].step(leader.role, Event(event))
        need(not step.stale, f"the leader has no row for {event} in {leader.role.state}")
        return put(world, Leader(replace(step.role, reason=""), tuple(c.do for c in step.commands)))

    if command == "start":
        yield f"{name} is asked", after(world, "start"), True
    elif command == "run_checks":
        yield f"{name} passed", after(world, "passed"), True
        yield f"{name}: a check says no", after(world, "refused"), False
    elif command == "write_clear":
        yield f"{name} clears", put(transaction(world, who, command)[0], replace(leader, todo=leader.todo[1:])), True
        yield f"{name} cannot clear", replace(put(world, replace(leader, todo=leader.todo[1:])), uncleared=True), False
    elif command.startswith("write_"):
        need(WRITES.get(leader.role.state) == command, f"the leader does {command} in {leader.role.state}")
        changed, answer = transaction(world, who, command)
        yield f"{name} {command}: {answer}", after(changed, answer), True
        if world.unknown and answer != "fenced":
            lost = replace(changed, unknown=world.unknown - 1)
            yield f"{name} {command}: {answer}, answer lost", after(lost, "unknown"), False
            yield f"{name} {command}: request lost", after(replace(world, unknown=world.unknown - 1), "unknown"), False
        if command == "write_begin" and world.registry.leader == who:
            yield f"{name} write_begin: the record changed", after(world, "conflict"), False
    elif command == "read_record":
        move, owner = world.registry.move, world.registry.owner
        over = move == "none" or owner == "c"
        yield f"{name} reads {move}", after(world, "says_over" if over else f"says_{move}"), True
        if world.unknown:
            yield f"{name} cannot read", after(replace(world, unknown=world.unknown - 1), "unknown"), False
    elif command == "command_receive":
        sent = world.send(f"receive{who}")
        if f"received{who}" in world.messages:
            yield f"{name} hears received", after(sent, "received"), True
        if sent != world:
            yield f"{name} asks to receive", sent, True
        yield f"{name} gives up receive", after(sent, "failed"), dead(world.destination)
        yield f"{name} is told to cancel", after(sent, "cancel"), False
    elif command == "command_send":
        sent = world.send(f"send{who}")
        for event in ("offered", "failed"):
            if f"{event}{who}" in world.messages:
                yield f"{name} hears {event}", after(sent, event), True
        if sent != world:
            yield f"{name} sends", sent, True
        yield f"{name} gives up send", after(sent, "failed"), dead(world.source)
        yield f"{name} is told to cancel", after(sent, "cancel"), False
    elif command == "reconcile":
        yield f"{name} reconciles", after(destination_reads(source_reads(world)), "reconciled"), True
        yield f"{name} reconciles in vain", after(world.send(f"reconcile{who}"), "unreconciled"), False
