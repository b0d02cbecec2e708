"""A warm worker's own process: everything that costs time is done, only the session is missing.

It listens on the path that its daemon chose and takes one connection. ``become``
names the session; then the process goes on as that session's worker, on the
same listening socket, which the daemon has moved to the session's folder. When
the daemon ends first, the warm worker ends: no later daemon would find it.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from rgpu.checkpoint.codec import encoders
from rgpu.checkpoint.codec.encoding import prepare as prepare_native
from rgpu.checkpoint.codec.frames import KEPT
from rgpu.checkpoint.device import Device
from rgpu.link.accepting import accept_next
from rgpu.link.local.packets import Channel
from rgpu.server.worker.entered_box import NO_BOX, EnteredBox
from rgpu.session.errors import LinkError, RgpuError

log = structlog.get_logger(__name__)

#: An argument of a warm worker: room on its command line for the session's name, so that `ps` shows it.
ROOM = "." * 250


#: A living daemon connects as soon as the socket exists, and waits no longer than this for the socket.
CONNECT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a warm worker becomes. ``quota``: bytes; ``socket``: the path at which its daemon finds it from now on."""

    session: str
    epoch: int
    quota: int
    state: str
    socket: str


def wait(listener: socket.socket, device: Device, box: EnteredBox = NO_BOX) -> Assignment | None:
    """Wait until the daemon assigns a session, and return the assignment; None when the daemon has ended."""
    listener.settimeout(CONNECT_SECONDS)
    try:
        came = accept_next(listener, lambda: False, "the warm worker's socket")
    except TimeoutError:
        log.info("warm worker ends", reason="its daemon never came: it died while this process started")
        return None
    finally:
        listener.settimeout(None)
    if came is None:
        return None
    sock = came[0]
    channel = Channel(sock)
    try:
        if not box.admits(channel):
            return None
        device.frames().prepare(KEPT)  # a restore begins with these frames, and with the compiled encoder
        prepare_native()
        encoders.get_ready()
        channel.send({"event": "ready"})
        message, fds = channel.receive()
        found = Assignment(str(message["session"]), int(message["epoch"]), int(message["quota"]),
                           str(message["state"]), str(message["socket"]))
        _prepare(found, device, fds)
        channel.send({"ok": True})
        return found
    except (RgpuError, KeyError, TypeError, ValueError, OSError) as error:
        log.info("warm worker ends", reason=str(error))
        return None
    finally:
        channel.close()


def _prepare(found: Assignment, device: Device, logs: Sequence[int]) -> None:
    """Log to the session's file (``logs``) from now on, show its name, and size the device to its quota."""
    text = getattr(device, "text", None)
    for fd in logs:
        for standard in (2,) if text is not None and text.holds_stdout else (1, 2):
            os.dup2(fd, standard)
        os.close(fd)
    resize = getattr(device, "resize", None)
    if resize is not None:
        resize(found.quota)
    set_command_line(["rgpu.server.worker.main", "--session", found.session, "--epoch", str(found.epoch), "--quota",
                      str(found.quota), "--socket", found.socket])


def set_command_line(words: list[str]) -> bool:
    """Show ``words`` as this process's arguments, behind the interpreter; False where that is not possible."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, proc(5)
        room = end - start
        before = Path("/proc/self/cmdline").read_bytes()
        text = b"\0".join(word.encode() for word in (sys.executable, "-m", *words)) + b"\0"
        if not 0 < len(text) <= room or len(before) != room:
            return False
        ctypes.memmove(start, text + bytes(room - len(text)), room)
        return True
    except (OSError, ValueError, IndexError):
        return False


def connect(channel: Channel) -> None:
    """Wait, in the daemon, until the warm worker is ready. Raises :class:`LinkError`."""
    message, _ = channel.receive()
    if message.get("event") != "ready":
        raise LinkError(f"a warm worker said {message!r:.80}")


def assign(channel: Channel, assignment: Assignment, log_path: Path) -> None:
    """Make the warm worker a session's worker, logging to ``log_path``; called in the daemon.

    Raises :class:`LinkError`, :class:`Corrupt`, OSError.
    """
    values: dict[str, Any] = {name: getattr(assignment, name) for name in Assignment.__dataclass_fields__}
    fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        channel.send({"do": "become", **values}, (fd,))
    finally:
        os.close(fd)
    channel.receive()
    channel.close()
