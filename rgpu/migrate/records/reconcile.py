"""Action of a node on a session that it holds, given the record that it read (OWNERSHIP 1, 2). Pure.

It is used by ``move.reconcile``, after the registry was unreachable, and when a restarted daemon takes
over workers. Nothing here guesses: an outcome that the record does not
decide leaves a paused session paused.

========  =====================================================================  ===========
holds     the record                                                             action
========  =====================================================================  ===========
incoming  this move committed to this incarnation                                activate
incoming  this move is still open                                                stay paused
incoming  anything else                                                          discard
running   no record, ended, failed, or a higher epoch                            forget
running   a lower epoch: the registry went back                                  resume (run on)
running   same epoch and this host owns                                          resume (run on)
running   same epoch and another host owns: impossible                           stay paused
paused    no record, ended, failed, or a higher epoch                            forget
paused    same epoch, this host owns, the move is open                           stay paused
paused    same epoch, this host owns, the move was aborted or there is none      resume
paused    a lower epoch, or the same epoch and another owner                     stay paused
========  =====================================================================  ===========
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rgpu.migrate.records.schema import SessionRecord

Holds = Literal["running", "paused", "incoming"]
Action = Literal["activate", "forget", "resume", "stay paused", "discard"]


#: Each action as an event of the move's roles (:mod:`rgpu.migrate.move`).
EVENTS: dict[Action, str] = {"activate": "reconcile_activate", "forget": "reconcile_forget",
                             "resume": "reconcile_resume", "discard": "reconcile_discard",
                             "stay paused": "reconcile_wait"}


@dataclass(frozen=True, slots=True)
class Holding:
    """State of a session on a node. ``move``: the move that it is paused for or incoming by, if any."""

    host: str
    incarnation: int
    holds: Holds
    epoch: int  #: of the worker; for incoming: any, because the commit assigns it
    move: str = ""


@dataclass(frozen=True, slots=True)
class Reconciled:
    """Action on a session. ``epoch``: the epoch to serve at, for activate and resume."""

    action: Action
    reason: str
    epoch: int = 0


def reconcile(record: SessionRecord | None, holding: Holding) -> Reconciled:
    """Return the action by the table of the module."""
    if holding.holds == "incoming":
        return _incoming(record, holding)
    if record is None:
        return Reconciled("forget", "the registry has no such session")
    if not record.live:
        return Reconciled("forget", f"the session is {record.state}: {record.reason}")
    if record.epoch > holding.epoch:
        return Reconciled("forget", f"{record.owner} owns the session at epoch {record.epoch}; ours was "
                                    f"{holding.epoch}")
    if record.epoch < holding.epoch:
        return _doubtful(holding, f"the registry went back: it says epoch {record.epoch}, ours is {holding.epoch}")
    if record.owner != holding.host:
        return Reconciled("stay paused", f"the registry says that {record.owner} owns our epoch {record.epoch}")
    if holding.holds == "running":
        return Reconciled("resume", "this host owns the session", record.epoch)
    move = record.open_move
    if move is not None and (not holding.move or move.id == holding.move):
        return Reconciled("stay paused", f"move {move.id} is {move.state}: neither committed nor aborted")
    return Reconciled("resume", record.move.reason if record.move else "the move is off", record.epoch)


def _incoming(record: SessionRecord | None, holding: Holding) -> Reconciled:
    if record is None or record.move is None or record.move.id != holding.move:
        return Reconciled("discard", "the registry no longer has a record of this move")
    move = record.move
    if move.state == "committed" and record.live \
            and (record.owner, record.incarnation) == (holding.host, holding.incarnation):
        return Reconciled("activate", move.reason or "the move was committed", record.epoch)
    if record.open_move is not None:
        return Reconciled("stay paused", f"move {move.id} is {move.state}")
    return Reconciled("discard", f"move {move.id} is {move.state} and the session is {record.state}: {record.reason}")


def _doubtful(holding: Holding, reason: str) -> Reconciled:
    """Return the action in doubt: a running session continues with its agent (OWNERSHIP 3, 10), a paused one stays."""
    if holding.holds == "running":
        return Reconciled("resume", reason, holding.epoch)
    return Reconciled("stay paused", reason)
