"""The client of the control link, blocking. The client for asyncio: :mod:`rgpu.link.control.async_client`.

When an answer is lost, an idempotent verb is sent again, to the next node; for
any other verb the outcome is unknown, and an error reports that.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

import msgspec
import zmq

from rgpu.link.control.framing import MESSAGE_LIMIT, encode, heartbeat
from rgpu.link.control.verbs import VERBS
from rgpu.link.keys import Endpoint, KeyPair
from rgpu.link.messages.control import Request as Message
from rgpu.session.errors import AuthenticationFailed, PoolUnavailable, RgpuError, UnknownOutcome, from_dict

CONNECT_SECONDS = 2.0  #: for one node to finish the handshake
HEAD_START = 0.3  #: s that a node has to connect before the next one is tried as well
Progress = Callable[[dict[str, Any]], None]
decode = msgspec.msgpack.Decoder().decode
_AUTH_REFUSED = 400
#: First frame of a monitor's message (zmq_socket_monitor(3)): event, value. pyzmq's reader of it imports asyncio.
_EVENT = Struct("=Hi")


@dataclass(frozen=True, slots=True)
class Reply:
    """A message of a node: progress, a result or an error."""

    progress: dict[str, Any] | None = None
    result: Any = None
    error: RgpuError | None = None


def parse(body: bytes, number: str) -> Reply | None:
    """Return a reply to request ``number``; None for anything else (late answers to other requests)."""
    try:
        value = decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if not isinstance(value, dict) or value.get("id") != number:
        return None
    if "progress" in value:
        return Reply(progress=dict(value["progress"] or {}))
    if value.get("ok"):
        return Reply(result=value.get("result"))
    return Reply(error=from_dict(value))


def configure(socket: Any, keys: KeyPair, endpoint: Endpoint) -> None:
    """Set the options of a socket that is to be connected to a node."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, endpoint.public.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_LIMIT)
    socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued before the handshake: it would arrive too late
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    socket.setsockopt(zmq.IPV6, 1 if "[" in endpoint.address else 0)
    heartbeat(socket)


class ControlClient:
    """A blocking client, for command lines and agents. Any thread may call; one call at a time.

    Endpoints are tried in turn: first the one that answered the latest call, at the end those that did not answer,
    because a call's time might not suffice for all. A dead one costs :data:`HEAD_START` while another is alive.
    """

    advice = "is the pool running? ('rgpu up')"  #: what to do when no node answers

    def __init__(self, keys: KeyPair, endpoints: Sequence[Endpoint], connect_timeout: float = CONNECT_SECONDS) -> None:
        self._keys = keys
        self._endpoints = list(endpoints)
        self._connect_timeout = connect_timeout
        self._context = zmq.Context()
        self._lock = threading.Lock()
        self._peers: dict[Endpoint, _Peer] = {}

    @property
    def endpoints(self) -> list[Endpoint]:
        return list(self._endpoints)

    def refresh(self, endpoints: Sequence[Endpoint]) -> None:
        """Replace the endpoints by those that the pool named lately; an empty list changes nothing."""
        if endpoints:
            fresh = list(dict.fromkeys(endpoints))
            kept = [endpoint for endpoint in self._endpoints if endpoint in fresh]
            self._endpoints = kept + [endpoint for endpoint in fresh if endpoint not in kept]

    def call(self, verb: str, args: dict[str, Any] | None = None, timeout: float = 10.0,
             on_progress: Progress | None = None, *, leader: int = 0, epoch: int = 0, command: str = "") -> Any:
        """Call a verb; return its result. ``timeout`` in seconds starts anew with every progress message.

        Raises the error that the node answers; :class:`AuthenticationFailed`
        when it refuses our key; :class:`PoolUnavailable` when no node answered;
        :class:`UnknownOutcome` when the answer to a verb that changes things
        was lost.
        """
        message = Message(secrets.token_hex(8), verb, args or {}, leader, epoch, command or secrets.token_hex(16))
        with self._lock:
            refused: RgpuError | None = None
            said: RgpuError | None = None
            deadline = time.monotonic() + timeout
            for gone in self._peers.keys() - set(self._endpoints):
                self._drop(gone)  # else its socket would try to reach a removed node for ever
            for endpoint in self._order(deadline):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                try:
                    result = self._ask(endpoint, message, left, timeout, on_progress)
                except (PoolUnavailable, _NotLetIn) as error:
                    refused = error if isinstance(error, _NotLetIn) else refused
                    said = error if error.detail.get("reason") == "went back" else said
                    self._drop(endpoint)
                    self._endpoints.remove(endpoint)
                    self._endpoints.append(endpoint)
                    continue
                self._endpoints.remove(endpoint)
                self._endpoints.insert(0, endpoint)
                return result
            if said is not None:  # a node answered: its error is more precise
                raise said
            if refused is not None:
                raise AuthenticationFailed(refused.message, **refused.detail)
            where = ", ".join(endpoint.address for endpoint in self._endpoints) or "no address known"
            raise PoolUnavailable(f"no node of the pool answers ({where}): {self.advice}", verb=verb)

    def _order(self, deadline: float) -> list[Endpoint]:
        """The order in which to try the endpoints: the first one that has connected before all others.

        They begin to connect one after the other, each with a head start; half the time is left for the call itself.
        """
        endpoints = list(self._endpoints)
        until = time.monotonic() + min(deadline - time.monotonic(), self._connect_timeout) / 2
        for endpoint in endpoints if len(endpoints) > 1 else []:
            left = until - time.monotonic()
            if left <= 0:
                break
            try:
                if self._peer(endpoint).wait_connected(min(left, HEAD_START)):
                    return [endpoint, *(other for other in endpoints if other != endpoint)]
            except _NotLetIn:
                self._drop(endpoint)  # reported once per socket; a new one reports it again in its turn
        return endpoints

    def _peer(self, endpoint: Endpoint) -> _Peer:
        if endpoint not in self._peers:
            self._peers[endpoint] = _Peer(self._context, self._keys, endpoint)
        return self._peers[endpoint]

    def _ask(self, endpoint: Endpoint, message: Message, left: float, patience: float,
             on_progress: Progress | None) -> Any:
        peer = self._peer(endpoint)
        if not peer.wait_connected(min(left, self._connect_timeout)):
            raise PoolUnavailable(f"{endpoint.address} does not answer")
        deadline = time.monotonic() + left
        if not peer.send(encode(message), left):
            raise PoolUnavailable(f"{endpoint.address} does not answer")
        again = VERBS[message.verb].idempotent if message.verb in VERBS else True
        while True:
            body = peer.receive(deadline - time.monotonic())
            if body is None:
                if again:
                    raise PoolUnavailable(f"{endpoint.address} did not answer {message.verb} in time")
                self._drop(endpoint)
                raise UnknownOutcome(f"{endpoint.address} took {message.verb} and its answer got lost: look before "
                                     "you repeat it", verb=message.verb, command=message.command)
            reply = parse(body, message.id)
            if reply is None:
                continue
            if reply.progress is not None:
                deadline = time.monotonic() + patience
                if on_progress:
                    on_progress(reply.progress)
            elif reply.error is not None:
                raise reply.error
            else:
                return reply.result

    def _drop(self, endpoint: Endpoint) -> None:
        peer = self._peers.pop(endpoint, None)
        if peer is not None:
            peer.close()

    def close(self) -> None:
        """Close the connections to all nodes."""
        with self._lock:
            for endpoint in list(self._peers):
                self._drop(endpoint)
            self._context.destroy(linger=0)

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _NotLetIn(RgpuError):
    """The node's ZAP handler refuses our key; internal, becomes AuthenticationFailed."""

    code = "not_let_in"


class _Peer:
    """One DEALER and its monitor, which distinguishes a refused key from an unreachable node."""

    EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED

    def __init__(self, context: zmq.Context[Any], keys: KeyPair, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.socket = context.socket(zmq.DEALER)
        configure(self.socket, keys, endpoint)
        self._monitor = self.socket.get_monitor_socket(self.EVENTS)
        self._connected = False
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self.socket.connect(endpoint.address)

    def wait_connected(self, timeout: float) -> bool:
        """Wait for the handshake; False on timeout. Raises :class:`_NotLetIn` when the key is refused."""
        deadline = time.monotonic() + timeout
        self._events()
        while not self._connected:
            left = deadline - time.monotonic()
            if left <= 0 or not self._monitor.poll(int(left * 1000) + 1):
                return False
            self._events()
        return True

    def send(self, data: bytes, timeout: float) -> bool:
        """Send a message. False: nothing was sent, the connection was lost. (Without timeout it would block.)"""
        self.socket.setsockopt(zmq.SNDTIMEO, int(timeout * 1000) + 1)
        try:
            self.socket.send(data)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout: float) -> bytes | None:
        """Return the next message; None when the time is up or the connection is lost."""
        deadline = time.monotonic() + timeout
        while True:
            if self.socket.poll(0):
                return bytes(self.socket.recv())
            if not self._connected:
                return None
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._poller.poll(int(left * 1000) + 1)
            self._events()

    def _events(self) -> None:
        while self._monitor.poll(0):
            event, value = _EVENT.unpack(self._monitor.recv_multipart()[0])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
            elif event == zmq.EVENT_DISCONNECTED:
                self._connected = False
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and value == _AUTH_REFUSED:
                raise _NotLetIn(f"{self._endpoint.address} does not know this key: have it authorized ('rgpu keys')",
                                address=self._endpoint.address)

    def close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(0)
