"""Checks before every page: header fields, the host that is requested, the origin of a form, and rates.

Pure but for :class:`Guarded`, which carries the decisions out around an ASGI application.
"""

from __future__ import annotations

import ipaddress
import socket
from collections import OrderedDict
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = "; ".join((
    "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self'", "connect-src 'self'",
    "form-action 'self'", "base-uri 'none'", "frame-ancestors 'none'"))
#: Fields of every answer: no scripts and styles except the package's files, no frames, no caches.
HEADERS = {
    "content-security-policy": POLICY, "x-content-type-options": "nosniff", "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # no-referrer would make browsers send `Origin: null` with forms
    "cross-origin-opener-policy": "same-origin", "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()", "cache-control": "no-store"}
LONGEST_FORM = 16 * 1024  #: bytes


@dataclass(frozen=True, slots=True)
class Names:
    """Names under which browsers may request the page: another name may be another site's (DNS rebinding)."""

    hosts: frozenset[str]
    origins: frozenset[str]  #: besides the requested one: of a proxy that requests under another name
    secure: bool  #: browsers use https

    @staticmethod
    def of(url: str) -> Names:
        """Return the names of a page that browsers reach at ``url``."""
        parts = urlsplit(url)
        hosts = {parts.hostname or "", "localhost", socket.gethostname().lower(), socket.getfqdn().lower()}
        return Names(frozenset(filter(None, hosts)), frozenset({parts.netloc.lower()}), parts.scheme == "https")

    def knows(self, host: str) -> bool:
        """Whether a ``Host`` field names this page. An IP address does: it cannot be the name of another site."""
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            return False
        if not name:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.lower() in self.hosts
        return True

    def from_here(self, origin: str, host: str) -> bool:
        """Whether the ``Origin`` of a form is this page itself. Every browser sends one; without, it is refused."""
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        return parts.scheme in ("http", "https") and parts.netloc.lower() in {host.lower(), *self.origins}


@dataclass(slots=True)
class _Bucket:
    tokens: float
    when: float


class Rate:
    """A limit for each key: ``burst`` at once, ``rate`` a second, for the ``most`` latest keys. Time is given, in s."""

    def __init__(self, burst: float, rate: float, most: int = 4096) -> None:
        self._burst, self._rate, self._most = burst, rate, most
        self._known: OrderedDict[str, _Bucket] = OrderedDict()

    def allows(self, key: str, now: float) -> bool:
        """Whether one more is within the limit; it is counted if so."""
        bucket = self._known.pop(key, None) or _Bucket(self._burst, now)
        self._known[key] = bucket
        while len(self._known) > self._most:
            self._known.popitem(last=False)
        bucket.tokens = min(self._burst, bucket.tokens + (now - bucket.when) * self._rate)
        bucket.when = now
        if bucket.tokens < 1:
            return False
        bucket.tokens -= 1
        return True

    def give_back(self, key: str) -> None:
        """Undo one count of :meth:`allows`: successful attempts are not limited."""
        if key in self._known:
            self._known[key].tokens += 1


def refusal(method: str, headers: dict[str, str], names: Names) -> tuple[int, str] | None:
    """Return the status and sentence with which a request is refused before any page gets it; None: it is accepted."""
    host = headers.get("host", "")
    if not names.knows(host):
        return 421, "this page is not served under that name: --web-url says under which"
    if method in ("GET", "HEAD"):
        return None
    if method != "POST":
        return 405, "there are pages and forms here"
    if not names.from_here(headers.get("origin", ""), host):
        return 403, "this form comes from another site"
    if headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        return 415, "that is no form of these pages"
    length = headers.get("content-length", "")
    if not length.isdigit() or int(length) > LONGEST_FORM:
        return 413, f"a form has {LONGEST_FORM} bytes at most, and says how many"
    return None


class Guarded:
    """An application behind :func:`refusal`, its answers with :data:`HEADERS`."""

    def __init__(self, app: ASGIApp, names: Names) -> None:
        self._app, self._names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            elif scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name.lower() for name, _ in message["headers"]}
                more = {**HEADERS, **({"strict-transport-security": "max-age=31536000"} if self._names.secure else {})}
                message["headers"] = [*message["headers"], *((name.encode(), value.encode()) for name, value
                                                             in more.items() if name.encode() not in own)]
            await send(message)

        refused = refusal(scope["method"], headers, self._names)
        if refused is not None:
            status, why = refused
            await PlainTextResponse(f"{why}\n", status)(scope, receive, sent)
            return
        await self._app(scope, receive, sent)
