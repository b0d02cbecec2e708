"""Logins of the page: the sessions of browsers, each tied to a grant of the daemon. In memory only."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MOST = 1024  #: logins at once; the oldest is dropped for another
KEPT_JOBS = 12  #: newest jobs of one login that are shown


@dataclass(slots=True)
class Job:
    """An action of a login. ``state``: running, done or failed; ``said``: its progress, or result."""

    number: int
    title: str
    about: str
    state: str = "running"
    said: str = ""


@dataclass(slots=True)
class Login:
    """One browser's session. ``until``: when it expires, in s of a monotonic clock. ``csrf``: token in each form."""

    grant: str = field(repr=False)
    role: str
    user: str
    name: str
    until: float
    csrf: str = field(repr=False, default_factory=lambda: secrets.token_urlsafe(32))
    jobs: deque[Job] = field(default_factory=lambda: deque(maxlen=KEPT_JOBS))
    begun: int = 0

    @property
    def operator(self) -> bool:
        return self.role == "operator"

    def genuine(self, token: str) -> bool:
        """Whether a form's token is this login's, in constant time."""
        return hmac.compare_digest(self.csrf.encode(), token.encode("utf-8", "replace"))

    def begin(self, title: str, about: str) -> Job:
        """Return a new job, shown from now on."""
        self.begun += 1
        job = Job(self.begun, title, about)
        self.jobs.append(job)
        return job


class Logins:
    """Logins by the secret in their browser's cookie, of which only a digest is kept."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[str, Login] = {}

    def add(self, answer: dict[str, Any]) -> tuple[str, Login]:
        """Return (cookie, login) from the daemon's answer to a code."""
        cookie = secrets.token_urlsafe(32)
        login = Login(str(answer["grant"]), str(answer["role"]), str(answer["user"]), str(answer["name"]),
                      self._clock() + float(answer["seconds"]))
        while len(self._known) >= MOST:
            del self._known[next(iter(self._known))]
        self._known[_digest(cookie)] = login
        return cookie, login

    def find(self, cookie: str) -> Login | None:
        """Return the login of a cookie, if it is still valid."""
        login = self._known.get(_digest(cookie))
        if login is not None and login.until <= self._clock():
            self.end(cookie)
            return None
        return login

    def end(self, cookie: str) -> Login | None:
        """Delete a login, and return it."""
        return self._known.pop(_digest(cookie), None)

    def living(self) -> list[Login]:
        """Return the valid logins; expired ones are deleted."""
        now = self._clock()
        self._known = {key: login for key, login in self._known.items() if login.until > now}
        return list(self._known.values())


def _digest(cookie: str) -> str:
    return hashlib.sha256(cookie.encode("utf-8", "replace")).hexdigest()
