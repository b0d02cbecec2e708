"""All changes of a session's record as pure decisions (OWNERSHIP 2, 5, 6, 9).

Each function takes the record as it was read and returns a
:class:`Decision`: the transaction that carries it out, and the reason; or it
raises :class:`Refused` (:class:`Fenced` where the caller's epoch or term is stale).
The transaction compares the revision of the record that was read, so any
other change in between makes it fail; then the caller reads and decides anew.

=============  ================  ============================  ======================================
decision       by                from                          to
=============  ================  ============================  ======================================
create         leader            no record, or ended           starting, epoch + 1; queue record deleted
started        leader            starting, recovering          running
lost           leader            any live state                recovering, same epoch: waits for a place
recover        leader            any live state                recovering, another owner, epoch + 1
begin_move     leader            running                       moving, move preparing
move_ready     leader            moving, preparing             moving, move ready
commit         leader            moving, ready                 running, destination owns, epoch + 1
abort          leader or source  moving                        running, move aborted
clear_move     leader            running, move decided         running, no move
share          leader            running                       same, with the peers of shared memory
silence        leader            running                       same, with the start of its client's silence
publish_image  leader or owner   running, moving               same, checkpoint named
adopt          owner's host      any live state                same, the owner's new incarnation
park           leader            running, checkpoint named     parked, no owner, same epoch
resume         leader            parked                        recovering, an owner, epoch + 1
fail           leader            any live state                failed
end            leader            any but ended                 ended, no owner
=============  ================  ============================  ======================================

The leader's transactions also compare the create revision of
``election/leader``; those that give a session to a node compare the create
revision of ``nodes/HOST`` (a new incarnation creates the key anew). A name has a session
or a place in the queue, never both: ``create`` compares ``queue/NAME`` and deletes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rgpu.migrate.records import losses
from rgpu.migrate.records.keys import LEADER, history_key, node_key, queue_key, session_key
from rgpu.migrate.records.schema import (
    MAX_OLDER,
    MAX_SHARES,
    MAX_TEXT,
    CheckpointName,
    Failure,
    HistoryRecord,
    MoveRecord,
    NodeRecord,
    Parked,
    Program,
    SessionRecord,
    Wants,
    encode,
)
from rgpu.migrate.registry.base import Compare, Delete, Operation, Put, created, unchanged
from rgpu.session.errors import AlreadyExists, Fenced, Refused

#: The states that each decision may start from; None: there is no record.
FROM: dict[str, frozenset[str | None]] = {
    "create": frozenset({None, "ended"}),
    "started": frozenset({"starting", "recovering"}),
    "lost": frozenset({"starting", "running", "moving", "recovering"}),
    "recover": frozenset({"starting", "running", "moving", "recovering"}),
    "begin_move": frozenset({"running"}),
    "move_ready": frozenset({"moving"}),
    "commit": frozenset({"moving"}),
    "abort": frozenset({"moving"}),
    "clear_move": frozenset({"running"}),
    "silence": frozenset({"running"}),
    "share": frozenset({"running"}),
    "publish_image": frozenset({"running", "moving"}),
    "adopt": frozenset({"starting", "running", "moving", "recovering"}),
    "park": frozenset({"running"}),
    "resume": frozenset({"parked"}),
    "fail": frozenset({"starting", "running", "moving", "recovering"}),
    "end": frozenset({"starting", "running", "moving", "recovering", "parked", "failed"}),
}

#: Number of checkpoints before the newest one that agents keep their journals for: 0 cuts journals at the newest
#: checkpoint; with 1 a damaged newest checkpoint loses nothing, and journals are about twice as long.
OLDER_CHECKPOINTS_KEPT = 0


@dataclass(frozen=True, slots=True)
class Leader:
    """Fencing token of the elected leader. ``actor``: user on whose request it decides; empty: on its own."""

    host: str
    revision: int
    actor: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """Record of a session as it was read."""

    record: SessionRecord
    revision: int  #: mod revision


@dataclass(frozen=True, slots=True)
class Node:
    """Record of a node as it was read."""

    record: NodeRecord
    revision: int  #: create revision


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision: a transaction, the record that it makes, and why."""

    name: str
    compares: tuple[Compare, ...]
    operations: tuple[Operation, ...]
    record: SessionRecord
    reason: str


def create(held: Held | None, *, name: str, node: Node, device: str, quota: int, agent: str, program: Program,
           recover: bool, leader: Leader, now: float, reason: str, wants: Wants | None = None,
           queued: int = 0, user: str = "", run: str = "", gang: str = "", rank: int = 0,
           proves_key: bool = False) -> Decision:
    """Create a session of ``user`` on ``node``. Raises :class:`AlreadyExists` while the name is taken.

    ``queued``: mod revision of ``queue/NAME`` as it was read; 0: it did not wait. ``run``: the run whose sessions
    share one promise of memory and compute. ``gang``, ``rank``: the gang that it is a member of, and its first rank.
    ``proves_key``: its agent makes its own tickets.
    """
    if held is not None and held.record.state != "ended":
        hint = "; `rgpu kill` it to free the name" if held.record.state == "failed" else ""
        raise AlreadyExists(f"there is a session {name} already, it is {held.record.state}{hint}", session=name)
    found = node.record.all_of(device)
    if not found:
        raise Refused(f"{node.record.host} has no device {device}")
    record = SessionRecord(
        name=name, state="starting", owner=node.record.host, incarnation=node.record.incarnation,
        epoch=held.record.epoch + 1 if held else 1, quota=quota, agent=agent, device=device, needs=found[0].needs(),
        recover=recover, program=program, created=now, changed=now, reason=reason, wants=wants or Wants(),
        user=user, run=run, gang=gang, rank=rank, proves_key=proves_key)
    decision = _decide("create", held, record, leader, now, reason, nodes=[node])
    waited = (Delete(queue_key(name)),) if queued else ()
    return replace(decision, compares=(*decision.compares, unchanged(queue_key(name), queued)),
                   operations=(*decision.operations, *waited))


def started(held: Held, *, epoch: int, node: Node, leader: Leader, now: float, reason: str) -> Decision:
    """Record that agents can attach to the owner's worker."""
    _check("started", held, epoch)
    _owns(held, node)
    record = held.record.replace(state="running", reason=reason, running_since=now)
    return _decide("started", held, record, leader, now, reason, nodes=[node])


def lost(held: Held, *, epoch: int, failure: Failure | None, leader: Leader, now: float, reason: str) -> Decision:
    """Record that the owner is lost and no place is known yet. At the same epoch a returning owner may continue."""
    _check("lost", held, epoch)
    failures = held.record.failures if failure is None else losses.count_failure(held.record, failure)
    record = held.record.replace(state="recovering", move=_aborted(held.record, reason), reason=reason,
                                 failures=failures)
    return _decide("lost", held, record, leader, now, reason)


def recover(held: Held, *, epoch: int, node: Node, device: str, failure: Failure | None, leader: Leader, now: float,
            reason: str, checkpoint: CheckpointName | None = None) -> Decision:
    """Give the session another owner at epoch + 1, from ``checkpoint`` (default: the record's).

    Raises :class:`Refused` when the session is not recoverable, was lost too often at one
    position, or the checkpoint is older than what the agent may have cut its journal to.
    """
    _check("recover", held, epoch)
    old = held.record
    if not old.recover:
        raise Refused(f"{old.name} runs with --recover off: nothing is kept that it could be brought back from")
    if checkpoint is not None and checkpoint.position < old.journal_from:
        raise Refused(f"checkpoint {checkpoint.name} stands at position {checkpoint.position}, and the journal before "
                      f"{old.journal_from} was cut: a live program cannot be rolled back", image=checkpoint.name)
    if old.shares:
        raise Refused(f"{old.name} {why_shared(old)}")
    failures = old.failures
    if failure is not None:
        failures = losses.count_failure(old, failure)
        if losses.after(old, failures) == "none":
            raise Refused(f"{old.name} was {losses.why_not(old, failure)}", losses=len(failures))
    if losses.touches(losses.barred(old, failures), node.record.host, device) \
            and not losses.only_avoided(old, failures):
        raise Refused(f"the second loss in one place needs another device than {device} of {node.record.host}")
    record = old.replace(
        state="recovering", owner=node.record.host, incarnation=node.record.incarnation, epoch=old.epoch + 1,
        device=device, checkpoint=checkpoint or old.checkpoint, move=_aborted(old, reason), reason=reason,
                         failures=failures)
    return _decide("recover", held, record, leader, now, reason, nodes=[node])


def begin_move(held: Held, *, epoch: int, move: str, node: Node, device: str, leader: Leader, now: float,
               reason: str) -> Decision:
    """Begin a move; source and destination may be sent commands after it."""
    _check("begin_move", held, epoch)
    if held.record.owner == node.record.host:
        raise Refused(f"{held.record.name} is on {node.record.host} already")
    record = held.record.replace(state="moving", reason=reason, move=MoveRecord(
        id=move, source=str(held.record.owner), destination=node.record.host, device=device,
        destination_incarnation=node.record.incarnation, reason=reason, started=now))
    return _decide("begin_move", held, record, leader, now, reason, nodes=[node])


def move_ready(held: Held, *, epoch: int, move: str, leader: Leader, now: float, reason: str) -> Decision:
    """Record that the source is paused and the destination has verified every page."""
    _check("move_ready", held, epoch)
    current = _move(held, move, "preparing")
    record = held.record.replace(move=current.replace(state="ready", reason=reason), reason=reason)
    return _decide("move_ready", held, record, leader, now, reason)


def commit(held: Held, *, epoch: int, move: str, node: Node, leader: Leader, now: float, reason: str) -> Decision:
    """Commit a move (OWNERSHIP 2): the destination owns the session from here on."""
    _check("commit", held, epoch)
    current = _move(held, move, "ready")
    if node.record.host != current.destination or node.record.incarnation != current.destination_incarnation:
        raise Fenced(f"{current.destination} has restarted since it received {held.record.name}: what it held is lost")
    record = held.record.replace(
        state="running", owner=current.destination, incarnation=current.destination_incarnation, epoch=epoch + 1,
        device=current.device, move=current.replace(state="committed", reason=reason), reason=reason, moved=now)
    return _decide("commit", held, record, leader, now, reason, nodes=[node])


def abort(held: Held, *, epoch: int, move: str, now: float, reason: str, leader: Leader | None = None,
          source: str | None = None) -> Decision:
    """Abort a move, in competition with the commit: by the leader, or by the source after its promised downtime."""
    _check("abort", held, epoch)
    current = _move(held, move, None)
    if leader is None and source != current.source:
        raise Refused(f"only the leader and the source {current.source} may abort move {move}")
    record = held.record.replace(state="running", reason=reason, move=current.replace(state="aborted", reason=reason))
    return _decide("abort", held, record, leader, now, reason)


def clear_move(held: Held, *, epoch: int, move: str, leader: Leader, now: float, reason: str) -> Decision:
    """Remove a decided move that both sides have reconciled."""
    _check("clear_move", held, epoch)
    if held.record.move is None or held.record.move.id != move:
        raise Fenced(f"move {move} of {held.record.name} is not the one on record")
    return _decide("clear_move", held, held.record.replace(move=None), leader, now, reason)


def silence(held: Held, *, epoch: int, since: float, leader: Leader, now: float, reason: str) -> Decision:
    """Record since when the session's client host is silent; 0: it is heard."""
    _check("silence", held, epoch)
    return _decide("silence", held, held.record.replace(silent_since=since), leader, now, reason)


def publish_checkpoint(held: Held, *, owner: str, epoch: int, checkpoint: CheckpointName, now: float, reason: str,
                  leader: Leader | None = None) -> Decision:
    """Name a checkpoint in the record; from then on the journal may be cut to it (OWNERSHIP 5)."""
    _check("publish_image", held, epoch)
    old = held.record
    if old.owner != owner:
        raise Fenced(f"{owner} does not own {old.name}; {old.owner} does", owner=old.owner)
    if checkpoint.epoch != epoch:
        raise Fenced(f"checkpoint {checkpoint.name} was taken at epoch {checkpoint.epoch}; this is {epoch}")
    if old.checkpoint is not None and checkpoint.position < old.checkpoint.position:
        raise Refused(f"checkpoint {checkpoint.name} stands at {checkpoint.position}, behind {old.checkpoint.name} at "
                      f"{old.checkpoint.position}")
    earlier = [] if old.checkpoint is None else [old.checkpoint, *old.older]
    older = [found for found in earlier if found.name != checkpoint.name][:MAX_OLDER]
    # Up to the checkpoint that is OLDER_CHECKPOINTS_KEPT before the newest; never back: calls that an agent was once
    # allowed to cut are deleted.
    named = [checkpoint, *older][OLDER_CHECKPOINTS_KEPT:]
    cut = max(old.journal_from, named[0].position) if named else old.journal_from
    return _decide("publish_image", held, old.replace(checkpoint=checkpoint, older=older, cut=cut), leader, now, reason)


def adopt(held: Held, *, epoch: int, node: Node | NodeRecord, now: float, reason: str) -> Decision:
    """Record the new incarnation of the owner's daemon, which was restarted and found the worker alive.

    The daemon does so before it registers itself, so that the leader does not take the session for lost.
    """
    _check("adopt", held, epoch)
    record = node.record if isinstance(node, Node) else node
    if held.record.owner != record.host:
        raise Fenced(f"{record.host} does not own {held.record.name}; {held.record.owner} does")
    changed = held.record.replace(incarnation=record.incarnation)
    return _decide("adopt", held, changed, None, now, reason)


def share(held: Held, *, epoch: int, host: str, peer: str, leader: Leader, now: float) -> Decision:
    """Record that the session shares memory with ``peer``, of the same user. Raises :class:`Refused` for too many."""
    _check("share", held, epoch)
    old = held.record
    if old.owner != host:
        raise Fenced(f"{host} does not own {old.name}; {old.owner} does")
    if peer not in old.shares and len(old.shares) >= MAX_SHARES:
        raise Refused(f"{old.name} shares memory with {MAX_SHARES} sessions, which are as many as one may")
    record = old.replace(shares=[*(name for name in old.shares if name != peer), peer])
    return _decide("share", held, record, leader, now, f"it shares device memory with {peer}")


def park(held: Held, *, epoch: int, favour: str, leader: Leader, now: float, reason: str,
         store: str = "") -> Decision:
    """Give the session's place to ``favour``: from here on its worker owns nothing, and is commanded to end.

    The calls since the checkpoint are in the agent's journal; answers that the worker still sends
    until it ends stay valid (the agent has them, and a replay is compared with them).
    ``store``: the store that holds the checkpoint, as its node names it.
    Raises :class:`Refused` where there is nothing to bring the session back from.
    """
    _check("park", held, epoch)
    old = held.record
    if old.shares:
        raise Refused(f"{old.name} cannot be parked: it {why_shared(old)}")
    if not old.recover or old.checkpoint is None:
        raise Refused(f"{old.name} cannot be parked: "
                      f"{'it runs with --recover off' if not old.recover else 'it has no checkpoint'}")
    if old.checkpoint.epoch != epoch:
        raise Refused(f"{old.name} cannot be parked: its newest checkpoint is of epoch {old.checkpoint.epoch}, not "
                      f"{epoch}")
    if old.move is not None:
        raise Refused(f"{old.name} cannot be parked: move {old.move.id} is not reconciled on both sides")
    record = old.replace(state="parked", owner=None, reason=reason, parked=Parked(
        host=str(old.owner), device=old.device, epoch=epoch, when=now, favour=favour, store=store))
    return _decide("park", held, record, leader, now, reason)


def resume(held: Held, *, epoch: int, node: Node, device: str, leader: Leader, now: float, reason: str) -> Decision:
    """Give a parked session a place again: it is brought back there as after a loss."""
    _check("resume", held, epoch)
    record = held.record.replace(
        state="recovering", owner=node.record.host, incarnation=node.record.incarnation, epoch=epoch + 1,
        device=device, parked=None, reason=reason)
    return _decide("resume", held, record, leader, now, reason, nodes=[node])


def fail(held: Held, *, epoch: int, leader: Leader, now: float, reason: str) -> Decision:
    """Give the session up, with the reason; checkpoint and journal are kept."""
    _check("fail", held, epoch)
    record = held.record.replace(state="failed", owner=None, move=_aborted(held.record, reason), reason=reason)
    return _decide("fail", held, record, leader, now, reason)


def end(held: Held, *, leader: Leader, now: float, reason: str, exit_code: int | None = None) -> Decision:
    """End the session: the program ended, or it is killed. ``exit_code``: the program's, where that is known."""
    _check("end", held, held.record.epoch)
    record = held.record.replace(state="ended", owner=None, move=_aborted(held.record, reason), reason=reason,
                                 parked=None, ended=now, exit_code=exit_code)
    return _decide("end", held, record, leader, now, reason)


def why_shared(record: SessionRecord) -> str:
    """Return why a session that shares memory is not brought back."""
    return (f"shares device memory with {', '.join(record.shares[-4:])} (CUDA IPC), and what several sessions wrote to "
            "it cannot be replayed: all of them end")


# -- the registry as a whole ----------------------------------------------------------


def went_back(*, seen_cluster: str, cluster: str, seen_revision: int, revision: int, seen_epoch: int = 0,
              epoch: int = 0) -> str | None:
    """Return why this registry is not the one that was seen before (OWNERSHIP 10); None while it is.

    Automation pauses on a reason. ``seen_epoch``: the highest that an agent or worker presented.
    """
    if cluster != seen_cluster:
        return f"the registry's identity changed from {seen_cluster} to {cluster}"
    if revision < seen_revision:
        return f"the registry went back from revision {seen_revision} to {revision}"
    if epoch < seen_epoch:
        return f"epoch {seen_epoch} was seen, and the registry says {epoch}"
    return None


# -- shared parts ------------------------------------------------------------------


def _check(name: str, held: Held, epoch: int) -> None:
    if held.record.epoch != epoch:
        raise Fenced(f"{held.record.name} is at epoch {held.record.epoch}; {epoch} is over", epoch=held.record.epoch)
    if held.record.state not in FROM[name]:
        allowed = ", ".join(sorted(state for state in FROM[name] if state))
        raise Refused(f"{held.record.name} is {held.record.state} ({held.record.reason}); {name} needs: {allowed}",
                      state=held.record.state)


def _move(held: Held, move: str, state: str | None) -> MoveRecord:
    current = held.record.open_move
    if current is None or current.id != move:
        raise Fenced(f"move {move} of {held.record.name} is over")
    if state is not None and current.state != state:
        raise Refused(f"move {move} of {held.record.name} is {current.state}, not {state}")
    return current


def _owns(held: Held, node: Node) -> None:
    if (held.record.owner, held.record.incarnation) != (node.record.host, node.record.incarnation):
        raise Fenced(f"{node.record.host} in this incarnation does not own {held.record.name}")


def _aborted(record: SessionRecord, reason: str) -> MoveRecord | None:
    """Return the record's open move as aborted, for a decision that takes the session out of ``moving``."""
    return record.move.replace(state="aborted", reason=reason) if record.open_move and record.move else record.move


def _decide(name: str, held: Held | None, record: SessionRecord, leader: Leader | None, now: float, reason: str,
            nodes: Sequence[Node] = ()) -> Decision:
    record = record.replace(changed=now, reason=record.reason[:MAX_TEXT])
    if record.move is not None:
        record = record.replace(move=record.move.replace(reason=record.move.reason[:MAX_TEXT]))
    revision = held.revision if held else 0
    compares: list[Compare] = [unchanged(session_key(record.name), revision)]
    if leader is not None:
        compares.append(created(LEADER, leader.revision))
    compares += [created(node_key(node.record.host), node.revision) for node in nodes]
    story = HistoryRecord(when=now, session=record.name, decision=name, reason=reason[:MAX_TEXT], epoch=record.epoch,
                          owner=record.owner, leader=leader.revision if leader else 0,
                          actor=leader.actor if leader else "", user=record.user)
    operations = (Put(session_key(record.name), encode(record)), Put(history_key(record.name, revision), encode(story)))
    return Decision(name, tuple(compares), operations, record, reason)


def describe(decision: Decision) -> dict[str, Any]:
    """Return a decision for the log."""
    return {"decision": decision.name, "session": decision.record.name, "state": decision.record.state,
            "owner": decision.record.owner, "epoch": decision.record.epoch, "reason": decision.reason}
