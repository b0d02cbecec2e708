"""Ledger of answers: each reaches the program once, and the answers of a replay are compared with those delivered.

An answer is received again after each attachment, and made anew when a recovered
session replays the call. The program is given the first; its digest is kept until
a checkpoint makes a replay impossible, and a second answer is compared with it: a
difference is a *divergence*, and is reported
(:class:`rgpu.session.answers.DeliveredAnswers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rgpu.client.exchange.summing import of_leaves
from rgpu.client.session.placements import Placements
from rgpu.link.messages.data import ANSWER_HEAD_LAYOUT
from rgpu.session.answers import AnswerHash, DeliveredAnswers, Divergence, answer_digest
from rgpu.session.calls.wire import ANSWERED, BY_ID
from rgpu.session.errors import Corrupt
from rgpu.session.journal.record import AWAITED

PAYLOAD_LIMIT = (1 << 32) - 64  #: bytes that a message to the shim can carry


class Verdict(Enum):
    """Treatment of a received answer."""

    DELIVER = "deliver"
    REPEATED = "repeated"
    DIVERGED = "diverged"
    UNWANTED = "unwanted"


@dataclass(frozen=True, slots=True)
class AnswerMessage:
    """One answer as the worker sent it."""

    seq: int
    result: int
    flags: int
    reply: Any
    payload: Any


class AnswerAssembler:
    """Assembler of whole answers from the pieces of ANSWER messages (u8 more, then a piece each)."""

    def __init__(self) -> None:
        self._pieces: list[memoryview] = []
        self._size = 0

    def feed(self, body: memoryview) -> AnswerMessage | None:
        """Add a piece; return the whole answer, or None. Raises :class:`Corrupt` if it is truncated or too long."""
        if len(body) < 1 or body[0] > 1:
            raise Corrupt("an answer's piece has no valid 'more' byte", reason="answer")
        piece = body[1:]
        if not self._pieces and len(piece) < ANSWER_HEAD_LAYOUT.size:
            raise Corrupt(f"an answer's first piece has {len(piece)} bytes", reason="answer")
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size > PAYLOAD_LIMIT:
            raise Corrupt("an answer is longer than 4 GiB", reason="answer")
        if body[0]:
            return None
        pieces, self._pieces, self._size = self._pieces, [], 0
        whole = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
        seq, result, flags, length = ANSWER_HEAD_LAYOUT.unpack_from(whole)
        payload = ANSWER_HEAD_LAYOUT.size + length
        if payload > len(whole):
            raise Corrupt(f"the answer of call {seq} is shorter than its reply arguments", seq=seq, reason="answer")
        return AnswerMessage(seq, result, flags, whole[ANSWER_HEAD_LAYOUT.size:payload], whole[payload:])


class PassingAnswer:
    """An answer that is passed on piece by piece; its digest is computed meanwhile."""

    def __init__(self, piece: memoryview, summed: bool) -> None:
        """``piece``: the first one; ``summed``: compute a digest. Where ``kept`` is set before :meth:`add`, the reply
        arguments are kept. Raises :class:`Corrupt`."""
        if len(piece) < ANSWER_HEAD_LAYOUT.size:
            raise Corrupt(f"an answer's first piece has {len(piece)} bytes", reason="answer")
        self.seq, self._result, _, self._reply = ANSWER_HEAD_LAYOUT.unpack_from(piece)
        self._size = -ANSWER_HEAD_LAYOUT.size
        self._hash = AnswerHash(leaves=of_leaves) if summed else None
        self.kept: bytearray | None = None

    @property
    def result(self) -> int:
        """The CUresult."""
        return int(self._result)

    @property
    def reply(self) -> bytes | None:
        """The encoded reply arguments, where they were kept; only after the last piece."""
        return None if self.kept is None else bytes(self.kept[:self._reply])

    @property
    def untouched(self) -> bool:
        """Whether no piece was added yet."""
        return self._size < 0

    def add(self, piece: memoryview) -> None:
        """Add a piece; the first one has to be added, too."""
        if self.kept is not None and len(self.kept) < self._reply:
            self.kept += piece if self._size >= 0 else piece[ANSWER_HEAD_LAYOUT.size:]
        if self._hash is not None:
            self._hash.update(piece if self._size >= 0 else piece[ANSWER_HEAD_LAYOUT.size:])
        self._size += len(piece)

    def check(self, piece: int) -> None:
        """Check that the reply is whole with a last piece of ``piece`` bytes. Raises :class:`Corrupt` if it is not."""
        size = self._size if self._size >= 0 else -ANSWER_HEAD_LAYOUT.size
        if size + piece < self._reply:
            raise Corrupt(f"the answer of call {self.seq} is shorter than its reply arguments", seq=self.seq,
                          reason="answer")

    def digest(self) -> bytes | None:
        """Return the digest, after the last piece; None where none is computed."""
        return self._hash.digest(self._result, self._reply, self._size - self._reply) if self._hash else None


class Deliveries:
    """The ledger of one session; see the module docstring."""

    def __init__(self, compare: bool = True, told: Callable[[int, bytes], None] = lambda seq, digest: None) -> None:
        """``compare``: keep digests; not needed without recovery, where no answered call is ever replayed.

        ``told``: called with number and digest of each answer that the program is given.
        """
        self.compare, self._told = compare, told
        self._pending: dict[int, int] = {}  #: seq → call id, of calls not answered yet
        self._awaited: set[int] = set()  #: of them, those that a thread of the program waits for
        self._answered: dict[int, int] = {}  #: seq → call id, of calls that may be answered again
        self._book = DeliveredAnswers()
        self.placements = Placements()
        self.highest = 0  #: the highest seq delivered
        self.given: Callable[[int], None] = lambda seq: None  #: called with each answer's seq, once the program has it

    def sent(self, seq: int, call_id: int, flags: int) -> bool:
        """Note a published call; return True when a thread of the program waits for its answer."""
        if call_id in ANSWERED or flags & AWAITED:
            self._pending[seq] = call_id
        if flags & AWAITED:
            self._awaited.add(seq)
        return bool(flags & AWAITED)

    def awaits(self, seq: int) -> bool:
        """Return whether the answer to this call is still to be delivered."""
        return seq in self._pending

    def keeps_reply(self, seq: int) -> bool:
        """Whether the reply arguments of this call's answer are wanted when it is delivered."""
        return self.compare and self.placements.wants(self._pending[seq])

    def delivered(self, seq: int, digest: bytes | None, result: int = 0, reply: Any = None) -> None:
        """Note that the program was given the whole answer. ``digest``: None where digests are not kept.

        ``reply``: its encoded reply arguments, where :meth:`keeps_reply` is true.
        """
        if reply is not None:
            self.placements.told(seq, result, reply)
        self._answered[seq] = self._pending.pop(seq)
        self._awaited.discard(seq)
        self.given(seq)
        if digest is not None:
            self._book.note(seq, digest)
            self._told(seq, digest)
        self.highest = max(self.highest, seq)

    def judge(self, answer: AnswerMessage) -> Verdict:
        """Return what to do with a whole answer; DELIVER once for each call."""
        if answer.seq in self._pending:
            self.delivered(answer.seq, answer_digest(answer.result, answer.reply, answer.payload)
                           if self.compare else None, answer.result,
                           answer.reply if self.keeps_reply(answer.seq) else None)
            return Verdict.DELIVER
        call_id = self._answered.get(answer.seq)
        if call_id is None:
            return Verdict.UNWANTED
        if call_id not in BY_ID or answer.seq not in self._book:
            return Verdict.REPEATED  # an unknown call's refusal, or no digests: nothing to compare with
        found = self._book.again(answer.seq, call_id, answer.result, answer.reply, answer.payload)
        return Verdict.DIVERGED if found else Verdict.REPEATED

    @property
    def divergences(self) -> list[Divergence]:
        return self._book.divergences

    def forget(self, position: int) -> None:
        """Drop the digests of calls ≤ ``position``, which will not be replayed."""
        self._book.cut(position)
        self.placements.forget(position)
        self._answered = {seq: call_id for seq, call_id in self._answered.items() if seq > position}

    @property
    def awaited(self) -> set[int]:
        """The calls whose answers were not received yet, and that threads of the program wait for."""
        return self._awaited

    @property
    def unanswered(self) -> Iterable[int]:
        """All calls whose answers were not received yet, in the order of the journal."""
        return self._pending

    @property
    def pending(self) -> int:
        """Number of calls whose answer was not received yet."""
        return len(self._pending)
