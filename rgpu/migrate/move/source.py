"""The source of a move as a table (DESIGN decisions 7, 8; OWNERSHIP 1, 2). Pure.

The worker that serves the session runs it (:mod:`rgpu.server.worker.move.departure`). Rounds of
pages are sent while the program runs. Then follows the last pause at once (copy), or a snapshot that
streams while the program runs on, and at the destination a replay of the calls that it makes
meanwhile. Two invariants hold whatever messages are lost, repeated or late and whatever process dies:

* A source that has *offered* (reported to any process that the copy is verified) resumes
  only after reading a record that is aborted, or after writing that itself:
  it waits for the commit until its own deadline, then competes for the record.
* Before the offer no record can be ready, so until then the source resumes by itself
  when anything fails, also while the registry cannot be reached.

Commands whose result is an event stand last in a row. Each of
``pause`` and ``pause_for_cut`` ends with a paused session, or with
``failed`` and a running one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rgpu.migrate.move import forecast
from rgpu.migrate.move.forecast import PAGE_BYTES, Choice, Cost, Measured
from rgpu.migrate.move.machine import Event, Machine, Role, Row
from rgpu.migrate.move.options import MoveOptions
from rgpu.migrate.move.sampling import Sampled

MAX_ROUNDS = 6  #: rounds of pages while the program runs
SMALL_ROUND = 64  #: pages: copying these in the pause is cheaper than another round
SHRINK = 0.7  #: a round that is not at least this much smaller than the last one gains nothing
SHORT_ROUND = 0.004  #: seconds: pages that take no longer are copied in the pause, over a link of any speed
TOLD_BYTES = 1 << 20  #: bytes: a smaller round does not measure the link's speed
CAUGHT_UP = 0.1  #: seconds that the replay may be behind when the last pause begins
CLOSER = 0.7  #: a lag counts as progress only where it is at most this part of the best one
SETTLED_SECONDS = 2.0  #: without progress, after which the lag counts as settled
STALL_SECONDS = 15.0  #: without progress of a destination that has calls to replay, after which it has stalled
REPLAY_SECONDS = 600.0  #: that a replay may take in all
WAITING_BYTES = 1 << 20  #: bytes of calls that may be unsent when a replay has caught up
SAMPLE_SECONDS = 2.0  #: that a replay which has caught up waits for the result of its first sample
ASK_AGAIN_SECONDS = 0.5  #: after which an abort or a read of the record without an answer is repeated
FAR = 1e9  #: seconds: lag of a replay that has not reported yet

#: The program runs and nothing is kept for a replay.
COPYING = ("beginning", "copying", "choosing", "gathering", "making")
#: A failure here may be the replay's alone: the caller may try again by copying.
BY_REPLAY = frozenset({"tapping", "pausing_for_cut", "cutting", "streaming", "replaying", "pausing_for_replay",
                       "comparing", "repairing"})
#: The session is paused: no call is applied and none is answered.
STANDING = frozenset({"cutting", "sending", "comparing", "repairing", "offering", "offered", "withdrawing", "asking"})
#: Another process may have been told that the copy is verified.
PROMISED = frozenset({"offered", "withdrawing", "asking"})


# -- results of commands -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Round:
    """Round of pages that was sent; ``seconds`` without throttling; ``objects``: objects are made ahead."""

    pages: int
    sent: int = 0  #: bytes
    seconds: float = 0.0
    objects: bool = False


@dataclass(frozen=True, slots=True)
class Shipped:
    """Progress of a replay after another piece of the calls was sent."""

    lag: float = FAR  #: seconds that it is behind, as the destination reported last
    heard: float = 0.0  #: when the destination reported last
    waiting: int = 0  #: bytes of calls that are not sent yet
    samples: tuple[tuple[Sampled, float], ...] = ()  #: samples compared since, each with the lag at that time
    overflowed: bool = False  #: calls do not fit in memory any more
    trouble: str = ""  #: error that ended the sampling
    broken: bool = False  #: the session has failed on its own


@dataclass(frozen=True, slots=True)
class Compared:
    """Pages that differ in the last pause, and the rest of the promised downtime in seconds."""

    pages: int
    left: float


# -- the role ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SourceRole(Role):
    """State of the source; ``running`` (the program runs on here) and ``forgotten`` are ends."""

    options: MoveOptions = MoveOptions()
    mode: str = "auto"  #: mode in use: as requested, or as chosen
    why: str = ""
    expected: Cost | None = None
    # copying
    speed: float = forecast.ASSUMED_SPEED  #: of the link, bytes/s
    first_seconds: float = 0.0  #: duration of the first round
    rounds: int = 0
    pages: int = 0  #: pages of the last round
    before: int = 0  #: pages of the round before it
    objects: bool = False  #: the destination makes objects ahead, and has not done so yet
    measured: Measured | None = None
    choice: Choice | None = None
    # replaying
    began: float = 0.0
    lag: float = FAR
    heard: float = 0.0
    best: float = FAR  #: the smallest lag so far
    better_at: float = 0.0  #: when ``best`` was reached
    samples: int = 0  #: number of samples compared
    sampled: Sampled = Sampled(0, 0, 0)  #: the last sample
    sample_by: float = 0.0  #: until when a replay that has caught up waits for a sample
    mismatched: int = 0  #: pages that differed in the last pause
    # the last pause
    paused_at: float = 0.0
    deadline: float = 0.0  #: end of the promised downtime; after it: when to repeat a request
    copy_may_help: bool = False  #: the replay failed, so a move by copy may succeed

    @property
    def standing(self) -> bool:
        return self.state in STANDING

    @property
    def stop(self) -> float:
        """Seconds that sending the remaining pages would take."""
        return self.pages * PAGE_BYTES / self.speed

    @property
    def settled(self) -> bool:
        """Whether the lag is short enough for the last pause, for a replay that gets no closer."""
        return self.lag <= self.options.limit / 4


def role_for(options: MoveOptions) -> SourceRole:
    """Make the role of a source for these options."""
    return SourceRole(options=options, mode=options.mode, why=f"{options.mode} was asked for")


def _note(role: SourceRole, event: Event) -> dict[str, object]:
    found = event.found
    match event.kind:
        case "round_done":
            return _round(role, found)
        case "measured":
            return _chosen(role, found)
        case "objects_taken":
            return {"objects": False}
        case "cut_verified":
            return {"began": event.now, "heard": event.now, "better_at": event.now}
        case "shipped":
            return _shipped(role, found, event.now)
        case "compared":
            return {"mismatched": found.pages, "copy_may_help": True}
        case "drained":
            return {"paused_at": event.now, "deadline": event.now + role.options.limit}
        case "failed":
            return {"copy_may_help": role.state in BY_REPLAY}
        case "verified" | "reconcile_resume":
            return {"copy_may_help": False}
    return {}


def _round(role: SourceRole, found: Round) -> dict[str, object]:
    values: dict[str, object] = {"rounds": role.rounds + 1, "before": role.pages, "pages": found.pages}
    if not role.rounds:
        values.update(objects=found.objects, first_seconds=found.seconds)
        if found.sent > TOLD_BYTES:
            values["speed"] = found.sent / max(found.seconds, 1e-6)
    if role.mode == "copy":  # cost of the last pause if further rounds gain nothing
        stop = found.pages * PAGE_BYTES / float(values.get("speed", role.speed))  # type: ignore[arg-type]
        values["expected"] = Cost(stop, 0.0, stop)
    return values


def _chosen(role: SourceRole, found: Measured) -> dict[str, object]:
    """Return the chosen mode and its expected cost; ``auto`` compares copy and replay."""
    options = role.options
    measured = replace(found, mismatched=options.mismatched)
    choice = forecast.choose(measured, max_downtime=options.max_downtime, max_slowdown=options.max_slowdown)
    mode, why = (choice.mode, choice.reason) if options.mode == "auto" else (options.mode, role.why)
    cost = choice.replay if mode == "replay" else choice.copy
    return {"measured": measured, "choice": choice, "mode": mode, "why": why, "expected": cost or choice.copy}


def _shipped(role: SourceRole, found: Shipped, now: float) -> dict[str, object]:
    values: dict[str, object] = {"lag": found.lag, "heard": found.heard, "samples": role.samples + len(found.samples),
                                 "copy_may_help": not found.broken}
    if found.lag < role.best * CLOSER:
        values.update(best=found.lag, better_at=now)
    if found.samples:
        values["sampled"] = found.samples[-1][0]
        cost = None if role.measured is None else forecast.replaying(
            replace(role.measured, mismatched=found.samples[-1][0].share), role.options.max_slowdown)
        if cost is not None:
            values["expected"] = replace(role.expected or cost, downtime=cost.downtime)
    if not role.sample_by and _close(replace(role, **values), found, now):  # type: ignore[arg-type]
        values["sample_by"] = now + SAMPLE_SECONDS
    return values


# -- guards ------------------------------------------------------------------------


def _first_of_others(role: SourceRole, event: Event) -> bool:
    """Whether the first round is over, and another mode than copy is allowed."""
    return role.rounds == 1 and role.options.mode != "copy"


def _unkept(role: SourceRole, event: Event) -> str:
    """Return why neither mode keeps the promised downtime, where a longer one is not allowed; empty otherwise."""
    options, choice = role.options, role.choice
    if choice is None or options.mode != "auto" or not options.abort_on_timeout \
            or choice.cost.downtime <= options.max_downtime:
        return ""
    return (f"the promised {options.max_downtime:.2f} s cannot be kept: {choice.reason}; the session runs on where it "
            "was")


def _by_replay(role: SourceRole, event: Event) -> bool | str:
    return role.mode == "replay" and (role.why or True)


def _objects_ahead(role: SourceRole, event: Event) -> bool:
    return role.objects


def _objects_found(role: SourceRole, event: Event) -> bool:
    """Whether there are objects that take long to make."""
    return bool(event.found)


def _enough(role: SourceRole, event: Event) -> str:
    """Return why another round would gain nothing; empty: it would."""
    if role.pages <= SMALL_ROUND or role.stop <= SHORT_ROUND:
        return f"{role.pages} pages are left: another round would cost as much as the pause"
    if role.rounds >= MAX_ROUNDS:
        return f"{role.pages} pages are left after {role.rounds} rounds"
    if role.rounds > 1 and role.pages > role.before * SHRINK:
        return f"{role.pages} pages are left, {role.before} were before: further rounds gain nothing"
    return ""


def _too_long(role: SourceRole, event: Event) -> str:
    """Return why the last pause does not begin: it would be longer than promised. Empty: it may."""
    if not _enough(role, event) or not role.options.abort_on_timeout or role.stop <= role.options.max_downtime:
        return ""
    return (f"the stop would take about {role.stop:.2f} s, more than the {role.options.max_downtime:.2f} s allowed; "
            "the session runs on where it was")


def _useless(role: SourceRole, event: Event) -> str:
    """Return why, by the last samples, the replay is to be given up; empty: it is not."""
    if role.measured is None:
        return ""
    for sampled, behind in event.found.samples:
        why = forecast.given_up(role.measured, sampled, behind=behind, limit=role.options.limit,
                                max_slowdown=role.options.max_slowdown, asked=role.options.mode == "replay")
        if why:
            return why
    return ""


def _stuck(role: SourceRole, event: Event) -> str:
    """Return why the replay will not catch up, or makes no progress; empty: it does."""
    if event.found.overflowed:
        return "the calls that wait to be replayed do not fit in memory any more"
    if event.now - role.heard > STALL_SECONDS:
        return f"the destination has applied nothing for {event.now - role.heard:.0f} s"
    if event.now - role.began > REPLAY_SECONDS:
        return f"the destination has not caught up within {REPLAY_SECONDS:.0f} s"
    return str(event.found.trouble)


def _broken(role: SourceRole, event: Event) -> str:
    return "the session has failed on its own: the program has the error" if event.found.broken else ""


def _close(role: SourceRole, found: Shipped, now: float) -> bool:
    """Whether the lag is short enough for the last pause.

    Two busy hosts may never reach ``CAUGHT_UP``: a settled lag is then replayed in the pause, if the limit allows it.
    """
    settled = now - role.better_at > SETTLED_SECONDS and role.settled
    return (role.lag <= CAUGHT_UP or settled) and found.waiting < WAITING_BYTES


def _caught_up(role: SourceRole, event: Event) -> str:
    """Whether the replay is close and a sample was compared, or none was in time.

    The last pause finds the pages that differ in any case.
    """
    if not _close(role, event.found, event.now) or not (role.samples or event.now > role.sample_by):
        return ""
    return f"the replay is {role.lag * 1000:.0f} ms behind"


def _too_many(role: SourceRole, event: Event) -> str:
    found: Compared = event.found
    if forecast.repair_fits(found.pages, role.speed, found.left):
        return ""
    return (f"{found.pages} pages differ after the replay, more than can be sent in what is left of the promised "
            f"{role.options.max_downtime:.2f} s")


def _overrun(role: SourceRole, event: Event) -> str:
    """Return why the move ends: the pause has already been longer than promised. Empty: it has not."""
    if event.now < role.deadline:
        return ""
    return (f"the stop took {event.now - role.paused_at:.2f} s, more than the {role.options.limit:.2f} s allowed; the "
            "session runs on where it was")


def _expired(role: SourceRole, event: Event) -> str:
    if event.now < role.deadline:
        return ""
    return f"no commit came within the promised {role.options.limit:.2f} s"


def _overdue(role: SourceRole, event: Event) -> bool:
    return event.now >= role.deadline


def _enter(role: SourceRole, event: Event) -> dict[str, object]:
    return {"deadline": event.now + ASK_AGAIN_SECONDS} if role.state in ("withdrawing", "asking") else {}


GUARDS: dict[str, Callable[[SourceRole, Event], bool | str]] = {
    "first_of_others": _first_of_others, "unkept": _unkept, "by_replay": _by_replay,
    "objects_ahead": _objects_ahead, "objects_found": _objects_found, "enough": _enough, "too_long": _too_long,
    "useless": _useless, "stuck": _stuck, "broken": _broken, "caught_up": _caught_up, "too_many": _too_many,
    "overrun": _overrun, "expired": _expired, "overdue": _overdue,
}


# -- the table ---------------------------------------------------------------------


def _on(state: str, event: str) -> Iterator[Row]:
    """Yield the rows for when only further rounds can still be done beside the running program."""
    yield Row(state, event, "running", ("report_failed",), "the stop would be longer than promised", "too_long")
    yield Row(state, event, "pausing", ("pause",), "few pages are left, or rounds gain nothing more", "enough")
    yield Row(state, event, "copying", ("send_round",), "pages that changed meanwhile are sent")


def _off(state: str, *undo: str) -> Iterator[Row]:
    """Yield the rows before the offer: no process was told that the copy is verified, so the program resumes here."""
    yield Row(state, "failed", "running", (*undo, "report_failed"), "the move failed; the session runs on")
    yield Row(state, "reconcile_resume", "running", (*undo, "report_failed"), "the move was called off")
    yield Row(state, "reconcile_forget", "forgotten", ("forget",), "somebody else owns the session")


def _decided(state: str) -> Iterator[Row]:
    yield Row(state, "reconcile_resume", "running", ("resume",), "the record says aborted")
    yield Row(state, "reconcile_forget", "forgotten", ("forget",), "the record says that another owns the session")


TABLE: tuple[Row, ...] = (
    Row("idle", "send", "beginning", ("begin",), "a move begins"),
    Row("beginning", "begun", "copying", ("send_round",), "the destination listens: all pages go"),
    Row("copying", "round_done", "choosing", ("measure",), "replay or copy?", "first_of_others"),
    Row("copying", "round_done", "gathering", ("take_objects",), "objects can be made ahead", "objects_ahead"),
    *_on("copying", "round_done"),
    Row("choosing", "measured", "running", ("report_failed",), "no mode keeps the promise", "unkept"),
    Row("choosing", "measured", "tapping", ("open_tap",), "a replay stops it for less than copying", "by_replay"),
    Row("choosing", "measured", "gathering", ("take_objects",), "objects can be made ahead", "objects_ahead"),
    *_on("choosing", "measured"),
    Row("gathering", "objects_taken", "making", ("send_objects",), "what takes long is made while it runs",
        "objects_found"),
    *_on("gathering", "objects_taken"),
    *_on("making", "objects_made"),
    *(row for state in COPYING for row in _off(state)),
    # Copy: the last pause.
    Row("pausing", "drained", "sending", ("send_rest",), "all work is done: the last pages and the objects go"),
    *_off("pausing"),
    Row("sending", "verified", "running", ("resume", "report_failed"), "the stop took too long", "overrun"),
    Row("sending", "verified", "offering", ("offer",), "the destination verified every page"),
    *_off("sending", "resume"),
    # Replay: a snapshot in one short pause; then the program runs on while the snapshot streams and the replay follows.
    Row("tapping", "tapped", "pausing_for_cut", ("pause_for_cut",), "what is applied from now on is kept"),
    *_off("tapping", "close_tap"),
    Row("pausing_for_cut", "drained", "cutting", ("take_cut",), "all work is done: pages are copied aside"),
    *_off("pausing_for_cut", "close_tap"),
    Row("cutting", "cut_taken", "streaming", ("resume", "start_samples", "send_cut"), "the program runs on"),
    *_off("cutting", "resume", "close_tap"),
    Row("streaming", "cut_verified", "replaying", ("release_cut", "slow_down", "ship_calls"),
        "the destination has the whole cut"),
    *_off("streaming", "release_cut", "stop_samples", "close_tap"),
    Row("replaying", "shipped", "running", ("stop_samples", "full_speed", "close_tap", "report_failed"),
        "the session failed", "broken"),
    Row("replaying", "shipped", "running", ("stop_samples", "full_speed", "close_tap", "report_failed"),
        "a sample differs in too many pages", "useless"),
    Row("replaying", "shipped", "running", ("stop_samples", "full_speed", "close_tap", "report_failed"),
        "the replay does not come along", "stuck"),
    Row("replaying", "shipped", "pausing_for_replay", ("stop_samples", "full_speed", "pause"),
        "the replay is close behind", "caught_up"),
    Row("replaying", "shipped", "replaying", ("ship_calls",), "the replay follows"),
    *_off("replaying", "stop_samples", "full_speed", "close_tap"),
    Row("pausing_for_replay", "drained", "comparing", ("send_last_calls", "close_tap", "compare"),
        "all work is done: the hashes of all pages go"),
    *_off("pausing_for_replay", "close_tap"),
    Row("comparing", "compared", "running", ("resume", "report_failed"), "too much to repair", "too_many"),
    Row("comparing", "compared", "repairing", ("repair",), "what differs is sent"),
    *_off("comparing", "resume", "close_tap"),
    Row("repairing", "verified", "running", ("resume", "report_failed"), "the stop took too long", "overrun"),
    Row("repairing", "verified", "offering", ("offer",), "the destination verified every page"),
    *_off("repairing", "resume"),
    # Both: from the offer on only the record decides.
    Row("offering", "promised", "offered", ("report_offered", "watch_deadline"), "verified; the record will decide"),
    *_off("offering", "resume"),
    *_decided("offered"),
    Row("offered", "tick", "withdrawing", ("write_abort",), "no commit within the promised downtime", "expired"),
    Row("withdrawing", "abort_won", "running", ("resume",), "our abort came before any commit"),
    Row("withdrawing", "abort_lost", "asking", ("read_record",), "the record had changed"),
    Row("withdrawing", "abort_unknown", "asking", ("read_record",), "the abort's outcome is not known"),
    Row("withdrawing", "tick", "withdrawing", ("write_abort",), "nobody said what became of the abort", "overdue"),
    *_decided("withdrawing"),
    Row("asking", "reconcile_wait", "withdrawing", ("write_abort",), "the move is still open"),
    Row("asking", "tick", "asking", ("read_record",), "the registry did not answer", "overdue"),
    *_decided("asking"),
)

SOURCE: Machine[SourceRole] = Machine(TABLE, GUARDS, _note, _enter)
