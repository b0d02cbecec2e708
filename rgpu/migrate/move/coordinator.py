"""The leader's role in a move as a table (OWNERSHIP 2, 6). Pure.

The elected leader runs it (:mod:`rgpu.migrate.leader.moving.mover`). There is no agreement protocol
with the two workers: the registry's record decides, and each worker reads it
(:mod:`rgpu.migrate.records.reconcile`). Only a copy that the source offered is committed.
"""

from __future__ import annotations

from dataclasses import dataclass

from rgpu.migrate.move.machine import Event, Machine, Role, Row


@dataclass(frozen=True, slots=True)
class CoordinatorRole(Role):
    """State of the mover. Ends: ``refused``, ``committed``, ``aborted``, ``over`` (the record no longer names this
    move), ``fenced``.

    A new leader begins in ``idle`` with ``resume``; whether the source ``offered`` is then not known.
    """

    offered: bool = False


def _note(role: CoordinatorRole, event: Event) -> dict[str, object]:
    return {"offered": True} if event.kind == "offered" else {}


def _offered(role: CoordinatorRole, event: Event) -> bool:
    return role.offered


_WRITES = ("beginning", "readying", "committing", "aborting")

TABLE: tuple[Row, ...] = (
    Row("idle", "start", "checking", ("run_checks",), "a move is asked for"),
    Row("idle", "resume", "asking", ("read_record",), "a new leader found an unfinished move"),
    Row("checking", "passed", "beginning", ("write_begin",), "every check passed"),
    Row("checking", "refused", "refused", (), "a check said no"),
    Row("beginning", "written", "receiving", ("command_receive",), "the move is on record"),
    Row("beginning", "conflict", "refused", (), "the session changed while it was checked"),
    Row("beginning", "refused", "refused", (), "the session cannot move now"),
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
    Row("committing", "written", "reconciling", ("reconcile",), "committed: the destination owns the session"),
    Row("committing", "conflict", "asking", ("read_record",), "the record changed"),
    Row("committing", "refused", "aborting", ("write_abort",), "the destination is not what it was"),
    Row("committing", "unknown", "asking", ("read_record",), "the outcome is not known"),
    Row("aborting", "written", "undoing", ("reconcile",), "aborted: the source owns the session"),
    Row("aborting", "conflict", "asking", ("read_record",), "the record changed"),
    Row("aborting", "refused", "asking", ("read_record",), "the record changed"),
    Row("aborting", "unknown", "asking", ("read_record",), "the outcome is not known"),
    Row("asking", "says_preparing", "readying", ("write_ready",), "the source offered, to us", "offered"),
    Row("asking", "says_preparing", "aborting", ("write_abort",), "left unfinished; no verified copy is on record"),
    Row("asking", "says_ready", "committing", ("write_commit",), "offered and verified: it can be finished"),
    Row("asking", "says_committed", "reconciling", ("reconcile",), "the record says committed"),
    Row("asking", "says_aborted", "undoing", ("reconcile",), "the record says aborted"),
    Row("asking", "says_over", "over", (), "the record knows nothing of this move any more"),
    Row("asking", "unknown", "asking", ("read_record",), "the registry did not answer"),
    *(Row(state, "fenced", "fenced", (), "another leader was elected; it finishes this") for state in _WRITES),
    Row("reconciling", "reconciled", "committed", ("write_clear",), "the destination serves, the source forgot"),
    Row("reconciling", "unreconciled", "committed", (), "committed; who did not answer will read the record"),
    Row("undoing", "reconciled", "aborted", ("write_clear",), "the source runs, the destination discarded"),
    Row("undoing", "unreconciled", "aborted", (), "aborted; who did not answer will read the record"),
)

COORDINATOR: Machine[CoordinatorRole] = Machine(TABLE, {"offered": _offered}, _note)
