"""A sealed connection in the agent's event loop, non-blocking.

A frame is sealed only when the frames before were sent, but for one long frame
that is being sent meanwhile: messages not sent yet can still change, and the
kernel's buffer is the only queue.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec

from rgpu.client.data_link.agent_lanes import LinkLanes
from rgpu.client.data_link.host_link import HostLink
from rgpu.client.data_link.sending import FrameSender
from rgpu.link import versions
from rgpu.link.data.frames import TRICKLE, SealedConnection, client_preamble, connect
from rgpu.link.data.lanes import WORTH
from rgpu.link.data.sealing import Opener, Sealer, frame_size
from rgpu.link.messages.data import (
    ATTACH,
    ATTACHED,
    CALLS,
    CALLS_AT,
    CALLS_REF,
    HAVE,
    LANED,
    LANES,
    PLACE_LAYOUT,
    POSITION_LAYOUT,
    REFERENCE_LAYOUT,
)
from rgpu.session.errors import Corrupt, LinkError, from_dict

ATTACH_TIMEOUT = 10.0  #: seconds for ATTACHED to arrive: the worker may be busy with a record
CONNECT_TIMEOUT = 4.0

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


def decode_map(body: Any) -> dict[str, Any]:
    """Decode a msgpack map. Raises :class:`Corrupt`."""
    try:
        value = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupt(f"a message from the worker is no msgpack: {error}", reason="msgpack") from error
    if not isinstance(value, dict):
        raise Corrupt("a message from the worker is no map", reason="msgpack")
    return value


def attach(address: tuple[str, int], ticket: bytes, secret: bytes, session: str, epoch: int, published: int,
           client: str, *, printed: int | None = None,
           connected: Callable[[socket.socket], bool] = lambda sock: True,
           extra: dict[str, Any] | None = None, told: Callable[[dict[str, Any]], None] = lambda answer: None
           ) -> tuple[SealedConnection, int, int]:
    """Connect and attach; return (connection, epoch, seq to ship next). Blocks; for a helper thread.

    ``printed``: bytes of printed text that the program has; None: it accepts none.
    ``connected(socket)`` is called before the first byte is sent; False ends
    the attempt. ``extra``: further fields of ATTACH; ``told``: called with the
    fields of ATTACHED. Raises :class:`RgpuError` of any kind. No ATTACH is sent
    to a node that claims an epoch below ``epoch``.
    """
    sock = connect(address, CONNECT_TIMEOUT)
    connection = None
    try:
        if not connected(sock):
            raise LinkError("the attempt was called off")
        connection = client_preamble(sock, "calls", ticket, secret, session, timeout=CONNECT_TIMEOUT)
        if connection.epoch < epoch:
            raise LinkError(f"{address[0]} still holds epoch {connection.epoch} of {session}; {epoch} was seen")
        request = {"session": session, "epoch": connection.epoch, "delivered": published, "client": client,
                   "versions": versions.ours(), **(extra or {})}
        connection.send(ATTACH, _encode(request if printed is None else {**request, "printed": printed}))
        kind, body = connection.recv(ATTACH_TIMEOUT)
        if kind != ATTACHED:
            raise Corrupt(f"the worker answered ATTACH with a message of type {kind}", reason="protocol")
        answer = decode_map(body)
        if isinstance(answer.get("refused"), dict):
            raise from_dict(answer["refused"])
        versions.check(answer.get("versions"), f"the worker at {address[0]}")
        wanted = answer.get("next")
        if answer.get("epoch") != connection.epoch or not isinstance(wanted, int) or wanted < 1:
            raise Corrupt(f"the worker answered ATTACH with {answer}", reason="protocol")
        told(answer)
        return connection, connection.epoch, wanted
    except BaseException:
        (connection or sock).close()
        raise


class DataLink:
    """An attached connection, non-blocking. Every failure raises :class:`LinkError`."""

    def __init__(self, number: int, connection: SealedConnection, host: HostLink | None = None,
                 lanes: LinkLanes | None = None, protocol: int = versions.DATA) -> None:
        """``host``: the result of asking whether the worker is on this host; ``lanes``: those that it offers.

        ``protocol``: the worker's version of it.
        """
        self.number = number
        self.protocol = protocol
        self.lanes = lanes or LinkLanes(None)
        self.host = host or HostLink()
        self.epoch = connection.epoch
        self._connection = connection
        self._sock: socket.socket = connection.sock
        self._sock.setblocking(False)
        self._sender = FrameSender(self._sock)
        self._stream = 0  #: bytes of records sent in CALLS messages
        self.long_bytes = 0  #: of them, and of answers, in messages long enough for a lane
        #: When a message last arrived, or TRICKLE bytes of a long one: the few bytes that a worker's signs of life add
        #: to a frame whose length was damaged do not count.
        self.heard = time.monotonic()
        self._unheard = 0  #: bytes received since then

    def fileno(self) -> int:
        """File descriptor of the connection, for polling."""
        return self._sock.fileno()

    @property
    def sealer(self) -> Sealer:
        """The sealer of the connection's frames."""
        return self._connection.sealer

    @property
    def opener(self) -> Opener:
        """The opener of the connection's frames."""
        return self._connection.opener

    @property
    def ready(self) -> bool:
        """Whether another message may be sent."""
        return self._sender.ready and self.lanes.ready

    @property
    def idle(self) -> bool:
        """Whether every message was given to the socket."""
        return self._sender.idle and self.lanes.ready

    @property
    def wants_write(self) -> bool:
        """Whether :meth:`flush` is to be called when the socket takes more."""
        return self._sender.wants_write

    def on_sent(self, tell: Callable[[], None]) -> None:
        """Have ``tell`` called, from another thread, when the link may have become :attr:`ready`."""
        self._sender.sent = tell

    def send(self, kind: int, *parts: Any) -> None:
        """Seal and send a message; only when :attr:`ready`."""
        frame = self._sender.buffer(frame_size(parts))
        self._connection.sealer.seal_into(kind, parts, frame)
        self._sender.send(frame)

    def send_map(self, kind: int, values: dict[str, Any]) -> None:
        """Send a message whose body is a msgpack map. Raises :class:`LinkError`."""
        self.send(kind, _encode(values))

    def send_calls(self, buffers: list[Any]) -> None:
        """Send the next bytes of the stream of records."""
        begin = POSITION_LAYOUT.pack(self._stream)
        length = sum(len(buffer) for buffer in buffers)
        self._stream += length
        if length < WORTH:
            self.send(CALLS, begin, *buffers)
            return
        self.long_bytes += length
        if self.lanes.lanes:
            self.send(LANED, self.lanes.send(CALLS, (begin, *buffers), 1 + len(begin) + length))
        else:
            self.send(CALLS, begin, *buffers)

    def use_lanes(self) -> None:
        """Have long messages go over the lanes that were opened, from now on, both ways; only when :attr:`ready`."""
        self.send(LANES, bytes([self.lanes.use()]))

    def send_calls_at(self, buffers: list[Any], memory: int, offset: int, length: int) -> None:
        """Send the next bytes of the stream: ``buffers``, then the place of ``length`` bytes in shared memory."""
        begin = self._stream
        self._stream += sum(len(buffer) for buffer in buffers) + length
        self.send(CALLS_AT, PLACE_LAYOUT.pack(begin, memory, 0, offset, length), *buffers)

    @property
    def stream_offset(self) -> int:
        """Bytes of the stream of records that were sent or named."""
        return self._stream

    def send_reference(self, length: int, digest: bytes) -> None:
        """Send the hash of the next ``length`` bytes of the stream of records."""
        offset = self._stream
        self._stream += length
        self.send(CALLS_REF, REFERENCE_LAYOUT.pack(offset, length, digest))

    def send_have(self, digests: list[bytes]) -> None:
        """Ask which of these module binaries (BLAKE3 digests) the node has. Raises :class:`LinkError`."""
        self.send(HAVE, *digests)

    def continue_at(self, offset: int) -> None:
        """Continue the stream of records at ``offset``: an earlier one, or one up to which other code has sent it."""
        self._stream = offset

    def send_rest(self, frames: bytes) -> None:
        """Send the rest of frames that were sealed elsewhere; only when :attr:`idle`. Raises :class:`LinkError`."""
        self._sender.send_at_once(memoryview(frames))

    def flush(self) -> None:
        """Send the bytes that the socket did not take at once."""
        self._sender.flush()

    def waiting(self) -> int:
        """Return the length of the next whole message (type and body), received if necessary; 0: there is none yet."""
        opener = self._connection.opener
        while not (length := opener.waiting()):
            try:
                count = self._sock.recv_into(opener.room())
            except (BlockingIOError, InterruptedError):
                return 0
            except OSError as error:
                raise LinkError(f"the connection broke: {error}") from error
            if not count:
                raise LinkError("the worker closed the connection", reason="end of file")
            opener.received(count)
            self._unheard += count
            if self._unheard >= TRICKLE:
                self.hear()
        if self._unheard:
            self.hear()
        return length

    def hear(self) -> None:
        """Note that a message arrived."""
        self.heard, self._unheard = time.monotonic(), 0

    def open_into(self, target: memoryview) -> None:
        """Open the message that is :meth:`waiting` into memory of just its length."""
        self._connection.opener.open_into(target)

    def open_next(self, target: memoryview) -> bool:
        """Open the next message into memory of just its length; return False if its lane has not received it yet."""
        if not self.lanes.awaited:
            self.open_into(target)
            self.hear()  # it, and the messages behind it, may have waited for the program
            return True
        message = self.lanes.next()
        if message is None:
            return False
        _put(target, *message)
        self.hear()
        return True

    def drain(self, timeout: float = 1.0) -> None:
        """Send what is left, waiting for at most ``timeout`` seconds."""
        self._sender.drain(timeout)

    def finish(self, timeout: float = 1.0) -> None:
        """Send what is left and let the worker read it, each for at most ``timeout`` seconds, then close.

        The worker closes when it has read the last message. A ``session.end`` by the control link
        before that would overtake the messages here.
        """
        self.drain(timeout)
        self._sock.settimeout(timeout)
        deadline = time.monotonic() + timeout
        try:
            while self._sock.recv(1 << 16) and time.monotonic() < deadline:
                pass
        except OSError:
            pass  # it sends nothing more
        self.close()

    def close(self) -> None:
        """Close the connection, its lanes and its shared memory."""
        self._sender.close()
        self._connection.close()
        self.lanes.close()
        self.host.close()


def _put(target: memoryview, kind: int, body: memoryview) -> None:
    """Copy a lane's message into ``target``, without the interpreter's lock: the lanes' threads run meanwhile."""
    import numpy as np

    target[0] = kind
    np.copyto(np.frombuffer(target, np.uint8)[1:], np.frombuffer(body, np.uint8))
