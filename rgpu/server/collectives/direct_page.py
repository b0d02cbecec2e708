"""The page of a communicator: how ranks whose GPUs reach each other's memory agree to exchange directly (pure).

Each worker has one page for each communicator, in memory that the others map. Its worker writes what its rank gives;
the other ranks' GPUs write words that this rank's stream waits for. Layout:
docs/developers/objects/direct-collectives.md.

A collective is exchanged directly if every rank has posted it, and each could from all others' posts tell that
everybody reaches everybody's memory: all decide from the same posts, which do not change, and so alike. A rank that
takes the way through the host says so by :meth:`Page.gives` without a post.
"""

from __future__ import annotations

import ctypes
import hashlib
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from rgpu.session.errors import Corrupt

MAGIC, VERSION = 0x3144505047525344, 1  # "DSRGPPD1"
SLOTS = 32  #: collectives whose posts a page holds
MOST_RANKS = 8
STEPS = 64  #: values of a word for each collective

_HEAD = struct.Struct("<QIIQQ")  #: magic, version, rank, identity, given
_POST = struct.Struct(f"<QQIIQQ{MOST_RANKS}Q{MOST_RANKS}I")  #: number + 1, called, segment, parts, offset, size, …
_GIVEN = 24
_READY, _DONE, _WORDS, _POSTS = 64, 64 + 8 * SLOTS * MOST_RANKS, 64 + 16 * SLOTS * MOST_RANKS, \
    64 + 16 * SLOTS * MOST_RANKS + 32 * SLOTS
PAGE_SIZE = 12288
assert _POSTS + SLOTS * _POST.size <= PAGE_SIZE

#: Words of a slot that only the page's own stream and worker use: the worker has decided; the contributions were
#: combined, or its own is in host memory; the result is in host memory, where it is needed; the collective is complete.
DECIDED, GOT, BROUGHT, COMPLETE = range(4)


class Decision(Enum):
    """How a collective is exchanged."""

    OPEN = "open"  #: not every rank has come
    DIRECT = "direct"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Post:
    """What a rank gives to one collective.

    ``called``: digest of the call, the same for all ranks; ``segment``, ``offset``, ``size``: where the contribution is
    in its worker's GPU memory; ``parts``: it becomes ready in; ``bound``: by rank, the identity of the page that this
    rank's stream writes to and reads; ``known``: by rank, the number of the last segment that it maps.
    """

    number: int
    called: int
    segment: int
    offset: int
    size: int
    parts: int
    bound: tuple[int, ...]
    known: tuple[int, ...]


def called_of(call: object) -> int:
    """Return a digest of a call, of 64 bits."""
    return int.from_bytes(hashlib.blake2b(repr(call).encode(), digest_size=8).digest(), "little")


def digest_of(unique: bytes) -> bytes:
    """Return the digest that names a communicator in PAGE, 16 bytes."""
    return hashlib.blake2b(unique, digest_size=16).digest()


def value_of(number: int, part: int = STEPS - 1) -> int:
    """Return the value of a word when ``part`` (from 0 on) of collective ``number`` is reached; the last: all of it."""
    return (number + 1) * STEPS + part


class Page:
    """One page in shared memory. ``memory``: u8, writable, :data:`PAGE_SIZE` bytes.

    Words are read and written as a whole, as GPUs do; a post counts when its number is there, which is written last.
    """

    def __init__(self, memory: np.ndarray[Any, Any]) -> None:
        self.memory = memory
        self._bytes = memory.data
        self._words = (ctypes.c_uint64 * (PAGE_SIZE // 8)).from_buffer(self._bytes)
        _, _, self.rank, self.identity, _ = _HEAD.unpack_from(self._bytes)

    @classmethod
    def make(cls, memory: np.ndarray[Any, Any], rank: int) -> Page:
        """Write an empty page of a rank; the memory is zero."""
        _HEAD.pack_into(memory.data, 0, MAGIC, VERSION, rank, secrets.randbits(63) | 1, 0)
        return cls(memory)

    @classmethod
    def read(cls, memory: np.ndarray[Any, Any], ranks: int) -> Page:
        """Return another worker's page. Raises :class:`Corrupt` for what is none."""
        if memory.size != PAGE_SIZE:
            raise Corrupt(f"a communicator's page has {memory.size} bytes", reason="size")
        magic, version, rank, _, _ = _HEAD.unpack_from(memory.data)
        if magic != MAGIC or version != VERSION:
            raise Corrupt("a communicator's page is of another format", reason="magic")
        if rank >= ranks:
            raise Corrupt(f"a communicator's page is of rank {rank} of {ranks}", reason="rank")
        return cls(memory)

    # -- its worker --------------------------------------------------------------------
    def gives(self, number: int, post: Post | None) -> None:
        """Note that the rank gives collective ``number``; without a post: through the host."""
        if post is not None:
            at = _POSTS + number % SLOTS * _POST.size
            rest = [0] * (MOST_RANKS - len(post.bound))
            self._words[at // 8] = 0
            _POST.pack_into(self._bytes, at, 0, post.called, post.segment, post.parts, post.offset, post.size,
                            *post.bound, *rest, *post.known, *rest)
            self._words[at // 8] = number + 1
        self._words[_GIVEN // 8] = max(self._words[_GIVEN // 8], number + 1)

    def post(self, number: int) -> Post | None:
        """Return the rank's post of a collective; None: there is none yet, or it takes the other way."""
        at = _POSTS + number % SLOTS * _POST.size
        if self._words[at // 8] != number + 1:
            return None
        _, called, segment, parts, offset, size, *rest = _POST.unpack_from(self._bytes, at)
        return Post(number, called, segment, offset, size, parts, tuple(rest[:MOST_RANKS]), tuple(rest[MOST_RANKS:]))

    def given(self, number: int) -> bool:
        """Whether the rank has given that collective."""
        return self._words[_GIVEN // 8] > number

    # -- words -------------------------------------------------------------------------
    def ready(self, number: int, rank: int) -> int:
        """Return the value up to which ``rank`` has its contribution ready."""
        return self._words[offset_of_ready(number, rank) // 8]

    def done(self, number: int, rank: int) -> bool:
        """Whether ``rank`` has read this rank's contribution."""
        return self._words[offset_of_done(number, rank) // 8] >= value_of(number)

    def word(self, number: int, which: int) -> bool:
        """Whether a word of this page's own has been reached by a collective."""
        return self._words[offset_of_word(number, which) // 8] >= value_of(number)

    def set(self, number: int, *which: int) -> None:
        """Set words of this page's own."""
        for one in which:
            self._words[offset_of_word(number, one) // 8] = value_of(number)

    def release(self, number: int, own: bool = False) -> None:
        """Let the stream not wait for other ranks' contributions. ``own``: nor for this rank's, which will not come."""
        value = value_of(number)
        for rank in range(MOST_RANKS):
            at = offset_of_ready(number, rank) // 8
            if (own or rank != self.rank) and self._words[at] < value:
                self._words[at] = value


def offset_of_ready(number: int, rank: int) -> int:
    """Return the offset of the word that ``rank``'s GPU writes when its contribution is ready."""
    return _READY + 8 * (number % SLOTS * MOST_RANKS + rank)


def offset_of_done(number: int, rank: int) -> int:
    """Return the offset of the word that ``rank``'s GPU writes when it has read the contribution."""
    return _DONE + 8 * (number % SLOTS * MOST_RANKS + rank)


def offset_of_word(number: int, which: int) -> int:
    """Return the offset of a word of the page's own."""
    return _WORDS + 8 * (number % SLOTS * 4 + which)


def decide(number: int, pages: Mapping[int, Page]) -> tuple[Decision, str]:
    """Decide about collective ``number`` from all ranks' pages, by rank, with the reason."""
    posts: dict[int, Post] = {}
    for rank, page in sorted(pages.items()):
        given = page.given(number)  # before the post, which is written before it
        post = page.post(number)
        if post is not None:
            posts[rank] = post
        elif given:
            return Decision.HOST, f"rank {rank} gives collective {number} through the host"
    if missing := sorted(set(pages) - set(posts)):
        return Decision.OPEN, f"ranks {missing} have not come to collective {number}"
    return _of_posts(posts, [pages[rank].identity for rank in sorted(pages)])


def _of_posts(posts: Mapping[int, Post], identities: Sequence[int]) -> tuple[Decision, str]:
    first = posts[0]
    for rank, post in posts.items():
        if (post.called, post.parts) != (first.called, first.parts):
            return Decision.HOST, f"rank {rank} calls another collective than rank 0"
        for other, there in posts.items():
            if other == rank:
                continue
            if post.bound[other] != identities[other]:
                return Decision.HOST, f"rank {rank} has another page of rank {other}"
            if post.known[other] < there.segment:
                return Decision.HOST, f"rank {rank} does not map segment {there.segment} of rank {other} yet"
    return Decision.DIRECT, "all ranks reach each other's memory"
