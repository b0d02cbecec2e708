"""The registry: the contract of every implementation (docs/developers/registry.md, "The registry").

A small ordered key-value store with one revision number over all keys, as in etcd:
every transaction that changes something raises the revision by one, and the new
revision is that of all keys that it changed. Reads are linearizable: an answer contains every
change that was acknowledged to any client before the read began.

Errors
    :class:`Conflict`         from :meth:`Registry.put_if`: a compare did not hold
    :class:`PoolUnavailable`  the registry cannot be reached; nothing was changed
    :class:`UnknownOutcome`   a change was sent; it is not known whether it happened
    :class:`NotFound`         the lease has expired or was revoked
    :class:`Compacted`        the changes that the watch asks for are no longer kept
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from rgpu.session.errors import Conflict, RgpuError, UnknownOutcome

#: Limits of one transaction: etcd's defaults, enforced for every implementation.
MAX_OPERATIONS = 128
MAX_REQUEST = 1_500_000  #: bytes of keys and values
MAX_KEY = 1024  #: bytes


class Compacted(Exception):
    """The requested changes are no longer kept: list again and watch from there.

    Not part of the error tree in ``session/errors.py``: every watcher handles it, and it
    never crosses a wire or reaches a user. ``oldest``: the first revision that is still kept.
    """

    def __init__(self, message: str, oldest: int) -> None:
        super().__init__(message)
        self.oldest = oldest


class Target(Enum):
    """Property of an entry that a compare reads."""

    MOD = "mod_revision"
    CREATE = "create_revision"  #: 0: the key does not exist
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class Compare:
    """Condition that ``target`` of the entry equals ``operand``; an absent key has revisions 0 and no value."""

    key: str
    target: Target
    operand: int | bytes


def unchanged(key: str, mod_revision: int) -> Compare:
    """Compare: the entry was not changed since it was read (0: it was absent)."""
    return Compare(key, Target.MOD, mod_revision)


def created(key: str, create_revision: int) -> Compare:
    """Compare: the key has existed without a gap since its creation at that revision (0: it is absent)."""
    return Compare(key, Target.CREATE, create_revision)


def absent(key: str) -> Compare:
    """Compare: the key does not exist."""
    return Compare(key, Target.CREATE, 0)


def has_value(key: str, value: bytes) -> Compare:
    """Compare: the key has this value."""
    return Compare(key, Target.VALUE, value)


@dataclass(frozen=True, slots=True)
class Put:
    """Operation: set a key. ``lease`` 0: none; a put without the key's lease detaches it from that, as in etcd."""

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
    """Result of a transaction. ``revision``: the registry's after it. ``entries``: the compared keys' entries
    when a compare failed (None: absent); empty after success."""

    succeeded: bool
    revision: int
    entries: dict[str, Entry | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """Change of one key. A deletion has ``entry`` None."""

    key: str
    entry: Entry | None


@dataclass(frozen=True, slots=True)
class Change:
    """All events of one transaction below the watched prefix. Resume with ``revision + 1``."""

    revision: int
    events: tuple[Event, ...]


class Registry(Protocol):
    """Interface of a registry (see the module docstring). One object serves one event loop."""

    @property
    def cluster_id(self) -> str:
        """Name of this registry's data; another name means that the data were replaced (OWNERSHIP 10)."""

    async def revision(self) -> int:
        """Return the revision of the last change, read linearizably."""

    async def get(self, key: str) -> Entry | None:
        """Return a key's entry, read linearizably; None: it does not exist. Raises :class:`PoolUnavailable`."""

    async def list(self, prefix: str) -> Listing:
        """Return all entries under a prefix as of one revision. Raises :class:`PoolUnavailable`."""

    async def txn(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> TxnResult:
        """Apply all operations at once if every compare holds, else none.

        Raises :class:`ValueError` for more than MAX_OPERATIONS, a key twice, or too many bytes;
        :class:`NotFound` for an expired lease in a put.
        """

    async def put_if(self, compare: Compare, value: bytes, lease: int = 0) -> int:
        """Put ``compare.key`` if the compare holds; return the new revision. Raises :class:`Conflict`."""

    async def lease_grant(self, ttl: float) -> int:
        """Grant a lease that ends ``ttl`` seconds after its last acknowledged keep-alive or later, never earlier.

        Returns its id. etcd grants whole seconds, has a shortest lease, and checks for ended ones twice a second.
        """

    async def keepalive(self, lease: int) -> float:
        """Renew a lease; return the seconds now granted. Raises :class:`NotFound` when it has ended."""

    async def lease_revoke(self, lease: int) -> None:
        """End the lease and delete its keys; an ended one is no error."""

    def watch(self, prefix: str, from_revision: int = 0) -> AsyncIterator[Change]:
        """Yield every change from ``from_revision`` on (0: from now), in order, none twice, none missed.

        Raises :class:`Compacted` where they are no longer kept. The order is kept, but a watch is not
        linearizable: a change may be read by :meth:`get` before its event arrives.
        """

    async def compact(self, revision: int) -> None:
        """Forget changes up to ``revision`` (watches only; entries stay)."""

    async def close(self) -> None:
        """Close connections; calls under way fail."""


def check_txn(compares: Sequence[Compare], operations: Sequence[Operation]) -> None:
    """Check the limits that every implementation enforces. Raises :class:`ValueError`."""
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
    """Return the revision of a transaction that must have succeeded. Raises :class:`Conflict`."""
    if not result.succeeded:
        raise Conflict(f"{what}: the registry changed since it was read", keys=sorted(result.entries))
    return result.revision


async def txn_certain(registry: Registry, compares: Sequence[Compare], operations: Sequence[Operation]) -> TxnResult:
    """Call :meth:`Registry.txn`, and read an unknown outcome back, so that it is known on return.

    Sound only when the compares name the revision of a key that is put (as in every change of a
    record): repeating the same compare-and-swap can then not apply it twice. A failed
    repetition is a success if the registry holds exactly the values of ``operations``. Raises
    :class:`UnknownOutcome` when the registry does not answer the read either.
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
