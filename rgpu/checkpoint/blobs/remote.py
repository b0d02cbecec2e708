"""Blobs through another process: a worker has no credentials, so the node daemon reads and writes for it.

One request and one answer at a time on each of a few Unix socket pairs. Both:
u32 length of a msgpack map, u64 length of the data, the map, the data. The
serving side lets a worker read and write below the prefixes it was granted, and
delete only what the same worker has written.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import structlog

from rgpu.checkpoint.blobs.base import MAX_BLOB, Blobs, Found, Gathered
from rgpu.session.errors import RgpuError, StoreDenied, StoreUnreachable, from_dict

log = structlog.get_logger(__name__)

CONNECTIONS = 4
_HEAD = struct.Struct("<IQ")
_MAX_MAP = 64 << 20  # a listing of a large store


def _send(sock: socket.socket, values: dict[str, Any], data: Any = b"") -> None:
    head = msgspec.msgpack.encode(values)
    sock.sendall(_HEAD.pack(len(head), len(data)) + head)
    if len(data):
        sock.sendall(data)


def _receive(sock: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Receive one message. Raises OSError at the end of the connection or for impossible lengths, DecodeError."""
    length, size = _HEAD.unpack(_exactly(sock, _HEAD.size))
    if length > _MAX_MAP or size > MAX_BLOB:
        raise OSError("a message of the store's connection is too long")
    values = msgspec.msgpack.decode(_exactly(sock, length))
    if not isinstance(values, dict):
        raise OSError("a message of the store's connection is no map")
    return values, _exactly(sock, size)


def _exactly(sock: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    view, at = memoryview(data), 0
    while at < length:
        got = sock.recv_into(view[at:])
        if not got:
            raise OSError("the store's connection has ended")
        at += got
    return bytes(data)


class RemoteBlobs:
    """Worker's side. ``descriptors``: its ends of the socket pairs, which this object closes."""

    def __init__(self, descriptors: Sequence[int], pack_limit: int, shown: str) -> None:
        self.pack_limit, self._shown = pack_limit, shown
        self._free: queue.Queue[socket.socket] = queue.Queue()
        self._all = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        for sock in self._all:
            self._free.put(sock)

    def where(self, name: str) -> str:
        return self._shown + name

    def _ask(self, what: str, name: str, data: bytes = b"", **values: Any) -> tuple[dict[str, Any], bytes]:
        sock = self._free.get()
        try:
            _send(sock, {"do": what, "name": name, **values}, data)
            answer, found = _receive(sock)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StoreUnreachable(f"cannot reach {self.where(name)}: the connection to the node daemon has ended "
                                   f"({error})") from error
        finally:
            self._free.put(sock)
        if "error" in answer:
            raise from_dict(answer["error"])
        return answer, found

    def read(self, name: str, limit: int = MAX_BLOB) -> bytes:
        return self._ask("read", name, limit=limit)[1]

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        return self._ask("read_range", name, offset=offset, length=length)[1]

    def size(self, name: str) -> int | None:
        found = self._ask("size", name)[0].get("size")
        return None if found is None else int(found)

    def ls(self, prefix: str) -> list[Found]:
        return [Found(str(name), int(size), float(when)) for name, size, when in self._ask("ls", prefix)[0]["found"]]

    def leftovers(self, prefix: str) -> list[Found]:
        return []

    def put(self, name: str, *data: bytes, new: bool = False) -> None:
        self._ask("put", name, data[0] if len(data) == 1 else b"".join(data), new=new)

    def create(self, name: str) -> Gathered:
        return Gathered(self, name)

    def delete(self, name: str) -> None:
        self._ask("delete", name)

    def close(self) -> None:
        """Close the sockets to the daemon; calls under way fail."""
        for sock in self._all:
            sock.close()


class BlobService:
    """Daemon's side: serves one worker until it closes its ends, or until :meth:`close`.

    ``writable``: the prefix below which it may write; ``readable``: further ones to read.
    """

    def __init__(self, blobs: Blobs, writable: str, readable: Sequence[str] = ()) -> None:
        self._blobs, self._writable = blobs, writable
        self._readable = (writable, *readable)
        self._written: set[str] = set()
        pairs = [socket.socketpair() for _ in range(CONNECTIONS)]
        self.descriptors = tuple(theirs.detach() for _, theirs in pairs)  #: for the worker; close them here once sent
        self._ours = [ours for ours, _ in pairs]
        for sock in self._ours:
            threading.Thread(target=self._serve, args=(sock,), name="store", daemon=True).start()

    def close(self) -> None:
        """Shut the worker's sockets: its access and the serving threads end."""
        for sock in self._ours:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                while True:
                    values, data = _receive(sock)
                    try:
                        answer, found = self._answer(values, data)
                    except RgpuError as error:
                        answer, found = {"error": error.as_dict()}, b""
                    except Exception as error:  # noqa: BLE001 - the worker must receive it
                        log.exception("a request to the store failed")
                        answer, found = {"error": RgpuError(f"the store failed: {error}").as_dict()}, b""
                    _send(sock, answer, found)
            except (OSError, msgspec.DecodeError, UnicodeDecodeError):
                return

    def _answer(self, values: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        what, name = str(values.get("do")), str(values.get("name"))
        writes = what in ("put", "delete")
        allowed = (self._writable,) if writes else self._readable
        if not name.startswith(allowed) or ".." in name or (what == "delete" and name not in self._written):
            raise StoreDenied(f"a worker may not {what} {name}", name=name)
        if what == "read":
            return {}, self._blobs.read(name, int(values["limit"]))
        if what == "read_range":
            return {}, self._blobs.read_range(name, int(values["offset"]), int(values["length"]))
        if what == "size":
            return {"size": self._blobs.size(name)}, b""
        if what == "ls":
            return {"found": [list(found) for found in self._blobs.ls(name)]}, b""
        if what == "put":
            self._written.add(name)
            self._blobs.put(name, data, new=bool(values.get("new")))
            return {}, b""
        if what == "delete":
            self._blobs.delete(name)
            return {}, b""
        raise StoreDenied(f"a worker may not {what}", name=name)
