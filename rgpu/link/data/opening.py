"""The node's side of a data link's preamble: without I/O (bytes in, the answer and the keys out), and blocking."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Sequence

from rgpu.link.data import proofs
from rgpu.link.data.agreement import AGREES, Share, keys_of_node, salt_for_older
from rgpu.link.data.frames import (
    ERROR_LIMIT,
    PREAMBLE_TIMEOUT,
    PURPOSES,
    Handover,
    mismatch,
    read_exact,
    send_exact,
)
from rgpu.link.data.tickets import BY_AGENT, Ticket, verify, version_of
from rgpu.link.data.tickets import LIMIT as TICKET_LIMIT
from rgpu.link.keys import KeyPair
from rgpu.link.messages.data import (
    CLIENT_HEAD_LAYOUT,
    FROM_NODE,
    MAGIC,
    NODE_HEAD_LAYOUT,
    PREAMBLE,
    PREAMBLE_REFUSED,
    SALT,
    TO_NODE,
    VERSION,
)
from rgpu.session.errors import Corrupt, LinkError, RgpuError

OLDEST = 1  #: preamble that is answered; those before :data:`AGREES` differ by their number alone
TICKETS = {"lane": "calls"}  #: purposes that another one's ticket opens


class Opening:
    """One preamble that a node answers.

    Read ``needed`` bytes and :meth:`take` them, until ``needed`` is 0; then send ``answer``. With ``error`` set it
    is a refusal, else ``handover`` is for the process that continues the connection. A peer that does not speak the
    protocol gets no answer.
    """

    def __init__(self, pool_secrets: Sequence[bytes], lookup: Callable[[Ticket], int],
                 node: KeyPair | None = None) -> None:
        """``pool_secrets``: those that tickets may be made with. ``lookup(ticket)`` returns the epoch at which the
        session is held, or raises the peer's error. ``node``: the key that agents' own tickets are for, and that
        makes tickets for pages; None: the pool's secrets make all.
        """
        self._secrets, self._lookup, self._node = pool_secrets, lookup, node
        self.needed = CLIENT_HEAD_LAYOUT.size
        self.answer = b""
        self.error: RgpuError | None = None
        self.handover: Handover | None = None
        self._head: tuple[int, int, int] | None = None  #: version, purpose, length of the ticket

    def take(self, data: bytes) -> None:
        """Take the next ``needed`` bytes. Raises :class:`LinkError` for a peer that gets no answer."""
        if self._head is None:
            magic, version, number, length = CLIENT_HEAD_LAYOUT.unpack(data)
            if magic != MAGIC:
                raise LinkError("the peer does not speak rgpu's data link", reason="magic")
            self._head = version, number, length
            self.needed = length + SALT
            if version < OLDEST or version > PREAMBLE + 1:
                self._refuse(mismatch("the peer's", version))
            elif number not in PURPOSES or length > TICKET_LIMIT:
                self._refuse(Corrupt("the preamble has an unknown purpose or too long a ticket", reason="preamble"))
            return
        self.needed = 0
        try:
            self._open(data, *self._head)
        except RgpuError as error:
            self._refuse(error)

    def _open(self, data: bytes, version: int, number: int, length: int) -> None:
        purpose = PURPOSES[number]
        ticket = self._ticket(data[:length], TICKETS.get(purpose, purpose))
        epoch = self._lookup(ticket)
        share = Share() if version >= AGREES else None
        salt = share.data if share is not None else salt_for_older()
        keys = keys_of_node(share, salt, data[length:], ticket.secret, ticket.session, epoch)
        self.answer = NODE_HEAD_LAYOUT.pack(MAGIC, self._says(version), 0) + salt + struct.pack("<Q", epoch)
        self.handover = Handover(keys[FROM_NODE], keys[TO_NODE], FROM_NODE, ticket.session, epoch, purpose,
                                 ticket.agent, ticket.id)

    def _ticket(self, data: bytes, purpose: str) -> Ticket:
        if self._node is None:
            return verify(self._secrets, data, purpose)
        if purpose == "pages":
            return verify([proofs.own_secret(self._node)], data, purpose)
        if version_of(data) == BY_AGENT:
            return proofs.check(self._node, data, purpose)
        return verify(self._secrets, data, purpose)

    @staticmethod
    def _says(version: int) -> int:
        """The number that the node answers: ends before :data:`AGREES` accept none above the one after theirs."""
        return PREAMBLE if version >= AGREES else VERSION

    def _refuse(self, error: RgpuError) -> None:
        data = json.dumps({"error": error.code, "message": error.message[:1000]}).encode()[:ERROR_LIMIT]
        self.needed, self.error = 0, error
        says = self._says(self._head[0] if self._head is not None else PREAMBLE)
        self.answer = NODE_HEAD_LAYOUT.pack(MAGIC, says, PREAMBLE_REFUSED) + struct.pack("<I", len(data)) + data


def server_preamble(sock: socket.socket, pool_secrets: Sequence[bytes], lookup: Callable[[Ticket], int], *,
                    timeout: float = PREAMBLE_TIMEOUT) -> Handover:
    """Wait for a preamble and answer it: check the ticket, get the epoch from ``lookup``, and derive the keys.

    ``lookup(ticket)`` returns the epoch at which this node holds the session,
    or raises the :class:`RgpuError` that the peer receives. Returns with
    the socket blocking again. Raises that error, :class:`AuthenticationFailed`,
    :class:`LinkError`, :class:`TimedOut`; the caller then closes the socket.
    """
    deadline = time.monotonic() + timeout
    opening = Opening(pool_secrets, lookup)
    while opening.needed:
        opening.take(read_exact(sock, opening.needed, deadline))
    if opening.error is not None:
        try:
            send_exact(sock, opening.answer, deadline)
        except RgpuError:
            pass
        raise opening.error
    send_exact(sock, opening.answer, deadline)
    sock.setblocking(True)
    assert opening.handover is not None
    return opening.handover
