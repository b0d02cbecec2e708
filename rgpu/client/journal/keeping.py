"""How long calls are kept, and what follows from it: a pure decision, with its reason in words.

Asked once a second and whenever the journal's memory changed. Three questions:

Is a checkpoint wanted? When the journal since the newest durable one passes a size
(¾ of its limit), an age (``--checkpoint-every``) or a predicted replay time
(``--max-replay``). Not again while one is being made, nor soon after one
failed; a store that cannot be reached cuts nothing and stops nothing.

May the program go on publishing? Not when memory holds ⅞ of the limit and
cannot be spilled any more: then ``--on-full`` says whether it waits (BLOCK) or
goes on without the possibility of recovery (UNPROTECTED, for good).

What does ``ps`` show? The reason for either, and why the exposure grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

CHECKPOINT_AT, FULL_AT = 0.75, 0.875  #: shares of the limit; the shim stops by itself at the limit
FULL_SECONDS = 1.0  #: a journal that is full for less is ordinary back-pressure, not worth a word
RETRY = 10.0  #: seconds between two requests for a checkpoint
RETRY_FULL = 0.5  #: … when the program would otherwise wait until the journal is on the disk
RETRY_FAILED = 30.0  #: and after one that failed
HALF_LIFE = 30.0  #: seconds of work after which a measured rate counts half


class Exposure(Enum):
    """What the program is exposed to when no more journal can be kept."""

    RUNNING = "running"
    BLOCK = "block"
    UNPROTECTED = "unprotected"


@dataclass(frozen=True, slots=True)
class Rules:
    """What the user asked for. ``limit``: bytes; ``max_age``, ``max_replay``: seconds, 0 for any."""

    limit: int
    recover: bool = True
    on_full: str = "block"
    max_age: float = 0.0
    max_replay: float = 0.0
    directory: bool = True  #: there is one to spill to


@dataclass(frozen=True, slots=True)
class Facts:
    """How things stand. Bytes, seconds, calls; ``replay``: predicted seconds, None while no rate is known.

    ``memory_bytes``: of shared memory that is held, :attr:`Journal.held_bytes`; ``kept_bytes``: and in files.
    """

    memory_bytes: int = 0
    kept_bytes: int = 0
    kept_calls: int = 0  #: that no durable checkpoint covers
    protected: bool = True
    full_seconds: float = 0.0  #: since memory passed ⅞ of the limit
    age: float = 0.0  #: of the oldest call that no durable checkpoint covers
    replay: float | None = None
    spill_error: str = ""
    store_error: str = ""  #: why the last request for a checkpoint failed
    since_request: float = float("inf")
    requesting: bool = False
    attached: bool = True
    given_up: str = ""  #: why it is not protected, where that is not because the journal was full


@dataclass(frozen=True, slots=True)
class Decision:
    """``checkpoint``: ask for a checkpoint now, because of ``why``. ``reason``: for the program's user, in ``ps``."""

    checkpoint: bool = False
    why: str = ""
    exposure: Exposure = Exposure.RUNNING
    reason: str = ""


def decide(rules: Rules, facts: Facts) -> Decision:
    """See the module docstring."""
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
    """Why a checkpoint is wanted; empty when none is."""
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
    """Why the program should stop publishing; empty when it need not."""
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
    """Calls a second that the session's owner applies while it has any: what a replay is predicted by.

    A second in which nothing was applied does not count, one with a single call
    counts whole: so the rate is rather too low, the prediction too long, and the
    checkpoint comes too early rather than too late.
    """

    def __init__(self) -> None:
        self._calls = self._seconds = 0.0
        self._position = 0
        self._time: float | None = None

    def sample(self, position: int, now: float) -> None:
        """Every call ≤ ``position`` is applied, at ``now`` (monotonic seconds). Positions may go back (a recovery)."""
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
        """Calls a second; None before the first were applied."""
        return self._calls / self._seconds if self._seconds else None

    def predict(self, calls: int) -> float | None:
        """Seconds that a replay of so many calls takes."""
        rate = self.rate
        return None if not rate else calls / rate
