"""The folders of a node's workers: one for each process, not shared with others.

``homes/ID`` holds the socket (``w.sock``), the position page, the mark of an ended program and temporary files.
``homes/ID.token`` authenticates a daemon of this node on that socket: the folder's worker was given the token
when it was started, and no worker can read the file. ``workers/SESSION/EPOCH`` is a link to the home of the worker
that serves the session; a warm worker has a home and no link yet.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from rgpu.link.local.channel import connect
from rgpu.link.local.packets import Channel
from rgpu.server.ended_mark import SUFFIX as ENDED
from rgpu.server.worker.entered_box import SOCKET

_TOKEN_BYTES = 16
KEPT_LOGS = 256  #: sessions without a worker whose logs a node keeps


@dataclass(frozen=True, slots=True)
class Home:
    """One worker's folder. ``path`` is the same for the worker and for its daemon, whatever the session."""

    path: Path

    @property
    def name(self) -> str:
        """The home's name, which the worker's control group bears, too."""
        return self.path.name

    @property
    def socket(self) -> Path:
        """The socket at which the worker listens."""
        return self.path / SOCKET

    def token(self) -> str:
        """The token that the daemon sends first; empty for a worker that was started without one."""
        try:
            return self._token.read_text()
        except OSError:
            return ""

    @property
    def _token(self) -> Path:
        return self.path.with_suffix(".token")

    def clear(self) -> None:
        """Remove the folder; an ended program's mark stays until it is reported (:mod:`rgpu.server.ended_mark`)."""
        self._token.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            for path in list(self.path.iterdir()):
                if path.suffix == ENDED:
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()


def make(directory: Path) -> Home:
    """Make a home. ``directory``: the node's. Raises OSError."""
    folder = directory / "homes"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    home = Home(folder / secrets.token_hex(8))
    home.path.mkdir(mode=0o700)
    descriptor = os.open(home._token, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(_TOKEN_BYTES))
    return home


def reach(home: Home, timeout: float) -> Channel:
    """Connect to the worker of a home, and authenticate as its daemon. Raises :class:`TimedOut`, :class:`LinkError`."""
    channel = connect(home.socket, timeout)
    if token := home.token():
        channel.send({"do": "hello", "token": token})
    return channel


def all_of(directory: Path) -> list[Home]:
    """Return every home of the node."""
    return [Home(path) for path in sorted((directory / "homes").glob("*")) if path.is_dir()]


def link(home: Home, session_folder: Path, epoch: int) -> Path:
    """Link the home into the session's folder at ``epoch``, in place of an earlier link; return the link."""
    name = session_folder / str(epoch)
    fresh = session_folder / f".{epoch}.{home.name}"
    os.symlink(os.path.relpath(home.path, session_folder), fresh)
    os.replace(fresh, name)
    return name


def forget_old(workers: Path, keep: int = KEPT_LOGS) -> None:
    """Remove the folders of sessions that have no worker here; the ``keep`` newest stay, for their logs.

    ``workers``: the folder of them all. Raises nothing.
    """
    ended = []
    for folder in workers.glob("*"):
        with contextlib.suppress(OSError):
            if not any(path.is_symlink() or path.suffix in (".sock", ENDED) for path in folder.iterdir()):
                ended.append((folder.stat().st_mtime, folder))
    for _, folder in sorted(ended)[:-keep]:
        shutil.rmtree(folder, ignore_errors=True)


def prune(session_folder: Path) -> None:
    """Remove a session's links whose homes no longer exist."""
    for path in session_folder.glob("*"):
        if path.is_symlink() and not path.exists():
            path.unlink(missing_ok=True)
