"""Loggers that import structlog with the first line that is logged.

structlog imports asyncio, ssl and pickle: a sixth of what ``rgpu run`` takes to start, and a run without trouble logs
nothing before its program uses CUDA. What the client and the links log goes through :func:`get_logger`; the server side
imports structlog itself (:mod:`rgpu.link.logging`).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any, TextIO

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}  #: by name, as :mod:`logging` numbers them

_configuring = threading.Lock()
_pending: list[tuple[str, TextIO]] = []  #: of :func:`configure_at_first_line`


class _Logger:
    """A logger of structlog's, made when it is used."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._made: Any = None

    def __getattr__(self, method: str) -> Any:
        if self._made is None:
            try:
                self._made = _structlog().get_logger(self._name)
            except (OSError, MemoryError) as error:  # no descriptor is left: the next line tries again
                return partial(self._bare, method, error)
        return getattr(self._made, method)

    def _bare(self, level: str, trouble: BaseException, event: str, *args: Any, **values: Any) -> None:
        """Log a line without its values, which structlog would clean of secrets."""
        stream = _pending[0][1] if _pending else sys.stderr
        line = {"event": event, "level": level, "logger": self._name, "bare": f"structlog is not there: {trouble}"}
        with contextlib.suppress(OSError, ValueError):
            stream.write(json.dumps(line) + "\n")


def _structlog() -> Any:
    """Import it, configured as was asked for."""
    from rgpu.link.logging import configure_logging, structlog

    with _configuring:  # what another thread logs meanwhile must not go elsewhere
        if _pending:
            level, stream = _pending[0]
            configure_logging(level=level, stream=stream, json=True)
            _pending.clear()
    return structlog


def get_logger(name: str) -> Any:
    """Return a logger of structlog's by that name, which is imported when something is logged."""
    return _Logger(name)


def check_level(level: str) -> str:
    """Return the level. Raises :class:`ValueError` for an unknown one."""
    if level not in LEVELS:
        raise ValueError(f"log level {level!r}: use one of {', '.join(LEVELS)}")
    return level


def open_log(file: Path) -> TextIO:
    """Open a log to append to, of mode 0600. Raises :class:`OSError`."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "a", buffering=1, encoding="utf-8", errors="backslashreplace")


def configure_at_first_line(level: str, file: Path) -> None:
    """Send this process' logs to ``file`` as JSON lines from the first one on that a logger of this module writes.

    The file is opened at once. Raises :class:`ValueError` for an unknown level, :class:`OSError`.
    """
    _pending[:] = [(check_level(level), open_log(file))]
