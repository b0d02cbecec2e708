"""Detection of a worker on this host, and the channel by which memory is shared with it."""

from __future__ import annotations

import mmap
import os
from typing import Any

from rgpu.link.local import shared
from rgpu.link.loggers import get_logger
from rgpu.session.errors import RgpuError

log = get_logger(__name__)

LARGEST_AREA = 1 << 34


class Area:
    """The worker's memory for long answers, mapped read-only."""

    def __init__(self, number: int, size: int, fd: int) -> None:
        """Map the memory; take ownership of ``fd``. Raises :class:`Corrupt`, :class:`OSError`."""
        self.number, self.size, self.fd = number, size, fd
        try:
            shared.check_sealed(fd, size, LARGEST_AREA)
            self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        except BaseException:
            os.close(fd)
            raise
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Unmap the memory. May be called more than once."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self.view.release()
        try:
            self._map.close()
        except BufferError:
            pass  # a piece of an answer is still being summed; the mapping is freed with it


class HostLink:
    """Shared-memory link of one attachment. Without a :attr:`channel` bulk is sent in frames, for a :attr:`reason`."""

    def __init__(self) -> None:
        self.channel: shared.Channel | None = None
        self.worker = ""  #: identity of its process, by which a later attachment recognises it; empty: not reported
        self.area: Area | None = None
        self.reason = "not asked for"

    @property
    def state(self) -> str:
        """State as ``rgpu ps`` shows it: ``on``, or why bulk goes over TCP."""
        return "on" if self.channel is not None else self.reason

    def take_area(self) -> Area | None:
        """Return the area, which the caller owns from now on."""
        area, self.area = self.area, None
        return area

    def close(self) -> None:
        """Close the channel and the shared memory."""
        if self.area is not None:
            self.area.close()
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.close()


class HostAsk:
    """Request for shared memory while attaching, on the helper thread: fields of ATTACH, and the answer in ATTACHED."""

    def __init__(self, session: str, enabled: bool) -> None:
        self._session, self._host = session, shared.identity() if enabled else ""
        self.found = HostLink()

    @property
    def attach_fields(self) -> dict[str, Any]:
        return {"host": self._host} if self._host else {}

    def told(self, answer: dict[str, Any]) -> None:
        """Take the worker's answer. Raises nothing: on any error bulk is sent in frames."""
        found = self.found
        worker = answer.get("worker")
        found.worker = worker if isinstance(worker, str) else ""
        if not self._host:
            return
        offer = answer.get("shared")
        if not isinstance(offer, dict):
            found.reason = "the worker is on another host" if found.worker else "the worker shares no memory"
            return
        if "refused" in offer:
            found.reason = str(offer["refused"])[:300]
        else:
            self._connect(offer)
        if found.channel is None:
            log.warning("the worker is on this host, but memory cannot be shared: bulk goes over TCP",
                        session=self._session, reason=found.reason)

    def _connect(self, values: dict[str, Any]) -> None:
        found = self.found
        try:
            found.channel, proven = shared.connect(shared.Offer.from_dict(values))
            found.reason = ""
        except RgpuError as error:
            found.reason = error.message
            return
        if proven.fd < 0:
            return
        try:
            found.area = Area(proven.number, proven.size, proven.fd)
        except (RgpuError, OSError, ValueError) as error:
            log.warning("the worker's memory for answers cannot be used: they go over TCP", session=self._session,
                        reason=str(error))
