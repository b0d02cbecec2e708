"""The box that a worker was started in, as its environment names it, and which processes may connect to it there."""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import MutableMapping
from dataclasses import dataclass

import structlog

from rgpu.link.local.packets import Channel
from rgpu.session.errors import RgpuError

log = structlog.get_logger(__name__)

BOX, TOKEN = "RGPU_ENTERED_BOX", "RGPU_WORKER_TOKEN"  #: environment variables; child processes do not get them
SOCKET = "w.sock"  #: in the worker's folder
HELLO_SECONDS = 2.0  #: time that a connecting process may take to prove itself


@dataclass(frozen=True, slots=True)
class EnteredBox:
    """A box. ``walls``: in force; ``owner``: the daemon's user, -1: this process's; ``token``: that a daemon proves."""

    walls: tuple[str, ...] = ()
    owner: int = -1
    token: str = ""

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str]) -> EnteredBox:
        """Read the box from the environment, and remove its variables there."""
        text, token = environ.pop(BOX, "{}"), environ.pop(TOKEN, "")
        found = json.loads(text)
        return cls(tuple(found.get("walls", ())), int(found.get("owner", -1)), token)

    @property
    def peer_user(self) -> int:
        """User id that the daemon, and agents of this host, run as."""
        return os.getuid() if self.owner < 0 else self.owner

    def admits(self, channel: Channel) -> bool:
        """Whether the daemon of this node is at the other end; waits :data:`HELLO_SECONDS` for its first message.

        Other processes of its user may reach the socket: another worker, where workers have no users of their own.
        """
        if channel.peer()[1] != self.peer_user:
            return False
        if not self.token:
            return True
        channel.sock.settimeout(HELLO_SECONDS)
        try:
            message, _ = channel.receive()
            known = message.get("do") == "hello" and hmac.compare_digest(str(message.get("token")), self.token)
        except RgpuError as error:
            log.debug("who connected said nothing that is understood", reason=error.message)
            return False
        finally:
            channel.sock.settimeout(None)
        if not known:
            log.warning("who connected to this worker is not its daemon", pid=channel.peer()[0])
        return known


NO_BOX = EnteredBox()  #: for a worker that was started without a daemon
