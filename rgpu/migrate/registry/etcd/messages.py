"""Conversion between the registry's types and etcd's messages, and the meaning of etcd's errors. Pure.

Entries live below ``PREFIX/pool/``; ``PREFIX/identity`` names the data: etcd's
own cluster id is computed from the members' first configuration, so that an
etcd which was wiped, or restored from a backup, has the same id again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rgpu.migrate.registry.base import Change, Compare, Delete, Entry, Event, Operation, Target, TxnResult
from rgpu.migrate.registry.etcd.rpc import Rpc

PAGE = 1000  #: entries in one answer of a listing


class Keys:
    """Conversion of names of entries to etcd's keys, and back."""

    def __init__(self, prefix: str) -> None:
        self.identity = f"{prefix}/identity".encode()
        self._base = f"{prefix}/pool/".encode()

    def outer(self, key: str) -> bytes:
        """Return a key as etcd's: below the pool's prefix."""
        return self._base + key.encode()

    def inner(self, key: bytes) -> str:
        """Return the name of etcd's key. One that is not UTF-8 (written by another program) stays visible, escaped."""
        return key[len(self._base):].decode(errors="backslashreplace")

    def span(self, prefix: str) -> tuple[bytes, bytes]:
        """Return the first key and the end (not included) of all keys that begin with ``prefix``."""
        begin = self.outer(prefix)
        return begin, successor(begin)


def successor(prefix: bytes) -> bytes:
    """Return the first key after all that begin with ``prefix``; etcd's value for "no end" if there is none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"


def entry(keys: Keys, kv: Any) -> Entry:
    """Make an entry of etcd's KeyValue."""
    return Entry(keys.inner(kv.key), kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def txn_request(rpc: Rpc, keys: Keys, compares: Sequence[Compare], operations: Sequence[Operation]) -> Any:
    """Make the transaction; where a compare fails, it reads the compared keys at the same revision."""
    looked_at = dict.fromkeys(keys.outer(compare.key) for compare in compares)
    return rpc.TxnRequest(
        compare=[_compare(rpc, keys, compare) for compare in compares],
        success=[_operation(rpc, keys, operation) for operation in operations],
        failure=[rpc.RequestOp(request_range=rpc.RangeRequest(key=key)) for key in looked_at])


def _compare(rpc: Rpc, keys: Keys, compare: Compare) -> Any:
    message = rpc.Compare(key=keys.outer(compare.key), result=rpc.Compare.EQUAL)
    if compare.target is Target.VALUE:
        message.target, message.value = rpc.Compare.VALUE, compare.operand
    elif compare.target is Target.MOD:
        message.target, message.mod_revision = rpc.Compare.MOD, compare.operand
    else:
        message.target, message.create_revision = rpc.Compare.CREATE, compare.operand
    return message


def _operation(rpc: Rpc, keys: Keys, operation: Operation) -> Any:
    key = keys.outer(operation.key)
    if isinstance(operation, Delete):
        return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))
    return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=operation.value, lease=operation.lease))


def txn_result(keys: Keys, compares: Sequence[Compare], response: Any) -> TxnResult:
    """Make a result of etcd's answer to a transaction."""
    if response.succeeded:
        return TxnResult(True, response.header.revision)
    found: dict[str, Entry | None] = {compare.key: None for compare in compares}
    for answer in response.responses:
        for kv in answer.response_range.kvs:
            found[keys.inner(kv.key)] = entry(keys, kv)
    return TxnResult(False, response.header.revision, found)


def changes(keys: Keys, events: Iterable[Any]) -> list[Change]:
    """Group events in etcd's order into one change for each revision. A batch never ends within a revision."""
    grouped: dict[int, list[Event]] = {}
    for event in events:
        put = event.type == 0
        grouped.setdefault(event.kv.mod_revision, []).append(
            Event(keys.inner(event.kv.key), entry(keys, event.kv) if put else None))
    return [Change(revision, tuple(found)) for revision, found in grouped.items()]


class Fault(Enum):
    """Meaning of a failed request for its sender."""

    ELSEWHERE = "nothing was done; another member, or this one later, may do it"
    UNKNOWN = "a change may have been made or not"
    TOKEN = "the token has ended: authenticate again"
    NO_LEASE = "the lease has ended"
    LEASE_EXISTS = "the lease exists already"
    COMPACTED = "the revision is not kept any more"
    FUTURE = "the revision has not happened yet"
    INVALID = "the request itself is wrong"
    SPACE = "etcd's space alarm is on: it takes no more writes"
    NO_AUTH = "etcd has no user authentication switched on"
    DENIED = "user, password or permission is wrong"


@dataclass(frozen=True, slots=True)
class Rule:
    """Text of an etcd error, and its meaning."""

    text: str  #: contained in the error's details
    fault: Fault


#: etcd's own errors by their text (etcd-io/etcd, etcdserver/api/v3rpc/rpctypes/error.go): their codes are ambiguous.
RULES = (
    Rule("requested lease not found", Fault.NO_LEASE),
    Rule("lease already exists", Fault.LEASE_EXISTS),
    Rule("required revision has been compacted", Fault.COMPACTED),
    Rule("required revision is a future revision", Fault.FUTURE),
    Rule("database space exceeded", Fault.SPACE),
    Rule("invalid auth token", Fault.TOKEN),
    Rule("revision of auth store is old", Fault.TOKEN),
    Rule("authentication is not enabled", Fault.NO_AUTH),
    Rule("authentication failed", Fault.DENIED),
    Rule("permission denied", Fault.DENIED),
    Rule("user name is empty", Fault.DENIED),
    Rule("user name not found", Fault.DENIED),
    # Returned before anything is proposed to the cluster.
    Rule("no leader", Fault.ELSEWHERE),
    Rule("too many requests", Fault.ELSEWHERE),
    Rule("not supported for learner", Fault.ELSEWHERE),
    # gRPC's own, returned before anything is sent.
    Rule("failed to connect to all addresses", Fault.ELSEWHERE),
    Rule("DNS resolution failed", Fault.ELSEWHERE),
    # A corrupt member refuses every request; the others still answer.
    Rule("corrupt cluster", Fault.ELSEWHERE),
)

#: gRPC's codes (grpc/grpc, doc/statuscodes.md) by name, for what no rule names.
_INVALID = ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "OUT_OF_RANGE", "UNIMPLEMENTED")


def fault(code: str, details: str) -> Fault:
    """Return the meaning of an error. ``code``: name of the gRPC status. An unlisted one is unknown, never failed."""
    for rule in RULES:
        if rule.text in details:
            return rule.fault
    if code == "UNAUTHENTICATED":
        return Fault.TOKEN
    if code == "PERMISSION_DENIED":
        return Fault.DENIED
    return Fault.INVALID if code in _INVALID else Fault.UNKNOWN
