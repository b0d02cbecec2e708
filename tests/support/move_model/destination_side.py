"""What may happen at the worker that receives the session: what comes by its link, and what its daemon reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rgpu.migrate.move.destination import DestinationRole
from rgpu.migrate.move.machine import Event
from rgpu.migrate.records.reconcile import EVENTS
from tests.support.move_model.world import CUT, TABLES, Step, World, dead, need, reading


def at_destination(world: World, event: Event) -> World:
    assert world.destination is not None
    step = TABLES["destination"].step(world.destination.role, event)
    if step.stale:
        return world
    return obey_destination(world, step.role, tuple(c.do for c in step.commands), event.kind)


def came(world: World, event: Event) -> World:
    """The first command of the destination has found something."""
    assert world.destination is not None
    if rest := world.destination.todo[1:]:
        return obey_destination(world, world.destination.role, rest, "")
    step = TABLES["destination"].step(world.destination.role, event)
    if step.stale and event.kind == "failed":  # nobody listens any more; the record will say what follows
        return replace(world.broken_link(), destination=replace(world.destination, todo=()))
    need(not step.stale, f"the destination has no row for {event.kind} in {world.destination.role.state}")
    return obey_destination(world, step.role, tuple(c.do for c in step.commands), event.kind)


def obey_destination(world: World, role: DestinationRole, todo: tuple[str, ...], why: str) -> World:
    side = world.destination
    assert side is not None

    def say(world: World, word: str) -> World:
        return replace(world, up=(*world.up, word)) if world.link in ("open", "ended") else world

    while todo:
        command = todo[0]
        if command == "make_objects":
            world = say(world, "made")
        elif command == "report_verified":
            world = say(world, "verified")
        elif command == "begin_replay":
            side = replace(side, replays=True)
        elif command == "apply_calls":
            need(side.replays, "the destination answers what it only repeats")
            side = replace(side, calls=side.calls or why == "last calls")
        elif command == "answer_ping":
            world = say(world, "pong")
        elif command == "compare_sample":
            world = say(world, "probed")
        elif command == "report_failed":
            side, world = replace(side, told=True), say(world, "failed")
        elif command == "activate":
            side = replace(side, serves=True)
        elif command == "discard":
            side = replace(side, gone=True)
        else:
            break
        todo = todo[1:]
    side = replace(side, role=replace(role, reason=""), todo=todo, sent=False)
    if side.gone:
        need(side.told or why in ("reconcile_discard", "link_ended"), "the source is not told why nothing comes of it")
    need(side.gone == (role.state == "discarded"), f"the destination's process in {role.state}")
    need(side.serves == (role.state == "active"), f"who serves, in {role.state}")
    need(not side.serves or not side.replays, "the destination serves with a replay's answers and times")
    return replace(world, destination=side)


def destination_steps(world: World) -> Iterator[Step]:
    side = world.destination
    if side is None or side.gone:
        return
    if "receive0" in world.messages and not side.prepared:
        prepared = replace(world.send("received0"), destination=replace(side, prepared=True))
        yield "destination is prepared", prepared, True
    if side.todo:
        command, good = side.todo[0], False
        if command == "take_pages":
            yield from receiving(world)
            good = world.link != "open" and not world.down
        elif command == "rebuild":
            known = replace(world, destination=replace(side, knows=side.arrived))
            yield "destination rebuilt", came(known, Event("rebuilt", found=CUT)), True
        elif command == "listen":
            yield from listening(world)
        elif command == "compare":
            if side.calls:  # else it stands elsewhere than the source
                yield "destination compared", came(world, Event("compared")), True
            good = not side.calls
        elif command == "repair":
            yield from repairing(world)
            good = world.link != "open" and not world.down
        elif command == "finish_replay":
            settled = replace(world, destination=replace(side, replays=False))
            yield "destination finished", came(settled, Event("finished")), True
        yield f"destination cannot {command}", came(world, Event("failed")), good and not dead(side)
    if side.prepared:
        after = destination_reads(world)
        if after != world:
            yield "destination reads the record", after, True


def receiving(world: World) -> Iterator[Step]:
    side = world.destination
    assert side is not None
    if world.down[:1] == ("objects",):
        read = replace(world, down=world.down[1:])
        made = at_destination(read, Event("objects_came", found=b""))
        if made.destination is not None and not made.destination.gone:  # meanwhile the taking goes on
            made = replace(made, destination=replace(made.destination, todo=side.todo))
        yield "destination gets objects", made, True
        again = at_destination(made, Event("objects_came", found=b"")) if not dead(made.destination) else made
        yield "destination gets objects twice", again, False
    elif world.down:
        word, *_ = world.down
        need(word.startswith("state "), f"the destination gets {word!r} instead of pages")
        read = replace(world, down=world.down[1:], destination=replace(side, arrived=word.removeprefix("state ")))
        yield "destination has a state", came(read, Event("state_arrived", found="s")), True
        yield "destination has another's", came(read, Event("state_arrived", found="other")), False


def listening(world: World) -> Iterator[Step]:
    side = world.destination
    assert side is not None
    if world.down:
        word, read = world.down[0], replace(world, down=world.down[1:])
        if word == "replay":
            yield "destination hears of a replay", came(read, Event("replay_begins", found=CUT)), True
            yield "destination hears of another replay", came(read, Event("replay_begins", found=CUT + 1)), False
            return
        kind = {"calls": "calls", "last calls": "calls", "ping": "ping", "sample": "sample",
                "last": "last_arrived"}.get(word)
        need(kind is not None, f"the destination hears {word!r} in {side.role.state}")
        after = came(read, Event(str(kind), found=CUT))
        if word == "last calls" and after.destination is not None and after.destination.replays \
                and "apply_calls" in _given(side.role, str(kind)):
            after = replace(after, destination=replace(after.destination, calls=True))
        yield f"destination hears {word}", after, True
    elif world.link != "open":
        yield "destination hears no more", came(world, Event("link_ended")), True


def _given(role: DestinationRole, kind: str) -> tuple[str, ...]:
    return tuple(command.do for command in TABLES["destination"].step(role, Event(kind, found=CUT)).commands)


def repairing(world: World) -> Iterator[Step]:
    side = world.destination
    assert side is not None
    if not side.sent and world.link == "open":
        yield "destination asks for what differs", replace(world, up=(*world.up, "want"),
                                                           destination=replace(side, sent=True)), True
    elif world.down[:1] == ("rest",):
        read = replace(world, down=world.down[1:], destination=replace(side, knows="all"))
        yield "destination repaired", came(read, Event("repaired")), True


def destination_reads(world: World) -> World:
    side = world.destination
    if side is None or side.gone or not side.prepared or side.role.state == "active":
        return world
    action = reading(world.registry, "b", "incoming", 2)
    if action == "stay paused":
        return world
    if side.role.state == "idle":  # nobody has come yet: the worker just goes
        return replace(world, destination=None) if action == "discard" else world
    return at_destination(world, Event(EVENTS[action], found=2))  # type: ignore[index]
