"""The registry: what every implementation promises (docs/developers/registry.md, "The registry").

A small ordered key-value store with one revision number over all keys, as etcd
has it: every transaction that changes something raises the revision by one and
gives it to all it changed. Reads are linearizable: an answer holds everything
that was acknowledged to anybody before the read began.

Errors
    :class:`Conflict`         from :meth:`Registry.put_if`: a compare did not hold
    :class:`PoolUnavailable`  the registry cannot be reached; nothing was changed
    :class:`UnknownOutcome`   a change was sent and happened or did not: unknown
    :class:`NotFound`         the lease has expired or was revoked
    :class:`Compacted`        the watch asks for changes that are no longer kept
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from rgpu.session.errors import Conflict, RgpuError, UnknownOutcome

#: Limits of one transaction: those of etcd's defaults, so that no caller grows past them.
MAX_OPERATIONS = 128
MAX_REQUEST = 1_500_000  #: bytes of keys and values
MAX_KEY = 1024  #: bytes


class Compacted(Exception):
    """The changes asked for are not kept any more: list again and watch from there.

    No error of the tree in ``session/errors.py``: it is an answer that every watcher handles, and
    never crosses a wire or reaches a user. ``oldest``: the first revision that is still kept.
    """

    def __init__(self, message: str, oldest: int) -> None:
        super().__init__(message)
        self.oldest = oldest


class Target(Enum):
    """What of an entry a compare looks at."""

    MOD = "mod_revision"
    CREATE = "create_revision"  #: 0 stands for "there is no such key"
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class Compare:
    """Holds when ``target`` of the entry equals ``operand``; an absent key has revisions 0 and no value."""

    key: str
    target: Target
    operand: int | bytes


def unchanged(key: str, mod_revision: int) -> Compare:
    """The entry is the one that was read (0: it was absent)."""
    return Compare(key, Target.MOD, mod_revision)


def created(key: str, create_revision: int) -> Compare:
    """The key has existed without a gap since it was created at that revision (0: it is absent)."""
    return Compare(key, Target.CREATE, create_revision)


def absent(key: str) -> Compare:
    """Compare: the key does not exist."""
    return Compare(key, Target.CREATE, 0)


def has_value(key: str, value: bytes) -> Compare:
    """Compare: the key has this value."""
    return Compare(key, Target.VALUE, value)


@dataclass(frozen=True, slots=True)
class Put:
    """``lease`` 0: none. A put without the lease detaches the key from the one it had, as in etcd."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Operation: remove a key."""

    key: str


Operation = Put | Delete


@dataclass(frozen=True, slots=True)
class Entry:
    """A key with its value and revisions; ``lease`` 0: none."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Listing:
    """All entries below a prefix, in key order, as they were at ``revision``."""

    revision: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class TxnResult:
    """``revision``: the registry's after the transaction. ``entries``: what the compared keys
    held when a compare failed (None: absent); empty after success."""

    succeeded: bool
    revision: int
    entries: dict[str, Entry | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """One key's change. A deletion has ``entry`` None."""

    key: str
    entry: Entry | None


@dataclass(frozen=True, slots=True)
class Change:
    """All events of one transaction below the watched prefix. Resume with ``revision + 1``."""

    revision: int
    events: tuple[Event, ...]


class Registry(Protocol):
    """See the module docstring. One object serves one event loop."""

    @property
    def cluster_id(self) -> str:
        """Names this registry's data; another one means that somebody replaced them (OWNERSHIP 10)."""

    async def revision(self) -> int:
        """The revision of the last change, read linearizably."""

    async def get(self, key: str) -> Entry | None:
        """Return a key's entry, read linearizably; None: it does not exist. Raises :class:`PoolUnavailable`."""

    async def list(self, prefix: str) -> Listing:
        """Return all entries under a prefix as of one revision. Raises :class:`PoolUnavailable`."""

    async def txn(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> TxnResult:
        """If every compare holds, apply all operations at once, else none.

        Raises :class:`ValueError` for more than MAX_OPERATIONS, a key twice, or too many bytes;
        :class:`NotFound` for an expired lease in a put.
        """

    async def put_if(self, compare: Compare, value: bytes, lease: int = 0) -> int:
        """Put ``compare.key`` if the compare holds; the new revision. Raises :class:`Conflict`."""

    async def lease_grant(self, ttl: float) -> int:
        """A lease that ends ``ttl`` seconds after its last acknowledged keep-alive, or later, never earlier.

        etcd grants whole seconds, has a shortest lease, and looks for ended ones twice a second.
        """

    async def keepalive(self, lease: int) -> float:
        """Renew; the seconds now granted. Raises :class:`NotFound` when it has ended."""

    async def lease_revoke(self, lease: int) -> None:
        """End the lease and delete its keys; an ended one is no error."""

    def watch(self, prefix: str, from_revision: int = 0) -> AsyncIterator[Change]:
        """Every change from ``from_revision`` on (0: from now), in order, none twice, none missed.

        Raises :class:`Compacted` where they are no longer kept. Ordered, but not linearizable: a
        change may be read by :meth:`get` before its event arrives.
        """

    async def compact(self, revision: int) -> None:
        """Forget changes up to ``revision`` (watches only; entries stay)."""

    async def close(self) -> None:
        """Close connections; calls under way fail."""


def check_txn(compares: Sequence[Compare], operations: Sequence[Operation]) -> None:
    """The limits that every implementation enforces alike. Raises :class:`ValueError`."""
    if len(compares) > MAX_OPERATIONS or len(operations) > MAX_OPERATIONS:
        raise ValueError(f"{len(compares)} compares and {len(operations)} operations; {MAX_OPERATIONS} of each allowed")
    keys = [operation.key for operation in operations]
    if len(set(keys)) != len(keys):
        raise ValueError("a transaction changes one key twice")
    for key in [*keys, *(compare.key for compare in compares)]:
        if not 0 < len(key.encode()) <= MAX_KEY:
            raise ValueError(f"a key of {len(key.encode())} bytes; 1 to {MAX_KEY} allowed")
    size = sum(len(key) for key in keys) + sum(len(o.value) for o in operations if isinstance(o, Put))
    if size > MAX_REQUEST:
        raise ValueError(f"a transaction of {size} bytes; {MAX_REQUEST} allowed")


def require(result: TxnResult, what: str) -> int:
    """The revision of a transaction that must have succeeded. Raises :class:`Conflict`."""
    if not result.succeeded:
        raise Conflict(f"{what}: the registry changed since it was read", keys=sorted(result.entries))
    return result.revision


async def txn_certain(registry: Registry, compares: Sequence[Compare], operations: Sequence[Operation]) -> TxnResult:
    """:meth:`Registry.txn` whose outcome is known when it returns: an unknown one is read back.

    Sound only when the compares name the revision of a key that is put (as every change of a
    record does): repeating the same compare-and-swap can then not apply it twice. A failed
    repetition is a success if the registry holds exactly our values. Raises
    :class:`UnknownOutcome` when the registry does not answer the question either.
    """
    changed = {operation.key for operation in operations}
    if not any(c.target is not Target.VALUE and c.key in changed for c in compares):
        raise ValueError("a transaction that compares no revision of what it changes cannot be read back")
    try:
        return await registry.txn(compares, operations)
    except UnknownOutcome as first:
        try:
            again = await registry.txn(compares, operations)
            if not again.succeeded and await _holds(registry, operations):
                return TxnResult(True, again.revision)
            return again
        except RgpuError as error:
            raise UnknownOutcome(f"{first.message}; reading it back failed as well: {error.message}") from error


async def _holds(registry: Registry, operations: Sequence[Operation]) -> bool:
    for operation in operations:
        entry = await registry.get(operation.key)
        if (entry.value if entry else None) != (operation.value if isinstance(operation, Put) else None):
            return False
    return True
