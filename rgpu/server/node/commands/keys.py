"""The leader's command that a key is revoked, and its immediate effects on this node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from rgpu.link.keys import AuthorizedKeys, check_public
from rgpu.session.errors import UsageError

log = structlog.get_logger(__name__)


class KeyCommands:
    """``authorized``: keys that this node admits. ``own``: its own public key; ``stop``: called if that was revoked."""

    def __init__(self, authorized: AuthorizedKeys, own: str, stop: Callable[[], object]) -> None:
        self._authorized, self._own, self._stop = authorized, own, stop

    async def forget(self, *, keys: Any, **_: Any) -> dict[str, Any]:
        """Refuse these keys ({public: name}) from the next request on. Raises :class:`UsageError`."""
        try:
            names = msgspec.convert(keys, dict[str, str])
        except msgspec.ValidationError as error:
            raise UsageError(f"no list of keys: {error}") from error
        for public in names:
            check_public(public)
        self._authorized.revoke(names)
        log.info("keys are let in no more", names=sorted(names.values()))
        if self._own in names:
            self._stop()
        return {}
