"""Blobs in S3-compatible object storage, through obstore.

A pack is gathered in memory (:attr:`ObjectBlobs.pack_limit`) and put by one
request, which makes it appear whole or not at all: no partial upload is ever
left to be found and removed. A conditional put (``If-None-Match: *``) fails if
the manifest exists already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import obstore
from obstore import exceptions as failed
from obstore.store import S3Store

from rgpu.checkpoint.blobs.base import MAX_BLOB, Found, Gathered, check_name
from rgpu.session.errors import (
    AlreadyExists,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreMissing,
    StoreUnreachable,
)

#: The service's error codes by meaning (found in the text of the error; obstore has classes for some only).
_DENIED = ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken",
           "403 Forbidden", "401 Unauthorized", "RequestTimeTooSkewed")
_FULL = ("QuotaExceeded", "EntityTooLarge", "507 ", "InsufficientStorage", "XMinioStorageFull")


@contextlib.contextmanager
def _failing_as(what: str, where: str) -> Iterator[None]:
    """Turn obstore's errors into :class:`StoreError`."""
    try:
        yield
    except (failed.BaseError, OSError, ValueError) as error:
        kind, reason = _classify(error)
        raise kind(f"{what} {where}: {reason}", path=where, reason=reason) from error


def _classify(error: Exception) -> tuple[type[StoreError], str]:
    text = " ".join(str(error).split())
    if isinstance(error, failed.NotFoundError | FileNotFoundError):
        if "NoSuchBucket" in text:
            return StoreError, "there is no such bucket"
        return StoreMissing, "it is not there"
    if any(word in text for word in _FULL):
        return StoreFull, "the store is full"
    if isinstance(error, failed.PermissionDeniedError | failed.UnauthenticatedError) \
            or any(word in text for word in _DENIED):
        clock = "; look at this host's clock" if "RequestTimeTooSkewed" in text else ""
        return StoreDenied, f"the store refuses the credentials{clock}"
    if isinstance(error, failed.GenericError) and ("error sending request" in text or "timed out" in text
                                                   or "HTTP error" in text or " 50" in text):
        return StoreUnreachable, f"the store does not answer ({text[:200]})"
    return StoreError, text[:300]


class ObjectBlobs:
    """See the module docstring. ``prefix``: precedes every name in the bucket; ``patience``: seconds for retries."""

    pack_limit = 32 << 20

    def __init__(self, bucket: str, prefix: str, configuration: Mapping[str, Any], *, retries: int = 5,
                 patience: float = 30.0) -> None:
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        self._shown = f"s3://{bucket}/{self._prefix}"
        endpoint = str(configuration.get("endpoint") or "")
        options: dict[str, Any] = {"connect_timeout": timedelta(seconds=10), "timeout": timedelta(seconds=120)}
        if endpoint.startswith("http://"):
            options["allow_http"] = True
        with _failing_as("cannot use", self._shown):
            self._store = S3Store(bucket, config=dict(configuration), client_options=options,  # type: ignore[arg-type]
                                  retry_config={"max_retries": retries, "retry_timeout": timedelta(seconds=patience)})

    def where(self, name: str) -> str:
        return self._shown + name

    def _path(self, name: str) -> str:
        return self._prefix + check_name(name)

    def read(self, name: str, limit: int = MAX_BLOB) -> bytes:
        path = self._path(name)
        with _failing_as("cannot read", self.where(name)):
            if limit >= MAX_BLOB:
                return bytes(obstore.get(self._store, path).bytes())
            size = obstore.head(self._store, path)["size"]
            return bytes(obstore.get_range(self._store, path, start=0, length=min(limit, size))) if size else b""

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        if not length:
            return b""
        with _failing_as("cannot read", self.where(name)):
            return bytes(obstore.get_range(self._store, self._path(name), start=offset, length=length))

    def size(self, name: str) -> int | None:
        try:
            with _failing_as("cannot look at", self.where(name)):
                return int(obstore.head(self._store, self._path(name))["size"])
        except StoreMissing:
            return None

    def ls(self, prefix: str) -> list[Found]:
        found = []
        with _failing_as("cannot list", self.where(prefix)):
            for page in obstore.list(self._store, self._prefix + prefix):
                found += [Found(str(entry["path"])[len(self._prefix):], int(entry["size"]),
                                entry["last_modified"].timestamp()) for entry in page]
        return found

    def leftovers(self, prefix: str) -> list[Found]:
        """Return nothing: an object that is not complete does not exist."""
        return []

    def put(self, name: str, *data: bytes, new: bool = False) -> None:
        path, whole = self._path(name), data[0] if len(data) == 1 else b"".join(data)
        with _failing_as("cannot write", self.where(name)):
            try:
                obstore.put(self._store, path, whole, mode="create" if new else "overwrite", use_multipart=False)
            except failed.AlreadyExistsError as error:
                raise AlreadyExists(f"{self.where(name)} exists", path=self.where(name)) from error

    def create(self, name: str) -> Gathered:
        check_name(name)
        return Gathered(self, name)

    def delete(self, name: str) -> None:
        with contextlib.suppress(StoreMissing), _failing_as("cannot remove", self.where(name)):
            obstore.delete(self._store, self._path(name))
