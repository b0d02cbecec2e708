"""The audit log of a node: a line of JSON for each accepted change and each refusal, with the caller and its address.

Lines are only ever appended to ``audit.jsonl`` in the node's folder; full files are kept as ``audit.jsonl.1`` (the
newest) and so on. Repeated refusals are only counted, so that repeated attempts do not push older lines out of the log.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog

from rgpu.link.control import Request
from rgpu.link.control.access import Actor
from rgpu.link.control.verbs import VERBS
from rgpu.session.errors import AuthenticationFailed, RgpuError, all_classes

log = structlog.get_logger(__name__)

FILE_BYTES = 16 << 20  #: of one file
KEPT_FILES = 8  #: full ones
MAX_TEXT = 500  #: characters of a text in a line; the text may be from an unauthenticated peer
REPEATED_SECONDS = 10.0  #: for this time after one was written, equal refusals are only counted
REMEMBERED = 1024  #: different refusals that are counted at once
#: Arguments of a request that are written as its subject.
ABOUT = ("session", "host", "number", "image", "name", "move", "state", "paused", "reason", "epoch", "dry_run",
         "user", "default", "limits", "inherit")
#: Codes of refusals because of the caller's identity, whatever the request.
NOT_LET_IN = frozenset(error.code for error in all_classes(AuthenticationFailed))


@dataclass
class _Repeated:
    """A refusal that was written. ``since``: when (monotonic); ``count``: repetitions since then."""

    line: dict[str, Any]
    since: float
    count: int = 0


class Audit:
    """Writes the audit log at ``path``; ``host``: the node's name. Any thread may write."""

    def __init__(self, path: Path, host: str, *, file_bytes: int = FILE_BYTES, kept: int = KEPT_FILES,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._host, self._file_bytes, self._kept, self._clock = path, host, file_bytes, kept, clock
        self._lock = threading.Lock()
        self._refused: OrderedDict[tuple[str, ...], _Repeated] = OrderedDict()

    # -- events -----------------------------------------------------------------------
    def answered(self, request: Request, outcome: str, reason: str) -> None:
        """Record an answered request of an authenticated caller; :meth:`of` records those that were passed on."""
        if request.verb == "node.command" and outcome not in NOT_LET_IN:
            return
        self.done(request.verb, request.args, request.actor, request.peer, outcome, reason, request.via)

    @contextlib.contextmanager
    def of(self, verb: str, args: dict[str, Any], actor: Actor, peer: str, via: str = "") -> Iterator[None]:
        """Record the outcome of the ``with`` block, which does the verb. ``via``: the node that passed it on."""
        try:
            yield
        except RgpuError as error:
            self.done(verb, args, actor, peer, error.code, error.message, via)
            raise
        self.done(verb, args, actor, peer, "ok", "", via)

    def done(self, verb: str, args: dict[str, Any], actor: Actor, peer: str, outcome: str, reason: str,
             via: str = "", favour: str = "") -> None:
        """Write a line for a verb that was done or refused, if it changes state or was refused for the caller's key.

        ``via``: the node that passed it on, or the web page; ``favour``: for whom a leader commanded it.
        """
        entry = VERBS.get(verb)
        changes = entry is not None and entry.changes and not (verb == "image.import" and not args.get("end"))
        if not changes and outcome not in NOT_LET_IN:
            return
        line = {"verb": verb, "outcome": outcome, "role": actor.role, "user": actor.user, "name": actor.name,
                "key": actor.public, "peer": peer, "via": via, "for": favour,
                "reason": reason,
                "about": {name: args[name] for name in ABOUT if args.get(name) not in (None, "")}}
        if outcome == "ok":
            self._write(line)
        else:
            self._refusal((verb, outcome, actor.public, peer, via, str(line["about"])[:MAX_TEXT]), line)

    def stranger(self, peer: str, public: str, link: str = "control", reason: str = "the key is not known") -> None:
        """Record a peer that was not admitted at all."""
        self._refusal((link, peer, public, reason), {
            "verb": "connect", "outcome": AuthenticationFailed.code, "key": public, "peer": peer, "reason": reason,
            "about": {"link": link}})

    # -- writing ----------------------------------------------------------------------
    def _refusal(self, key: tuple[str, ...], line: dict[str, Any]) -> None:
        with self._lock:
            self._let_go(self._clock() - REPEATED_SECONDS)
            found = self._refused.get(key)
            if found is not None:
                found.count += 1
                return
            while len(self._refused) >= REMEMBERED:
                self._repeated(self._refused.popitem(last=False)[1])
            self._refused[key] = _Repeated(line, self._clock())
            self._append(line)

    def _let_go(self, before: float) -> None:
        """Write the counts of refusals that were first written before this time (monotonic)."""
        while self._refused and next(iter(self._refused.values())).since <= before:
            self._repeated(self._refused.popitem(last=False)[1])

    def _repeated(self, found: _Repeated) -> None:
        if found.count:
            self._append({**found.line, "repeated": found.count})

    def _write(self, line: dict[str, Any]) -> None:
        with self._lock:
            self._let_go(self._clock() - REPEATED_SECONDS)
            self._append(line)

    def close(self) -> None:
        """Write the counts that are still pending."""
        with self._lock:
            self._let_go(self._clock())

    def _append(self, line: dict[str, Any]) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        data = json.dumps({"when": now, "node": self._host, **_short(line)}).encode() + b"\n"
        try:
            self._rotate(len(data))
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, data)
            finally:
                os.close(descriptor)
        except OSError as error:  # a full disk must not stop the node; the daemon's log has the line then
            log.error("the audit log cannot be written", reason=str(error), line=data.decode())

    def _rotate(self, more: int) -> None:
        try:
            if self._path.stat().st_size + more <= self._file_bytes:
                return
        except FileNotFoundError:
            return
        for number in range(self._kept, 0, -1):
            source = self._numbered(number - 1)
            if source.exists():
                os.replace(source, self._numbered(number))

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}") if number else self._path


def _short(value: Any, depth: int = 0) -> Any:
    """Shorten an untrusted value for a line."""
    if isinstance(value, dict) and depth < 2:
        return {str(key)[:64]: _short(item, depth + 1) for key, item in list(value.items())[:32]}
    if isinstance(value, bool | int | float) or value is None:
        return value if not isinstance(value, int) or abs(value) < 2**63 else str(value)[:MAX_TEXT]
    return str(value)[:MAX_TEXT]
