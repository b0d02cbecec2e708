"""The pool's secrets as a node keeps them: the one from which the keys of stored checkpoints derive, and the
generations of the one that tickets are made with.

::

    secret         32 bytes: the secret that the pool was made with. The keys of stored checkpoints derive from it for
                   good; it is generation 1 of the tickets' secret, too
    secrets.json   {rgpu_secrets: 1, dropped, secrets: {number: hex}}: the generations that this host has, once there
                   was another than the first. Those up to ``dropped`` are invalid, also that in ``secret``

The pool's record (:mod:`rgpu.migrate.membership.rotation`) defines which are valid, and since when. Several daemons
of one folder share the files: each change is one atomic replacement under a lock of the folder.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import blake3
import msgspec

from rgpu.link.keys import SECRET_BYTES, PoolFiles
from rgpu.link.private_files import read_file, write_file
from rgpu.session.errors import Corrupt, NotFound, PoolUnavailable

FILE = "secrets.json"
FIRST = 1  #: the number of the secret that the pool was made with


class _File(msgspec.Struct, forbid_unknown_fields=True):
    secrets: dict[int, str]
    dropped: int = 0
    rgpu_secrets: int = 1


def mark(secret: bytes) -> str:
    """Return 32 hexadecimal digits that identify a secret without revealing it."""
    return blake3.blake3(b"rgpu 2026 pool secret: mark", key=secret).hexdigest(length=16)


class PoolSecrets:
    """The secrets in a pool's folder. Thread-safe: the data port's thread reads what the daemon's loop sets.

    Until :meth:`count` was called no generation is valid: tickets are neither made nor accepted.
    """

    def __init__(self, files: PoolFiles) -> None:
        """Read the files. Raises :class:`NotFound`, :class:`AuthenticationFailed`, :class:`Corrupt`."""
        self._path, self._folder = files.root / FILE, files.root
        self.of_checkpoints = files.secret()
        self._lock = threading.Lock()
        self._held: dict[int, bytes] = {}
        self._dropped = 0
        self._issue, self._accept = 0, ()  # type: int, tuple[int, ...]
        self.read()

    # -- what counts ------------------------------------------------------------------
    def count(self, issue: int, accept: tuple[int, ...]) -> None:
        """Make tickets with generation ``issue`` (0: with none), and accept those of ``accept``."""
        with self._lock:
            self._issue, self._accept = issue, accept

    def issuing(self) -> bytes:
        """Return the secret that tickets are made with. Raises :class:`PoolUnavailable` while this node has none."""
        with self._lock:
            found = self._held.get(self._issue)
        if found is None:
            raise PoolUnavailable("this node lacks the pool's newest secret and makes no tickets until another node "
                                  "gives it: see `rgpu keys rotate --status`", reason="no secret")
        return found

    def accepted(self) -> tuple[bytes, ...]:
        """Return the secrets whose tickets are accepted, the newest first."""
        with self._lock:
            return tuple(self._held[number] for number in sorted(self._accept, reverse=True) if number in self._held)

    # -- what is held -------------------------------------------------------------------
    def marks(self) -> dict[int, str]:
        """Return number → mark of each generation that is held."""
        with self._lock:
            return {number: mark(secret) for number, secret in self._held.items()}

    @property
    def dropped(self) -> int:
        """The highest generation that was dropped."""
        return self._dropped

    def secret(self, number: int, named: str) -> bytes:
        """Return one generation, by its number and mark. Raises :class:`NotFound`."""
        with self._lock:
            found = self._held.get(number)
        if found is None or mark(found) != named:
            raise NotFound(f"this node does not hold secret {number} of the pool", number=number)
        return found

    def everything(self) -> dict[str, object]:
        """Return what a host that joins is given: {dropped, held: {number: secret}}."""
        with self._lock:
            return {"dropped": self._dropped, "held": {str(number): secret for number, secret in self._held.items()}}

    def read(self) -> None:
        """Read the files again. Raises :class:`AuthenticationFailed`, :class:`Corrupt`."""
        held, dropped = self._read()
        with self._lock:
            self._held, self._dropped = held, dropped

    def make(self, number: int) -> bytes:
        """Make, store and return a secret as generation ``number``. Raises :class:`OSError`, and as :meth:`read`."""
        fresh = secrets.token_bytes(SECRET_BYTES)
        self.add(number, fresh)
        return fresh

    def add(self, number: int, secret: bytes) -> None:
        """Store a generation. Raises :class:`Corrupt` for an invalid secret, :class:`OSError`, and as :meth:`read`."""
        check_secret(secret)
        with self._changing() as (held, dropped):
            if number > dropped:
                held[number] = secret
            self._write(held, dropped)

    def drop(self, highest: int) -> bool:
        """Drop all generations up to ``highest``, for good; return whether there were any.

        Raises :class:`OSError`, and as :meth:`read`.
        """
        if highest <= self._dropped:
            return False
        with self._changing() as (held, dropped):
            self._write({number: secret for number, secret in held.items() if number > highest}, max(dropped, highest))
        return True

    # -- files ------------------------------------------------------------------------
    @contextmanager
    def _changing(self) -> Iterator[tuple[dict[int, bytes], int]]:
        """The files' content, under the folder's lock; it is read again afterwards."""
        with open(os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self._read()
        self.read()

    def _read(self) -> tuple[dict[int, bytes], int]:
        try:
            data = read_file(self._path, private=True)
        except NotFound:
            return {FIRST: self.of_checkpoints}, 0
        try:
            found = msgspec.json.decode(data, type=_File)
            held = {number: bytes.fromhex(text) for number, text in found.secrets.items()}
        except (msgspec.MsgspecError, ValueError) as error:
            raise Corrupt(f"{self._path} cannot be read: {error}; another host's has the same secrets",
                          path=str(self._path), reason="format") from error
        if found.rgpu_secrets != 1 or found.dropped < 0:
            raise Corrupt(f"{self._path} is of another version", path=str(self._path), reason="version")
        for secret in held.values():
            check_secret(secret)
        return held, found.dropped

    def _write(self, held: Mapping[int, bytes], dropped: int) -> None:
        content = _File({number: held[number].hex() for number in sorted(held)}, dropped)
        write_file(self._path, msgspec.json.encode(content) + b"\n", mode=0o600, replace=True)


def write_joined(files: PoolFiles, given: object) -> None:
    """Store what a host that joins was given (:meth:`PoolSecrets.everything`); None: an older version gave nothing.

    Raises :class:`Corrupt`, :class:`OSError`.
    """
    if given is None:
        return
    try:
        found = msgspec.convert(given, _Given)
        held = {int(number): secret for number, secret in found.held.items()}
    except (msgspec.ValidationError, ValueError) as error:
        raise Corrupt(f"the pool answered without its secrets: {error}", reason="secret") from error
    for secret in held.values():
        check_secret(secret)
    content = _File({number: held[number].hex() for number in sorted(held)}, found.dropped)
    write_file(files.root / FILE, msgspec.json.encode(content) + b"\n", mode=0o600, replace=True)


class _Given(msgspec.Struct):
    held: dict[str, bytes]
    dropped: int = 0


def check_secret(secret: object) -> bytes:
    """Return the secret, if it is a valid one. Raises :class:`Corrupt`."""
    if not isinstance(secret, bytes) or len(secret) != SECRET_BYTES:
        raise Corrupt(f"a pool's secret has {SECRET_BYTES} bytes", reason="secret")
    return secret
