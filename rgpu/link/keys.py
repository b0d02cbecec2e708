"""Keys, and the files in which a pool keeps them.

Every link end has a CURVE key pair (Curve25519, Z85 text of 40 characters)
with a *role*: ``user`` (runs and manages sessions), ``node`` (a GPU host),
``operator`` (changes the pool), ``invited`` (may join, once:
:mod:`rgpu.link.invitations`) or ``web`` (a node's web page, which acts for the users
logged in there: :mod:`rgpu.link.control.grants`; in no file). Secret keys are JSON files of mode 0600 in
directories of mode 0700; one that others may read is refused, because a key
that was readable counts as known to others.

The nodes of a pool also share the *pool secret*, 32 random bytes, from which
tickets and the secrets of data links are derived (:mod:`rgpu.link.data.tickets`).

Layout of a pool's directory (a node or a client has only its part of it)::

    pool.json                   id, control endpoints and their public keys
    secret                      the pool secret: nodes only
    keys/user.key, operator.key
    keys/authorized/NAME.pub    a public key that is accepted, with its role
    nodes/HOST/node.key         and the node's other files
"""

from __future__ import annotations

import os
import re
import secrets
import struct
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
import zmq.utils.z85

from rgpu.link.loggers import get_logger
from rgpu.link.private_files import private_directory, read_file, write_file
from rgpu.link.revoked import RevokedKeys
from rgpu.session.errors import AlreadyExists, Corrupt, NotFound, UsageError

log = get_logger(__name__)

ROLES = ("user", "node", "operator", "invited", "web")  #: the last one is in no file
SECRET_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")
_DESCRIPTION_LIMIT = 4 << 20  #: longest pool.json, bytes: some 30,000 members


class _KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    name: str
    public: str
    secret: str = ""
    rgpu_key: int = 1
    user: str | msgspec.UnsetType = msgspec.UNSET  #: left out where it is the name, as the previous version wrote it


def check_name(name: str, what: str = "name") -> str:
    """Return a name that is safe as a file's name. Raises :class:`UsageError`."""
    if not _NAME.match(name):
        raise UsageError(f"{what} {name!r}: use 1 to 63 letters, digits, '.', '_' and '-', first a letter or digit")
    return name


def check_public(key: str) -> str:
    """Return a public key in Z85. Raises :class:`Corrupt`."""
    try:
        good = len(key) == 40 and len(zmq.utils.z85.decode(key.encode("ascii"))) == 32
    except (KeyError, ValueError, UnicodeEncodeError, struct.error):  # the last: five characters above 32 bits
        good = False
    if not good:
        raise Corrupt("a key is not 40 characters of Z85", reason="key")
    return key


@dataclass(frozen=True, slots=True)
class PublicKey:
    """Identity of a peer: its role, its name, and the key that proves it. ``user``: its holder, if not ``name``."""

    role: str
    name: str
    public: str
    user: str = ""

    @property
    def holder(self) -> str:
        """The user who owns what this key creates; empty for nodes and invitations, which own nothing."""
        return (self.user or self.name) if self.role in ("user", "operator") else ""

    def save(self, path: Path) -> None:
        """Write the key to a file (mode 0644), in place of an earlier one. Raises OSError."""
        data = _KeyFile(role=self.role, name=self.name, public=self.public, user=self.user or msgspec.UNSET)
        write_file(path, msgspec.json.encode(data) + b"\n", mode=0o644, replace=True)

    @classmethod
    def load(cls, path: Path) -> PublicKey:
        """Read a key file. Raises :class:`NotFound`, :class:`Corrupt`."""
        found = _decode_key(path, read_file(path))
        return cls(found.role, found.name, found.public, found.user or "")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair with its role. ``repr`` shows no secret."""

    role: str
    name: str
    public: str
    secret: str = field(repr=False)
    user: str = ""

    @classmethod
    def create(cls, role: str, name: str, user: str = "") -> KeyPair:
        """Return a new random pair. ``user``: holder, if not ``name``. Raises :class:`UsageError` (role, name)."""
        if role not in ROLES:
            raise UsageError(f"role {role!r}: use one of {', '.join(ROLES)}")
        check_name(name)
        if user:
            check_name(user, "user")
        public, secret = zmq.curve_keypair()
        return cls(role, name, public.decode("ascii"), secret.decode("ascii"), "" if user == name else user)

    def public_key(self) -> PublicKey:
        """Return the public half."""
        return PublicKey(self.role, self.name, self.public, self.user)

    def save(self, path: Path, *, replace: bool = False) -> None:
        """Write the pair with mode 0600 in a directory of mode 0700. Raises :class:`AlreadyExists`."""
        private_directory(path.parent)
        data = _KeyFile(role=self.role, name=self.name, public=self.public, secret=self.secret,
                        user=self.user or msgspec.UNSET)
        write_file(path, msgspec.json.encode(data) + b"\n", mode=0o600, replace=replace)

    @classmethod
    def load(cls, path: Path) -> KeyPair:
        """Read a pair. Raises :class:`NotFound`, :class:`AuthenticationFailed` (others can read it), :class:`Corrupt`.
        """
        found = _decode_key(path, read_file(path, private=True))
        if not found.secret:
            raise Corrupt(f"{path} holds no secret key", path=str(path), reason="no secret")
        try:
            matches = zmq.curve_public(found.secret.encode("ascii")).decode("ascii") == found.public
        except (zmq.ZMQError, ValueError, KeyError):
            matches = False
        if not matches:
            raise Corrupt(f"{path}: the secret and the public key do not belong together", path=str(path),
                          reason="mismatch")
        return cls(found.role, found.name, found.public, found.secret, found.user or "")


class AuthorizedKeys:
    """The public keys that are accepted: one ``NAME.pub`` each, in one directory.

    :meth:`find` reads the directory again when its modification time has changed, so
    a key that is added or removed takes effect with the next request.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._known: dict[str, PublicKey] = {}
        self._stamp: tuple[int, int] | None = None
        #: Never accepted, whatever is recorded elsewhere.
        self.revoked = RevokedKeys(directory)
        #: Accepted besides: public key → its entry; a node puts the entries of the pool's registry here.
        self.on_record: dict[str, PublicKey] = {}

    def add(self, key: PublicKey) -> None:
        """Accept a key. Raises :class:`AlreadyExists` when another key has the name."""
        check_name(key.name)
        check_public(key.public)
        private_directory(self.directory)
        path = self.directory / f"{key.name}.pub"
        if path.exists() and PublicKey.load(path) != key:
            raise AlreadyExists(f"{path} holds another key; remove it first", name=key.name)
        key.save(path)
        self._stamp = None

    def remove(self, name: str) -> None:
        """Delete the key of that name. Raises :class:`NotFound`."""
        try:
            (self.directory / f"{check_name(name)}.pub").unlink()
        except FileNotFoundError:
            raise NotFound(f"no authorized key is named {name}", name=name) from None
        self._stamp = None

    def find(self, public: str) -> PublicKey | None:
        """Return the entry of a key in Z85, or None."""
        self._refresh()
        return None if public in self.revoked else self._known.get(public) or self.on_record.get(public)

    def revoke(self, names: dict[str, str]) -> None:
        """Never accept these keys ({public: name}) any more, and delete their files. Raises :class:`OSError`."""
        if self.revoked.add(names):
            for key in self._files():
                if key.public in names:
                    (self.directory / f"{key.name}.pub").unlink(missing_ok=True)
            self._stamp = None

    def all(self) -> list[PublicKey]:
        """Return the keys of the folder that are accepted now, sorted by name."""
        self._refresh()
        return sorted((key for key in self._known.values() if key.public not in self.revoked), key=lambda key: key.name)

    def everybody(self) -> list[PublicKey]:
        """Return the keys of the folder and those of the registry, sorted by name."""
        found = {**self.on_record, **{key.public: key for key in self.all()}}
        return sorted((key for key in found.values() if key.public not in self.revoked), key=lambda key: key.name)

    def _refresh(self) -> None:
        try:
            status = os.stat(self.directory)
        except OSError:
            self._known, self._stamp = {}, None
            return
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp == self._stamp:
            return
        try:
            self.revoked.read()
        except Corrupt as error:  # the list as read before still holds; a daemon does not start with a damaged one
            log.error("keys may be let in that were taken away", reason=error.message)
        self._known, self._stamp = {key.public: key for key in self._files()}, stamp

    def _files(self) -> list[PublicKey]:
        found = []
        for path in sorted(self.directory.glob("*.pub")):
            try:
                found.append(PublicKey.load(path))
            except (Corrupt, NotFound):
                continue  # one broken file must neither lock out the other keys nor let one in
        return found


class Endpoint(msgspec.Struct, frozen=True):
    """The address at which a node answers control messages, and the key that it must prove."""

    address: str  #: tcp://HOST:PORT
    public: str
    host: str = ""


class PoolDescription(msgspec.Struct):
    """pool.json: what a client needs to reach a pool."""

    id: str
    endpoints: list[Endpoint] = []
    version: int = 1
    registry: str = ""  #: its address; empty: embedded, in the pool's directory


@dataclass(frozen=True, slots=True)
class PoolFiles:
    """Paths and files of a pool's directory; see the module docstring."""

    root: Path

    @property
    def description_path(self) -> Path:
        return self.root / "pool.json"

    @property
    def authorized(self) -> AuthorizedKeys:
        return AuthorizedKeys(self.root / "keys" / "authorized")

    def key_path(self, role: str) -> Path:
        """Return the path of the key of a role."""
        return self.root / "keys" / f"{role}.key"

    def key_for(self, role: str) -> Path:
        """Return the path of the key for calls as ``role``; without a user's key an operator's serves as one."""
        path = self.key_path(role)
        if role == "user" and not path.exists() and self.key_path("operator").exists():
            return self.key_path("operator")
        return path

    def node_directory(self, host: str) -> Path:
        """Return the directory of a node. Raises :class:`UsageError` for an invalid host name."""
        return self.root / "nodes" / check_name(host, "host")

    def node_key_path(self, host: str) -> Path:
        """Return the path of a node's key."""
        return self.node_directory(host) / "node.key"

    def create(self) -> PoolDescription:
        """Create a pool: its id, secret, and a user's and an operator's key. Raises :class:`AlreadyExists`."""
        private_directory(self.root)
        description = PoolDescription(id=secrets.token_hex(8))
        write_file(self.root / "secret", secrets.token_bytes(SECRET_BYTES), mode=0o600, replace=False)
        for role in ("user", "operator"):
            pair = KeyPair.create(role, role)
            pair.save(self.key_path(role))
            self.authorized.add(pair.public_key())
        self.write_description(description)
        return description

    def add_node(self, host: str) -> KeyPair:
        """Return the node's key pair: made and authorized on the first call, loaded later."""
        path = self.node_key_path(host)
        if path.exists():
            return KeyPair.load(path)
        private_directory(path.parent)
        pair = KeyPair.create("node", host)
        pair.save(path)
        self.authorized.add(PublicKey("node", f"node-{host}"[:63], pair.public))
        return pair

    def read_description(self) -> PoolDescription:
        """Read pool.json. Raises :class:`NotFound`, :class:`Corrupt`."""
        try:
            data = read_file(self.description_path, limit=_DESCRIPTION_LIMIT)
            description = msgspec.json.decode(data, type=PoolDescription)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Corrupt(f"{self.description_path}: {error}", path=str(self.description_path)) from error
        for endpoint in description.endpoints:
            check_public(endpoint.public)
        return description

    def write_description(self, description: PoolDescription) -> None:
        """Write the pool's description (mode 0600), in place of an earlier one."""
        write_file(self.description_path, msgspec.json.format(msgspec.json.encode(description)) + b"\n",
                   mode=0o600, replace=True)

    def registry_address(self) -> str:
        """Return ``KIND:PLACE`` of the pool's registry. Raises :class:`NotFound`, :class:`Corrupt`."""
        return self.read_description().registry or f"embedded:{self.root / 'registry.db'}"

    def secret(self) -> bytes:
        """Return the pool secret. Raises :class:`NotFound`, :class:`AuthenticationFailed`, :class:`Corrupt`."""
        data = read_file(self.root / "secret", private=True)
        if len(data) != SECRET_BYTES:
            raise Corrupt(f"{self.root / 'secret'} holds {len(data)} bytes, not {SECRET_BYTES}", reason="length")
        return data


def _decode_key(path: Path, data: bytes) -> _KeyFile:
    try:
        found = msgspec.json.decode(data, type=_KeyFile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupt(f"{path} is no key file: {error}", path=str(path), reason="format") from None
    if found.rgpu_key != 1 or found.role not in ROLES[:-1] or not _NAME.match(found.name) \
            or found.user and not _NAME.match(found.user):
        raise Corrupt(f"{path} is no key file: version, role or name", path=str(path), reason="format")
    check_public(found.public)
    return found
