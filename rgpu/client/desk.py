"""The agent's dealings with the pool: control calls off the event loop, by a few helper threads.

Every reply may name the pool's control endpoints; they are kept, so that an
agent that ran for days still knows whom to ask (OWNERSHIP 7).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import structlog

from rgpu.client.attachment import Event, Owner, OwnerGone, OwnerKnown, OwnerUnknown
from rgpu.link.control import ControlClient
from rgpu.link.keys import Endpoint, KeyPair
from rgpu.session.errors import Fenced, NotFound, PoolUnavailable, RgpuError, UnknownOutcome

log = structlog.get_logger(__name__)

THREADS = 4
FIND_TIMEOUT = 5.0
_OVER = frozenset({"ended", "failed"})


@dataclass
class Grant:
    """What lets the agent attach: renewed while the session lives."""

    ticket: bytes
    secret: bytes = field(repr=False)
    expires: float = 0.0  #: unix seconds


class Desk:
    """Control calls of one agent; several at once, each with a client of its own."""

    def __init__(self, keys: KeyPair, endpoints: list[Endpoint],
                 make: Callable[[KeyPair, list[Endpoint]], Any] = ControlClient) -> None:
        self._keys = keys
        self._make = make
        self._lock = threading.Lock()
        self._endpoints = list(endpoints)
        self._idle: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="control")
        self._closed = False

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run ``work`` on a helper thread."""
        return self._threads.submit(work, *args)

    def call(self, verb: str, args: dict[str, Any], timeout: float = 10.0, **more: Any) -> Any:
        """As :meth:`ControlClient.call`, from any thread."""
        try:
            client = self._idle.get_nowait()
        except queue.Empty:
            client = self._make(self._keys, self.endpoints)
        try:
            client.refresh(self.endpoints)
            result = client.call(verb, args, timeout, **more)
        finally:
            if self._closed:
                client.close()
            else:
                self._idle.put(client)
        if isinstance(result, dict):
            self.refresh(result.get("endpoints"))
        return result

    @property
    def endpoints(self) -> list[Endpoint]:
        with self._lock:
            return list(self._endpoints)

    def refresh(self, named: Any) -> None:
        """Take the endpoints that a reply named; what is not one is left out."""
        fresh = []
        for item in named if isinstance(named, list) else []:
            if isinstance(item, dict) and isinstance(item.get("address"), str) and isinstance(item.get("public"), str):
                fresh.append(Endpoint(item["address"], item["public"], str(item.get("host") or "")))
        if fresh:
            with self._lock:
                self._endpoints = fresh

    # -- what sessions ask --------------------------------------------------------------
    def find_owner(self, session: str, seen: int = 0) -> Event:
        """Ask any node who owns the session. ``seen``: our highest epoch, which a registry that went back lacks."""
        try:
            reply = self.call("session.owner", {"session": session, "epoch": seen}, FIND_TIMEOUT)
        except NotFound as error:
            return OwnerGone(error.message, time.monotonic())
        except RgpuError as error:
            return OwnerUnknown(error.message, time.monotonic())
        return owner_event(reply)

    def renew(self, session: str) -> Grant | None:
        """A new ticket; None when it cannot be had now."""
        try:
            return grant(self.call("session.renew_ticket", {"session": session}, FIND_TIMEOUT))
        except (RgpuError, KeyError, TypeError) as error:
            log.warning("the ticket was not renewed", session=session, reason=str(error))
            return None

    def quietly(self, verb: str, args: dict[str, Any], timeout: float = 10.0) -> bool:
        """A call whose failure is only logged."""
        try:
            self.call(verb, args, timeout)
            return True
        except (PoolUnavailable, UnknownOutcome, Fenced, RgpuError) as error:
            log.warning("control call failed", verb=verb, session=args.get("session"), reason=error.message)
            return False

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._closed = True
        while True:
            try:
                self._idle.get_nowait().close()
            except queue.Empty:
                return


def owner_event(reply: Any) -> Event:
    """A reply of session.owner as an event; one without an address is *unknown*."""
    now = time.monotonic()
    try:
        if reply.get("state") in _OVER:
            return OwnerGone(str(reply.get("reason") or f"the session has {reply['state']}"), now)
        return OwnerKnown(owner(reply), now)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        return OwnerUnknown("the session has no owner at present", now)


def owner(reply: dict[str, Any]) -> Owner:
    host, port = reply["address"]
    return Owner(str(reply["owner"]), (str(host), int(port)), int(reply["epoch"]), bool(reply.get("alive", True)))


def grant(reply: dict[str, Any]) -> Grant:
    return Grant(bytes(reply["ticket"]), bytes(reply["secret"]), float(reply.get("expires") or time.time() + 3600))
