"""The rotation of the pool's secret as a table: the leader's next record, and a node's actions by the record. Pure.

==========  =================  ================================  ===================================================
phase       tickets made with  accepted                          ends when
==========  =================  ================================  ===================================================
settled     old                old                               an operator rotates: spreading
spreading   old                old, new                          every living node holds the new one: overlap
overlap     new                old and new, until ``until``      ``until`` has passed: settled, with new as old
==========  =================  ================================  ===================================================

No node makes tickets with a secret that another node might not accept yet, and none is dropped while a ticket that was
made with it can be valid. The registry holds numbers and marks; nodes send each other the secrets over the control
link. An interrupted rotation stays in its phase, and the next leader continues from the record. A new secret that was
lost with the node that made it, before another one had it, is replaced by rotating again. A record that is older than
what a node dropped (a registry that was set back) is not followed: a dropped secret never counts again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rgpu.migrate.records.schema import decode
from rgpu.migrate.records.secrets import SECRETS, Named, SecretsRecord
from rgpu.session.errors import Corrupt, Refused


@dataclass(frozen=True, slots=True)
class Held:
    """Secrets of a node: number → mark; ``dropped``: the highest number that it deleted, never accepted again."""

    marks: Mapping[int, str]
    dropped: int = 0

    def has(self, named: Named | None) -> bool:
        """Whether it holds the named secret, with the same mark."""
        return named is not None and named.number > self.dropped and self.marks.get(named.number) == named.mark

    def newest(self) -> int:
        """Return the highest number; 0 without any."""
        return max((number for number in self.marks if number > self.dropped), default=0)

    def oldest(self) -> int:
        """Return the lowest number that was not dropped; 0 without any."""
        return min((number for number in self.marks if number > self.dropped), default=0)


@dataclass(frozen=True, slots=True)
class Follow:
    """Actions of a node: make tickets with ``issue`` (0: with none, it lacks the secret), accept those of ``accept``,
    request ``fetch`` from other nodes, and delete all up to ``drop``. ``reason``: a sentence for the log."""

    issue: int
    accept: tuple[int, ...]
    fetch: tuple[Named, ...]
    drop: int
    reason: str


def newest(record: SecretsRecord) -> Named:
    """Return the highest generation that the record names."""
    return record.new or record.old


def behind(record: SecretsRecord | None, held: Held) -> bool:
    """Whether the record is older than one that this node has followed."""
    return held.dropped > 0 and (record is None or newest(record).number <= held.dropped)


def follow(record: SecretsRecord | None, held: Held, now: float) -> Follow:
    """Return what a node with ``held`` does by the record (None: no secret was ever rotated) at ``now`` (Unix s)."""
    if record is None or behind(record, held):
        mine = held.oldest()  # a newer one may have been made here for a rotation that was never recorded
        why = "the registry names an older secret than this node: a dropped one never counts again" if held.dropped \
            else "no secret was rotated yet"
        return Follow(mine, (mine,) if mine else (), (), 0, why)
    old, new = record.old, record.new
    if record.phase == "settled" or new is None:
        issue, counts, why = old, [old], f"secret {old.number} counts"
    elif record.phase == "spreading":
        issue, counts, why = old, [old, new], f"secret {new.number} is being given to all nodes"
    elif now < record.until:
        issue, counts, why = new, [old, new], f"secret {old.number} is accepted for {record.until - now:.0f} s more"
    else:
        issue, counts, why = new, [new], f"secret {new.number} counts alone: the overlap is over"
    fetch = tuple(named for named in counts if named.number > held.dropped and not held.has(named))
    accept = tuple(named.number for named in counts if held.has(named))
    made = issue.number if held.has(issue) else max(accept, default=0)
    # A secret newer than the record may be about to be recorded; an old one is kept until its successor was fetched.
    drop = 0 if fetch else min(named.number for named in counts) - 1
    lacks = f"; lacks {', '.join(str(named.number) for named in fetch)}" if fetch else ""
    return Follow(made, accept, fetch, drop, why + lacks)


def check_idle(record: SecretsRecord | None, holders: Mapping[str, str]) -> None:
    """Check that a rotation may begin.

    Raises :class:`Refused` while one is under way, except where it is spreading and no living node has its new secret.
    ``holders``: living host → mark of the newest secret on record, if the host holds it.
    """
    if record is None or record.new is None:
        return
    if record.phase == "overlap":
        raise Refused(f"secret {record.old.number} is accepted beside {record.new.number} still; `rgpu keys rotate "
                      "--status` says until when, --finish ends that now", reason="overlap")
    if record.phase == "spreading" and record.new.mark in holders.values():
        raise Refused(f"a rotation is under way: {describe(record, holders)}", reason="spreading")


def begin(record: SecretsRecord | None, first: Named, made: Named, *, overlap: float, host: str,
          now: float) -> SecretsRecord:
    """Return the record with which a rotation begins; :func:`check_idle` checks whether one may.

    ``first``: the secret in use while there is no record; ``made``: the new secret, made on ``host``. Raises
    :class:`Refused` for a number that was used.
    """
    current = record or SecretsRecord(old=first)
    if made.number <= newest(current).number:
        raise Refused(f"secret {made.number} is not newer than {newest(current).number}", reason="number")
    return SecretsRecord(phase="spreading", old=current.old, new=made, overlap=overlap, since=now, holder=host)


def advance(record: SecretsRecord | None, holders: Mapping[str, str], now: float) -> SecretsRecord | None:
    """Return the record that the leader writes next; None: nothing yet. ``holders``: as for :func:`check_idle`."""
    if record is None or record.new is None:
        return None
    if record.phase == "spreading":
        if not holders or any(mark != record.new.mark for mark in holders.values()):
            return None
        return record.replace(phase="overlap", until=now + record.overlap, since=now)
    if record.phase == "overlap" and now >= record.until:
        return SecretsRecord(phase="settled", old=record.new, since=now)
    return None


def finish(record: SecretsRecord | None, now: float) -> SecretsRecord:
    """Return the record that ends an overlap now. Raises :class:`Refused` where there is none."""
    if record is None or record.phase != "overlap":
        raise Refused("no old secret is accepted beside a new one: there is nothing to finish", reason="phase")
    return record.replace(until=min(record.until, now))


def describe(record: SecretsRecord | None, holders: Mapping[str, str]) -> str:
    """Return a sentence for people: the rotation's phase, and what it waits for."""
    if record is None:
        return "the pool has the secret that it was made with"
    if record.phase == "settled" or record.new is None:
        return f"secret {record.old.number} counts alone"
    if record.phase == "spreading":
        lacking = sorted(host for host, mark in holders.items() if mark != record.new.mark)
        waits = f" (waits for {', '.join(lacking)})" if lacking else ""
        return f"secret {record.new.number} is being given to all nodes{waits}; tickets are made with " \
               f"{record.old.number}"
    return f"tickets are made with secret {record.new.number}; {record.old.number} is accepted beside it"


def status(record: SecretsRecord | None, holders: Mapping[str, str]) -> dict[str, Any]:
    """Return {phase, secret, new, until, hosts: {host: whether it holds the newest}, reason} for ``-o json``.

    ``secret``: number that tickets are made with; ``new``, ``until``: null where there is none. Without a record
    ``hosts`` is empty.
    """
    overlap = record is not None and record.phase == "overlap"
    return {"phase": record.phase if record else "settled",
            "secret": (newest(record) if overlap else record.old).number if record else 1,
            "new": record.new.number if record is not None and record.new is not None else None,
            "until": record.until if record is not None and overlap else None,
            "hosts": {host: held == newest(record).mark for host, held in sorted(holders.items())} if record else {},
            "reason": describe(record, holders)}


def decoded(data: bytes) -> SecretsRecord:
    """Decode and check a record. Raises :class:`Corrupt`, :class:`VersionMismatch`."""
    record = decode(data, SecretsRecord, SECRETS)
    if (record.phase == "settled") != (record.new is None) or record.new and record.new.number <= record.old.number:
        raise Corrupt(f"{SECRETS}: phase {record.phase} with a new secret {record.new}", offset=0, reason="schema",
                      key=SECRETS)
    return record
