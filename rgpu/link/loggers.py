"""Structured logs: JSON lines, or colours on a terminal; secrets are hidden.

Every process calls :func:`configure_logging` once, at its start, or :func:`configure_at_first_line`: a logger of
:func:`get_logger` imports structlog with its first line. structlog imports asyncio, ssl and pickle, which would delay
each start of ``rgpu run``, and a run without problems logs nothing before its program uses CUDA. So the client and the
links log through :func:`get_logger`; the server side imports structlog itself (:mod:`rgpu.link.logging`).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any, TextIO

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}  #: by name, as :mod:`logging` numbers them

_SECRET_WORDS = ("secret", "ticket", "password", "send_key", "receive_key", "hash_key", "private")
_HIDDEN = "(hidden)"

_configuring = threading.Lock()
_pending: list[tuple[str, TextIO]] = []  #: set by :func:`configure_at_first_line`


class _Logger:
    """A logger of structlog's, created on first use."""

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
        """Log a line without its values, from which structlog would remove secrets."""
        stream = next((stream for _, stream in _pending), sys.stderr)
        line = {"event": event, "level": level, "logger": self._name, "bare": f"structlog is not there: {trouble}"}
        with contextlib.suppress(OSError, ValueError):
            stream.write(json.dumps(line) + "\n")


def _structlog() -> Any:
    """Import structlog, and configure it as requested."""
    from rgpu.link.logging import structlog

    with _configuring:  # lines of another thread must not be written elsewhere meanwhile
        if _pending:
            level, stream = _pending[0]
            configure_logging(level=level, stream=stream, json=True)
            _pending.clear()
    return structlog


def get_logger(name: str) -> Any:
    """Return a logger of that name; structlog is imported with its first line."""
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


def configure_logging(*, level: str = "info", file: Path | None = None, stream: TextIO | None = None,
                      json: bool | None = None, **bound: Any) -> None:
    """Send this process' logs to ``file`` (mode 0600, appended) or to ``stream`` (default stderr).

    ``json``: JSON lines; by default everywhere but on a terminal. ``bound``:
    values that every line carries. Raises :class:`ValueError` for an unknown level.
    """
    from rgpu.link.logging import structlog

    check_level(level)
    target = open_log(file) if file is not None else stream or sys.stderr
    plain = json if json is not None else not target.isatty()
    renderer: Any = structlog.processors.JSONRenderer(default=repr) if plain else structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            redact,
            structlog.processors.StackInfoRenderer(),
            *([structlog.processors.format_exc_info] if plain else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=target),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(**bound)


def redact(logger: Any, method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Hide values that are named like a secret, at any depth; bytes are shown by their length."""
    return {key: _clean(key, value) for key, value in event.items()}


def _clean(key: Any, value: Any, depth: int = 0) -> Any:
    name = key.lower() if isinstance(key, str) else ""
    if any(word in name for word in _SECRET_WORDS) and not isinstance(value, bool):
        return _HIDDEN
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"({len(value)} bytes)"
    if isinstance(value, dict):
        return _HIDDEN if depth > 6 else {k: _clean(k, v, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return _HIDDEN if depth > 6 else [_clean("", item, depth + 1) for item in value]
    return value
