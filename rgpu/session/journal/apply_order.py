"""The order in which records may be applied: the same rules live and in replay (SEMANTICS 1, 2).

:class:`ApplyGate` is fed records and says what to do, in order. It does no
waiting itself.

==============================  =================================================
record                          commands
==============================  =================================================
at or below the position        Drop
not the next position           Corrupt: calls are missing
``completed(n)``                WaitFor(n), Apply: what follows it, from any
                                thread, was submitted when n was complete
``completed(n)``, n ≥ its own   Corrupt: nobody observes the future
position
ends memory, in replay          WaitAll, Apply: the program's side knew from the
                                watermark that no work was left; a replay has to
                                make it so
ends memory, while replayed     WaitAll(replay_until), Apply: that watermark was
work may be unfinished          of a worker that is gone (SEMANTICS 21)
makes a texture, in replay      WaitAll, Apply: a driver gives no handle again that
                                work under way may use, and the program had got
                                this one (docs/developers/objects/arrays.md)
any other                       Apply
==============================  =================================================

Live, a WaitFor is over at once, for the program was told before it could
publish the record. *In replay* means at or below ``replay_until``: the highest
position that the program's side had published when this owner took over.
*Replayed work* may be unfinished until :meth:`ApplyGate.complete` said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from rgpu.session.calls.codec import decode
from rgpu.session.calls.wire import BY_ID, BY_NAME, Answer, Effect
from rgpu.session.errors import Corrupt
from rgpu.session.journal.record import Record

COMPLETED = BY_NAME["completed"].id
#: Calls after which an address or a handle may be given out again, published when no work was left.
#: (memory_free_wait is published while work runs: the device waits, and later calls may be what that work waits for.)
ENDS_MEMORY = frozenset(call.id for call in BY_ID.values()
                        if call.answer is Answer.ASYNC and call.effect is Effect.DESTROYS
                        and call.object_kind in ("memory", "mapping", "host_memory", "array", "texture"))
#: In a replay these wait for all earlier work.
_WAITS_IN_REPLAY = ENDS_MEMORY | {BY_NAME["texture_create"].id}


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply the record now."""

    record: Record


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Go on when the work of call ``seq`` is complete."""

    seq: int


@dataclass(frozen=True, slots=True)
class WaitAll:
    """Go on when all work up to and with call ``seq`` is complete."""

    seq: int


@dataclass(frozen=True, slots=True)
class Drop:
    """The record was applied before."""

    seq: int


Command = Apply | WaitFor | WaitAll | Drop


class ApplyGate:
    """See the module docstring. ``position``: every call ≤ it was given out to be applied."""

    def __init__(self, position: int = 0, replay_until: int = 0) -> None:
        self.position = position
        self.replay_until = replay_until

    def complete(self, seq: int) -> None:
        """All work up to and with call ``seq`` is known to be complete here."""
        if seq >= self.replay_until:
            self.replay_until = 0

    @property
    def replaying(self) -> bool:
        """Whether the next record is one that an earlier owner may have applied."""
        return self.position < self.replay_until

    def feed(self, record: Record) -> tuple[Command, ...]:
        """What to do for a record, in order. Raises :class:`Corrupt` for a gap or an impossible observation."""
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
