"""The world that the three tables of a move are explored in: every interleaving of what may happen.

It holds the tables that ship, the real :func:`settle`, and an abstract registry
record. What a command finds is an event, so a table that forgets a command
waits for ever, and one that gives a wrong one meets an event that it has no row
for. The leader's messages stay for ever: each may be delivered at any time, any
number of times, or never; the link between the workers keeps its order and may
break. Writes to the registry may succeed with their answer lost. A second
leader may take over at any time while the first one goes on believing. Each
worker may die, the program may fail, whoever asked may cancel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from rgpu.migrate.move.coordinator import COORDINATOR, CoordinatorRole
from rgpu.migrate.move.destination import DESTINATION, DestinationRole
from rgpu.migrate.move.forecast import Measured
from rgpu.migrate.move.machine import Event, Machine
from rgpu.migrate.move.options import MoveOptions
from rgpu.migrate.move.sampling import Sampled
from rgpu.migrate.move.source import PROMISED, SOURCE, STANDING, Compared, Round, Shipped, SourceRole, role_for
from rgpu.migrate.records.reconcile import EVENTS, Holding, reconcile
from rgpu.migrate.records.schema import MoveRecord, SessionRecord

#: What is explored: a test may put another table in its place.
TABLES: dict[str, Machine] = {"source": SOURCE, "destination": DESTINATION, "coordinator": COORDINATOR}

LATE, IN_TIME = 1e9, -1.0  #: the model's deadlines are at 0
FEW, MANY = 1, 10**6  #: pages
SLOW = 1e6  #: bytes/s
CLOCK = "the source's clock"
CUT = 5  #: the position of what is sent first
ENOUGH = Measured(pages=10, differing=1, changed=((0.1, 1),), speed=1e9, free_pages=100)
WORTH_A_REPLAY = Measured(pages=MANY, differing=10**5, changed=((0.1, 10**5),), speed=1e9, free_pages=MANY)
HOPELESS = Measured(pages=MANY, differing=MANY, changed=((0.1, MANY),), speed=1e9, free_pages=0)
GOOD, BAD = Sampled(512, 0, MANY), Sampled(512, 512, 10**9)

#: In these states, and in no others, the source holds these things when its commands are done.
HOLDS = {"tap": {"pausing_for_cut", "cutting", "streaming", "replaying", "pausing_for_replay"},
         "samples": {"streaming", "replaying"}, "throttle": {"replaying"}, "cut": {"streaming"}}
#: What the source has its daemon do at once when it comes into a state.
ASKED = {"withdrawing": "write_abort", "asking": "read_record"}
#: What a leader writes in a state: that is what `rgpu migrate status` shows.
WRITES = {"beginning": "write_begin", "readying": "write_ready", "committing": "write_commit",
          "aborting": "write_abort"}
#: What is sent down the link by a command of the source, and the answer that it waits for.
ASKS = {"send_objects": (("objects",), "made", "objects_made"), "send_rest": (("state all",), "verified", "verified"),
        "send_cut": (("state cut",), "verified", "cut_verified"), "compare": (("last",), "want", "compared"),
        "repair": (("rest",), "verified", "verified")}


class Broken(Exception):
    """An invariant does not hold."""


def need(holds: bool, says: str) -> None:
    if not holds:
        raise Broken(says)


@dataclass(frozen=True, slots=True)
class Registry:
    """The session's record. ``owner``: a (source), b (destination), c (recovered elsewhere)."""

    owner: str = "a"
    epoch: int = 1
    move: str = "none"  #: none, preparing, ready, committed, aborted
    leader: int = 0

    def record(self) -> SessionRecord:
        return _record(self.owner, self.epoch, self.move)


@cache
def _record(owner: str, epoch: int, state: str) -> SessionRecord:
    moving = state in ("preparing", "ready")
    move = None if state == "none" else MoveRecord(
        id="m", source="a", destination="b", destination_incarnation=7, device="cpu:0", state=state)
    return SessionRecord(name="s", state="moving" if moving else "running", owner=owner, incarnation=7, epoch=epoch,
                         quota=1, agent="", device="cpu:0", move=move)


@cache
def reading(registry: Registry, host: str, holds: str, epoch: int) -> str:
    return reconcile(registry.record(), Holding(host, 7, holds, epoch, "m")).action  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Leader:
    """``todo``: commands not yet done."""

    role: CoordinatorRole = CoordinatorRole()
    todo: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """The worker that has the session. ``asked``: of its daemon: abort, read, or nothing."""

    role: SourceRole = role_for(MoveOptions())
    todo: tuple[str, ...] = ()
    sent: bool = False  #: the first command of ``todo`` has sent what it sends
    pauses: int = 0
    has: frozenset[str] = frozenset()
    reported: str = ""
    asked: str = ""
    called_off: bool = False
    gone: bool = False  #: its process has ended, as it was told


@dataclass(frozen=True, slots=True)
class Destination:
    """``knows``: what is here: nothing, cut, all; ``calls``: the last ones were applied."""

    role: DestinationRole = DestinationRole(session="s")
    todo: tuple[str, ...] = ()
    sent: bool = False
    prepared: bool = False  #: its process was started
    knows: str = ""
    arrived: str = ""
    calls: bool = False
    replays: bool = False  #: what it applies is a replay, whose answers stay here
    told: bool = False
    serves: bool = False
    gone: bool = False


@dataclass(frozen=True, slots=True)
class World:
    registry: Registry = Registry()
    source: Source | None = Source()  #: None: dead
    destination: Destination | None = Destination()
    leaders: tuple[Leader, Leader | None] = (Leader(CoordinatorRole(), ("start",)), None)
    messages: frozenset[str] = frozenset()
    down: tuple[str, ...] = ()  #: the link between the workers: messages not read yet
    up: tuple[str, ...] = ()
    link: str = ""  #: open, ended (by the source, with all that was sent), broken; empty: not yet
    offered: bool = False  #: history: the source told somebody
    committed: bool = False
    unknown: int = 2  #: answers of the registry and of daemons that may still be lost
    deaths: int = 2
    breaks: int = 1
    recoveries: int = 1
    fair: bool = True  #: history: nothing went wrong
    uncleared: bool = False  #: history: a leader could not take the move off the record
    allowed: tuple[int, int, int] = (2, 2, 1)  #: unknown, deaths and recoveries at its beginning

    def send(self, message: str) -> World:
        return replace(self, messages=self.messages | {message})

    def broken_link(self) -> World:
        return replace(self, link="broken", down=(), up=()) if self.link else self


#: (what happens, the world after it, whether nothing goes wrong by it)
Step = tuple[str, World, bool]


# -- the registry's transactions: what ownership.py decides, on the abstract record ---------------


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
    elif command == "settle":
        yield f"{name} settles", after(destination_reads(source_reads(world)), "settled"), True
        yield f"{name} settles in vain", after(world.send(f"settle{who}"), "unsettled"), False


def dead(side: Source | Destination | None) -> bool:
    return side is None or side.gone


# -- the source -----------------------------------------------------------------------------------


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
    kind, has = "settle_resume" if world.source.called_off else "failed", world.source.has
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
            world = at_source(replace(world, source=source), Event("settle_resume", IN_TIME))
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
    if state in PROMISED or world.messages & {"settle0", "settle1"}:
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
        return at_source(world, Event("settle_forget", IN_TIME))
    if action == "resume" and world.registry.move not in ("preparing", "ready"):
        if source.todo:  # a thread is at it: it finds its link closed
            return replace(world.broken_link(), source=replace(source, called_off=True))
        return at_source(world, Event("settle_resume", IN_TIME))
    return world


# -- the destination ------------------------------------------------------------------------------


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
        need(side.told or why in ("settle_discard", "link_ended"), "the source is not told why nothing comes of it")
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
        elif command == "settle_replay":
            settled = replace(world, destination=replace(side, replays=False))
            yield "destination settled", came(settled, Event("settled")), True
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


# -- accidents -------------------------------------------------------------------------------------


def accidents(world: World) -> Iterator[Step]:
    """Deaths, a broken link, an election, a recovery to a third node (also of a source that only seems dead)."""
    if world.deaths:
        fewer = replace(world, deaths=world.deaths - 1)
        if not dead(world.source):
            yield "source dies", replace(fewer.broken_link(), source=None), False
        if world.destination is not None and world.destination.prepared and not world.destination.gone:
            yield "destination dies", replace(fewer.broken_link(), destination=None), False
        if world.leaders[0].todo:
            yield "leader0 dies", replace(fewer, leaders=(Leader(CoordinatorRole("dead")), world.leaders[1])), False
    if world.breaks and world.link == "open":
        yield "the link breaks", replace(world.broken_link(), breaks=world.breaks - 1), False
    if world.leaders[1] is None and world.registry.move != "none":
        step = TABLES["coordinator"].step(CoordinatorRole(), Event("resume"))
        second = Leader(replace(step.role, reason=""), tuple(command.do for command in step.commands))
        yield "an election", replace(world, leaders=(world.leaders[0], second),
                                     registry=replace(world.registry, leader=1)), False
    elif world.leaders[1] is None and world.leaders[0].todo[:1] == ("write_begin",):  # nothing that it would find
        yield "an election", replace(world, leaders=(world.leaders[0], Leader(CoordinatorRole("over"))),
                                     registry=replace(world.registry, leader=1)), False
    if world.recoveries and world.registry.owner != "c":
        r = world.registry
        move = "aborted" if r.move in ("preparing", "ready") else r.move
        after = replace(r, owner="c", epoch=r.epoch + 1, move=move)
        yield "recovered at c", replace(world, recoveries=0, registry=after), False


def steps(world: World) -> Iterator[Step]:
    for every in (leader_steps(world, 0), leader_steps(world, 1), source_steps(world), destination_steps(world),
                  accidents(world)):
        for name, after, good in every:
            fair = (good and name != CLOCK) or not after.fair  # before its time: nobody else was so slow
            yield name, after if fair else replace(after, fair=False), good
