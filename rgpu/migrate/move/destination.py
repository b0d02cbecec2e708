"""The destination of a move as a table (OWNERSHIP 1, 2). Pure.

The worker that receives the session runs it (:mod:`rgpu.server.worker.move.arrival`). It first
receives a state with all its pages. In a move by copy that is the state of the last pause and
nothing follows. In a move by replay it is a snapshot; the calls applied at the source since then
follow and are applied here as in any replay (SEMANTICS 1). Their answers are not sent to the program.

A destination serves only after reading a record that is committed to it. It never infers the
outcome of the move: its daemon reads the record until that is decided.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rgpu.migrate.move.machine import Event, Machine, Role, Row


@dataclass(frozen=True, slots=True)
class DestinationRole(Role):
    """State of the destination; ``active`` and ``discarded`` are ends. A verified snapshot alone must not serve."""

    session: str = ""
    position: int = 0  #: journal position of the state that was rebuilt
    made: bool = False  #: whether objects were made ahead


def _note(role: DestinationRole, event: Event) -> dict[str, object]:
    return {"position": event.found} if event.kind == "rebuilt" else {}


def _enter(role: DestinationRole, event: Event) -> dict[str, object]:
    return {"made": True} if event.kind == "objects_came" else {}


def _again(role: DestinationRole, event: Event) -> str:
    return "objects come ahead a second time" if role.made else ""


def _another(role: DestinationRole, event: Event) -> str:
    return f"pages of {event.found} came for {role.session}" if event.found != role.session else ""


def _elsewhere(role: DestinationRole, event: Event) -> str:
    return f"a replay from {event.found} after a cut at {role.position}" if event.found != role.position else ""


def _off(state: str) -> Iterator[Row]:
    """Yield the rows that discard the received state: the source continues, or the session was recovered elsewhere."""
    yield Row(state, "failed", "discarded", ("report_failed", "discard"), "the session cannot be taken here")
    yield Row(state, "reconcile_discard", "discarded", ("discard",), "the move is off")


TABLE: tuple[Row, ...] = (
    Row("idle", "receive", "receiving", ("take_pages",), "a session is to arrive"),
    Row("receiving", "objects_came", "discarded", ("report_failed", "discard"), "objects come twice", "again"),
    Row("receiving", "objects_came", "receiving", ("make_objects",), "objects are made while it runs at its source"),
    Row("receiving", "state_arrived", "discarded", ("report_failed", "discard"), "another session's", "another"),
    Row("receiving", "state_arrived", "rebuilding", ("rebuild",), "all of a session, or of a cut, is here"),
    *_off("receiving"),
    Row("rebuilding", "rebuilt", "verified", ("report_verified", "listen"), "every page has the source's hash"),
    *_off("rebuilding"),
    # Verified: this worker may be the owner already; only the record decides that. A source that still sends calls has
    # not offered.
    Row("verified", "link_ended", "verified", (), "the source has nothing to add: what came was all of it"),
    Row("verified", "replay_begins", "discarded", ("report_failed", "discard"), "not from the cut on", "elsewhere"),
    Row("verified", "replay_begins", "replaying", ("begin_replay", "listen"), "what came was a cut; its calls follow"),
    Row("verified", "reconcile_activate", "active", ("activate",), "the record says committed to this node"),
    Row("verified", "reconcile_discard", "discarded", ("discard",), "the record says that the move is off"),
    Row("replaying", "calls", "replaying", ("apply_calls", "listen"), "calls since the cut; no answer leaves"),
    Row("replaying", "ping", "replaying", ("answer_ping", "listen"), "the source asks how far the replay is"),
    Row("replaying", "sample", "replaying", ("compare_sample", "listen"), "the source stood here: do its pages match?"),
    Row("replaying", "last_arrived", "comparing", ("compare",), "the hashes of the last pause are here"),
    Row("replaying", "link_ended", "discarded", ("discard",), "the source has given the replay up"),
    *_off("replaying"),
    Row("comparing", "compared", "repairing", ("repair",), "what differs is asked for"),
    *_off("comparing"),
    Row("repairing", "repaired", "finishing", ("finish_replay",), "every page has the source's hash"),
    *_off("repairing"),
    Row("finishing", "finished", "verified", ("report_verified",), "answers, events and clock are the source's"),
    *_off("finishing"),
)

DESTINATION: Machine[DestinationRole] = Machine(
    TABLE, {"again": _again, "another": _another, "elsewhere": _elsewhere}, _note, _enter)
