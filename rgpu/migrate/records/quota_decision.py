"""Use of a user's quota, and whether a request is within it: the table :data:`LIMITS`, and decisions by it.

Pure, and the only place of these decisions. They are made for requests for a session and for a place in the queue,
before anything is made, and for checkpoints before they count. They are not made for moves, recoveries, restores and
parked sessions that come back, whose use counts already: a limit that was lowered below a user's use ends nothing and
refuses only new requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rgpu.migrate.records.quotas import EVERYBODY, MOST, QuotaRecord
from rgpu.migrate.records.schema import QueueRecord, SessionRecord
from rgpu.session.devices import parts
from rgpu.session.errors import LimitReached, UsageError

WHOLE = 100  #: per cent of a GPU
_MIB, _GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Use:
    """Use of a user, present or requested. ``memory``: bytes; ``gpus``: per cent of a GPU; ``queued``: places in the
    queue; ``checkpoints``: bytes of the store.
    """

    sessions: int = 0
    memory: int = 0
    gpus: int = 0
    queued: int = 0
    checkpoints: int = 0

    def __add__(self, other: Use) -> Use:
        return Use(self.sessions + other.sessions, self.memory + other.memory, self.gpus + other.gpus,
                   self.queued + other.queued, self.checkpoints + other.checkpoints)

    def of(self, limit: str) -> int:
        """Return the amount that counts against the limit of that name."""
        return int(getattr(self, limit))


NOTHING = Use()


@dataclass(frozen=True, slots=True)
class Limit:
    """Row of the table. ``counted``: the use that is counted; ``refused``: the request that is refused above it.

    ``text``: an amount, for people; ``instead``: what a user can do; ``smaller``: how to request less.
    """

    name: str
    counted: str
    refused: str
    text: Callable[[int], str]
    instead: str
    smaller: str = ""


def _several(one: str, more: str) -> Callable[[int], str]:
    return lambda count: f"{count} {one if count == 1 else more}"


def _gpus(count: int) -> str:
    return f"{count / WHOLE:g} GPU{'' if count == WHOLE else 's'}"


def _bytes(count: int) -> str:
    if count and count % _GIB == 0:
        return f"{count // _GIB} GiB of device memory"
    return f"{count // _MIB} MiB of device memory" if count % _MIB == 0 else f"{count} bytes of device memory"


def _stored(count: int) -> str:
    for unit, size in (("GiB", _GIB), ("MiB", _MIB), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f}".removesuffix(".0") + f" {unit} of checkpoints"
    return f"{count} bytes of checkpoints"


_WAIT = "end one of them, or wait until one ends (--queue)"
LIMITS: tuple[Limit, ...] = (
    Limit("sessions", "sessions that live or are parked; each process of a run that uses a GPU is one",
          "a session more", _several("session", "sessions"), _WAIT),
    Limit("memory", "device memory that these were promised, on each of their devices; once for all processes of a run "
          "on a device", "a session with more than is left", _bytes, _WAIT, "ask for less with --memory or --gpus"),
    Limit("gpus", "shares of GPUs that these were promised by --gpus, --compute or the pool's default, in GPUs; 0 for "
          "one that asked for --memory alone", "a session with more than is left", _gpus, _WAIT,
          "ask for less with --gpus"),
    Limit("queued", "requests that wait for a place", "a request more that would wait",
          _several("place in the queue", "places in the queue"), "withdraw one of them (`rgpu kill NAME`)"),
    Limit("checkpoints", "bytes in the store that the user's checkpoints need, what several share once",
          "a checkpoint more", _stored, "remove some (`rgpu image rm CHECKPOINT`, or `rgpu image gc` with --ended for "
          "those of sessions that ended)"),
)
NAMES = frozenset(limit.name for limit in LIMITS)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a decision. ``reason``: a sentence for the caller, the queue, the history and tests.

    ``never``: refused even if the user had nothing else. ``limit``, ``used``, ``asked``, ``most``: of the limit that
    refuses; ``used`` includes the requests that wait ahead.
    """

    allowed: bool
    reason: str
    never: bool = False
    limit: str = ""
    used: int = 0
    asked: int = 0
    most: int = 0

    def error(self, user: str, **detail: Any) -> LimitReached:
        """Return the refusal as an error, with amounts in the form of :func:`shown`."""
        amounts = {name: shown({self.limit: amount})[self.limit]
                   for name, amount in (("used", self.used), ("asked", self.asked), ("most", self.most))}
        return LimitReached(self.reason, user=user, limit=self.limit, never=self.never, **amounts, **detail)


def decide(user: str, limits: Mapping[str, int], use: Use, asked: Use, ahead: Use = NOTHING) -> Verdict:
    """Decide whether ``user``, with present use ``use``, may have ``asked`` in addition.

    ``limits``: the limits of the user, by name. ``ahead``: total of the user's requests that wait before this one.
    """
    bounding = [(limit, limits[limit.name], asked.of(limit.name)) for limit in LIMITS
                if limit.name in limits and asked.of(limit.name)]
    for limit, most, wanted in bounding:
        if wanted > most:
            smaller = f"{limit.smaller}, or ask" if most and limit.smaller else "ask"
            return Verdict(False, f"{user} may have {limit.text(most)}, and this asks for {limit.text(wanted)}: "
                                  f"{smaller} an operator for more (`rgpu quota set {user}`)",
                           True, limit.name, use.of(limit.name), wanted, most)
    for limit, most, wanted in bounding:
        used, before = use.of(limit.name), ahead.of(limit.name)
        if used + before + wanted > most:
            waiting = f", {limit.text(before)} are asked for by requests that wait before it" if before else ""
            return Verdict(False, f"{user} may have {limit.text(most)} at a time and has {limit.text(used)}{waiting}; "
                                  f"this asks for {limit.text(wanted)}: {limit.instead}, or ask an operator for more "
                                  f"(`rgpu quota set {user}`)", False, limit.name, used + before, wanted, most)
    return Verdict(True, f"within what {user} may have")


def decide_checkpoint(user: str, most: int, used: int, adds: int | None = None) -> Verdict:
    """Decide whether ``user``, with ``used`` bytes of checkpoints of at most ``most``, may write one more.

    ``adds``: bytes that it adds, as far as known; None: not known yet, and it may begin where anything is left.
    """
    row = next(limit for limit in LIMITS if limit.name == "checkpoints")
    if used < most if adds is None else used + adds <= most:
        return Verdict(True, f"within what {user} may have")
    this = "" if used >= most else f"; this one adds more than the {row.text(most - used)} that are left"
    return Verdict(False, f"{user} may have {row.text(most)} at a time and has {row.text(used)}{this}: {row.instead}, "
                          f"or ask an operator for more (`rgpu quota set {user}`)", False, row.name, used, adds or 0,
                   most)


def use_of(sessions: Iterable[SessionRecord], requests: Iterable[QueueRecord] = ()) -> Use:
    """Count the use of one user: ``sessions`` and ``requests`` of that user, which may include ended ones.

    A session that moves counts once, where it is. Processes of a run share the run's promise on a device.
    """
    count = 0
    held: dict[tuple[str, str | None, str], tuple[int, int]] = {}
    for session in sessions:
        if not session.live and session.parked is None:
            continue
        count += 1
        host, devices = (session.parked.host, session.parked.device) if session.parked else \
            (session.owner, session.device)
        for device in parts(devices):
            key = session.run or f"/{session.name}", host, device
            memory, compute = held.get(key, (0, 0))
            held[key] = max(memory, session.quota), max(compute, session.wants.compute)
    return Use(count, sum(memory for memory, _ in held.values()), sum(compute for _, compute in held.values()),
               sum(1 for _ in requests))


def limits_of(user: str, records: Mapping[str, QuotaRecord]) -> dict[str, int]:
    """Return the limits of a user: the user's own, else those of all users; without those set to no limit."""
    found: dict[str, int | None] = {}
    for name in (EVERYBODY, user):
        record = records.get(name)
        if record is not None:
            found.update((limit, most) for limit, most in record.limits.items() if limit in NAMES)
    return {limit: most for limit, most in found.items() if most is not None}


@dataclass(frozen=True)
class Quotas:
    """Limits and use of all users at one revision. ``owners``: user of each public key, for records without a user.

    ``stored``: bytes of checkpoints of each user, where they were counted; empty where no decision needs
    them. Use is counted when it is read, once for each user.
    """

    records: Mapping[str, QuotaRecord] = field(default_factory=dict)
    sessions: tuple[SessionRecord, ...] = ()
    requests: tuple[QueueRecord, ...] = ()
    owners: Mapping[str, str] = field(default_factory=dict)
    stored: Mapping[str, int] = field(default_factory=dict)
    _uses: dict[str, Use] = field(default_factory=dict, init=False, repr=False, compare=False)
    _grouped: dict[str, tuple[list[SessionRecord], list[QueueRecord]]] = field(
        default_factory=dict, init=False, repr=False, compare=False)

    def user_of(self, record: SessionRecord | QueueRecord) -> str:
        """Return the user of a record; empty where it is not known."""
        return record.user or self.owners.get(record.agent, "")

    def limits(self, user: str) -> dict[str, int]:
        """Return the limits of a user."""
        return limits_of(user, self.records)

    def use(self, user: str) -> Use:
        """Return the use of a user."""
        if user not in self._uses:
            if not self._grouped:
                self._group()
            self._uses[user] = use_of(*self._grouped.get(user, ([], []))) + Use(checkpoints=self.stored.get(user, 0))
        return self._uses[user]

    def users(self) -> set[str]:
        """Return the users with any use, or with limits of their own."""
        self._group()
        return {user for user in [*self._grouped, *self.records] if user and user != EVERYBODY}

    def _group(self) -> None:
        self._grouped.clear()
        for session in self.sessions:
            if session.live or session.parked is not None:
                self._grouped.setdefault(self.user_of(session), ([], []))[0].append(session)
        for request in self.requests:
            self._grouped.setdefault(self.user_of(request), ([], []))[1].append(request)

    def decide(self, user: str, asked: Use, ahead: Use = NOTHING) -> Verdict:
        """Decide whether a user may have ``asked`` in addition; without a user no quota applies."""
        limits = self.limits(user) if user else {}
        if not limits:
            return Verdict(True, f"{user or 'nobody'} has no limits")
        return decide(user, limits, self.use(user), asked, ahead)

    def over(self, user: str) -> list[str]:
        """Return sentences about use above the limits, as after one was lowered."""
        limits, use = self.limits(user), self.use(user)
        return [f"{user} has {row.text(use.of(row.name))} and may have {row.text(limits[row.name])}: nothing is ended, "
                f"and {row.refused} is not let in until that is below" for row in LIMITS
                if row.name in limits and use.of(row.name) > limits[row.name]]


def shown(limits: Mapping[str, int | None]) -> dict[str, float | None]:
    """Return limits or amounts in the form of messages and ``-o json``: GPUs in GPUs, not in per cent."""
    return {name: most / WHOLE if name == "gpus" and most is not None else most for name, most in limits.items()}


def read_limits(given: object) -> dict[str, int | None]:
    """Read limits from a message: {sessions, memory (bytes), gpus (GPUs), queued, checkpoints (bytes)}, None: no limit.

    Raises :class:`UsageError`.
    """
    if not isinstance(given, dict):
        raise UsageError("limits must be a map")
    found: dict[str, int | None] = {}
    for name, most in given.items():
        if name not in NAMES:
            raise UsageError(f"there is no limit {str(name)[:40]!r}; there are: "
                             f"{', '.join(row.name for row in LIMITS)}")
        found[str(name)] = None if most is None else _amount(str(name), most)
    return found


def _amount(name: str, most: object) -> int:
    if isinstance(most, bool) or not isinstance(most, int | float) or not math.isfinite(most) or most < 0:
        raise UsageError(f"the limit {name} is a number that is not negative, not {str(most)[:40]!r}")
    amount = round(most * WHOLE, 6) if name == "gpus" else most
    if amount != int(amount) or amount > MOST:
        raise UsageError(f"the limit {name} cannot be {str(most)[:40]}: " + (
            "GPUs come in hundredths" if name == "gpus" and amount <= MOST else f"0 to {MOST} in whole numbers"))
    return int(amount)
