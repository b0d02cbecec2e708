"""Rows of the Python API: the pool's answers as typed objects, whose fields are those of `-o json`.

Answers are untrusted. A field that cannot be read is left at its default; where a required field cannot be read, the
answer is :class:`Corrupt`. Fields of a newer pool that are not known here are left out.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import field

from rgpu.session.errors import Corrupt

_Row = TypeVar("_Row", bound="Row")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One row of an answer: immutable."""


class Session(Row, frozen=True, kw_only=True):
    """A session, or a request that waits (``state`` queued). Times in s since 1970, sizes in bytes."""

    name: str = field(name="session")
    state: str
    user: str | None = None
    host: str | None = None
    device: str | None = None  #: set by :meth:`rgpu.Pool.session` only
    epoch: int = 0
    memory_bytes: int | None = None
    quota: int | None = None  #: set by :meth:`rgpu.Pool.session`, and for requests that wait
    calls: int | None = None
    awaited_calls: int | None = None
    exchanged_calls: int | None = None  #: of them, those whose answer compiled code passed on
    waits: dict[str, dict[str, float]] = {}  #: wire calls awaited longest, by name: count, seconds
    pid: int | None = None
    worker_pid: int | None = None
    command: str | None = None
    attached: bool | None = None
    priority: int = 0
    position: int | None = None  #: in the queue
    labels: dict[str, str] = {}
    gang: str | None = None  #: gang that the session is a member of, or whose ranks the request asks for
    rank: int | None = None  #: its first rank in the gang
    gpu_seconds: float | None = None
    gpu_share: float | None = None  #: of the last ten seconds, 0 to 1
    created: float | None = None
    age_s: float | None = None
    ended: float | None = None
    lasted_s: float | None = None
    exit_code: int | None = None
    reason: str = ""
    note: str = ""


class Device(Row, frozen=True, kw_only=True):
    """A device of a node. Sizes in bytes."""

    device: str
    name: str = ""
    total_memory: int = 0
    free_memory: int = 0  #: not promised to any session
    memory_used: int | None = None
    utilization: float | None = None  #: 0 to 1
    sessions: int = 0
    healthy: bool = True
    reason: str = ""
    compute_capability: tuple[int, ...] = ()
    driver_version: int = 0


class Node(Row, frozen=True, kw_only=True):
    """A host of the pool, also one that is lost. ``lost_since``: s since 1970."""

    host: str
    state: str
    address: str = ""
    data: str = ""
    reason: str = ""
    version: str = ""
    pid: int | None = None
    leader: bool = False
    answers: bool = False
    lost_since: float | None = None
    devices: tuple[Device, ...] = ()


class Move(Row, frozen=True, kw_only=True):
    """The result of a move. Times in ms, sizes in bytes. ``source``, ``destination``: hosts."""

    session: str
    outcome: str
    source: str = field(name="from", default="")
    destination: str = field(name="to", default="")
    epoch: int = 0
    mode: str = ""
    reason: str = ""
    why: str = ""  #: reason for that mode
    downtime_ms: float = 0.0
    brownout_ms: float = 0.0
    total_ms: float = 0.0
    rounds: int = 0
    pages_sent: int = 0
    pages_total: int = 0
    bytes_sent: int = 0
    verified: bool = False


class Checkpoint(Row, frozen=True, kw_only=True):
    """A checkpoint. ``image`` is empty when the checkpoint was not waited for. Times in ms, sizes in bytes."""

    session: str
    image: str = ""
    position: int = 0
    epoch: int = 0
    pages: int = 0
    bytes: int = 0
    pause_ms: float = 0.0  #: time for which the session was paused
    total_ms: float = 0.0


class Restored(Row, frozen=True, kw_only=True):
    """A session that was brought back from a checkpoint."""

    session: str
    image: str = ""
    host: str | None = None
    epoch: int = 0
    position: int = 0


class DetachedStatus(Row, frozen=True, kw_only=True):
    """The status of a detached run. Times in s since 1970.

    ``state``: running, ended, or unknown where its end was not recorded; ``reason``: why. ``exit_code``: of the
    program, None where it is not known. ``folder``: its working directory; ``time_limit``: in s, None: none.
    """

    name: str
    state: str
    command: str = ""
    pid: int = 0
    exit_code: int | None = None
    reason: str = ""
    begun: float = 0.0
    ended: float | None = None
    host: str = ""
    pool: str = ""
    folder: str = ""
    time_limit: float | None = None


class Event(Row, frozen=True, kw_only=True):
    """A decision about a node, a session, a move, a gang or the pool (``kind``). ``when``: s since 1970."""

    kind: str
    decision: str
    when: float = 0.0
    revision: int = 0
    session: str | None = None
    host: str | None = None
    reason: str = ""
    epoch: int | None = None
    owner: str | None = None
    actor: str | None = None
    user: str | None = None


class MoveNotice(Row, frozen=True, kw_only=True):
    """A move of this program's session. ``outcome``: begun, committed or aborted; ``when``: s since 1970."""

    session: str
    outcome: str
    reason: str = ""
    epoch: int | None = None
    owner: str | None = None  #: the host that serves the session
    when: float = 0.0


def read(kind: type[_Row], answer: Any) -> _Row:
    """Return the pool's answer as a row of that kind. Raises :class:`Corrupt`."""
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        if not isinstance(answer, dict):
            raise Corrupt(f"the pool's answer is no {kind.__name__.lower()}: {error}", reason="reply") from None
    known: dict[str, Any] = {}
    for one in msgspec.structs.fields(kind):
        try:
            known[one.name] = msgspec.convert(answer[one.encode_name], one.type)
        except (KeyError, msgspec.ValidationError) as error:
            if one.required:
                raise Corrupt(f"the pool's answer is no {kind.__name__.lower()}: {one.encode_name}: {error}",
                              reason="reply") from None
    return kind(**known)
