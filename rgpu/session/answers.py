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

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from struct import Struct
from typing import Any

import blake3
import xxhash

from rgpu.session.calls.wire import BY_ID
from rgpu.session.errors import Corrupt

DIGEST_SIZE = 16  #: bytes; used for comparison only, never as a name
MAX_ANSWERS = 1 << 20

#: Digests are computed in the agent, while the program waits for its next call: XXH3 (128 bits) is ten times as
#: fast there as BLAKE3 (docs/lab/decisions.md, 2026-11-30). They protect from no attacker: the program's own
#: answers are compared with its own. Of an answer longer than LEAF, XXH3_LEAVES is the digest of its leaves' digests,
#: so that several threads can compute it; of others it is that of XXH3.
XXH3_LEAVES, XXH3, BLAKE3 = "xxh3-128-leaves", "xxh3-128", "blake3"
LEAF = 128 * 1024  #: bytes of a leaf; the last one may be shorter

_HEAD = Struct("<iIQ")


def of_leaves(data: Any) -> bytes:
    """Return the digests of the leaves of :data:`LEAF` bytes that ``data`` consists of, one behind the other."""
    return b"".join([xxhash.xxh3_128_digest(data[at:at + LEAF]) for at in range(0, len(data), LEAF)])


class AnswerHash:
    """Hasher for one answer, whose bytes (reply arguments, then payload) are added in pieces of any size."""

    def __init__(self, kind: str = XXH3_LEAVES, leaves: Callable[[Any], bytes] = of_leaves) -> None:
        """``kind``: another one for comparison with the answers of an old recording. ``leaves``: as
        :func:`of_leaves`, perhaps quicker."""
        self._hasher: Any = blake3.blake3() if kind == BLAKE3 else xxhash.xxh3_128()  #: of the current leaf
        self._room = LEAF if kind == XXH3_LEAVES else 1 << 63  #: bytes that the current leaf still takes
        self._before: list[bytes] = []  #: digests of the leaves before it
        self._leaves = leaves

    def update(self, data: Any) -> None:
        """Add bytes to the digest."""
        size = len(data)
        if size > self._room:
            self._add_leaves(memoryview(data))
        else:
            self._hasher.update(data)
            self._room -= size

    def _add_leaves(self, data: memoryview) -> None:
        """Add bytes that end in another leaf than the current one."""
        if self._room < LEAF:
            self._hasher.update(data[:self._room])
            self._before.append(self._hasher.digest())
            data = data[self._room:]
        last = (len(data) - 1) // LEAF * LEAF  # the answer may end with it: it stays open
        self._before.append(self._leaves(data[:last]))
        self._hasher = xxhash.xxh3_128(data[last:])
        self._room = LEAF - (len(data) - last)

    def digest(self, result: int, reply: int, payload: int) -> bytes:
        """Return the digest. ``reply``, ``payload``: their lengths, which are hashed last, as they are known last."""
        if self._before:
            self._hasher = xxhash.xxh3_128(b"".join([*self._before, self._hasher.digest()]))
        self._hasher.update(_HEAD.pack(result, reply, payload))
        digest: bytes = self._hasher.digest()
        return digest[:DIGEST_SIZE]


def answer_digest(result: int, reply: Any, payload: Any, kind: str = XXH3_LEAVES) -> bytes:
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
