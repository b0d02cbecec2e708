"""The agent's control calls to the pool, off the event loop, on a few helper threads.

Every reply may name the pool's control endpoints; they are kept, so that an
agent that ran for days still reaches a node (OWNERSHIP 7). When no known node
answers, the pool's description is read again (``known_nodes.py``).
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rgpu.client.run.known_nodes import KnownNodes
from rgpu.client.run.pool_clock import PoolClock
from rgpu.client.session.owner import Owner, OwnerGone, OwnerKnown, OwnerUnknown
from rgpu.link.control import ControlClient
from rgpu.link.data.tickets import LIFETIME
from rgpu.link.keys import Endpoint, KeyPair
from rgpu.link.loggers import get_logger
from rgpu.session.errors import AuthenticationFailed, Fenced, NotFound, PoolUnavailable, RgpuError, UnknownOutcome

log = get_logger(__name__)

THREADS = 4
FIND_TIMEOUT = 5.0
OVER = frozenset({"ended", "failed"})  #: final states of a session


@dataclass
class Grant:
    """Permission for the agent to attach: renewed while the session lives."""

    ticket: bytes
    secret: bytes = field(repr=False)
    expires: float = 0.0  #: unix seconds, of the pool's clock
    keys: KeyPair | None = None  #: the agent's; all nodes but those of the previous version accept tickets made with it
    clock: PoolClock = field(default_factory=PoolClock, repr=False)

    @property
    def seconds_left(self) -> float:
        """Seconds for which the ticket is still valid."""
        return self.expires - self.clock.now()

    def at(self, owner: Owner, session: str) -> tuple[bytes, bytes]:
        """Return ticket and secret for one connection to ``owner``. Raises :class:`AuthenticationFailed` if its key is
        invalid.
        """
        if self.keys is None or not owner.public:
            return self.ticket, self.secret
        from rgpu.link.data import proofs  # cryptography: not before a program uses CUDA

        made = proofs.prove(self.keys, owner.public, session, now=self.clock.now())
        return made.ticket, made.secret


class PoolRequests:
    """Control calls of one agent; several at once, each with a client of its own."""

    def __init__(self, keys: KeyPair, endpoints: list[Endpoint],
                 make: Callable[[KeyPair, list[Endpoint]], Any] = ControlClient,
                 described: Callable[[], list[Endpoint]] | None = None,
                 learned: Callable[[list[Endpoint]], None] | None = None) -> None:
        """``described()``: the endpoints that the pool's description names now. ``learned(endpoints)``: called with
        those that a reply named, when they differ from those before."""
        self._keys = keys
        self._make = make
        self.nodes = KnownNodes(endpoints, described or (lambda: []), time.monotonic(), learned)
        self.clock = PoolClock()
        self._idle: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="control")
        self._closed = False

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run ``work`` on a helper thread."""
        return self._threads.submit(work, *args)

    def call(self, verb: str, args: dict[str, Any], timeout: float = 10.0, **more: Any) -> Any:
        """Call a verb as :meth:`ControlClient.call` does, from any thread; on nodes of the description if no known one
        answers.
        """
        try:
            return self._call(self.nodes.endpoints, verb, args, timeout, **more)
        except (PoolUnavailable, AuthenticationFailed) as error:
            said = error  # it may be the answer of a known node
            others = self.nodes.described(time.monotonic())
            if not others:
                raise
        try:
            result = self._call(others, verb, args, timeout, **more)
        except (PoolUnavailable, AuthenticationFailed):
            self.nodes.in_vain(others, time.monotonic())
            raise said from None
        except RgpuError:  # a node's answer
            self.nodes.answered(others)
            raise
        self.nodes.answered(others)
        log.info("the pool was found again by its description", nodes=[endpoint.address for endpoint in others])
        return result

    def _call(self, endpoints: list[Endpoint], verb: str, args: dict[str, Any], timeout: float, **more: Any) -> Any:
        try:
            client = self._idle.get_nowait()
        except queue.Empty:
            client = self._make(self._keys, endpoints)
        try:
            client.refresh(endpoints)
            result = client.call(verb, args, timeout, **more)
        finally:
            if self._closed:
                client.close()
            else:
                self._idle.put(client)
        if isinstance(result, dict):
            self.nodes.named(result.get("endpoints"), time.monotonic())
            self.clock.learn(result.get("time"))
        return result

    def ask_nodes(self) -> None:
        """Ask for the present nodes; a failure is only logged."""
        self.quietly("pool.ping", {}, FIND_TIMEOUT)

    # -- calls for sessions --------------------------------------------------------------
    def find_owner(self, session: str, seen: int = 0) -> OwnerKnown | OwnerUnknown | OwnerGone:
        """Ask any node for the session's owner. ``seen``: our highest epoch, which a restored registry may lack."""
        try:
            reply = self.call("session.owner", {"session": session, "epoch": seen}, FIND_TIMEOUT)
        except NotFound as error:
            return OwnerGone(error.message, time.monotonic())
        except RgpuError as error:
            return OwnerUnknown(error.message, time.monotonic())
        return owner_event(reply)

    def renew(self, session: str) -> Grant | None:
        """Return a new ticket; None when it is not available now."""
        try:
            return self.grant(self.call("session.renew_ticket", {"session": session}, FIND_TIMEOUT))
        except (RgpuError, KeyError, TypeError) as error:
            log.warning("the ticket was not renewed", session=session, reason=str(error))
            return None

    def grant(self, reply: dict[str, Any]) -> Grant:
        """Read the permission to attach out of a node's reply."""
        latest = self.clock.now() + LIFETIME  # for a node that names no time, and whose clock is ahead of this one
        return Grant(bytes(reply["ticket"]), bytes(reply["secret"]),
                     min(float(reply.get("expires") or latest), latest), self._keys, self.clock)

    def quietly(self, verb: str, args: dict[str, Any], timeout: float = 10.0) -> bool:
        """Call a verb; a failure is only logged. Return whether it succeeded."""
        try:
            self.call(verb, args, timeout)
            return True
        except (PoolUnavailable, UnknownOutcome, Fenced, RgpuError) as error:
            log.warning("control call failed", verb=verb, session=args.get("session"), reason=error.message)
            return False

    def close(self) -> None:
        """Withdraw calls that have not begun, wait for the others and close their clients."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._closed = True
        while True:
            try:
                self._idle.get_nowait().close()
            except queue.Empty:
                return


def owner_event(reply: Any) -> OwnerKnown | OwnerUnknown | OwnerGone:
    """Return a reply of session.owner as an event; one without an address is *unknown*."""
    now = time.monotonic()
    try:
        if reply.get("state") in OVER:
            return OwnerGone(str(reply.get("reason") or f"the session has {reply['state']}"), now)
        return OwnerKnown(owner(reply), now)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        return OwnerUnknown("the session has no owner at present", now)


def owner(reply: dict[str, Any]) -> Owner:
    """Read a session's owner out of a node's reply."""
    host, port = reply["address"]
    return Owner(str(reply["owner"]), (str(host), int(port)), int(reply["epoch"]), bool(reply.get("alive", True)),
                 str(reply.get("public") or ""))
