"""The guard of the metrics port: a certificate, and a token that a scrape must show.

Both are read again when their files change, so that they can be renewed under a running daemon; if the new files
cannot be used, the previous ones stay in force, and the log contains the reason.
"""

from __future__ import annotations

import hmac
import os
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog

from rgpu.link.private_files import read_file
from rgpu.session.errors import RgpuError, UsageError

log = structlog.get_logger(__name__)

T = TypeVar("T")

SHORTEST = 16  #: characters of a token; a shorter one could be guessed
Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


@dataclass(frozen=True, slots=True)
class ScrapeOptions:
    """``address``: HOST:PORT, empty for nowhere. ``cert``, ``key``: PEM files for TLS; ``token_file``: what a scrape
    must show as ``Authorization: Bearer``."""

    address: str = ""
    cert: Path | None = None
    key: Path | None = None
    token_file: Path | None = None

    def check(self) -> None:
        """Raises :class:`UsageError` for options that do not fit together."""
        if not self.address and (self.cert or self.key or self.token_file):
            raise UsageError("--metrics-cert, --metrics-key and --metrics-token-file need --metrics HOST:PORT")
        if (self.cert is None) != (self.key is None):
            raise UsageError("--metrics-cert and --metrics-key belong together: name both")


class Renewed(Generic[T]):
    """The result of ``read``, computed again when one of the files was changed."""

    def __init__(self, paths: tuple[Path, ...], read: Callable[[], T]) -> None:
        """Raises what ``read`` raises."""
        self._paths, self._read = paths, read
        self._stamps = self._stamp()
        self._value = read()

    def value(self) -> T:
        """The newest result that could be computed."""
        stamps = self._stamp()
        if stamps != self._stamps:
            self._stamps = stamps
            try:
                self._value = self._read()
            except RgpuError as error:
                log.error("changed files of the metrics port cannot be used: what they were before is still in force",
                          reason=error.message)
        return self._value

    def _stamp(self) -> list[tuple[int, int]]:
        found = []
        for path in self._paths:
            try:
                status = os.stat(path)
                found.append((status.st_mtime_ns, status.st_ino))
            except OSError:
                found.append((0, 0))
        return found


def certificate(cert: Path, key: Path) -> Renewed[ssl.SSLContext]:
    """The server's side of TLS (1.2 or newer). Raises :class:`UsageError`, :class:`NotFound`,
    :class:`AuthenticationFailed` (others may read the key)."""
    def read() -> ssl.SSLContext:
        read_file(key, private=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(cert, key, password=lambda: b"")  # never prompt at a terminal
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise UsageError(f"--metrics-cert {cert} and --metrics-key {key} cannot be used: {error}; both are PEM, "
                             "the key without a password", cert=str(cert), key=str(key)) from error
        return context

    return Renewed((cert, key), read)


def token(path: Path) -> Renewed[bytes]:
    """The token in a file that only its owner may read.

    Raises :class:`UsageError` (too short, or no text), :class:`NotFound`, :class:`AuthenticationFailed`.
    """
    def read() -> bytes:
        found = read_file(path, private=True).strip()
        if len(found) < SHORTEST or not all(33 <= byte < 127 for byte in found):
            raise UsageError(f"--metrics-token-file {path} holds no token: one word of at least {SHORTEST} visible "
                             "ASCII characters (`openssl rand -hex 32`)", path=str(path))
        return found

    return Renewed((path,), read)


def behind_token(app: Wsgi, expected: Renewed[bytes]) -> Wsgi:
    """Wrap ``app``: requests without the token get status 401."""
    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        scheme, _, shown = str(environ.get("HTTP_AUTHORIZATION") or "").partition(" ")
        good = hmac.compare_digest(shown.strip().encode("latin-1", "replace"), expected.value())
        if scheme.lower() == "bearer" and good:
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", 'Bearer realm="rgpu"'),
                                            ("Content-Type", "text/plain")])
        return [b"this port needs the token of --metrics-token-file (Authorization: Bearer ...)\n"]

    return guarded


def check_files(options: ScrapeOptions) -> None:
    """Read what the options name once, before anything is started. Raises what reading raises."""
    options.check()
    if options.cert is not None and options.key is not None:
        certificate(options.cert, options.key)
    if options.token_file is not None:
        token(options.token_file)
