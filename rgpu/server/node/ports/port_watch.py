"""A node's check of its own ports, as a peer reaches them: a node that cannot be reached is marked as not ready."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import structlog

from rgpu.link.data.frames import read_exact, send_exact
from rgpu.link.messages.data import CLIENT_HEAD_LAYOUT, MAGIC, NODE_HEAD_LAYOUT, PURPOSE_CALLS, SALT, VERSION
from rgpu.server.node.ports.data_port import DataPort
from rgpu.session.errors import LinkError, RgpuError, TimedOut

log = structlog.get_logger(__name__)

LOOK_SECONDS = 15.0
AGAIN_SECONDS = 3.0  #: after a check that failed, or while a port cannot be reached
ANSWER_SECONDS = 4.0  #: a port that answers its own daemon later counts as unreachable
ZMTP_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
FAILURES = 2  #: in a row, before the port counts as unreachable

#: receives which ports cannot be reached and why, or "" once all can be
Tell = Callable[[str], Awaitable[None]]


@dataclass
class Reach:
    """State of one port. Pure: :meth:`looked` is given each check's result, and returns when the verdict changes."""

    name: str
    failures: int = 0
    why: str = ""  #: why it counts as unreachable; empty while it does not

    def looked(self, error: str) -> bool:
        """Count a check, ``error`` empty where it succeeded; return whether the verdict has changed."""
        self.failures = self.failures + 1 if error else 0
        before = self.why
        if not error:
            self.why = ""
        elif self.failures >= FAILURES:
            self.why = before or f"its {self.name} cannot be reached: {error}"
        return bool(before) != bool(self.why)


class PortWatch:
    """Checks the data and the control port of this node every few seconds, and calls ``tell`` with changes."""

    def __init__(self, port: DataPort, control: Callable[[], tuple[str, int]], tell: Tell) -> None:
        """``control``: returns the address at which the control port is bound."""
        self._port, self._control, self._tell = port, control, tell
        self.reach = {name: Reach(name) for name in ("data port", "control port")}

    @property
    def unreachable(self) -> str:
        """The ports that cannot be reached, and why; empty while all can be."""
        return "; ".join(one.why for one in self.reach.values() if one.why)

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            failing = any(one.failures or one.why for one in self.reach.values())
            await asyncio.sleep(AGAIN_SECONDS if failing else LOOK_SECONDS)
            errors = await asyncio.gather(asyncio.to_thread(self._look, self._data_port),
                                          asyncio.to_thread(self._look, self._control_port))
            changed = [one.looked(error) for one, error in zip(self.reach.values(), errors, strict=True)]
            why = self.unreachable
            if any(changed):
                (log.error if why else log.info)("this node looked at its own ports", reason=why or "all answer")
            if any(changed) or why:  # repeated while it lasts: an operator, or a lost lease, may have reset the state
                with contextlib.suppress(RgpuError, OSError):
                    await self._tell(why)

    @staticmethod
    def _look(probe: Callable[[], None]) -> str:
        try:
            probe()
        except Exception as error:  # noqa: BLE001 - after any error the port was not reached
            return str(error) or type(error).__name__
        return ""

    def _data_port(self) -> None:
        """Begin a preamble without a ticket: the port must answer, with a refusal."""
        with _connected(self._port.bound, self._port.own) as sock:
            deadline = time.monotonic() + ANSWER_SECONDS
            send_exact(sock, CLIENT_HEAD_LAYOUT.pack(MAGIC, VERSION, PURPOSE_CALLS, 0) + secrets.token_bytes(SALT),
                       deadline)
            magic, _, status = NODE_HEAD_LAYOUT.unpack(read_exact(sock, NODE_HEAD_LAYOUT.size, deadline))
            if magic != MAGIC or not status:
                raise LinkError(f"another process answers at {address_of(self._port.bound)}")

    def _control_port(self) -> None:
        """Begin as ZMTP does: ZeroMQ must answer through the gate before it.

        No ZeroMQ client is used: making one aborts the process where no descriptors are left.
        """
        host, number = self._control()
        with _connected((host, number)) as sock:
            deadline = time.monotonic() + ANSWER_SECONDS
            send_exact(sock, ZMTP_SIGNATURE, deadline)
            if read_exact(sock, 1, deadline) != ZMTP_SIGNATURE[:1]:
                raise LinkError(f"another process answers at {host}:{number}")


@contextlib.contextmanager
def _connected(bound: tuple[str, int], told: Callable[[str], None] = lambda name: None) -> Iterator[socket.socket]:
    """Connect to a port bound on this host; ``told`` is called with the near end's address before that."""
    host, number = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound[0], bound[0]), bound[1]
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.settimeout(ANSWER_SECONDS)
        sock.bind((host, 0))
        told(address_of(sock.getsockname()))
        try:
            sock.connect((host, number))
        except TimeoutError:
            raise TimedOut(f"no connection to {host}:{number} within {ANSWER_SECONDS:g} s") from None
        yield sock


def address_of(pair: tuple[Any, ...]) -> str:
    """``host:port``."""
    return f"{pair[0]}:{pair[1]}"
