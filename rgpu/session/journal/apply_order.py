"""The order in which records may be applied: the same rules live and in replay (SEMANTICS 1, 2).

:class:`ApplyGate` takes records and returns commands, in order. It does no
waiting itself.

==============================  =================================================
record                          commands
==============================  =================================================
at or below the position        Drop
not the next position           Corrupt: calls are missing
``completed(n)``                WaitFor(n), Apply: later calls, from any
                                thread, were submitted when n was complete
``completed(n)``, n ≥ its own   Corrupt: a later call cannot have been observed
position
ends memory, in replay          WaitAll, Apply: by the watermark, no work was left
                                when the program's side published the call; a
                                replay has to establish that again
ends memory, while replayed     WaitAll(replay_until), Apply: that watermark was
work may be unfinished          of an earlier worker (SEMANTICS 21)
makes a texture, in replay      WaitAll, Apply: a driver reuses no handle that
                                unfinished work may use, and the program holds
                                this one (docs/developers/objects/arrays.md)
any other                       Apply
==============================  =================================================

Live, a WaitFor ends at once, since the program was informed before it could
publish the record. *In replay* means at or below ``replay_until``: the highest
position that the program's side had published when this owner took over.
*Replayed work* may be unfinished until :meth:`ApplyGate.complete` is called for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from rgpu.session.calls.codec import decode
from rgpu.session.calls.wire import BY_ID, BY_NAME, Answer, Effect
from rgpu.session.errors import Corrupt
from rgpu.session.journal.record import Record

COMPLETED = BY_NAME["completed"].id
#: Calls after which an address or a handle may be given out again, published when no work was left.
#: (memory_free_wait is published while work runs: the device waits, and that work may wait for later calls.)
ENDS_MEMORY = frozenset(call.id for call in BY_ID.values()
                        if call.answer is Answer.ASYNC and call.effect is Effect.DESTROYS
                        and call.object_kind in ("memory", "mapping", "host_memory", "array", "texture"))
#: Calls that wait for all earlier work in a replay.
_WAITS_IN_REPLAY = ENDS_MEMORY | {BY_NAME["texture_create"].id}


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply the record now."""

    record: Record


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Continue when the work of call ``seq`` is complete."""

    seq: int


@dataclass(frozen=True, slots=True)
class WaitAll:
    """Continue when all work up to and including call ``seq`` is complete."""

    seq: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Drop the record: it was applied before."""

    seq: int


Command = Apply | WaitFor | WaitAll | Drop


class ApplyGate:
    """See the module docstring. ``position``: every call up to it was returned to be applied."""

    def __init__(self, position: int = 0, replay_until: int = 0) -> None:
        self.position = position
        self.replay_until = replay_until

    def complete(self, seq: int) -> None:
        """Note that all work up to and including call ``seq`` is complete on this device."""
        if seq >= self.replay_until:
            self.replay_until = 0

    @property
    def replaying(self) -> bool:
        """Whether the next record is one that an earlier owner may have applied."""
        return self.position < self.replay_until

    def feed(self, record: Record) -> tuple[Command, ...]:
        """Return the commands for a record, in order. Raises :class:`Corrupt` for a gap or impossible observation."""
        seq = record.seq
        if seq <= self.position:
            return (Drop(seq),)
        if seq != self.position + 1:
            raise Corrupt(f"journal position {seq} follows {self.position}: calls are missing", seq=seq,
                          applied=self.position, reason="gap")
        if record.call_id == COMPLETED:
            observed = decode(COMPLETED, record.args).observed
            if not 0 < observed < seq:
                raise Corrupt(f"journal position {seq} observes call {observed}", seq=seq, reason="observation")
            self.position = seq
            return (WaitFor(observed), Apply(record))
        self.position = seq
        if self.replay_until and record.call_id in _WAITS_IN_REPLAY:
            return (WaitAll(min(seq - 1, self.replay_until)), Apply(record))
        return (Apply(record),)
