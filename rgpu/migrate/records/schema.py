"""The registry's records: keys, values, limits. Pure (docs/developers/registry.md, "Registry").

Values are msgpack maps with a schema version ``v``. A reader takes a newer
record of the same ``v`` (unknown fields are ignored) and refuses
another ``v``. Input is not trusted: sizes, ranges and names are
checked before a record is used, errors are :class:`Corrupt`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from rgpu.session.devices import MAX_GPUS, MAX_LIST, parts
from rgpu.session.errors import Corrupt, UsageError, VersionMismatch

SCHEMA = 1
MAX_RECORD = 256 * 1024  #: bytes of one encoded record
MAX_DEVICES = 64
MAX_TEXT = 4096
MAX_OLDER = 4
MAX_SHARES = 64  #: sessions that one session shares memory with, during its whole life
MAX_PRIORITY = 1000
MOST_KERNEL_SECONDS = 10_000_000

#: Subjects of history other than sessions; no session may have such a name.
OF_HOST, OF_POOL = "@host/", "@pool"

_SESSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}(/[0-9]{1,6}){0,4}", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}", re.ASCII)
_MOVE = re.compile(r"[A-Za-z0-9._/-]{1,120}", re.ASCII)

U64 = Annotated[int, Meta(ge=0)]  # msgspec has no bound above int64; the wire has no more than 64 bits
U63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]
LabelKey = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}$")]
LabelValue = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._/@:+-]{0,63}$")]

#: ready: takes sessions. cordoned: keeps its own. draining: is being emptied. unhealthy: its sessions are recovered
#: elsewhere.
NodeState = Literal["ready", "cordoned", "draining", "unhealthy"]
#: parked: stopped in favour of another session; only a checkpoint and its agent's journal exist for now.
SessionState = Literal["starting", "running", "moving", "recovering", "parked", "failed", "ended"]
MoveState = Literal["preparing", "ready", "committed", "aborted"]

LIVE: frozenset[str] = frozenset({"starting", "running", "moving", "recovering"})
OPEN_MOVE: frozenset[str] = frozenset({"preparing", "ready"})


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """Base class of all records."""

    def replace(self: R, **changes: Any) -> R:
        """Return a copy with other values."""
        return msgspec.structs.replace(self, **changes)


R = TypeVar("R", bound=Record)


class Needs(Record, frozen=True, kw_only=True):
    """Requirements on a device that continues a session: set by the device that it began on.

    ``kind``: ``cpu`` or ``cuda``; results would differ between them. ``driver_version``: as
    cuDriverGetVersion; a newer one will do.
    """

    kind: Name = "cpu"
    compute_capability: tuple[Annotated[int, Meta(ge=0, le=255)], Annotated[int, Meta(ge=0, le=255)]] = (0, 0)
    driver_version: U63 = 0


class Wants(Record, frozen=True, kw_only=True):
    """Requirements beside memory. A session keeps them on every host.

    ``compute``: promised per cent of one device; 0: it counts by its memory alone.
    ``models``: names of acceptable devices (:func:`rgpu.migrate.scheduling.placement.is_model`); none: any.
    ``anti_affinity``: no two sessions of one group share a host. ``gpus``: devices, all of one host; memory and
    compute are for each of them. ``client_grace``: seconds that its client's host may be silent; 0: the pool's.
    ``labels``: for people, to search by. ``kind``: only devices of that kind; empty: of any.
    """

    compute: Annotated[int, Meta(ge=0, le=100)] = 0
    models: Annotated[list[Name], Meta(max_length=16)] = []
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    anti_affinity: Annotated[str, Meta(max_length=64)] = ""
    gpus: Annotated[int, Meta(ge=1, le=MAX_GPUS)] = 1
    client_grace: Seconds = 0.0
    labels: Annotated[dict[LabelKey, LabelValue], Meta(max_length=16)] = {}
    kind: Annotated[str, Meta(max_length=16)] = ""


class DeviceRecord(Record, frozen=True, kw_only=True):
    """Device of a node. ``memory``: bytes that sessions may use in all.

    ``free_memory`` is the node's last reading, for people; placement counts the quotas in the
    session records instead, which are never late. ``facts``: device properties for the client (opaque here).
    """

    device: Name  #: cpu:0, cuda:1
    name: Text = ""
    uuid: Annotated[bytes, Meta(max_length=16)] = b""
    memory: U63
    free_memory: U63 = 0
    compute_capability: tuple[Annotated[int, Meta(ge=0, le=255)], Annotated[int, Meta(ge=0, le=255)]] = (0, 0)
    driver_version: U63 = 0
    healthy: bool = True
    reason: Text = ""
    facts: dict[str, Any] = {}

    @property
    def kind(self) -> str:
        return self.device.partition(":")[0]

    def needs(self) -> Needs:
        """Return the requirements of a session that begins on this device on every later one."""
        return Needs(kind=self.kind, compute_capability=self.compute_capability, driver_version=self.driver_version)


class NodeRecord(Record, frozen=True, kw_only=True):
    """Node: ``nodes/HOST``, under the node's lease. ``incarnation``: random at each start of the daemon.

    ``store``: where its checkpoints are; nodes with the same store read each other's. Empty: not known. ``secret``:
    mark of the newest of the pool's secrets on record, if the node holds it (:mod:`rgpu.migrate.records.secrets`).
    ``checks_agents``: it accepts tickets that agents make with their own keys; the previous version does not.
    """

    v: int = SCHEMA
    host: Name
    incarnation: U64
    control: Text
    data: Text
    public_key: Text = ""
    devices: Annotated[list[DeviceRecord], Meta(max_length=MAX_DEVICES)] = []
    state: NodeState = "ready"
    reason: Text = ""
    version: Text = ""
    started: Seconds = 0.0
    store: Text = ""
    secret: Annotated[str, Meta(max_length=32)] = ""
    checks_agents: bool = False

    def device(self, name: str) -> DeviceRecord | None:
        """Return the record of a device by its name; None: the node has no such device."""
        return next((device for device in self.devices if device.device == name), None)

    def all_of(self, name: str) -> list[DeviceRecord]:
        """Return the devices of a session, in its order; empty where the node lacks one of them."""
        found = [self.device(one) for one in parts(name)]
        return [device for device in found if device is not None] if all(found) else []


class CheckpointName(Record, frozen=True, kw_only=True):
    """Durable checkpoint: the state at journal position ``position``, taken at ``epoch``."""

    name: Name
    position: U63
    epoch: U63
    created: Seconds = 0.0
    bytes: U63 = 0
    cut: Text = ""  #: consistent cut of sessions that share communicators, equal for all; empty: taken alone
    put_off: U63 = 0  #: failed attempts at that cut


class MoveRecord(Record, frozen=True, kw_only=True):
    """Move; its state decides which node owns the session (OWNERSHIP 2)."""

    id: Name
    source: Name
    destination: Name
    destination_incarnation: U64
    device: Name
    state: MoveState = "preparing"
    reason: Text = ""
    started: Seconds = 0.0


class Failure(Record, frozen=True, kw_only=True):
    """Loss of the session's server. ``position``: how far its calls were applied, as last known.

    ``epoch``: the epoch that was lost; an epoch is lost once, however often that is reported (0: not known).
    ``begun``: the last call begun. ``complete``: every call ≤ it was complete. (:mod:`rgpu.migrate.records.losses`)
    """

    host: Name
    device: Text
    position: U63 | None = None
    when: Seconds = 0.0
    reason: Text = ""
    epoch: U63 = 0
    begun: U63 | None = None
    complete: U63 | None = None


class Program(Record, frozen=True, kw_only=True):
    """Client process, for people and to recognise a repeated creation."""

    pid: U63 = 0
    command: Text = ""
    host: Text = ""


class Parked(Record, frozen=True, kw_only=True):
    """Place and epoch of a session before it was parked, and in whose favour. ``store``: where its checkpoint is."""

    host: Name
    device: Text
    epoch: U63
    when: Seconds
    favour: Text
    store: Text = ""


class SessionRecord(Record, frozen=True, kw_only=True):
    """Session: ``sessions/NAME``. ``owner`` is None once it ended, and while it is parked; ``quota``: bytes per device.

    ``device``: one, or several of the owner's (:mod:`rgpu.session.devices`). ``user``: the user that it belongs to; the
    previous version wrote none: then it belongs to the user of the key ``agent``. ``run``: the name of its run, whose
    sessions share the memory and compute of one of them on a device; empty (as the previous version wrote it): it does
    not share. ``proves_key``: its agent makes its own tickets, and tickets made with the pool's secret are refused.
    """

    v: int = SCHEMA
    name: Name
    state: SessionState
    owner: Name | None
    incarnation: U64
    epoch: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    quota: U63
    agent: Text
    device: Text
    needs: Needs = Needs()
    checkpoint: CheckpointName | None = msgspec.field(default=None, name="image")  #: on disk: image
    older: Annotated[list[CheckpointName], Meta(max_length=MAX_OLDER)] = []  #: earlier checkpoints, newest first
    cut: U63 | None = None  #: the agent may have cut its journal up to here; None: to the checkpoint's position
    move: MoveRecord | None = None
    recover: bool = True
    program: Program = Program()
    created: Seconds = 0.0
    changed: Seconds = 0.0
    running_since: Seconds = 0.0
    reason: Text = ""
    failures: Annotated[list[Failure], Meta(max_length=16)] = []
    wants: Wants = Wants()
    moved: Seconds = 0.0  #: time of its last move
    ended: Seconds = 0.0  #: time of its end; 0: it has not ended, or under an earlier version
    exit_code: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None  #: of its program; None: unknown
    silent_since: Seconds = 0.0  #: since when its client's host is silent; 0: it is not, or that is not known
    parked: Parked | None = None
    user: Text = ""
    run: Text = ""
    gang: Annotated[str, Meta(max_length=64)] = ""  #: its gang; empty: none, as in the previous version
    rank: Annotated[int, Meta(ge=0, le=MAX_LIST)] = 0  #: its first rank in the gang
    proves_key: bool = False
    #: sessions that it shares or shared device memory with: it cannot be brought back alone
    shares: Annotated[list[Name], Meta(max_length=MAX_SHARES)] = []

    @property
    def recoverable(self) -> bool:
        """Whether it may be brought back after its worker was lost."""
        return self.recover and not self.shares

    @property
    def journal_from(self) -> int:
        """Position up to which the agent may have cut its journal."""
        named = self.checkpoint.position if self.checkpoint is not None else 0
        return self.cut if self.cut is not None else named

    @property
    def usable_checkpoints(self) -> list[CheckpointName]:
        """Checkpoints that the kept journal reaches back to, newest first."""
        if self.checkpoint is None:
            return []
        older = [found for found in self.older if found.name != self.checkpoint.name]
        return [found for found in [self.checkpoint, *older] if found.position >= self.journal_from]

    @property
    def live(self) -> bool:
        return self.state in LIVE

    @property
    def open_move(self) -> MoveRecord | None:
        """Move that is not decided yet; None: there is none."""
        return self.move if self.move is not None and self.move.state in OPEN_MOVE else None


class GangAsk(Record, frozen=True, kw_only=True):
    """Part of a run in a gang: ``ranks`` of the gang's ``of`` ranks in all.

    ``spread``: each rank is one device of one list over several hosts; a member has all devices on its host.
    ``deadline``: seconds within which the gang's other runs must arrive, above 0.
    """

    name: Annotated[str, Meta(min_length=1, max_length=56)]
    ranks: Annotated[int, Meta(ge=1, le=MAX_LIST)]
    of: Annotated[int, Meta(ge=1, le=MAX_LIST)]
    spread: bool = False
    deadline: Annotated[float, Meta(gt=0.0, le=1e12)] = 600.0


class QueueRecord(Record, frozen=True, kw_only=True):
    """Request that waits for a place: ``queue/NAME``. ``quota``: bytes. ``host``: the requested host, or empty.

    It is deleted when the session is made (in the same transaction), or when its client is gone. ``user``: as a
    session's. ``gang``: it asks for ranks of a gang; ``quota`` and ``wants`` are for each.
    """

    v: int = SCHEMA
    name: Name
    quota: U63
    wants: Wants = Wants()
    host: Annotated[str, Meta(max_length=253)] = ""
    agent: Text = ""
    program: Program = Program()
    recover: bool = True
    arrived: Seconds = 0.0
    reason: Text = ""
    user: Text = ""
    gang: GangAsk | None = None
    proves_key: bool = False


class LeaderRecord(Record, frozen=True, kw_only=True):
    """Elected leader: ``election/leader``, under the leader's lease; its create revision is the leader revision."""

    v: int = SCHEMA
    host: Name
    incarnation: U64


class HostRecord(Record, frozen=True, kw_only=True):
    """Decisions of operators about a host: ``hosts/HOST``, under no lease, so that they outlive its daemon.

    Absent: ready. ``joined``: since when its daemon is in the pool; 0: it left on its own, or joined under an earlier
    version. ``lost``: since when it is lost (it did not leave on its own); 0: it is not, as far as known.
    """

    v: int = SCHEMA
    host: Name
    state: Literal["ready", "cordoned", "draining"] = "ready"
    reason: Text = ""
    changed: Seconds = 0.0
    joined: Seconds = 0.0
    lost: Seconds = 0.0


class PoolRecord(Record, frozen=True, kw_only=True):
    """Settings of the pool: ``pool/settings``. ``paused``: the leader begins nothing without a user's request.

    ``rebalance``: whether sessions are moved automatically to make room; None: only where the registry is etcd.
    ``default_gpus``: GPUs of a session that asks neither for memory nor for GPUs, as ``rgpu run --gpus`` takes them;
    empty: one GPU where the devices are GPUs (:func:`rgpu.migrate.leader.requests.with_default`).
    """

    v: int = SCHEMA
    paused: bool = False
    rebalance: bool | None = None
    default_gpus: Annotated[str, Meta(max_length=16)] = ""
    max_kernel_seconds: Annotated[int, Meta(ge=0, le=MOST_KERNEL_SECONDS)] = 0  #: of a kernel; 0: no limit
    reason: Text = ""
    changed: Seconds = 0.0


class IdentityRecord(Record, frozen=True, kw_only=True):
    """Identity of the pool in this registry: ``pool/identity``, with the id in its ``pool.json``."""

    v: int = SCHEMA
    pool: Name
    since: Seconds = 0.0


class KeyRecord(Record, frozen=True, kw_only=True):
    """Public key that every node accepts: ``keys/NAME``. ``origin``: the folder that it was published from.

    ``user``: the key's user; empty: the user called NAME.
    """

    v: int = SCHEMA
    name: Name
    role: Literal["user", "node", "operator"]
    public: Annotated[str, Meta(min_length=40, max_length=40)]
    origin: Annotated[str, Meta(max_length=64)] = ""
    user: Annotated[str, Meta(max_length=63)] = ""


class InvitationRecord(Record, frozen=True, kw_only=True):
    """Invitation: ``invitations/NAME``. ``used_by``: public key of the node or user that used it; empty: none yet.

    ``role``, ``member``: those of its user; ``host``: the only host that may use it, if it is for a node.
    """

    v: int = SCHEMA
    name: Name
    public: Annotated[str, Meta(min_length=40, max_length=40)]
    host: Annotated[str, Meta(max_length=253)] = ""
    created: Seconds = 0.0
    expires: Seconds
    used_by: Text = ""
    role: Literal["user", "node", "operator"] = "node"
    member: Annotated[str, Meta(max_length=63)] = ""


class HistoryRecord(Record, frozen=True, kw_only=True):
    """Decision in the history: ``history/SUBJECT/…``, with its reason, written in the transaction that made it.

    The subject is a session (``session``), a host (``host``) or, with neither, the pool.
    """

    v: int = SCHEMA
    when: Seconds
    session: Text = ""
    host: Text = ""
    decision: Name
    reason: Text
    epoch: U63 = 0
    owner: Name | None = None
    leader: U63 = 0  #: revision of the leader that decided; 0: the session's own node decided
    actor: Text = ""  #: user on whose request; empty: the pool decided on its own
    user: Text = ""  #: user of the session


def encode(record: Record) -> bytes:
    """Encode a record as a value. Raises :class:`ValueError` above MAX_RECORD."""
    data = msgspec.msgpack.encode(record)
    if len(data) > MAX_RECORD:
        raise ValueError(f"a {type(record).__name__} of {len(data)} bytes; {MAX_RECORD} are allowed")
    return data


def decode(data: bytes, kind: type[R], key: str) -> R:
    """Decode and check a record. Raises :class:`Corrupt` (offset, reason), :class:`VersionMismatch`."""
    if len(data) > MAX_RECORD:
        raise Corrupt(f"{key}: a record of {len(data)} bytes", offset=0, reason="size", key=key)
    try:
        version = msgspec.msgpack.decode(data, type=_Version).v
        if version != SCHEMA:
            raise VersionMismatch(f"{key} has schema {version}; this program reads {SCHEMA}", found=version,
                                  known=SCHEMA)
        record = msgspec.msgpack.decode(data, type=kind)
        _check(record)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Corrupt(f"{key} does not hold a {kind.__name__}: {error}", offset=0, reason="schema", key=key) from error
    return record


class _Version(msgspec.Struct):
    v: int


def _check(record: Record) -> None:
    """Check constraints that types do not express. Raises :class:`ValueError`."""
    if isinstance(record, SessionRecord):
        _match(_SESSION, record.name, "session name")
        if record.live and record.owner is None:
            raise ValueError(f"a {record.state} session without an owner")
        if (record.state == "parked") != (record.parked is not None) or (record.parked and record.owner):
            raise ValueError(f"a {record.state} session that is {'' if record.parked else 'not '}parked")
        if record.parked and record.checkpoint is None:
            raise ValueError("a parked session without a checkpoint")
        if (record.state == "moving") != (record.open_move is not None):
            found = record.move.state if record.move else "absent"
            raise ValueError(f"state {record.state} with a move that is {found}")
        if record.checkpoint is not None and record.checkpoint.epoch > record.epoch:
            raise ValueError(f"a checkpoint of epoch {record.checkpoint.epoch} in a session of epoch {record.epoch}")
        if record.move is not None:
            _match(_MOVE, record.move.id, "move id")
    elif isinstance(record, QueueRecord):
        _match(_SESSION, record.name, "session name")
    elif isinstance(record, HostRecord):
        _match(_HOST, record.host, "host name")
    elif isinstance(record, NodeRecord):
        _match(_HOST, record.host, "host name")
        names = [device.device for device in record.devices]
        if len(set(names)) != len(names):
            raise ValueError("a device stands twice in a node's record")


def _match(pattern: re.Pattern[str], value: str, what: str) -> None:
    if not pattern.fullmatch(value):
        raise ValueError(f"{what} {value!r} is not allowed")


def check_session_name(name: str) -> str:
    """Return the name, if it is valid for a session. Raises :class:`UsageError`."""
    if not _SESSION.fullmatch(name):
        raise UsageError(f"a session cannot be called {name!r}: use 1 to 64 letters, digits, dots, dashes and "
                         "underscores, beginning with a letter or digit", name=name)
    return name


def check_host_name(host: str) -> str:
    """Return the name, if it is valid for a node. Raises :class:`UsageError`."""
    if not _HOST.fullmatch(host):
        raise UsageError(f"a host cannot be called {host!r}: use letters, digits, dots, dashes and underscores",
                         host=host)
    return host
