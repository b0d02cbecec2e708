"""Address of an etcd registry and of how to connect to it: ``etcd://HOST:PORT[,HOST:PORT…]/PREFIX?OPTIONS``. Pure but
for reading the files that it names."""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from rgpu.session.errors import AuthenticationFailed, Refused, UsageError

DEFAULT_PORT = 2379
DEFAULT_PREFIX = "rgpu"
DEFAULT_TIMEOUT = 4.0
OPTIONS = ("ca", "cert", "key", "tls", "server-name", "user", "password-file", "timeout")
FORM = "etcd://HOST:PORT[,HOST:PORT…][/PREFIX][?" + "&".join(f"{name}=…" for name in OPTIONS) + "]"
_PREFIX = re.compile(r"[A-Za-z0-9._-]{1,64}(/[A-Za-z0-9._-]{1,64}){0,7}")


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """Parsed address. ``endpoints``: HOST:PORT each. ``timeout``: seconds for one request, all members together."""

    endpoints: tuple[str, ...]
    prefix: str = DEFAULT_PREFIX
    tls: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""  #: the name in the servers' certificates, if other than in ``endpoints``
    user: str = ""
    password_file: str = ""
    timeout: float = DEFAULT_TIMEOUT

    def password(self) -> str:
        """The first line of the password file. Raises :class:`AuthenticationFailed`, :class:`Refused`."""
        return _secret(self.password_file).decode(errors="replace").split("\n", 1)[0].rstrip("\r")

    def certificates(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Return (authority, key, certificate) for gRPC; no authority: the system's.

        Raises :class:`AuthenticationFailed`, :class:`Refused`.
        """
        authority = _content(self.ca) if self.ca else None
        return authority, _secret(self.key) if self.key else None, _content(self.cert) if self.cert else None

    def __str__(self) -> str:
        """Return the address without options, for messages."""
        return f"etcd://{','.join(self.endpoints)}/{self.prefix}"


def parse(text: str) -> EtcdAddress:
    """Parse an address. Raises :class:`UsageError` with the error, :class:`Refused` for a password without TLS."""
    try:
        scheme, _, rest = text.partition("://")
        hosts = re.split("[/?#]", rest, maxsplit=1)[0]
        # Several hosts are not a valid URL: newer Pythons refuse brackets after the first of them.
        parts = urlsplit(f"{scheme}://{'hosts' if hosts else ''}{rest[len(hosts):]}")
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise UsageError(f"{text!r} is no registry: {error}; write {FORM}") from error
    if parts.scheme != "etcd" or not hosts or parts.fragment:
        raise UsageError(f"{text!r} is no registry in etcd: write {FORM}")
    if "@" in hosts:
        raise UsageError("a password does not belong into an address, where every `ps` shows it: use "
                         "user=NAME&password-file=FILE")
    options = dict(pairs)
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown or len(options) != len(pairs):
        raise UsageError(f"{text!r}: {'unknown option ' + unknown[0] if unknown else 'an option twice'}; write {FORM}")
    endpoints = tuple(_endpoint(part) for part in hosts.split(","))
    if len(set(endpoints)) != len(endpoints):
        raise UsageError(f"{text!r} names one member twice")
    prefix = unquote(parts.path).strip("/") or DEFAULT_PREFIX
    if not _PREFIX.fullmatch(prefix):
        raise UsageError(f"{prefix!r} is no prefix: up to 8 names of letters, digits, '.', '_' and '-', with '/' "
                         "between them")
    address = EtcdAddress(
        endpoints, prefix, _tls(options), options.get("ca", ""), options.get("cert", ""), options.get("key", ""),
        options.get("server-name", ""), options.get("user", ""), options.get("password-file", ""),
        _timeout(options.get("timeout", str(DEFAULT_TIMEOUT))))
    _check(address)
    return address


def _endpoint(text: str) -> str:
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?", text)
    port = int(match.group(2) or DEFAULT_PORT) if match else 0
    if match is None or not 0 < port < 65536:
        raise UsageError(f"{text!r} is no HOST:PORT of a member of a registry in etcd")
    return f"{match.group(1)}:{port}"


def _tls(options: dict[str, str]) -> bool:
    word = options.get("tls", "on" if "ca" in options or "cert" in options else "off")
    if word not in ("on", "off"):
        raise UsageError(f"tls={word}: on or off")
    if word == "off" and any(options.get(name) for name in ("ca", "cert", "key", "server-name")):
        raise UsageError("tls=off does not go with certificates")
    return word == "on"


def _timeout(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 60:
        raise UsageError(f"timeout={text}: seconds from 0.1 to 60")
    return seconds


def _check(address: EtcdAddress) -> None:
    if bool(address.cert) != bool(address.key):
        raise UsageError("cert and key belong together")
    if bool(address.user) != bool(address.password_file):
        raise UsageError("user and password-file belong together")
    away = [endpoint for endpoint in address.endpoints if not _loopback(endpoint.rsplit(":", 1)[0].strip("[]"))]
    if address.user and not address.tls and away:
        raise Refused(f"the password of {address.user} would go to {away[0]} in clear: use TLS (ca=FILE, or tls=on for "
                      "the system's authorities)")


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _content(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise AuthenticationFailed(f"{path} cannot be read: {error.strerror}", path=path) from error


def _secret(path: str) -> bytes:
    """Return the content of a file that only its owner may read."""
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise Refused(f"{path} may be read by others (mode {mode:04o}): make it 0600", path=path)
            return file.read(1 << 20)
    except OSError as error:
        raise AuthenticationFailed(f"{path} cannot be read: {error.strerror}", path=path) from error
