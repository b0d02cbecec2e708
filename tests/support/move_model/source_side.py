"""What may happen at the worker that has the session: its commands, what they find, its link and its daemon."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rgpu.migrate.move.machine import Event
from rgpu.migrate.move.source import PROMISED, STANDING, Compared, Round, Shipped, SourceRole
from rgpu.migrate.records.reconcile import EVENTS
from tests.support.move_model.destination_side import at_destination
from tests.support.move_model.world import (
    ASKED,
    ASKS,
    BAD,
    CLOCK,
    ENOUGH,
    FEW,
    GOOD,
    HOLDS,
    HOPELESS,
    IN_TIME,
    LATE,
    MANY,
    SLOW,
    TABLES,
    WORTH_A_REPLAY,
    Source,
    Step,
    World,
    dead,
    need,
    reading,
)


def slim(role: SourceRole) -> SourceRole:
    """Times and figures distinguish no behaviour here beyond these."""
    return SourceRole(state=role.state, options=role.options, mode=role.mode, objects=role.objects,
                      rounds=min(role.rounds, 2), pages=min(role.pages, MANY), before=10**9,
                      speed=role.speed if role.speed < SLOW else SourceRole().speed, measured=role.measured)


def at_source(world: World, event: Event) -> World:
    """An event that somebody told: what is under way is stale then."""
    assert world.source is not None
    step = TABLES["source"].step(world.source.role, event)
    if step.stale:
        return world
    return obey_source(world, step.role, tuple(command.do for command in step.commands))


def found(world: World, event: Event) -> World:
    """The first command of the source has found something."""
    assert world.source is not None
    rest = world.source.todo[1:]
    if rest:  # the last event of a row's commands counts
        return obey_source(world, world.source.role, rest)
    step = TABLES["source"].step(world.source.role, event)
    need(not step.stale, f"the source has no row for {event.kind} in {world.source.role.state}")
    return obey_source(world, step.role, tuple(command.do for command in step.commands))


def failed(world: World) -> World:
    """Its first command fails: so do those behind it."""
    assert world.source is not None
    kind, has = "reconcile_resume" if world.source.called_off else "failed", world.source.has
    # It is open, and the agent did not come back to it; or the last calls of it could not be sent.
    if world.source.todo[0] == "open_tap" or (world.source.todo[0] == "compare" and not world.source.sent):
        has |= {"tap"}
    return found(replace(world, source=replace(world.source, todo=world.source.todo[:1], has=has)),
                 Event(kind, IN_TIME))


def obey_source(world: World, role: SourceRole, todo: tuple[str, ...]) -> World:
    """Do commands up to the first one that finds something."""
    source = world.source
    assert source is not None
    while todo:
        command = todo[0]
        if command == "resume":
            need(source.pauses > 0, "the source resumes what runs")
            source = replace(source, pauses=source.pauses - 1)
        elif command in ("start_samples", "slow_down"):
            source = replace(source, has=source.has | {"samples" if command == "start_samples" else "throttle"})
        elif command in ("stop_samples", "full_speed", "close_tap"):
            source = replace(source, has=source.has - {{"stop_samples": "samples", "full_speed": "throttle",
                                                        "close_tap": "tap"}[command]})
        elif command == "release_cut":
            need("cut" in source.has, "the source releases a cut that it has not")
            source = replace(source, has=source.has - {"cut"})
        elif command == "send_last_calls":
            need("tap" in source.has, "calls were not kept")
            if world.link == "open":
                world = replace(world, down=(*world.down, "last calls"))
        elif command == "report_offered":
            need(role.state == "offered", "the source reports what it has not offered")
            source = replace(source, reported=source.reported + "offered")
            world = replace(world.send("offered0"), offered=True)
        elif command == "report_failed":
            source = replace(source, reported=source.reported + "failed")
            world = world.send("failed0")
        elif command == "watch_deadline":
            source = replace(source, has=source.has | {"clock"})
        elif command in ("write_abort", "read_record"):
            source = replace(source, asked=command)
        elif command == "forget":
            source = replace(source, gone=True, has=frozenset(), asked="", called_off=False)
            world = world.broken_link()
        else:
            break
        todo = todo[1:]
    source = replace(source, role=slim(role), todo=todo, sent=False)
    world = replace(world, source=source)
    if not todo and not source.gone:  # the driving thread ends, and closes its end of the link
        world = replace(world, link="ended") if world.link == "open" else world
        if source.called_off:  # told between the offer and here
            source = replace(source, called_off=False)
            world = at_source(replace(world, source=source), Event("reconcile_resume", IN_TIME))
    assert world.source is not None
    check_source(world.source)
    return world


def check_source(source: Source) -> None:
    """What its commands left is what its state needs."""
    state = source.role.state
    for thing, states in HOLDS.items():
        held = thing in source.has
        need(held == (state in states) or source.gone, f"{'held' if held else 'lacking'}: {thing} in {state}")
    need(source.gone or source.pauses == (state in STANDING), f"paused {source.pauses} times in {state}")
    need(source.gone == (state == "forgotten"), f"the source's process in {state}")
    need(state not in PROMISED or source.reported == "offered", f"reported {source.reported!r} in {state}")
    need(state not in PROMISED or "clock" in source.has, f"nobody looks at the clock in {state}")
    need(source.reported in ("", "offered", "failed"), f"reported {source.reported!r}")
    need(source.asked == ASKED.get(state, source.asked), f"{source.asked or 'nothing'} was asked for in {state}")
    if state == "running":
        need(source.reported != "", "the move ended, and nobody was told")
        need(not source.todo, f"{source.todo} in an end")


def measured() -> Iterator[Event]:
    for one in (ENOUGH, WORTH_A_REPLAY, HOPELESS):
        yield Event("measured", IN_TIME, found=one)


def source_steps(world: World) -> Iterator[Step]:
    source = world.source
    if source is None or source.gone:
        return
    state = source.role.state
    if "send0" in world.messages and state == "idle":
        yield "source takes send", at_source(world, Event("send")), True
    if source.todo:
        yield from command_steps(world, source.todo[0])
        yield f"source cannot {source.todo[0]}", failed(world), world.link not in ("open", "") \
            or source.called_off or dead(world.destination)
    elif "clock" in source.has and state in PROMISED and not source.asked:
        yield CLOCK, at_source(world, Event("tick", LATE)), True
    if source.asked:
        yield from daemon_steps(world)
    if state in PROMISED or world.messages & {"reconcile0", "reconcile1"}:
        after = source_reads(world)
        if after != world:
            yield "source reads the record", after, True


def command_steps(world: World, command: str) -> Iterator[Step]:
    """What a command of the source may find."""
    source = world.source
    assert source is not None
    other = world.destination
    up = world.link == "open" and not dead(other)

    def on(what: str, event: Event, good: bool = True, world: World = world) -> Step:
        return f"source {what}", found(world, event), good

    def also(**values: object) -> World:
        return replace(world, source=replace(source, **values))  # type: ignore[arg-type]

    if command == "begin":
        if other is not None and other.prepared and not other.gone and other.role.state == "idle":
            yield on("begins", Event("begun"), world=at_destination(replace(world, link="open"), Event("receive")))
    elif command == "send_round" and up and other is not None and other.todo[:1] == ("take_pages",):
        for pages in (FEW, MANY):
            for objects in (True, False) if not source.role.rounds else (False,):
                shrinks = pages == FEW or not source.role.rounds
                yield on(f"sent {pages}", Event("round_done", IN_TIME, found=Round(pages, objects=objects)), shrinks)
        if not source.role.rounds:  # over a slow link
            for objects in (True, False):
                for pages in (FEW, MANY):
                    slow = Round(pages, sent=2 << 20, seconds=1e4, objects=objects)
                    yield on("sent slowly", Event("round_done", IN_TIME, found=slow), False)
    elif command == "measure":
        for event in measured():
            yield on("measured", event, event.found is not HOPELESS)
    elif command == "take_objects":
        for count in (1, 0):
            yield on("took objects", Event("objects_taken", IN_TIME, found=count))
    elif command in ("pause", "pause_for_cut"):
        yield on("stands", Event("drained", IN_TIME), world=also(pauses=source.pauses + 1))
    elif command == "open_tap":
        yield on("opened a tap", Event("tapped", IN_TIME), world=also(has=source.has | {"tap"}))
    elif command == "take_cut":
        need(source.pauses == 1 and "tap" in source.has, "a cut is taken of what runs, or is not kept")
        yield on("took a cut", Event("cut_taken", IN_TIME), world=also(has=source.has | {"cut"}))
    elif command == "ship_calls" and up:
        yield from shipping(world)
    elif command in ASKS and up:
        yield from asking(world, command)
    elif command == "offer" and not source.called_off:
        need(source.pauses == 1, "the source offers what runs")
        yield on("offers", Event("promised", IN_TIME))


def shipping(world: World) -> Iterator[Step]:
    source = world.source
    assert source is not None
    if not source.sent:
        messages = (*world.down, "calls", "ping", "sample")
        yield "source ships calls", replace(world, down=messages, source=replace(source, sent=True)), True
        return
    if world.up == ("pong", "probed"):
        read = replace(world, up=())
        for name, shipped, good in (("is caught up with", Shipped(0.0, 0.0, samples=((GOOD, 0.0),)), True),
                                    ("is far ahead", Shipped(5.0, 0.0), False),
                                    ("sees a bad sample", Shipped(0.0, 0.0, samples=((BAD, 0.0),)), False)):
            yield f"source {name}", found(read, Event("shipped", 0.0, found=shipped)), good
    if "failed" in world.up:
        yield "source hears of a failure", failed(world), True
    yield "source's program fails", found(world, Event("shipped", 0.0, found=Shipped(broken=True))), False
    yield "source waits in vain", found(world, Event("shipped", LATE, found=Shipped(heard=0.0))), False


def asking(world: World, command: str) -> Iterator[Step]:
    """A command that sends something and waits for the answer."""
    source, (messages, answer, event) = world.source, ASKS[command]
    assert source is not None
    if not source.sent:
        yield f"source begins to {command}", replace(world, down=world.down + messages,
                                                     source=replace(source, sent=True)), True
    elif world.up[:1] == ("failed",):
        yield "source hears of a failure", failed(world), True
    elif world.up[:1] == (answer,):
        more = (*world.down, "replay") if command == "send_cut" else world.down
        read = replace(world, up=world.up[1:], down=more)
        if event == "compared":
            yield "source repairs", found(read, Event(event, IN_TIME, found=Compared(FEW, 1e6))), True
            yield "source has too much to repair", found(read, Event(event, IN_TIME, found=Compared(MANY, 0.0))), False
            return
        yield f"source did {command}", found(read, Event(event, IN_TIME)), True
        if event == "verified":
            yield f"source did {command} too late", found(read, Event(event, LATE)), False
    elif world.up[:1] in (("pong",), ("probed",)):  # late answers
        yield "source skips a late answer", replace(world, up=world.up[1:]), True


def daemon_steps(world: World) -> Iterator[Step]:
    """The source's daemon does what the worker asked for, or dies before, or before it tells."""
    source, r = world.source, world.registry
    assert source is not None
    done = replace(world, source=replace(source, asked=""))
    if source.asked == "write_abort":
        still_open = r.move in ("preparing", "ready") and r.owner == "a"
        written = replace(done, registry=replace(r, move="aborted")) if still_open else done
        yield ("source aborts", at_source(written, Event("abort_won" if still_open else "abort_lost", IN_TIME)), True)
        if world.unknown:
            fewer = world.unknown - 1
            yield ("source aborts, answer lost", at_source(replace(written, unknown=fewer),
                                                           Event("abort_unknown", IN_TIME)), False)
            yield "source aborts, nobody tells", replace(written, unknown=fewer), False
            yield "source aborts, request lost", at_source(replace(done, unknown=fewer),
                                                           Event("abort_unknown", IN_TIME)), False
    else:
        action = reading(r, "a", "paused", 1)
        yield f"source reads {action}", at_source(done, Event(EVENTS[action], IN_TIME)), True  # type: ignore[index]
    if world.unknown:
        yield "source asked in vain", replace(done, unknown=world.unknown - 1), False


def source_reads(world: World) -> World:
    """Its daemon looks at the record, unasked."""
    source = world.source
    if source is None or source.gone:
        return world
    action = reading(world.registry, "a", "paused" if source.role.state in PROMISED else "running", 1)
    if action == "forget":
        if source.role.state in ("idle", "running"):  # no move has it: the worker just goes
            return replace(world.broken_link(), source=None)
        return at_source(world, Event("reconcile_forget", IN_TIME))
    if action == "resume" and world.registry.move not in ("preparing", "ready"):
        if source.todo:  # a thread is at it: it finds its link closed
            return replace(world.broken_link(), source=replace(source, called_off=True))
        return at_source(world, Event("reconcile_resume", IN_TIME))
    return world
