"""Sealed frames without the I/O: a :class:`Sealer` makes them, an :class:`Opener` decrypts them.

Frame: u32 length of what follows (little-endian), then AES-256-GCM of one
message (u8 type, body) with its tag of 16 bytes. The nonce counts the frames of
this connection and direction, so a frame that is repeated, dropped, moved or
taken from another connection does not open. The associated data binds
direction, epoch and session. docs/developers/links/sealing.md has the tables.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from rgpu.session.errors import LinkError

MESSAGE_LIMIT = 4 * 1024 * 1024 + 32  #: longest message (type and body), bytes
TAG = 16
FRAME_LIMIT = MESSAGE_LIMIT + TAG  #: largest value of the length field that is accepted
BULK = 64 * 1024  #: messages from here on may be opened into a buffer of the receiver's
LONG = 256 * 1024  #: messages from here on are sealed directly from their parts: gathering these would cost as much
_COUNTER_LIMIT = 1 << 40  #: frames of one connection: far below what one GCM key may seal

_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<IB")
OVERHEAD = _LENGTH.size + TAG  #: bytes of a frame beside its message
_NONCE = struct.Struct("<IQ")


def derive_key(secret: bytes, client_salt: bytes, node_salt: bytes, direction: int, session: str, epoch: int) -> bytes:
    """Return the AES-256 key of one direction of one connection (HKDF-SHA256, RFC 5869)."""
    info = b"rgpu data link" + bytes([direction]) + session.encode() + struct.pack("<Q", epoch)
    return HKDF(hashes.SHA256(), 32, client_salt + node_salt, info).derive(secret)


def associated_data(direction: int, epoch: int, session: str) -> bytes:
    """Return the bytes that are authenticated with each frame: direction, epoch, session."""
    return b"rgpu" + bytes([direction]) + struct.pack("<Q", epoch) + session.encode()


class Sealer:
    """The sending side of one direction: makes its frames. Not thread-safe: the counter must never repeat."""

    def __init__(self, key: bytes, direction: int, epoch: int, session: str) -> None:
        self._cipher = AESGCM(key)
        self._key = algorithms.AES(key)
        self.key, self.associated = key, associated_data(direction, epoch, session)
        self.counter = 0  #: frames sealed so far; to be set by code that has sealed frames of this direction elsewhere

    def seal(self, kind: int, parts: Sequence[Any]) -> bytearray:
        """Return one whole frame. Raises :class:`LinkError` for a message over the limit."""
        frame = bytearray(frame_size(parts))
        self.seal_into(kind, parts, memoryview(frame))
        return frame

    def seal_run(self, message: Any, frame: memoryview) -> int:
        """Seal a contiguous message, its type in front, into the beginning of ``frame``; return the frame's length.

        Runs without the interpreter's lock.
        """
        if len(message) > MESSAGE_LIMIT or self.counter >= _COUNTER_LIMIT:
            raise LinkError(f"a message of {len(message)} bytes as frame {self.counter}: over the limit")
        end = OVERHEAD + len(message)
        _LENGTH.pack_into(frame, 0, len(message) + TAG)
        self._cipher.encrypt_into(_NONCE.pack(0, self.counter), message, self.associated, frame[_LENGTH.size:end])
        self.counter += 1
        return end

    def seal_into(self, kind: int, parts: Sequence[Any], frame: memoryview) -> int:
        """Seal a message into the beginning of ``frame``, which is large enough; return the frame's length.

        The parts are contiguous, of bytes. Those of a short message are gathered
        there and sealed in place; a long one is sealed directly from its parts.
        """
        end = frame_size(parts)
        if end - _LENGTH.size > FRAME_LIMIT or self.counter >= _COUNTER_LIMIT:
            raise LinkError(f"a message of {end - OVERHEAD} bytes as frame {self.counter}: over the limit")
        _HEAD.pack_into(frame, 0, end - _LENGTH.size, kind)
        at = _HEAD.size
        if end >= LONG:
            self._seal_parts(parts, frame, end)
            self.counter += 1
            return end
        for part in parts:
            size = len(part)
            frame[at:at + size] = part
            at += size
        self._cipher.encrypt_into(_NONCE.pack(0, self.counter), frame[_LENGTH.size:at], self.associated,
                                  frame[_LENGTH.size:end])
        self.counter += 1
        return end


    def _seal_parts(self, parts: Sequence[Any], frame: memoryview, end: int) -> None:
        """Seal the parts after the type, which is in ``frame`` already. Runs without the interpreter's lock."""
        encryptor = Cipher(self._key, modes.GCM(_NONCE.pack(0, self.counter))).encryptor()
        encryptor.authenticate_additional_data(self.associated)
        at = _LENGTH.size
        for part in (bytes(frame[at:_HEAD.size]), *parts):
            if len(part):
                at += encryptor.update_into(part, frame[at:end])
        encryptor.finalize()
        frame[at:end] = encryptor.tag


def frame_size(parts: Sequence[Any]) -> int:
    """Return the bytes of the frame of a message with this body."""
    return _HEAD.size + sum(map(len, parts)) + TAG


class Buffers:
    """Memory for long messages, used again when no view of it is left.

    Fresh memory of a megabyte costs more to touch for the first time than to
    fill. A buffer's reference count shows whether it is free: each view of it
    holds a reference.
    """

    KEPT = 8
    SHORT = 64 * 1024  #: shorter buffers are cheap and not kept

    def __init__(self) -> None:
        self._kept: list[bytearray] = []

    def take(self, length: int) -> memoryview:
        """Return a writable view of ``length`` bytes that is not shared; their content is undefined."""
        if length < self.SHORT:
            return memoryview(bytearray(length))
        for index in range(len(self._kept)):
            held = sys.getrefcount(self._kept[index]) - 2  # except the list's and the call's
            if not held and len(self._kept[index]) >= length:
                return memoryview(self._kept[index])[:length]
        fresh = bytearray(length)
        self._kept.append(fresh)
        del self._kept[:-self.KEPT]
        return memoryview(fresh)


class Opener:
    """The receiving side of one direction: opens frames from bytes that arrive in any pieces.

    Use: receive into :meth:`room`, pass the count to :meth:`received`, then
    call :meth:`next` until it returns None; or check :meth:`waiting` and let
    :meth:`open_into` put the message into a given buffer. After an error
    it opens nothing more.
    """

    def __init__(self, key: bytes, direction: int, epoch: int, session: str, size: int = 256 * 1024) -> None:
        self._cipher = AESGCM(key)
        self.key, self.associated = key, associated_data(direction, epoch, session)
        self.counter = 0  #: frames opened so far
        self.came = 0  #: bytes received so far
        self._buffer = bytearray(size)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._needed = _LENGTH.size
        self._dead = False
        self._buffers = Buffers()

    def room(self) -> memoryview:
        """Return the memory to receive into: never empty, and large enough for the rest of the current frame."""
        if self._start == self._end:
            self._start = self._end = 0
        if len(self._buffer) - self._start < self._needed or self._end == len(self._buffer):
            self._make_room()
        return self._view[self._end:]

    def _make_room(self) -> None:
        """Move the pending bytes to the front; for a peer that sends long frames make a buffer for several."""
        pending = self._end - self._start
        view = self._view[self._start:self._end]
        if self._needed > len(self._buffer) or pending == len(self._buffer):
            self._buffer = bytearray(max(4 * self._needed, pending) + 64 * 1024)
            self._view = memoryview(self._buffer)
        self._view[:pending] = view
        self._start, self._end = 0, pending

    def received(self, count: int) -> None:
        """Note that ``count`` bytes were received into the buffer."""
        self._end += count
        self.came += count

    @property
    def missing(self) -> int:
        """Bytes that the current frame lacks, as far as is known; at least 1."""
        return max(1, self._needed - (self._end - self._start))

    @property
    def pending(self) -> int:
        """Bytes received that belong to a frame not yet taken."""
        return self._end - self._start

    def unopened(self) -> memoryview:
        """Return the bytes received that belong to frames not opened yet."""
        return self._view[self._start:self._end]

    def continue_at(self, counter: int, received: int, unopened: bytes) -> None:
        """Continue at frame ``counter``, where other code has ``received`` bytes more and opened the frames before it.

        ``unopened``: the bytes of frames that it has not opened; they take the place of those that :meth:`unopened`
        returned.
        """
        if len(unopened) > len(self._buffer):
            self._buffer = bytearray(len(unopened) + 64 * 1024)
            self._view = memoryview(self._buffer)
        self.came += received
        self.counter, self._start, self._end = counter, 0, len(unopened)
        self._view[:self._end] = unopened
        self._needed = _LENGTH.size

    def waiting(self) -> int:
        """Return the length of the next message (type and body) if its frame has arrived completely, else 0.

        Raises :class:`LinkError` for an impossible length.
        """
        if self._dead:
            raise LinkError("the connection was ended by a bad frame")
        available = self._end - self._start
        if available < _LENGTH.size:
            self._needed = _LENGTH.size
            return 0
        length: int = _LENGTH.unpack_from(self._buffer, self._start)[0]
        if not TAG < length <= FRAME_LIMIT:
            self._dead = True
            raise LinkError(f"frame {self.counter} says it is {length} bytes long", frame=self.counter,
                            reason="length")
        if available < _LENGTH.size + length:
            self._needed = _LENGTH.size + length
            return 0
        return length - TAG

    def open_into(self, target: memoryview) -> None:
        """Open the frame that is :meth:`waiting` into ``target``, of just its message's length.

        Raises :class:`LinkError` for a frame that does not open; the
        content of ``target`` is undefined then.
        """
        at = self._start + _LENGTH.size
        end = at + len(target) + TAG
        try:
            self._cipher.decrypt_into(_NONCE.pack(0, self.counter), self._view[at:end], self.associated, target)
        except InvalidTag:
            self._dead = True
            raise LinkError(f"frame {self.counter} does not open: forged, repeated or lost", frame=self.counter,
                            reason="seal") from None
        self.counter += 1
        self._start = end
        self._needed = _LENGTH.size

    def next(self, room: Callable[[int], memoryview | None] | None = None,
             drop: Callable[[memoryview], None] | None = None) -> tuple[int, memoryview] | None:
        """Return (type, body) of the next whole frame, or None.

        The body is a view of fresh bytes: it stays valid for as long as it is
        referenced. With ``room``, a message of BULK bytes or more is put into the
        buffer that room(bytes) returns, if any. Raises :class:`LinkError` for a frame that does not open; then
        drop(buffer) is called.
        """
        length = self.waiting()
        if not length:
            return None
        lent = room(length) if room is not None and length >= BULK else None
        message = self._buffers.take(length) if lent is None else lent
        try:
            self.open_into(message)
        except LinkError:
            if lent is not None and drop is not None:
                drop(lent)
            raise
        return message[0], message.toreadonly()[1:]
