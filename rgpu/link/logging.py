"""Structured logs: JSON lines, or colours on a terminal; secrets never get in.

Every process calls :func:`configure_logging` once, first thing (``rgpu run``:
:func:`rgpu.link.loggers.configure_at_first_line`). Each package that imports structlog imports this module before it:
where rich is installed, ``import structlog`` imports it, and pygments, for coloured tracebacks: a fifth of
what a worker, an agent or a daemon takes to start. structlog does without when it does not find rich.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, TextIO

from rgpu.link.loggers import LEVELS, check_level, open_log

if "structlog" not in sys.modules:
    _there = sys.modules.get("rich")
    sys.modules["rich"] = None  # type: ignore[assignment]  # an import of it fails
    try:
        import structlog
    finally:
        if _there is None:
            del sys.modules["rich"]
        else:
            sys.modules["rich"] = _there
import structlog

_SECRET_WORDS = ("secret", "ticket", "password", "send_key", "receive_key", "hash_key", "private")
_HIDDEN = "(hidden)"


def configure_logging(*, level: str = "info", file: Path | None = None, stream: TextIO | None = None,
                      json: bool | None = None, **bound: Any) -> None:
    """Send this process' logs to ``file`` (mode 0600, appended) or to ``stream`` (default stderr).

    ``json``: JSON lines; by default everywhere but on a terminal. ``bound``:
    values that every line carries. Raises :class:`ValueError` for an unknown level.
    """
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
    """Hide whatever is named like a secret, at any depth; bytes are shown by their length."""
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
