"""The first message of a process to the agent."""

from __future__ import annotations

import select
import time

from rgpu.client.shim_link.local import Choose, Gather, Hello, ListDevices, LocalPeer, NewSegment, Observe
from rgpu.session.errors import Corrupt, TimedOut

HELLO_TIMEOUT = 5.0


def wait_hello(peer: LocalPeer) -> tuple[Hello | Observe | Gather | ListDevices, list[NewSegment], int | None]:
    """Return the first message, segments that came right behind a HELLO, and the device that was chosen before it.

    Raises :class:`TimedOut`, :class:`Corrupt`.
    """
    device: int | None = None
    deadline = time.monotonic() + HELLO_TIMEOUT
    poller = select.poll()
    poller.register(peer.fileno(), select.POLLIN)
    while True:
        messages = peer.receive()
        if messages and device is None and isinstance(messages[0], Choose):
            device = messages.pop(0).device  # type: ignore[union-attr]
        if messages:
            break
        left = deadline - time.monotonic()
        if peer.eof or left <= 0:
            raise TimedOut("a process connected to the agent and said nothing")
        poller.poll(left * 1000)
    hello, rest = messages[0], messages[1:]
    segments = [message for message in rest if isinstance(message, NewSegment)]
    if not isinstance(hello, Hello | Observe | Gather | ListDevices) or len(segments) != len(rest):
        raise Corrupt("a process did not begin with HELLO", reason="protocol")
    return hello, segments, device
