"""What a node must do about a session that it holds, given the record it read (OWNERSHIP 1, 2). Pure.

``move.reconcile``, a node's return after it lost the registry, and the adoption of
workers all ask this. Nothing here guesses: an outcome that the record does not
decide leaves a paused session paused.

========  =====================================================================  ===========
holds     the record says                                                        do
========  =====================================================================  ===========
incoming  this move committed to this incarnation                                activate
incoming  this move is still open                                                stay paused
incoming  anything else                                                          discard
running   no record, ended, failed, or a higher epoch                            forget
running   a lower epoch: the registry went back                                  resume (go on)
running   our epoch and this host owns                                           resume (go on)
running   our epoch and another host owns: cannot be                             stay paused
paused    no record, ended, failed, or a higher epoch                            forget
paused    our epoch, this host owns, the move is open                            stay paused
paused    our epoch, this host owns, the move was aborted or there is none       resume
paused    a lower epoch, or our epoch and another owner                          stay paused
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
    """What a node has of a session. ``move``: the move it is paused for or incoming by, if any."""

    host: str
    incarnation: int
    holds: Holds
    epoch: int  #: of the worker; for incoming: any, it is given one by the commit
    move: str = ""


@dataclass(frozen=True, slots=True)
class Reconciled:
    """``epoch``: the one to serve at, for activate and resume."""

    action: Action
    reason: str
    epoch: int = 0


def reconcile(record: SessionRecord | None, holding: Holding) -> Reconciled:
    """See the table above."""
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
        return Reconciled("discard", "the registry knows nothing of this move any more")
    move = record.move
    if move.state == "committed" and record.live \
            and (record.owner, record.incarnation) == (holding.host, holding.incarnation):
        return Reconciled("activate", move.reason or "the move was committed", record.epoch)
    if record.open_move is not None:
        return Reconciled("stay paused", f"move {move.id} is {move.state}")
    return Reconciled("discard", f"move {move.id} is {move.state} and the session is {record.state}: {record.reason}")


def _doubtful(holding: Holding, reason: str) -> Reconciled:
    """What runs goes on with the agent it has (OWNERSHIP 3, 10); what is paused does not start on a doubt."""
    if holding.holds == "running":
        return Reconciled("resume", reason, holding.epoch)
    return Reconciled("stay paused", reason)
