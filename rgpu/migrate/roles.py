"""The three roles of a move as tables (DESIGN decisions 7, 8; OWNERSHIP 1, 2). Pure.

The worker that has the session runs :data:`SOURCE`, the one that is to have it
:data:`DESTINATION`, the elected leader :data:`COORDINATOR`. They agree on
nothing among themselves: the registry's record decides, and each of them reads
it (``settle.py``) before it acts on a decision.

What holds, whatever is lost, repeated, late or dead (tests/migrate/test_model.py):

* A source that has *offered* (told anybody that the copy is verified) goes on
  only after reading a record that says aborted. Before the offer no record can
  say ready, so until then it may resume by itself, and does when anything fails.
* A destination serves only after reading a record that says committed to it.
* The coordinator commits only what a source offered.
"""

from __future__ import annotations

from dataclasses import dataclass

from rgpu.migrate.machine import Event, Machine, Role, Row

MAX_ROUNDS = 6  #: of pages while the program runs
SMALL_ROUND = 64  #: pages: sending these in the pause is cheaper than another round
SHRINK = 0.7  #: a round that is not at least this much smaller than the last one gains nothing
DRAIN_SECONDS = 10.0  #: for the source's work to finish (SEMANTICS 19)
RECEIVE_SECONDS = 120.0  #: a destination that hears nothing for so long gives up, or asks


# -- the source ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SourceRole(Role):
    """``idle``, ``copying``, ``streaming`` and ``replaying`` run; ``cutting`` and ``pausing`` to ``asking`` do not.

    ``running`` and ``forgotten`` are ends.
    """

    replay: bool = False  #: a cut and a replay, instead of copying to the end
    rounds: int = 0
    pages: int = 0  #: of the last round
    before: int = 0  #: of the round before it
    deadline: float = 0.0  #: end of the drain, then of the promised downtime
    max_downtime: float = 10.0

    @property
    def paused(self) -> bool:
        """No call is applied and nobody is answered."""
        return self.state in ("cutting", "pausing", "sending", "offered", "withdrawing", "asking")


def _source_note(role: SourceRole, event: Event) -> dict[str, object]:
    if event.kind == "replay":
        return {"replay": True}
    if event.kind == "cut_begins":
        return {"deadline": event.now + DRAIN_SECONDS}
    if event.kind == "round_done":
        return {"rounds": role.rounds + 1, "before": role.pages, "pages": event.pages}
    if event.kind == "paused":
        return {"deadline": event.now + DRAIN_SECONDS}
    if event.kind == "drained":
        return {"deadline": event.now + role.max_downtime}
    return {}


def _enough(role: SourceRole, event: Event) -> bool:
    """Another round would gain nothing."""
    shrunk = role.rounds < 2 or role.pages <= role.before * SHRINK
    return role.pages <= SMALL_ROUND or role.rounds >= MAX_ROUNDS or not shrunk


def _overdue(role: SourceRole, event: Event) -> bool:
    return event.now > role.deadline


SOURCE: Machine[SourceRole] = Machine((
    Row("idle", "send", "copying", ("send_round",), "a move begins"),
    Row("copying", "round_done", "pausing", ("pause",), "few pages are left, or rounds gain nothing more", "enough"),
    Row("copying", "round_done", "copying", ("send_round",), "pages that changed meanwhile are sent"),
    Row("copying", "failed", "running", ("report_failed",), "the copy failed; the program never stopped"),
    Row("copying", "settle_resume", "running", (), "the move was aborted; the program never stopped"),
    Row("copying", "settle_forget", "forgotten", ("forget",), "somebody else owns the session"),
    # By replay: a cut in one short pause, then the program runs on while the cut streams and is caught up with.
    Row("copying", "replay", "cutting", ("pause",), "a replay gets along with a shorter stop than copying"),
    Row("cutting", "cut_begins", "cutting", (), "calls are not applied any more; their work drains"),
    Row("cutting", "cut", "streaming", ("resume", "send_cut"), "the cut's pages are aside, the program runs on"),
    Row("cutting", "failed", "running", ("resume", "report_failed"), "there is no room for a cut, or it failed"),
    Row("cutting", "tick", "running", ("resume", "report_failed"), "the work did not drain in time", "overdue"),
    Row("cutting", "settle_resume", "running", ("resume", "report_failed"), "the move was aborted"),
    Row("cutting", "settle_forget", "forgotten", ("forget",), "somebody else owns the session"),
    Row("streaming", "cut_verified", "replaying", ("send_calls", "slow_down"), "the destination has the whole cut"),
    Row("streaming", "failed", "running", ("report_failed",), "the cut was not delivered; the program never stopped"),
    Row("streaming", "settle_resume", "running", (), "the move was aborted"),
    Row("streaming", "settle_forget", "forgotten", ("forget",), "somebody else owns the session"),
    Row("replaying", "caught_up", "pausing", ("full_speed", "pause"), "the replay is close behind"),
    Row("replaying", "failed", "running", ("full_speed", "report_failed"),
        "the replay faulted, fell behind, or is too often wrong"),
    Row("replaying", "settle_resume", "running", ("full_speed",), "the move was aborted"),
    Row("replaying", "settle_forget", "forgotten", ("forget",), "somebody else owns the session"),
    # Paused, not offered: nobody can have been told that the copy is good.
    Row("pausing", "paused", "pausing", (), "calls are not applied any more; their work drains"),
    Row("pausing", "drained", "sending", ("send_rest",), "all work is done: the last pages and the objects go"),
    Row("pausing", "failed", "running", ("resume", "report_failed"), "the work does not drain"),
    Row("pausing", "tick", "running", ("resume", "report_failed"), "the work did not drain in time", "overdue"),
    Row("pausing", "settle_resume", "running", ("resume", "report_failed"), "the move was aborted"),
    Row("pausing", "settle_forget", "forgotten", ("forget",), "somebody else owns the session"),
    Row("sending", "verified", "offered", ("report_offered",), "the destination verified every page"),
    Row("sending", "failed", "running", ("resume", "report_failed"), "the copy failed"),
    Row("sending", "tick", "running", ("resume", "report_failed"), "the promised downtime ran out", "overdue"),
    Row("sending", "settle_resume", "running", ("resume", "report_failed"), "the move was aborted"),
    Row("sending", "settle_forget", "forgotten", ("forget",), "somebody else owns the session"),
    # Offered: only the record may say what follows.
    Row("offered", "settle_resume", "running", ("resume",), "the record says aborted"),
    Row("offered", "settle_forget", "forgotten", ("forget",), "the record says that another owns the session"),
    Row("offered", "tick", "withdrawing", ("write_abort",), "the promised downtime ran out", "overdue"),
    Row("withdrawing", "abort_won", "running", ("resume",), "our abort came before any commit"),
    Row("withdrawing", "abort_lost", "asking", ("read_record",), "the record had changed"),
    Row("withdrawing", "abort_unknown", "asking", ("read_record",), "the abort's outcome is not known"),
    Row("withdrawing", "settle_resume", "running", ("resume",), "the record says aborted"),
    Row("withdrawing", "settle_forget", "forgotten", ("forget",), "the record says that another owns the session"),
    Row("asking", "settle_resume", "running", ("resume",), "the record says aborted"),
    Row("asking", "settle_forget", "forgotten", ("forget",), "the record says that another owns the session"),
    Row("asking", "settle_wait", "withdrawing", ("write_abort",), "the move is still open"),
    Row("asking", "tick", "asking", ("read_record",), "the registry did not answer", "overdue"),
    Row("running", "settle_forget", "forgotten", ("forget",), "somebody else owns the session"),
), {"enough": _enough, "overdue": _overdue}, _source_note)


# -- the destination ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DestinationRole(Role):
    """``active`` and ``discarded`` are ends. A cut that was verified is not a session that may serve."""

    deadline: float = 0.0


def _destination_note(role: DestinationRole, event: Event) -> dict[str, object]:
    return {} if event.kind == "tick" else {"deadline": event.now + RECEIVE_SECONDS}


def _silent(role: DestinationRole, event: Event) -> bool:
    return event.now > role.deadline


DESTINATION: Machine[DestinationRole] = Machine((
    Row("idle", "receive", "receiving", ("prepare",), "a session is to arrive"),
    Row("receiving", "page", "receiving", (), "the source sends"),
    Row("receiving", "state_arrived", "rebuilding", ("rebuild",), "all of the session is here"),
    Row("receiving", "cut_arrived", "rebuilding_cut", ("rebuild",), "all of a cut is here"),
    Row("receiving", "failed", "discarded", ("report_failed", "discard"), "the copy failed"),
    Row("receiving", "tick", "discarded", ("discard",), "nothing was heard from the source", "silent"),
    Row("receiving", "settle_discard", "discarded", ("discard",), "the move is off"),
    Row("rebuilding", "rebuilt", "verified", ("report_verified",), "every page has the hash that the source sent"),
    Row("rebuilding", "failed", "discarded", ("report_failed", "discard"), "the session cannot be rebuilt here"),
    Row("rebuilding", "settle_discard", "discarded", ("discard",), "the move is off"),
    Row("rebuilding_cut", "rebuilt", "replaying", ("report_cut_verified",), "every page of the cut is right"),
    Row("rebuilding_cut", "failed", "discarded", ("report_failed", "discard"), "the session cannot be rebuilt here"),
    Row("rebuilding_cut", "settle_discard", "discarded", ("discard",), "the move is off"),
    Row("replaying", "calls", "replaying", (), "calls of the program since the cut are applied; no answer leaves"),
    Row("replaying", "last_arrived", "repairing", ("compare", "want"), "the hashes of the last pause are here"),
    Row("replaying", "failed", "discarded", ("report_failed", "discard"), "the replay failed; its context goes"),
    Row("replaying", "tick", "discarded", ("discard",), "nothing was heard from the source", "silent"),
    Row("replaying", "settle_discard", "discarded", ("discard",), "the move is off"),
    Row("repairing", "rebuilt", "verified", ("report_verified",), "every page has the hash that the source sent"),
    Row("repairing", "failed", "discarded", ("report_failed", "discard"), "what differs could not be repaired"),
    Row("repairing", "tick", "discarded", ("discard",), "nothing was heard from the source", "silent"),
    Row("repairing", "settle_discard", "discarded", ("discard",), "the move is off"),
    # Verified: it may be the owner already; only the record may say.
    Row("verified", "settle_activate", "active", ("activate",), "the record says committed to this node"),
    Row("verified", "settle_discard", "discarded", ("discard",), "the record says that the move is off"),
    Row("verified", "tick", "verified", ("read_record",), "nobody said how the move ended", "silent"),
    Row("active", "settle_forget", "forgotten", ("forget",), "somebody else owns the session"),
), {"silent": _silent}, _destination_note)


# -- the coordinator ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CoordinatorRole(Role):
    """The mover. Ends: ``refused``, ``committed``, ``aborted``, ``over`` (the record moved on without us), ``fenced``.

    A new leader begins in ``idle`` with ``resume``, and so without knowing whether the source ``offered``.
    """

    offered: bool = False


def _coordinator_note(role: CoordinatorRole, event: Event) -> dict[str, object]:
    return {"offered": True} if event.kind == "offered" else {}


def _offered(role: CoordinatorRole, event: Event) -> bool:
    return role.offered


_WRITES = ("beginning", "readying", "committing", "aborting", "asking")

COORDINATOR: Machine[CoordinatorRole] = Machine((
    Row("idle", "start", "checking", ("run_checks",), "a move is asked for"),
    Row("idle", "resume", "asking", ("read_record",), "a new leader found an unfinished move"),
    Row("checking", "passed", "beginning", ("write_begin",), "every check passed"),
    Row("checking", "refused", "refused", ("finish",), "a check said no"),
    Row("beginning", "written", "receiving", ("command_receive",), "the move is on record"),
    Row("beginning", "conflict", "refused", ("finish",), "the session changed while it was checked"),
    Row("beginning", "refused", "refused", ("finish",), "the session cannot move now"),
    Row("beginning", "unknown", "asking", ("read_record",), "it is not known whether the move is on record"),
    Row("receiving", "received", "sending", ("command_send",), "the destination waits for pages"),
    Row("receiving", "failed", "aborting", ("write_abort",), "the destination cannot receive"),
    Row("receiving", "cancel", "aborting", ("write_abort",), "the move was cancelled"),
    Row("sending", "offered", "readying", ("write_ready",), "the source is paused, the copy verified"),
    Row("sending", "failed", "aborting", ("write_abort",), "the source could not send"),
    Row("sending", "cancel", "aborting", ("write_abort",), "the move was cancelled"),
    Row("readying", "written", "committing", ("write_commit",), "the move is ready on record"),
    Row("readying", "conflict", "asking", ("read_record",), "the record changed"),
    Row("readying", "refused", "asking", ("read_record",), "the record changed"),
    Row("readying", "unknown", "asking", ("read_record",), "the outcome is not known"),
    Row("committing", "written", "settling", ("settle",), "committed: the destination owns the session"),
    Row("committing", "conflict", "asking", ("read_record",), "the record changed"),
    Row("committing", "refused", "aborting", ("write_abort",), "the destination is not what it was"),
    Row("committing", "unknown", "asking", ("read_record",), "the outcome is not known"),
    Row("aborting", "written", "undoing", ("settle",), "aborted: the source owns the session"),
    Row("aborting", "conflict", "asking", ("read_record",), "the record changed"),
    Row("aborting", "refused", "asking", ("read_record",), "the record changed"),
    Row("aborting", "unknown", "asking", ("read_record",), "the outcome is not known"),
    Row("asking", "says_preparing", "readying", ("write_ready",), "the source offered, to us", "offered"),
    Row("asking", "says_preparing", "aborting", ("write_abort",), "nobody offered yet, or we cannot know"),
    Row("asking", "says_ready", "committing", ("write_commit",), "offered and verified: it can be finished"),
    Row("asking", "says_committed", "settling", ("settle",), "the record says committed"),
    Row("asking", "says_aborted", "undoing", ("settle",), "the record says aborted"),
    Row("asking", "says_over", "over", ("finish",), "the record knows nothing of this move any more"),
    Row("asking", "unknown", "asking", ("read_record",), "the registry did not answer"),
    *(Row(state, "fenced", "fenced", ("finish",), "another leader was elected; it finishes this") for state in _WRITES),
    Row("settling", "settled", "committed", ("write_clear", "finish"), "the destination serves, the source forgot"),
    Row("settling", "unsettled", "committed", ("finish",), "committed; who did not answer will read the record"),
    Row("undoing", "settled", "aborted", ("write_clear", "finish"), "the source runs, the destination discarded"),
    Row("undoing", "unsettled", "aborted", ("finish",), "aborted; who did not answer will read the record"),
), {"offered": _offered}, _coordinator_note)

#: The states of the coordinator's role that end it.
ENDS = frozenset({"refused", "committed", "aborted", "over", "fenced"})

#: What ``settle.py`` says, as an event for each role.
SETTLE_EVENTS = {"activate": "settle_activate", "forget": "settle_forget", "resume": "settle_resume",
                 "discard": "settle_discard", "stay paused": "settle_wait"}
