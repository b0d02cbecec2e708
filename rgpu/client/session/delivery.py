"""Answers reach the program once: which are awaited, which it has had, and whether a replay agrees.

An answer comes again after each attachment, and anew when a recovered session
replays the call. The program gets the first; the digest of what it got is kept
until a checkpoint makes a replay impossible, and a second answer is compared with
it: a difference is *divergence*, and is reported
(:class:`rgpu.session.answers.DeliveredAnswers`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rgpu.client.session.placements import Placements
from rgpu.link.messages.data import ANSWER_HEAD_LAYOUT
from rgpu.session.answers import AnswerHash, DeliveredAnswers, Divergence, answer_digest
from rgpu.session.calls.wire import BY_ID, Answer
from rgpu.session.errors import Corrupt
from rgpu.session.journal.record import AWAITED

PAYLOAD_LIMIT = (1 << 32) - 64  #: what a message to the shim can carry
_ANSWERED = frozenset(call.id for call in BY_ID.values() if call.answer is not Answer.ASYNC)


class Verdict(Enum):
    """What becomes of an answer that came."""

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
    """Whole answers from the pieces of ANSWER messages (u8 more, then a piece each)."""

    def __init__(self) -> None:
        self._pieces: list[memoryview] = []
        self._size = 0

    def feed(self, body: memoryview) -> AnswerMessage | None:
        """Raises :class:`Corrupt` for an answer that is cut or too long."""
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
    """The answer whose pieces are being passed on; summed up piece by piece."""

    def __init__(self, piece: memoryview, summed: bool) -> None:
        """``piece``: the first one; ``kept``, set before more is added: its reply arguments are. Raises
        :class:`Corrupt`."""
        if len(piece) < ANSWER_HEAD_LAYOUT.size:
            raise Corrupt(f"an answer's first piece has {len(piece)} bytes", reason="answer")
        self.seq, self._result, _, self._reply = ANSWER_HEAD_LAYOUT.unpack_from(piece)
        self._size = -ANSWER_HEAD_LAYOUT.size
        self._hash = AnswerHash() if summed else None
        self.kept: bytearray | None = None

    @property
    def result(self) -> int:
        """The CUresult."""
        return int(self._result)

    @property
    def reply(self) -> bytes | None:
        """Its encoded reply arguments, where they were kept; the last piece was added."""
        return None if self.kept is None else bytes(self.kept[:self._reply])

    @property
    def untouched(self) -> bool:
        """No piece was added yet."""
        return self._size < 0

    def add(self, piece: memoryview) -> None:
        """A piece, the first one too."""
        if self.kept is not None and len(self.kept) < self._reply:
            self.kept += piece if self._size >= 0 else piece[ANSWER_HEAD_LAYOUT.size:]
        if self._hash is not None:
            self._hash.update(piece if self._size >= 0 else piece[ANSWER_HEAD_LAYOUT.size:])
        self._size += len(piece)

    def check(self, piece: int) -> None:
        """A last piece of this length may follow. Raises :class:`Corrupt` for an answer without all of its reply."""
        size = self._size if self._size >= 0 else -ANSWER_HEAD_LAYOUT.size
        if size + piece < self._reply:
            raise Corrupt(f"the answer of call {self.seq} is shorter than its reply arguments", seq=self.seq,
                          reason="answer")

    def digest(self) -> bytes | None:
        """The last piece was added."""
        return self._hash.digest(self._result, self._reply, self._size - self._reply) if self._hash else None


class Deliveries:
    """The ledger of one session; see the module docstring."""

    def __init__(self, compare: bool = True, told: Callable[[int, bytes], None] = lambda seq, digest: None) -> None:
        """``compare``: keep digests. Without recovery no call is ever replayed that was answered.

        ``told``: hears the digest of each answer when the program is given it.
        """
        self.compare, self._told = compare, told
        self._pending: dict[int, int] = {}  #: seq → call id, of calls not answered yet
        self._answered: dict[int, int] = {}  #: seq → call id, of those that may be answered again
        self._book = DeliveredAnswers()
        self.placements = Placements()
        self.highest = 0  #: the highest seq delivered
        self.given: Callable[[int], None] = lambda seq: None  #: told each answer that the program is given

    def sent(self, seq: int, call_id: int, flags: int) -> bool:
        """A call was published; True when the program's thread waits for it."""
        if call_id in _ANSWERED or flags & AWAITED:
            self._pending[seq] = call_id
        return bool(flags & AWAITED)

    def awaits(self, seq: int) -> bool:
        """Is the answer to this call still to be delivered?"""
        return seq in self._pending

    def keeps_reply(self, seq: int) -> bool:
        """Whether the reply arguments of this call's answer are wanted when it is delivered."""
        return self.compare and self.placements.wants(self._pending[seq])

    def delivered(self, seq: int, digest: bytes | None, result: int = 0, reply: Any = None) -> None:
        """The program was given the whole answer; its digest, where digests are kept.

        ``reply``: its encoded reply arguments, where :meth:`keeps_reply` wanted them.
        """
        if reply is not None:
            self.placements.told(seq, result, reply)
        self._answered[seq] = self._pending.pop(seq)
        self.given(seq)
        if digest is not None:
            self._book.note(seq, digest)
            self._told(seq, digest)
        self.highest = max(self.highest, seq)

    def judge(self, answer: AnswerMessage) -> Verdict:
        """What to do with a whole answer; DELIVER is said once for each call."""
        if answer.seq in self._pending:
            self.delivered(answer.seq, answer_digest(answer.result, answer.reply, answer.payload)
                           if self.compare else None, answer.result,
                           answer.reply if self.keeps_reply(answer.seq) else None)
            return Verdict.DELIVER
        call_id = self._answered.get(answer.seq)
        if call_id is None:
            return Verdict.UNWANTED
        if call_id not in BY_ID or answer.seq not in self._book:
            return Verdict.REPEATED  # an unknown call's refusal, or no digests: nothing to compare by
        found = self._book.again(answer.seq, call_id, answer.result, answer.reply, answer.payload)
        return Verdict.DIVERGED if found else Verdict.REPEATED

    @property
    def divergences(self) -> list[Divergence]:
        return self._book.divergences

    def forget(self, position: int) -> None:
        """Digests of calls ≤ position are not needed any more: they will not be replayed."""
        self._book.cut(position)
        self.placements.forget(position)
        self._answered = {seq: call_id for seq, call_id in self._answered.items() if seq > position}

    @property
    def pending(self) -> int:
        """Calls whose answer has not come yet."""
        return len(self._pending)
