"""Decision when to request a checkpoint and when to stop the program's calls, with the reason in words. Pure.

Made once a second and whenever the journal's memory changed. It answers three questions:

Is a checkpoint wanted? When the journal since the newest durable one passes a size
(¾ of its limit), an age (``--checkpoint-every``) or a predicted replay time
(``--max-replay``). None is requested while one is being made, nor soon after
one failed; without a reachable store the journal is not cut, and the program goes on.

May the program go on publishing? Not when memory holds ⅞ of the limit and
cannot be spilled any more: then ``--on-full`` decides whether it waits (BLOCK) or
goes on without the possibility of recovery (UNPROTECTED, for good).

What does ``ps`` show? The reason for either decision, and why the exposure grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

CHECKPOINT_AT, FULL_AT = 0.75, 0.875  #: shares of the limit; the shim stops by itself at the limit
FULL_SECONDS = 1.0  #: a journal that is full for a shorter time is ordinary back-pressure, not reported
RETRY = 10.0  #: seconds between two requests for a checkpoint
RETRY_FULL = 0.5  #: the same while memory fills: the program would have to wait until the journal is on the disk
RETRY_FAILED = 30.0  #: seconds after a request that failed
HALF_LIFE = 30.0  #: seconds of work after which a measured rate counts half


class Exposure(Enum):
    """State of the program's protection by the journal, as it is shown in ``ps``."""

    RUNNING = "running"
    BLOCK = "block"
    UNPROTECTED = "unprotected"


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits that the user set. ``limit``: bytes; ``max_age``, ``max_replay``: seconds, 0: no limit."""

    limit: int
    recover: bool = True
    on_full: str = "block"
    max_age: float = 0.0
    max_replay: float = 0.0
    directory: bool = True  #: there is a directory to spill to


@dataclass(frozen=True, slots=True)
class Facts:
    """State of the journal, in bytes, seconds and calls. ``replay``: predicted seconds, None while no rate is known.

    ``memory_bytes``: shared memory that is held, :attr:`Journal.held_bytes`; ``kept_bytes``: that and the files.
    """

    memory_bytes: int = 0
    kept_bytes: int = 0
    kept_calls: int = 0  #: calls that no durable checkpoint covers
    protected: bool = True
    full_seconds: float = 0.0  #: since memory passed ⅞ of the limit
    age: float = 0.0  #: of the oldest call that no durable checkpoint covers
    replay: float | None = None
    spill_error: str = ""
    store_error: str = ""  #: why the last request for a checkpoint failed
    since_request: float = float("inf")
    requesting: bool = False
    attached: bool = True
    given_up: str = ""  #: why the session is not protected, if for another reason than a full journal


@dataclass(frozen=True, slots=True)
class Decision:
    """``checkpoint``: request a checkpoint now, because of ``why``. ``reason``: shown to the user, in ``ps``."""

    checkpoint: bool = False
    why: str = ""
    exposure: Exposure = Exposure.RUNNING
    reason: str = ""


def decide(rules: Rules, facts: Facts) -> Decision:
    """Decide by the rules in the module docstring."""
    why = _checkpoint_wanted(rules, facts)
    filling = facts.memory_bytes >= rules.limit * CHECKPOINT_AT
    patience = RETRY_FAILED if facts.store_error else RETRY_FULL if filling else RETRY
    ask = bool(why) and not facts.requesting and facts.attached and facts.since_request >= patience
    full = full_reason(rules, facts)
    if not facts.protected and rules.recover:
        return Decision(False, "", Exposure.UNPROTECTED,
                        facts.given_up or "the journal was full: the session can be moved, but not recovered")
    if full and facts.full_seconds >= FULL_SECONDS:
        if rules.recover and rules.on_full == "unprotected":
            return Decision(False, "", Exposure.UNPROTECTED,
                            f"{full}: the session can be moved from now on, but not recovered")
        return Decision(ask, why, Exposure.BLOCK, _with_store(full, facts))
    if why and facts.store_error:
        beyond = "on disk" if rules.directory else "nowhere"
        return Decision(ask, why, Exposure.RUNNING,
                        f"no checkpoint can be written ({facts.store_error}): {_size(facts.kept_bytes)} of journal "
                        f"kept, "
                        f"in memory up to {_size(rules.limit)} and beyond that {beyond}; {why}")
    return Decision(ask, why)


def _checkpoint_wanted(rules: Rules, facts: Facts) -> str:
    """Return why a checkpoint is wanted; empty when none is."""
    if not rules.recover or not facts.protected or not facts.kept_calls:
        return ""
    if facts.kept_bytes > rules.limit * CHECKPOINT_AT:
        return f"the journal holds {_size(facts.kept_bytes)}, {CHECKPOINT_AT:.0%} of its limit are " \
               f"{_size(rules.limit * CHECKPOINT_AT)}"
    if rules.max_age and facts.age > rules.max_age:
        return f"the newest checkpoint is {facts.age:.0f} s behind, {rules.max_age:g} s are allowed"
    if rules.max_replay and facts.replay is not None and facts.replay > rules.max_replay:
        return f"a recovery would replay {facts.kept_calls} calls for about {facts.replay:.0f} s, " \
               f"{rules.max_replay:g} s are allowed"
    return ""


def full_reason(rules: Rules, facts: Facts) -> str:
    """Return why the program should stop publishing; empty when it need not."""
    if facts.memory_bytes < rules.limit * FULL_AT:
        return ""
    if not rules.recover or not facts.protected:
        return "the server has not taken the calls yet"
    if facts.spill_error:
        return f"the journal is full and cannot be spilled: {facts.spill_error}"
    if not rules.directory:
        return "the journal is full and has no directory to spill to (--journal-dir)"
    return "the journal is being spilled"


def _with_store(full: str, facts: Facts) -> str:
    return f"{full}; no checkpoint can be written either: {facts.store_error}" if facts.store_error else full


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


class ApplyRate:
    """Calls per second that the session's owner applies while it has any, for the prediction of a replay's time.

    A second in which no call was applied does not count, a second with a single
    call counts in full: the rate errs on the low side, the prediction on the long
    side, and the checkpoint is made too early rather than too late.
    """

    def __init__(self) -> None:
        self._calls = self._seconds = 0.0
        self._position = 0
        self._time: float | None = None

    def sample(self, position: int, now: float) -> None:
        """Note that every call ≤ ``position`` is applied at ``now``, monotonic seconds. A recovery lowers positions."""
        before, since = self._position, self._time
        self._position, self._time = position, now
        if since is None or position <= before or now <= since:
            return
        seconds = now - since
        keep = 0.5 ** (seconds / HALF_LIFE)
        self._calls = self._calls * keep + (position - before)
        self._seconds = self._seconds * keep + seconds

    @property
    def rate(self) -> float | None:
        """Calls per second; None before the first were applied."""
        return self._calls / self._seconds if self._seconds else None

    def predict(self, calls: int) -> float | None:
        """Return the seconds that a replay of so many calls takes; None while no rate is known."""
        rate = self.rate
        return None if not rate else calls / rate
