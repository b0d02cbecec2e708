"""The control addresses that an agent keeps: updated as nodes join and leave, found again when all of them are lost.

=========================  ====================================================
source of addresses        use
=========================  ====================================================
a reply of the pool        they are the known ones; fewer than three are filled
                           up with those known before (OWNERSHIP 7)
the worker, by a notice    its node's address, for a key that is known already
the pool's description     read when no known node answers: its other addresses
                           are asked too, and known once one of them answered
=========================  ====================================================

An address is used only together with the key that its node must prove, so a wrong one costs only time.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from typing import Any

from rgpu.link.description import named
from rgpu.link.keys import Endpoint
from rgpu.link.loggers import get_logger
from rgpu.session.errors import RgpuError

log = get_logger(__name__)

LEAST = 3
REFRESH_SECONDS = 60.0  #: without a reply that names the nodes, after which one is requested
PAUSES = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)  #: s before addresses of the description that did not answer are asked again
Described = Callable[[], list[Endpoint]]


def _nothing() -> list[Endpoint]:
    return []


class KnownNodes:
    """Known nodes of one agent; its methods may be called on any thread. ``now``: monotonic seconds."""

    def __init__(self, endpoints: Iterable[Endpoint], described: Described = _nothing, now: float = 0.0,
                 learned: Callable[[list[Endpoint]], None] | None = None) -> None:
        """``described()``: the endpoints of the pool's description as it is now; may raise RgpuError or OSError.

        ``learned(endpoints)``: called with those that a reply named, when they differ from the last reply's.
        """
        self._described, self._learned = described, learned
        self._last: list[Endpoint] = []
        self._lock = threading.Lock()
        self._endpoints = list(endpoints)
        self._vain: list[Endpoint] = []  #: endpoints of the description, which did not answer either
        self._tries = 0
        self._again = 0.0
        self._refresh_at = now + _spread(REFRESH_SECONDS)

    @property
    def endpoints(self) -> list[Endpoint]:
        """Return the nodes to ask, the best first."""
        with self._lock:
            return list(self._endpoints)

    def named(self, raw: Any, now: float) -> None:
        """Take the endpoints that a reply named; invalid ones are left out. A reply without any changes nothing."""
        fresh = named(raw)
        if fresh:
            with self._lock:
                self._take(fresh, LEAST)
                self._refresh_at = now + _spread(REFRESH_SECONDS)
                news, self._last = sorted(fresh, key=_address) != self._last, sorted(fresh, key=_address)
            if news and self._learned is not None:
                self._learned(fresh)

    def told(self, address: Any, public: Any) -> bool:
        """Take a node's new address from the worker; False for a node whose key is not known."""
        with self._lock:
            for index, known in enumerate(self._endpoints):
                if known.public == public and isinstance(address, str) and address.startswith("tcp://"):
                    self._endpoints[index] = Endpoint(address, known.public, known.host)
                    break
            else:
                return False
        log.info("a node answers elsewhere, says the worker", address=address, host=known.host)
        return True

    def described(self, now: float) -> list[Endpoint]:
        """Return the unknown endpoints in the pool's description; none for a while after they did not answer."""
        try:
            found = self._described()
        except (RgpuError, OSError) as error:
            log.warning("the pool's description cannot be read again", reason=str(error))
            return []
        with self._lock:
            others = [endpoint for endpoint in found if endpoint not in self._endpoints]
            if others != self._vain:
                self._vain, self._tries = [], 0
            elif now < self._again:
                return []
            return others

    def answered(self, others: list[Endpoint]) -> None:
        """Keep the description's others, one of which answered, as known, unless its reply named the nodes."""
        with self._lock:
            self._vain, self._tries = [], 0
            if not any(endpoint in self._endpoints for endpoint in others):
                self._take(others, len(others) + LEAST)

    def in_vain(self, others: list[Endpoint], now: float) -> None:
        """Note that none of the description's others answered."""
        with self._lock:
            self._vain, self._tries = list(others), self._tries + 1
            self._again = now + PAUSES[min(self._tries, len(PAUSES) - 1)]

    def refresh_due(self, now: float) -> bool:
        """Whether to ask for the nodes now: no reply named them for long. Once for each such time."""
        with self._lock:
            due = now >= self._refresh_at
            if due:
                self._refresh_at = now + _spread(REFRESH_SECONDS)
            return due

    def _take(self, fresh: list[Endpoint], count: int) -> None:
        """Keep the ``fresh`` endpoints, and of other nodes as many as make ``count`` in all."""
        keys = {endpoint.public for endpoint in fresh}
        older = [endpoint for endpoint in self._endpoints if endpoint.public not in keys]
        self._endpoints = list(dict.fromkeys(fresh + older[:max(0, count - len(fresh))]))


def _address(endpoint: Endpoint) -> str:
    return endpoint.address


def _spread(seconds: float) -> float:
    """Vary the time by a quarter: agents that began together do not send requests together."""
    return seconds * random.uniform(0.75, 1.25)
