"""Addresses of stores: ``DIR``, or ``s3://BUCKET/PREFIX?endpoint=URL&region=NAME``.

The address never contains credentials. They are read from a file of mode 0600
(JSON: ``access_key_id``, ``secret_access_key``, ``session_token``) or from the
environment (``AWS_ACCESS_KEY_ID`` …), and only the node daemon reads them: its
workers are started without these variables (:func:`without_credentials`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

import msgspec

from rgpu.checkpoint.blobs.base import Blobs, DirectoryBlobs
from rgpu.session.errors import AuthenticationFailed, Corrupt, NotFound, UsageError

if TYPE_CHECKING:
    from rgpu.checkpoint.blobs.objects import ObjectBlobs

_OPTIONS = ("endpoint", "region")
_VARIABLES = {"access_key_id": "AWS_ACCESS_KEY_ID", "secret_access_key": "AWS_SECRET_ACCESS_KEY",
              "session_token": "AWS_SESSION_TOKEN"}
_LIMIT = 64 * 1024


class Credentials(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Credentials of an object store. ``repr`` shows nothing."""

    access_key_id: str = ""
    secret_access_key: str = ""
    session_token: str = ""

    def __repr__(self) -> str:
        return "Credentials(…)"


@dataclass(frozen=True, slots=True)
class Place:
    """A parsed address. ``bucket`` is empty for a directory."""

    path: str
    bucket: str = ""
    endpoint: str = ""
    region: str = "us-east-1"

    @property
    def is_directory(self) -> bool:
        return not self.bucket

    def __str__(self) -> str:
        return self.path if self.is_directory else f"s3://{self.bucket}/{self.path}"


def parse(address: str) -> Place:
    """Parse a store's address. Raises :class:`UsageError`."""
    if "://" not in address:
        if not address.strip():
            raise UsageError("a store needs an address: a directory or s3://BUCKET/PREFIX")
        return Place(str(Path(address).expanduser().resolve()))
    parts = urlsplit(address)
    if parts.scheme == "file":
        return Place(str(Path(parts.path).resolve()))
    if parts.scheme != "s3" or not parts.hostname:
        raise UsageError(f"{address!r} is no store: use a directory or s3://BUCKET/PREFIX?endpoint=URL")
    if parts.username or parts.password:
        raise UsageError("credentials do not belong into a store's address: use --store-credentials or the environment")
    options = dict(parse_qsl(parts.query))
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise UsageError(f"a store's address has no option {unknown[0]!r}: use {' and '.join(_OPTIONS)}")
    if options.get("endpoint") and urlsplit(options["endpoint"]).scheme not in ("http", "https"):
        raise UsageError(f"the endpoint {options['endpoint']!r} is no http or https address")
    return Place(parts.path.strip("/"), parts.hostname, options.get("endpoint", ""), options.get("region", "us-east-1"))


def credentials(file: Path | None, environ: Mapping[str, str]) -> Credentials:
    """Read the credentials from ``file`` if there is one, else from the environment.

    Raises :class:`NotFound`, :class:`AuthenticationFailed` if others may read the file, :class:`Corrupt`.
    """
    if file is None:
        return Credentials(**{name: environ.get(variable, "") for name, variable in _VARIABLES.items()})
    try:
        with open(file, "rb") as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            data = opened.read(_LIMIT)
    except OSError as error:
        raise NotFound(f"the store's credentials {file} cannot be read: {error.strerror}", path=str(file)) from error
    if mode & 0o077:
        raise AuthenticationFailed(f"{file} can be read by others (mode {mode:04o}): run 'chmod 600 {file}'",
                                   path=str(file))
    try:
        return msgspec.json.decode(data, type=Credentials)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupt(f"{file} holds no credentials: {error}", path=str(file), reason="json") from None


def without_credentials(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process that must not have access to the store by itself."""
    return {name: value for name, value in environ.items()
            if not name.startswith("AWS_") and name != "RGPU_STORE_CREDENTIALS"}


def connect(place: Place, granted: Credentials | None = None) -> Blobs:
    """Open the blobs at a place. Raises :class:`StoreError`; :class:`StoreDenied` for an object store without
    credentials.
    """
    if place.is_directory:
        return DirectoryBlobs(place.path)
    return _objects(place, granted or Credentials())


def _objects(place: Place, granted: Credentials) -> ObjectBlobs:
    from rgpu.checkpoint.blobs.objects import ObjectBlobs
    from rgpu.session.errors import StoreDenied

    if not granted.access_key_id or not granted.secret_access_key:
        raise StoreDenied(f"no credentials for {place}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for the node "
                          "daemon, or give it --store-credentials FILE")
    configuration = {"access_key_id": granted.access_key_id, "secret_access_key": granted.secret_access_key,
                     "region": place.region}
    if place.endpoint:
        configuration["endpoint"] = place.endpoint
    if granted.session_token:
        configuration["session_token"] = granted.session_token
    return ObjectBlobs(place.bucket, place.path, configuration)
