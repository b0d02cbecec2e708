"""Limits for the requests of one key to a node, at once and per second, as one decision. Pure: time is given.

Nodes are not counted: they act for all users, and obey the leader. Requests that arrive too fast are delayed a little;
too many at once are refused, so that other keys are served.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Requests that a node handles at once; so many of them for users and operators, the rest is the pool's own.
ALL, OF_PEOPLE = 1024, 768
#: From so many requests of users and operators on, a key may have two at once.
CROWDED = 960


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one key: ``rate`` requests a second after ``burst`` at once, ``running`` at once, ``polls`` that wait.

    ``patience``: s that a request may be held back to keep the rate. ``long``: bytes of long messages in progress.
    """

    rate: float = 100.0
    burst: float = 300.0
    running: int = 128
    polls: int = 64
    patience: float = 2.0
    long: int = 16 << 20


ROLES = {"user": Limits(), "operator": Limits(rate=400.0, burst=1200.0, running=256, polls=128),
         "web": Limits(running=64, polls=0),  # its own requests; with a user's grant they count as the user's
         "invited": Limits(rate=5.0, burst=20.0, running=4, polls=0)}


@dataclass(slots=True)
class Usage:
    """The requests of one key in progress at a node. ``tokens`` at ``when`` (monotonic s)."""

    tokens: float
    when: float
    running: int = 0
    polls: int = 0
    long: int = 0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. ``polls``: it may wait for news; ``long``: its bytes, if it is a long message."""

    polls: bool = False
    long: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """A decision. ``wait``: s to delay the request. ``poll``: whether it may wait for news; else answer it at once.

    ``reason``: a sentence; of a refusal unless ``allowed``.
    """

    allowed: bool
    reason: str
    wait: float = 0.0
    poll: bool = True


def decide(limits: Limits, usage: Usage, people: int, busy: int, asked: Asked, now: float) -> Verdict:
    """Decide whether one more request of a key is accepted.

    ``people``: requests of users and operators in progress here; ``busy``: number of their keys.
    """
    share = limits.running
    if people >= CROWDED:
        share = 2
    elif people >= OF_PEOPLE:
        share = min(limits.running, max(8, OF_PEOPLE // max(1, busy)))
    if usage.running >= share:
        return Verdict(False, f"{usage.running} requests of this key are under way here, {share} may be: "
                              "wait for some to be answered")
    if asked.long and usage.long + asked.long > limits.long:
        return Verdict(False, f"{usage.long} bytes of long messages of this key are in hand, {limits.long} may be: "
                              "send the next when one is answered")
    tokens = min(limits.burst, usage.tokens + (now - usage.when) * limits.rate)
    wait = max(0.0, (1.0 - tokens) / limits.rate)
    if wait > limits.patience:
        return Verdict(False, f"more than {limits.rate:g} requests a second of this key: try again in {wait:.0f} s")
    if asked.polls and usage.polls >= limits.polls:
        return Verdict(True, f"{usage.polls} requests of this key wait for news, {limits.polls} may: "
                             "answered at once", wait, poll=False)
    return Verdict(True, "within the limits of this key", wait)


@dataclass(slots=True)
class Ledger:
    """The keys that sent requests lately, and their requests in progress."""

    known: dict[str, Usage] = field(default_factory=dict)
    people: int = 0

    def begin(self, public: str, role: str, asked: Asked, now: float) -> tuple[Usage | None, Verdict]:
        """Decide about one request and count it if it is accepted; pass the usage to :meth:`end`. None: not counted."""
        limits = ROLES.get(role)
        if limits is None:
            return None, Verdict(True, "nodes are not counted")
        usage = self.known.get(public)
        if usage is None:
            self._forget(now)
            usage = self.known[public] = Usage(limits.burst, now)
        busy = sum(1 for one in self.known.values() if one.running)
        found = decide(limits, usage, self.people, busy, asked, now)
        if not found.allowed:
            return None, found
        usage.tokens = min(limits.burst, usage.tokens + (now - usage.when) * limits.rate) - 1.0
        usage.when = now
        usage.running += 1
        usage.polls += int(asked.polls and found.poll)
        usage.long += asked.long
        self.people += 1
        return usage, found

    def end(self, usage: Usage, asked: Asked, polled: bool) -> None:
        """Stop counting a request that is answered; ``polled``: it was allowed to wait."""
        usage.running -= 1
        usage.polls -= int(polled)
        usage.long -= asked.long
        self.people -= 1

    def _forget(self, now: float) -> None:
        """Delete keys without recent requests, so that the table stays small."""
        for public in [public for public, usage in self.known.items() if not usage.running and now - usage.when > 60]:
            del self.known[public]
