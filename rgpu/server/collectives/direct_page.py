"""The page of a communicator: how ranks whose GPUs reach each other's memory agree to exchange directly (pure).

Each worker has one page for each communicator, in memory that the others map. Its worker writes what its rank gives;
the other ranks' GPUs write words that this rank's stream waits for. Layout:
docs/developers/objects/direct-collectives.md.

A collective is exchanged directly if every rank has posted it, and each could from all others' posts tell that
everybody reaches everybody's memory: all decide from the same posts, which do not change, and so alike. A rank that
takes the way through the host says so by :meth:`Page.gives` without a post.
"""

from __future__ import annotations

import hashlib
import secrets
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

_POST = np.dtype([("number", "<u8"), ("called", "<u8"), ("segment", "<u4"), ("parts", "<u4"), ("offset", "<u8"),
                  ("size", "<u8"), ("bound", "<u8", MOST_RANKS), ("known", "<u4", MOST_RANKS)])
_PAGE = np.dtype([
    ("magic", "<u8"), ("version", "<u4"), ("rank", "<u4"), ("identity", "<u8"), ("given", "<u8"), ("checksum", "<u8"),
    ("reserved", "<u8", 3), ("ready", "<u8", (SLOTS, MOST_RANKS)), ("done", "<u8", (SLOTS, MOST_RANKS)),
    ("words", "<u8", (SLOTS, 4)), ("posts", _POST, SLOTS)])
PAGE_SIZE = 12288
assert _PAGE.itemsize <= PAGE_SIZE

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
    """One page in shared memory. ``memory``: u8, writable, :data:`PAGE_SIZE` bytes."""

    def __init__(self, memory: np.ndarray[Any, Any]) -> None:
        self._row: Any = memory[:_PAGE.itemsize].view(_PAGE)[0]
        self.memory = memory

    @classmethod
    def make(cls, memory: np.ndarray[Any, Any], rank: int) -> Page:
        """Write an empty page of a rank; the memory is zero."""
        page = cls(memory)
        page._row["rank"], page._row["identity"] = rank, secrets.randbits(63) | 1
        page._row["version"], page._row["magic"] = VERSION, MAGIC
        return page

    @classmethod
    def read(cls, memory: np.ndarray[Any, Any], ranks: int) -> Page:
        """Return another worker's page. Raises :class:`Corrupt` for what is none."""
        if memory.size != PAGE_SIZE:
            raise Corrupt(f"a communicator's page has {memory.size} bytes", reason="size")
        page = cls(memory)
        if int(page._row["magic"]) != MAGIC or int(page._row["version"]) != VERSION:
            raise Corrupt("a communicator's page is of another format", reason="magic")
        if page.rank >= ranks:
            raise Corrupt(f"a communicator's page is of rank {page.rank} of {ranks}", reason="rank")
        return page

    @property
    def rank(self) -> int:
        """Rank whose page it is."""
        return int(self._row["rank"])

    @property
    def identity(self) -> int:
        """Number that no other page has."""
        return int(self._row["identity"])

    # -- its worker --------------------------------------------------------------------
    def gives(self, number: int, post: Post | None) -> None:
        """Note that the rank gives collective ``number``; without a post: through the host."""
        if post is not None:
            row = self._row["posts"][number % SLOTS]
            row["number"] = 0
            row["called"], row["segment"], row["offset"] = post.called, post.segment, post.offset
            row["size"], row["parts"] = post.size, post.parts
            row["bound"][:len(post.bound)], row["known"][:len(post.known)] = post.bound, post.known
            row["number"] = number + 1
        self._row["given"] = max(int(self._row["given"]), number + 1)

    def post(self, number: int) -> Post | None:
        """Return the rank's post of a collective; None: there is none yet, or it takes the other way."""
        row = self._row["posts"][number % SLOTS]
        if int(row["number"]) != number + 1:
            return None
        return Post(number, int(row["called"]), int(row["segment"]), int(row["offset"]), int(row["size"]),
                    int(row["parts"]), tuple(map(int, row["bound"])), tuple(map(int, row["known"])))

    def given(self, number: int) -> bool:
        """Whether the rank has given that collective."""
        return int(self._row["given"]) > number

    # -- words -------------------------------------------------------------------------
    def ready(self, number: int, rank: int) -> int:
        """Return the value up to which ``rank`` has its contribution ready."""
        return int(self._row["ready"][number % SLOTS, rank])

    def done(self, number: int, rank: int) -> bool:
        """Whether ``rank`` has read this rank's contribution."""
        return int(self._row["done"][number % SLOTS, rank]) >= value_of(number)

    def word(self, number: int, which: int) -> bool:
        """Whether a word of this page's own has been reached by a collective."""
        return int(self._row["words"][number % SLOTS, which]) >= value_of(number)

    def set(self, number: int, *which: int) -> None:
        """Set words of this page's own."""
        for one in which:
            self._row["words"][number % SLOTS, one] = value_of(number)

    def release(self, number: int, own: bool = False) -> None:
        """Let the stream not wait for other ranks' contributions. ``own``: nor for this rank's, which will not come."""
        row, value = self._row["ready"][number % SLOTS], value_of(number)
        for rank in range(MOST_RANKS):
            if (own or rank != self.rank) and int(row[rank]) < value:
                row[rank] = value


def offset_of_ready(number: int, rank: int) -> int:
    """Return the offset of the word that ``rank``'s GPU writes when its contribution is ready."""
    return int(_PAGE.fields["ready"][1]) + 8 * (number % SLOTS * MOST_RANKS + rank)  # type: ignore[index]


def offset_of_done(number: int, rank: int) -> int:
    """Return the offset of the word that ``rank``'s GPU writes when it has read the contribution."""
    return int(_PAGE.fields["done"][1]) + 8 * (number % SLOTS * MOST_RANKS + rank)  # type: ignore[index]


def offset_of_word(number: int, which: int) -> int:
    """Return the offset of a word of the page's own."""
    return int(_PAGE.fields["words"][1]) + 8 * (number % SLOTS * 4 + which)  # type: ignore[index]


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
