"""A session that is made before its program starts, and kept until the program's first process uses CUDA.

A request every few seconds shows the pool that the client is alive, so that its host is not taken for silent. The
program gets the session wherever it is by then: it may have been moved or recovered meanwhile.
"""

from __future__ import annotations

import threading
from typing import Any

from rgpu.client.run.pool_requests import OVER, PoolRequests
from rgpu.link.loggers import get_logger
from rgpu.session.errors import NotFound, Refused, RgpuError

log = get_logger(__name__)

KEEP_SECONDS = 2.0  #: between two requests; well below `rgpu.migrate.leader.silence.NOTICED_SECONDS`
ASK_TIMEOUT = 5.0
UNUSED = "its program ended without using a GPU"


class PlacedSession:
    """One such session. ``reply``: the pool's to session.create; ``args``: the arguments of that request."""

    def __init__(self, requests: PoolRequests, args: dict[str, Any], reply: dict[str, Any]) -> None:
        self.reply = reply
        self._requests, self._args, self._session = requests, args, str(reply["session"])
        self._taken = threading.Event()
        threading.Thread(target=self._keep, name="keeps-place", daemon=True).start()

    @property
    def asked_pid(self) -> int:
        """The process that the pool's record names."""
        return int(self._args["program"]["pid"])

    def _keep(self) -> None:
        while not self._taken.wait(KEEP_SECONDS):
            self._requests.quietly("session.keep", {"session": self._session, "program": self._args["program"]},
                                   ASK_TIMEOUT)

    def take(self) -> dict[str, Any]:
        """Return the reply with the present owner and a new ticket. Raises :class:`Refused` if the session is over."""
        self._taken.set()
        try:
            now = self._requests.call("session.renew_ticket", {"session": self._session}, ASK_TIMEOUT)
        except NotFound as error:
            raise Refused(f"{self._session} was ended before its program used it: {error.message}") from None
        except RgpuError as error:  # it was made: the shipper of its calls finds its owner
            log.warning("where the session is now is not known", session=self._session, reason=error.message)
            return self.reply
        if now.get("state") in OVER:
            raise Refused(f"{self._session} was ended before its program used it: "
                          f"{now.get('reason') or now['state']}")
        of_owner = ("owner", "address", "epoch", "alive", "public")
        fields = ("ticket", "secret", "expires") + (of_owner if "address" in now else ())
        return {**self.reply, **{name: now[name] for name in fields if name in now}}

    def give_up(self, exit_code: int | None, why: str = "") -> None:
        """End the session: the program ended, and never used it. ``why``: the reason, if the program was ended."""
        self._taken.set()
        ended = {"session": self._session, "reason": why or UNUSED, "exit_code": exit_code}
        self._requests.quietly("session.end", ended, ASK_TIMEOUT)


def program_asking(command: str, host: str, pid: int) -> dict[str, Any]:
    """Return ``program`` of a session.create for ``command``, which does not run yet; process ``pid`` requests it."""
    return {"pid": pid, "command": command, "host": host}
