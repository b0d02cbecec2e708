"""A session that is made before its program starts, and kept until the program's first process uses CUDA.

The pool hears every few seconds that its client lives, so that it is not taken for one whose host went silent. The
session is taken over where it is by then: it may have been moved or recovered meanwhile.
"""

from __future__ import annotations

import threading
from typing import Any

from rgpu.client.run.pool_desk import OVER, Desk
from rgpu.link.loggers import get_logger
from rgpu.session.errors import NotFound, Refused, RgpuError

log = get_logger(__name__)

KEEP_SECONDS = 2.0  #: between two words to the pool; well below `rgpu.migrate.leader.silence.NOTICED_SECONDS`
ASK_TIMEOUT = 5.0
UNUSED = "its program ended without using a GPU"


class PlacedSession:
    """``reply``: the pool's to session.create; ``args``: what it was asked for with."""

    def __init__(self, desk: Desk, args: dict[str, Any], reply: dict[str, Any]) -> None:
        self.reply = reply
        self._desk, self._args, self._session = desk, args, str(reply["session"])
        self._taken = threading.Event()
        threading.Thread(target=self._keep, name="keeps-place", daemon=True).start()

    @property
    def asked_pid(self) -> int:
        """The process that the pool's record names."""
        return int(self._args["program"]["pid"])

    def _keep(self) -> None:
        while not self._taken.wait(KEEP_SECONDS):
            self._desk.quietly("session.keep", {"session": self._session, "program": self._args["program"]},
                               ASK_TIMEOUT)

    def take(self) -> dict[str, Any]:
        """The reply with today's owner and a fresh ticket. Raises :class:`Refused` where the session is over."""
        self._taken.set()
        try:
            now = self._desk.call("session.renew_ticket", {"session": self._session}, ASK_TIMEOUT)
        except NotFound as error:
            raise Refused(f"{self._session} was ended before its program used it: {error.message}") from None
        except RgpuError as error:  # it was made: whoever ships its calls finds out where it is
            log.warning("where the session is now is not known", session=self._session, reason=error.message)
            return self.reply
        if now.get("state") in OVER:
            raise Refused(f"{self._session} was ended before its program used it: "
                          f"{now.get('reason') or now['state']}")
        of_owner = ("owner", "address", "epoch", "alive", "public")
        fields = ("ticket", "secret", "expires") + (of_owner if "address" in now else ())
        return {**self.reply, **{name: now[name] for name in fields if name in now}}

    def give_up(self, exit_code: int | None, why: str = "") -> None:
        """End it: the program ended, and never asked for it. ``why``: the program was ended."""
        self._taken.set()
        self._desk.quietly("session.end", {"session": self._session, "reason": why or UNUSED, "exit_code": exit_code},
                           ASK_TIMEOUT)


def program_asking(command: str, host: str, pid: int) -> dict[str, Any]:
    """The ``program`` of a session.create for ``command``, which does not run yet: the process ``pid`` asks."""
    return {"pid": pid, "command": command, "host": host}
