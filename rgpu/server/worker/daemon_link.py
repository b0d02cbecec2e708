"""The worker's end of the channel to its daemon: requests in, events out, and an end that the daemon carries out.

Each request is carried out in a thread of its own. When the daemon ends, the worker waits for its next connection.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import structlog

from rgpu.link.accepting import accept_next
from rgpu.link.local.packets import Channel
from rgpu.server.worker.entered_box import EnteredBox
from rgpu.session.errors import LinkError, Refused, RgpuError

log = structlog.get_logger(__name__)

#: Requests that carry descriptors.
WITH_DESCRIPTORS = frozenset({"attach", "derived", "lane", "receive", "deadline", "checkpoint", "restore", "send",
                              "ranks_link", "ranks_widen", "ranks_lend", "ranks_serve", "share_serve", "share_link"})
END_SECONDS = 60.0  #: within which the daemon ends a worker that asked for it


class DaemonLink:
    """See the module docstring.

    ``handler(name)``: the function that carries a request out, None for an unknown request; ``orphaned(since)``:
    whether the worker is to end, given the time since when it has no daemon (:func:`time.monotonic`).
    """

    def __init__(self, box: EnteredBox, handler: Callable[[str], Callable[..., Any] | None],
                 orphaned: Callable[[float], bool]) -> None:
        self._box, self._handler, self._orphaned = box, handler, orphaned
        self._channel: Channel | None = None
        self._away = time.monotonic()

    @property
    def known(self) -> bool:
        """Whether a daemon has connected; that connection may have ended."""
        return self._channel is not None

    def serve(self, listener: socket.socket) -> None:
        """Serve the daemon's connections, one after the other, until the worker is an orphan."""
        while True:
            listener.settimeout(1.0)
            try:
                found = accept_next(listener, lambda: False, "the worker's socket")
            except TimeoutError:
                if self._orphaned(self._away):
                    log.error("no daemon and no agent for too long: the worker ends")
                    return
                continue
            if found is None:
                return
            sock = found[0]
            sock.setblocking(True)
            channel = Channel(sock)
            if not self._box.admits(channel):
                channel.close()
                continue
            self._channel = channel
            self._converse(channel)

    def report(self, event: str, **values: Any) -> None:
        """Send the daemon an event; nothing is lost without a daemon, since a new one requests the worker's state."""
        channel = self._channel
        if channel is not None:
            try:
                channel.send({"event": event, **values})
            except LinkError:
                pass

    def be_ended(self, event: str, reason: str, **values: Any) -> NoReturn:
        """Have the daemon end this process, and wait for that: the caller does nothing more.

        The process ends itself where no daemon did within :data:`END_SECONDS`.
        """
        self.report(event, pid=os.getpid(), reason=reason, **values)
        time.sleep(END_SECONDS)
        log.error("no daemon ended the worker: it ends", reason=reason)
        end_process()

    def _converse(self, channel: Channel) -> None:
        try:
            while True:
                message, fds = channel.receive()
                threading.Thread(target=self._handle, args=(channel, message, fds), daemon=True,
                                 name=f"do-{message.get('do')}").start()
        except RgpuError as error:
            log.info("daemon went away", reason=error.message)
        finally:
            self._away = time.monotonic()
            channel.close()

    def _handle(self, channel: Channel, message: dict[str, Any], fds: list[int]) -> None:
        name, number = str(message.pop("do", "")), message.pop("id", None)
        do = self._handler(f"do_{name}")
        reply: dict[str, Any]
        try:
            if do is None:
                raise Refused(f"a worker does not know {name!r}")
            sockets = [fds] if name in WITH_DESCRIPTORS else []
            reply = {"id": number, "ok": do(*sockets, **message) or {}}
        except RgpuError as error:
            reply = {"id": number, "error": error.as_dict()}
        except Exception as error:  # noqa: BLE001 - the daemon must receive it
            log.exception("worker task failed", task=name)
            reply = {"id": number, "error": RgpuError(f"{name}: {error}").as_dict()}
        try:
            channel.send(reply)
        except LinkError:
            log.warning("the daemon went before it had its answer", task=name)


def end_process() -> NoReturn:
    """End the process at once, without clean-up: the kernel frees the rest."""
    log.info("worker ends")
    sys.stderr.flush()
    os._exit(0)
