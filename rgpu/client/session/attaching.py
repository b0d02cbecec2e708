"""One attempt to attach, on a helper thread, that the event loop can cancel at any moment."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rgpu.client.data_link.agent_lanes import LinkLanes
from rgpu.client.data_link.connection import DataLink, attach
from rgpu.client.data_link.host_link import HostAsk
from rgpu.client.run.pool_requests import Grant, PoolRequests
from rgpu.client.session.attachment import Owner
from rgpu.client.session.identity import Identity
from rgpu.link import versions
from rgpu.session.errors import AuthenticationFailed, RgpuError, VersionMismatch

Opened = Callable[["Attempt", DataLink | None, int, str], None]


class Attempt:
    """One attempt, which starts at once and posts ``opened(attempt, link or None, next, error)``, unless cancelled."""

    def __init__(self, number: int, owner: Owner, identity: Identity, grant: Grant, published: int,
                 requests: PoolRequests, opened: Opened, post: Callable[..., None], printed: int | None = None,
                 same_host: bool = False, usual: int = 0, variables: Sequence[Any] = ()) -> None:
        """``same_host``: share memory with a worker on this host. ``usual``: as in PING. ``variables``: see
        :meth:`.placements.Placements.as_rows`."""
        self.number = number
        self.owner = owner
        self.started = time.monotonic()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._cancelled = False
        self.hopeless = False  #: no later attempt can succeed: the versions of the two sides do not fit
        self.refused = False  #: the ticket was refused; another one may be accepted
        self._opened, self._post = opened, post
        self._host, self._usual, self._variables = HostAsk(identity.session, same_host), usual, variables
        requests.submit(self._run, identity, grant, published, printed)

    def _run(self, identity: Identity, grant: Grant, published: int, printed: int | None) -> None:
        if self._cancelled:
            return
        host, said = self._host, dict[str, Any]()

        def told(answer: dict[str, Any]) -> None:
            said.update(answer)
            host.told(answer)

        try:
            ticket, secret = grant.at(self.owner, identity.session)
            connection, _, wanted = attach(self.owner.address, ticket, secret, identity.session, self.owner.epoch,
                                           published, identity.client, printed=printed,
                                           connected=self._connected, told=told,
                                           extra={**host.attach_fields, "usual": self._usual,
                                                  "variables": self._variables})
            link = DataLink(self.number, connection, host.found, LinkLanes(said.get("lanes")),
                            versions.data_of(said.get("versions")))
            self._post(self._opened, self, link, wanted, "")
        except VersionMismatch as error:
            self.hopeless = True
            self._post(self._opened, self, None, 0, error.message)
        except RgpuError as error:
            self.refused = isinstance(error, AuthenticationFailed)
            self._post(self._opened, self, None, 0, error.message)
        except Exception as error:  # noqa: BLE001 - the loop waits for an outcome
            self._post(self._opened, self, None, 0, f"{type(error).__name__}: {error}")

    def _connected(self, sock: Any) -> bool:
        """Note the socket, before the first byte is sent; return False if the attempt was cancelled."""
        with self._lock:
            self._socket = sock
            return not self._cancelled

    def cancel(self) -> None:
        """Cancel the attempt: after the return nothing more is sent on its connection."""
        with self._lock:
            self._cancelled = True
            if self._socket is not None:
                try:
                    self._socket.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
