"""The exports of a session: objects that other sessions may open, and the check of the tokens for them."""

from __future__ import annotations

import hmac
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from rgpu.session.errors import Refused
from rgpu.session.objects.handle_tokens import Token, TokenKind, encode, session_digest

#: Bytes of a mapping, and a function that returns a descriptor of its memory, which the caller closes.
Piece = tuple[int, Callable[[], int]]


@dataclass(frozen=True, slots=True)
class Export:
    """The object that a token opens; ``pieces``: its memory, by address."""

    token: Token
    pieces: tuple[Piece, ...]


class Exports:
    """The exports of ``session``. Thread-safe."""

    def __init__(self, session: str) -> None:
        self._session = session_digest(session)
        self._lock = threading.Lock()
        self._exports: dict[tuple[TokenKind, int], Export] = {}

    def add(self, kind: TokenKind, number: int, size: int, secret: bytes, pieces: tuple[Piece, ...]) -> bytes:
        """Let others open an object from now on, and return its token; a second export of it replaces the first.

        Raises :class:`ValueError` for a secret of another length.
        """
        token = Token(kind, secret, self._session, number, size)
        encoded = encode(token)
        with self._lock:
            self._exports[kind, number] = Export(token, pieces)
        return encoded

    def remove(self, kind: TokenKind, number: int) -> None:
        """End the export; sessions that have it open keep it."""
        with self._lock:
            self._exports.pop((kind, number), None)

    def find(self, token: Token) -> Export:
        """Return the export that a token opens. Raises :class:`Refused` unless it is the token of a present export."""
        with self._lock:
            export = self._exports.get((token.kind, token.number))
        if token.session != self._session:
            raise Refused("the handle is of another session")
        if export is None or not hmac.compare_digest(export.token.secret, token.secret) or export.token != token:
            raise Refused("the handle names nothing that is there: it was freed, or never given out")
        return export

    def take(self, export: Export) -> list[tuple[int, int]]:
        """Return (descriptor, bytes) of each piece; the caller closes them. Raises :class:`DeviceError` if freed."""
        taken: list[tuple[int, int]] = []
        try:
            for size, descriptor in export.pieces:
                taken.append((descriptor(), size))
        except BaseException:
            for fd, _ in taken:
                os.close(fd)
            raise
        return taken
