"""The server of the control link: ZeroMQ ROUTER with CURVE, roles from keys, handlers by verb.

One message is one frame of msgpack (docs/protocols/control.md). A peer whose key is
not authorized gets no further than CURVE's handshake (ZAP, RFC 27).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils import z85

from rgpu.link.accepting import Warned
from rgpu.link.control import intake, limits
from rgpu.link.control.access import Actor, check
from rgpu.link.control.framing import encode, heartbeat
from rgpu.link.control.front import Front
from rgpu.link.control.grants import Grants
from rgpu.link.control.verbs import VERBS
from rgpu.link.gate.budget import Budget, budget_for
from rgpu.link.gate.gate import Gate
from rgpu.link.keys import AuthorizedKeys, KeyPair, PublicKey
from rgpu.link.loggers import get_logger
from rgpu.link.messages.control import Request as Message
from rgpu.session.errors import AuthenticationFailed, LimitReached, LinkError, Refused, RgpuError, from_dict

log = get_logger(__name__)

#: Messages that ZeroMQ keeps for one connection: received ones, and answers to a peer that does not read.
RECEIVED_AHEAD, ANSWERED_AHEAD = 8, 32
HANDSHAKE_MS = 5000
#: Verbs whose request may wait for news, for ``wait`` s.
POLLS = frozenset({"pool.events", "session.create"})
_ZAP = "inproc://zeromq.zap.01"


@dataclass(slots=True)
class Request:
    """A request for a handler. ``role``, ``name``, ``public``: of the caller, proven by CURVE. ``peer``: address."""

    verb: str
    args: dict[str, Any]
    role: str
    name: str
    public: str
    leader: int
    epoch: int
    command: str
    _send_progress: Callable[[dict[str, Any]], Awaitable[None]] = field(repr=False)
    user: str = ""  #: holder of the key (:attr:`rgpu.link.keys.PublicKey.holder`)
    peer: str = ""
    via: str = ""  #: the name of the web page's key that calls on behalf of ``public``

    @property
    def actor(self) -> Actor:
        """The caller, for authorization decisions."""
        return Actor(self.role, self.name, self.user, self.public)

    async def progress(self, **values: Any) -> None:
        """Send the caller a progress message; it also shows that the node is alive."""
        await self._send_progress(values)


Handler = Callable[[Request], Awaitable[Any]]


class CommandLog:
    """Results by command id: a repeated command is answered, not done again (OWNERSHIP 6).

    A repetition that arrives while the first still runs waits for it. An owner's oldest
    results are deleted beyond ``limit``; running ones never are. Errors are kept in wire form:
    an exception would keep all objects of its handler alive.
    """

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        self._known: dict[str, OrderedDict[str, asyncio.Future[tuple[Any, dict[str, Any] | None]]]] = {}

    async def run(self, owner: str, command: str, work: Callable[[], Awaitable[Any]]) -> Any:
        """Return ``work()``'s result, or raise its error, from the first time this id was seen."""
        known = self._known.setdefault(owner, OrderedDict())
        found = known.get(command)
        if found is None:
            found = known[command] = asyncio.ensure_future(_outcome(work))
            done = [key for key, future in known.items() if future.done()]
            for key in done[:max(0, len(known) - self._limit)]:
                del known[key]
        # A caller that disconnects must not cancel the command: it may be half done.
        result, error = await asyncio.shield(found)
        if error is not None:
            raise from_dict(error)
        return result

    def __len__(self) -> int:
        return sum(map(len, self._known.values()))


async def _outcome(work: Callable[[], Awaitable[Any]]) -> tuple[Any, dict[str, Any] | None]:
    """The result of ``work``, or its error in wire form."""
    try:
        return await work(), None
    except RgpuError as error:
        return None, error.as_dict()
    except Exception as error:  # noqa: BLE001 - a handler's bug is the caller's answer, not the node's end
        log.exception("a command failed")
        return None, RgpuError(f"it failed on the node: {type(error).__name__}: {error}").as_dict()


class ControlServer:
    """A server of control messages on one port; see the module docstring."""

    def __init__(self, keys: KeyPair, authorized: AuthorizedKeys, address: str, budget: Budget | None = None) -> None:
        """``address``: tcp://HOST:PORT, port 0 or ``*`` for any free one. ``budget``: of its connections."""
        self._keys = keys
        self._authorized = authorized
        self._wanted = address
        self._budget = budget or budget_for(1024)
        self._front: Front | None = None
        self._handlers: dict[str, Handler] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = zmq.asyncio.Context()  # its own: the ZAP endpoint is one for each context
        self._commands = CommandLog()
        self._ledger = limits.Ledger()
        self._refusals: deque[list[bytes]] = deque()
        self._refusing = False
        self._warned = Warned()
        self.address = ""  #: where it listens, once started
        self.grants = Grants()
        #: Accepted besides the authorized keys: public key → its description; of processes that the node has started.
        self.own_processes: dict[str, PublicKey] = {}
        #: Called for each request that was answered: (verb, ok or the error's code); for metrics.
        self.observe: Callable[[str, str], None] = lambda verb, outcome: None
        #: Called before a handler; raises an error to refuse the caller.
        self.admit: Callable[[Request], Awaitable[None]] = _admit_all
        #: Called for each request with an accepted key, with its outcome (``ok`` or the error's code) and its reason.
        self.audit: Callable[[Request, str, str], None] = lambda request, outcome, reason: None
        #: Called for each refused peer: (address, public key in Z85).
        self.stranger: Callable[[str, str], None] = lambda peer, public: None

    @property
    def bound(self) -> tuple[str, int]:
        """Return (host, port) where it listens. Only after :meth:`start`."""
        assert self._front is not None
        return self._front.gate.bound

    @property
    def gate(self) -> Gate | None:
        """The gate in front of the port; None before :meth:`start`."""
        return self._front.gate if self._front else None

    def register(self, verb: str, handler: Handler) -> None:
        """Set the handler of a verb of the table. Raises :class:`ValueError` for an unknown verb."""
        if verb not in VERBS:
            raise ValueError(f"{verb} is not in the table of verbs")
        self._handlers[verb] = handler

    async def start(self) -> None:
        """Bind and serve. Raises :class:`LinkError` when the address is not free."""
        host, _, port = self._wanted.removeprefix("tcp://").rpartition(":")
        front = self._front = Front((host, 0 if port == "*" else int(port)), self._budget)
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret.encode())
        self._socket.setsockopt(zmq.ZAP_DOMAIN, b"rgpu")
        self._socket.setsockopt(zmq.MAXMSGSIZE, intake.LONG)
        self._socket.setsockopt(zmq.RCVHWM, RECEIVED_AHEAD)
        self._socket.setsockopt(zmq.SNDHWM, ANSWERED_AHEAD)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.BACKLOG, 1024)
        self._socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
        heartbeat(self._socket)
        try:
            self._socket.bind(front.inside)
        except zmq.ZMQError as error:
            front.finish(0)
            self._context.destroy(linger=0)
            raise LinkError(f"cannot listen on {front.inside}: {error}", address=front.inside) from error
        at, number = front.gate.bound
        self.address = f"tcp://[{at}]:{number}" if ":" in at else f"tcp://{at}:{number}"
        front.start()
        self._spawn(self._authenticate())
        self._spawn(self._serve())

    async def stop(self) -> None:
        """Stop serving; handlers that still run are cancelled."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=200)
        if self._front is not None:
            await asyncio.to_thread(self._front.finish)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _authenticate(self) -> None:
        """Answer ZAP requests: accept a known key, and return the key itself as the user id."""
        while True:
            request = await self._zap.recv_multipart()
            status, text, user = b"400", b"unknown key", b""
            if len(request) >= 7 and request[0] == b"1.0" and request[5] == b"CURVE" and len(request[6]) == 32:
                public = z85.encode(request[6])
                if self._find(public.decode()):
                    status, text, user = b"200", b"OK", public
                else:
                    address = self._front.at_the_door() if self._front else ""
                    log.warning("a peer with an unknown key was refused", peer=address)
                    self.stranger(address, public.decode())
            number = request[1] if len(request) > 1 else b""
            await self._zap.send_multipart([b"1.0", number, status, text, user, b""])

    def _find(self, public: str) -> PublicKey | None:
        """The description of a public key, if it is accepted now."""
        return self._authorized.find(public) or self.own_processes.get(public)

    def _stands_for(self, who: PublicKey, message: Message) -> PublicKey:
        """The key that a request acts for: the user's, where a web page sends a user's grant.

        Raises :class:`AuthenticationFailed` for a grant that has expired, a key that is not accepted any more, a verb
        that pages do not call, and a grant from another process than a web page.
        """
        if not message.grant:
            return who
        if who.public not in self.own_processes:
            raise AuthenticationFailed("only a node's web page acts for a login", verb=message.verb, role=who.role)
        user = self._authorized.find(self.grants.holder(message.grant, time.monotonic()))
        if user is None:
            raise AuthenticationFailed("the key of this login is let in no more", reason="grant")
        verb = VERBS.get(message.verb)
        if verb is None or not verb.web:
            raise AuthenticationFailed(f"{message.verb} is not for web pages: use the command line", verb=message.verb)
        return user

    async def _serve(self) -> None:
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            if len(frames) != 2 or len(self._tasks) > limits.ALL:
                continue  # invalid; or too busy with other nodes: the caller's timeout expires
            try:
                public = frames[1].get("User-Id")
            except zmq.ZMQError:
                continue
            address = self._front.peer_of(frames[1].get(zmq.SRCFD)) if self._front else ""
            self._take(frames[0].bytes, str(public), address, frames[1])

    def _take(self, peer: bytes, public: str, address: str, frame: Any) -> None:
        """Read one message, and handle it if its sender's limits allow it."""
        who = self._find(public)  # again: its key may have been revoked meanwhile
        role = who.role if who else "invited"
        try:
            message = intake.read(frame.buffer, role)
        except intake.Unreadable as found:
            self._refuse(peer, found.id, found.verb, found.error)
            return
        with contextlib.suppress(AuthenticationFailed):  # reported when the request is answered
            who = self._stands_for(who, message) if who else None
        wants = message.args.get("wait")
        polls = message.verb in POLLS and isinstance(wants, int | float) and wants > 0
        size = len(frame.buffer)
        asked = limits.Asked(polls, size if size > intake.SHORT else 0)
        usage, verdict = self._ledger.begin(who.public if who else public, who.role if who else role, asked,
                                            time.monotonic())
        if not verdict.allowed:
            self._refuse(peer, message.id, message.verb, LimitReached(f"{message.verb}: {verdict.reason}"))
            return
        if not verdict.poll:
            message.args["wait"] = 0
        task = self._spawn(self._handle(peer, public, address, message, verdict.wait))
        if usage is not None:
            task.add_done_callback(lambda _: self._ledger.end(usage, asked, polls and verdict.poll))

    def _refuse(self, peer: bytes, number: str, verb: str, error: RgpuError) -> None:
        """Answer without a handler, and without waiting: an answer that cannot be sent at once is not sent."""
        if verb in VERBS:
            self.observe(verb, error.code)
        if self._warned.due():
            log.warning("a request was refused before it was looked at", verb=verb, reason=error.message)
        if number and not self._refusing:
            self._refusing = True
            self._spawn(self._send_refusal([peer, encode({"id": number, "ok": False, **_plain(error.as_dict())})]))
        elif number and len(self._refusals) < limits.ALL:
            self._refusals.append([peer, encode({"id": number, "ok": False, **_plain(error.as_dict())})])

    async def _send_refusal(self, first: list[bytes]) -> None:
        """Send all refusals, one after the other, in one task."""
        self._refusals.append(first)
        try:
            while self._refusals:
                await self._socket.send_multipart(self._refusals.popleft())
        finally:
            self._refusing = False

    async def _handle(self, peer: bytes, public: str, address: str, message: Message, wait: float) -> None:
        if wait > 0:
            await asyncio.sleep(wait)
        try:
            result = await self._answer(peer, public, address, message)
            reply = encode({"id": message.id, "ok": True, "result": result})
            self.observe(message.verb, "ok")
        except RgpuError as error:
            if message.verb in VERBS:  # any other name was made up by a peer
                self.observe(message.verb, error.code)
            reply = encode({"id": message.id, "ok": False, **_plain(error.as_dict())})
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - a handler's bug is the caller's answer, not the node's end
            log.exception("control handler failed", verb=message.verb)
            failure = RgpuError(f"{message.verb} failed on the node: {type(error).__name__}: {error}")
            reply = encode({"id": message.id, "ok": False, **failure.as_dict()})
        await self._socket.send_multipart([peer, reply])

    async def _answer(self, peer: bytes, public: str, address: str, message: Message) -> Any:
        who = self._find(public)  # again: its key may have been revoked meanwhile
        if who is None:
            self.stranger(address, public)
            raise AuthenticationFailed("this key is not authorized any more")

        async def progress(values: dict[str, Any]) -> None:
            await self._socket.send_multipart([peer, encode({"id": message.id, "progress": values})])

        request = Request(message.verb, message.args, who.role, who.name, public, message.leader, message.epoch,
                          message.command, progress, who.holder, address)
        try:
            user = self._stands_for(who, message)
            if user is not who:
                request = replace(request, role=user.role, name=user.name, public=user.public, user=user.holder,
                                  via=who.name)
            result = await self._do(request)
        except RgpuError as error:
            self.audit(request, error.code, error.message)
            raise
        except Exception as error:
            self.audit(request, "error", repr(error))
            raise
        self.audit(request, "ok", "")
        return result

    async def _do(self, request: Request) -> Any:
        verb = check(request.verb, request.role)
        handler = self._handlers.get(request.verb)
        if handler is None:
            raise Refused(f"this node does not answer {request.verb}", verb=request.verb)
        await self.admit(request)
        if verb.idempotent or not request.command:
            return await handler(request)
        return await self._commands.run(request.public, request.command, lambda: handler(request))


def actor_of(key: PublicKey) -> Actor:
    """Return the holder of a key, for authorization decisions."""
    return Actor(key.role, key.name, key.holder, key.public)


async def _admit_all(request: Request) -> None:
    """Admit every request."""


def _plain(value: Any) -> Any:
    """Convert error details, which may hold any object, to types that msgpack encodes."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, bytes, type(None))) else str(value)
