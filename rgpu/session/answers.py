"""Answers that the program might not have received yet, and digests for checking the answers of a replay.

Two records, one on each side of the data link, both without I/O:

:class:`RetainedAnswers`   in the worker: every answer given, until the record
                           ``completed(seq)`` for it was applied. Part of
                           checkpoints and moves; sent again after an ATTACH.
:class:`DeliveredAnswers`  the digests of the answers that the program was given.
                           The answer of a replay is not delivered a second
                           time, and one that differs is a :class:`Divergence`
                           (except of volatile calls: SEMANTICS 5).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from struct import Struct
from typing import Any

import blake3
import xxhash

from rgpu.session.calls.wire import BY_ID
from rgpu.session.errors import Corrupt

DIGEST_SIZE = 16  #: bytes; used for comparison only, never as a name
MAX_ANSWERS = 1 << 20

#: Digests are computed in the agent's loop, while the program waits for its next call: XXH3 (128 bits) is an order of
#: magnitude faster there than BLAKE3 (docs/lab/decisions.md, 2026-11-30). They protect from no attacker: the program's
#: own answers are compared with its own.
XXH3, BLAKE3 = "xxh3-128", "blake3"
_HASHERS = {XXH3: xxhash.xxh3_128, BLAKE3: blake3.blake3}

_HEAD = Struct("<iIQ")


class AnswerHash:
    """Hasher for one answer, whose bytes (reply arguments, then payload) are added in pieces of any size."""

    def __init__(self, kind: str = XXH3) -> None:
        """``kind``: BLAKE3 for comparison with the answers of an old recording."""
        self._hasher: Any = _HASHERS[kind]()
        self.update = self._hasher.update  #: add bytes to the digest

    def digest(self, result: int, reply: int, payload: int) -> bytes:
        """Return the digest. ``reply``, ``payload``: their lengths, which are hashed last, as they are known last."""
        self.update(_HEAD.pack(result, reply, payload))
        digest: bytes = self._hasher.digest()
        return digest[:DIGEST_SIZE]


def answer_digest(result: int, reply: Any, payload: Any, kind: str = XXH3) -> bytes:
    """Return the digest of one answer: CUresult, reply arguments, reply payload. ``kind``: as :class:`AnswerHash`."""
    hasher = AnswerHash(kind)
    hasher.update(reply)
    hasher.update(payload)
    return hasher.digest(result, len(reply), len(payload))


@dataclass(frozen=True, slots=True)
class Divergence:
    """An answer of a replay that differs from the one that the program was given. ``what``: description in words."""

    seq: int
    call: str
    what: str


@dataclass(frozen=True, slots=True)
class RetainedAnswer:
    """An answer that is kept until the program has it."""

    seq: int
    result: int  #: CUresult
    reply: bytes
    payload: bytes


class RetainedAnswers:
    """The worker's answers; see the module docstring. Not locked: the caller orders its threads."""

    def __init__(self) -> None:
        self._answers: dict[int, RetainedAnswer] = {}
        #: In a replay ``completed(n)`` may be applied just before call n is answered.
        self._early: set[int] = set()
        self.bytes = 0  #: held in replies and payloads

    def __len__(self) -> int:
        return len(self._answers)

    def __contains__(self, seq: int) -> bool:
        return seq in self._answers

    def answered(self, seq: int, result: int, reply: bytes, payload: bytes) -> None:
        """Retain the answer to call ``seq``; a second answer (a replay's) replaces the first."""
        if seq in self._early:
            self._early.discard(seq)
            return
        self._drop(seq)
        self._answers[seq] = RetainedAnswer(seq, result, bytes(reply), bytes(payload))
        self.bytes += len(reply) + len(payload)

    def observed(self, seq: int, answer_expected: bool = False) -> None:
        """Release the answer to ``seq``, if there is one: ``completed(seq)`` was applied, so the program has it.

        ``answer_expected``: the call is awaited and was not answered here yet;
        its later answer (a replay's) will not be retained.
        """
        if not self._drop(seq) and answer_expected:
            self._early.add(seq)

    def unobserved(self) -> list[tuple[int, int, bytes, bytes]]:
        """Return (seq, result, reply, payload) of the answers that the program might not have, by seq."""
        return [(a.seq, a.result, a.reply, a.payload) for _, a in sorted(self._answers.items())]

    def _drop(self, seq: int) -> bool:
        answer = self._answers.pop(seq, None)
        if answer is None:
            return False
        self.bytes -= len(answer.reply) + len(answer.payload)
        return True

    def as_list(self) -> list[list[Any]]:
        """Return the rows for a checkpoint or a move: seq, result, reply, payload."""
        return [list(row) for row in self.unobserved()]

    @staticmethod
    def from_list(rows: Any) -> RetainedAnswers:
        """Invert :meth:`as_list`. Raises :class:`Corrupt`."""
        found = RetainedAnswers()
        if not isinstance(rows, list) or len(rows) > MAX_ANSWERS:
            raise Corrupt("retained answers: no list, or too long", offset=0, reason="answers")
        for index, row in enumerate(rows):
            if not isinstance(row, list) or [type(value) for value in row] != [int, int, bytes, bytes] \
                    or row[0] <= 0 or row[0] in found._answers:
                raise Corrupt(f"retained answer {index} is malformed", offset=index, reason="answers")
            found.answered(*row)
        return found

    def check(self) -> None:
        """Check the invariants. Raises AssertionError."""
        assert self.bytes == sum(len(a.reply) + len(a.payload) for a in self._answers.values())
        assert not self._early & self._answers.keys()
        assert all(seq == answer.seq for seq, answer in self._answers.items())


class DeliveredAnswers:
    """The digests of answers that the program was given, until the journal is cut behind them."""

    def __init__(self, digests: Iterable[tuple[int, bytes]] = ()) -> None:
        self._digests: dict[int, bytes] = dict(digests)
        self.divergences: list[Divergence] = []

    def __contains__(self, seq: int) -> bool:
        return seq in self._digests

    def __len__(self) -> int:
        return len(self._digests)

    def delivered(self, seq: int, result: int, reply: Any, payload: Any) -> None:
        """Record the digest of the answer to call ``seq`` that the program is given."""
        self._digests[seq] = answer_digest(result, reply, payload)

    def note(self, seq: int, digest: bytes) -> None:
        """Record as :meth:`delivered` does, given the digest of the answer."""
        self._digests[seq] = digest

    def again(self, seq: int, call_id: int, result: int, reply: Any, payload: Any) -> Divergence | None:
        """Check a further answer to a call that was answered before; the caller does not deliver it.

        Returns (and keeps) the divergence if the program was given another answer.
        """
        call = BY_ID[call_id]
        if call.volatile or self._digests[seq] == answer_digest(result, reply, payload):
            return None
        what = (f"the replay of {call.name} (position {seq}) gives another answer than the program was given: "
                f"result {result}, {len(reply)} + {len(payload)} bytes")
        found = Divergence(seq, call.name, what)
        self.divergences.append(found)
        return found

    def cut(self, position: int) -> None:
        """Drop the digests of calls up to ``position``, which are never replayed any more."""
        self._digests = {seq: digest for seq, digest in self._digests.items() if seq > position}

    def items(self) -> list[tuple[int, bytes]]:
        """Return (seq, digest) by seq, for a spill."""
        return sorted(self._digests.items())
