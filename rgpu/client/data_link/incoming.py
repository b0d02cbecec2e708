"""Messages of the worker to one session: answers, its position, notices. Part of the session's loop
(``rgpu/client/session/shipper.py``)."""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING, Any, Protocol

from rgpu.client.data_link.connection import decode_map
from rgpu.client.session import attachment as at
from rgpu.client.session.parts import Parts
from rgpu.link.data.lanes import WORTH
from rgpu.link.data.published import read_pong
from rgpu.link.loggers import get_logger
from rgpu.link.messages.data import ANSWER, ANSWER_AT, LANED_BACK, NEED, NOTICE, PONG, PRESENT, TEXT, WATERMARK
from rgpu.session.effects import Kind
from rgpu.session.errors import Corrupt, LinkError

if TYPE_CHECKING:
    from rgpu.client.data_link.connection import DataLink
    from rgpu.client.session.upkeep import Upkeep

log = get_logger(__name__)

MESSAGES = 64  #: of the worker, processed in a row
#: Calls complete, and bytes shipped, that are not counted as applied yet: fewer are left to the next PING.
MARKS, MARKED_BYTES = 64, 4 * 1024 * 1024


class Session(Parts, Protocol):
    """The part of the session's loop that this module uses."""

    over: str
    attachment: at.Attachment
    upkeep: Upkeep

    def feed(self, event: at.Event) -> None:
        """Give the attachment an event."""

    def lose(self, reason: str) -> None:
        """End the session because of ``reason``; the program's next call fails."""

    def effect(self, kind: Kind, position: int, note: str = "") -> None:
        """Record an effect at a journal position in the effects log."""


class Incoming:
    """See the module docstring. Used by the loop's thread."""

    def __init__(self, shipper: Session, takes_text: bool) -> None:
        self._shipper, self._takes_text = shipper, takes_text
        self.blocked = False  #: a message waits for space in the answer ring
        self.unread = False  #: more messages may have been received than were taken

    def detached(self) -> None:
        """Forget the state of a closed link."""
        self.blocked = self.unread = False

    def take(self, link: DataLink) -> None:
        """Process the messages received, at most :data:`MESSAGES` of them."""
        try:
            self._take(link)
        finally:
            self._shipper.returns.wake()

    def _take(self, link: DataLink) -> None:
        shipper, self.unread = self._shipper, False
        for _ in range(MESSAGES):
            try:
                link.flush()
                length = 0 if shipper.returns.full else link.lanes.awaited or link.waiting()
            except LinkError as error:
                shipper.down(link, error)
                return
            room = shipper.returns.room(length) if length else None
            self.blocked = length > 0 and room is None
            if room is None:
                return
            try:
                if not link.open_next(room):
                    return  # its lane wakes the loop when it has arrived
                self._message(link, room[0], room[1:])
            except (LinkError, Corrupt, struct.error) as error:
                shipper.down(link, error)
            if shipper.link is not link or shipper.over:
                return
        self.unread = True  # the others' turn; more may have been received than the socket will signal

    def _message(self, link: DataLink, kind: int, body: memoryview) -> None:
        shipper = self._shipper
        if not shipper.attachment.accepts(link.number, link.epoch):
            return
        if kind == ANSWER:
            if link.lanes.wanted and len(body) >= WORTH:
                link.long_bytes += len(body)
            shipper.returns.answer(body)
            if shipper.deliveries.divergences:
                self._diverged()
        elif kind == ANSWER_AT:
            shipper.returns.answer_at(body)
            if shipper.deliveries.divergences:
                self._diverged()
        elif kind == WATERMARK:
            self.marked(body)
            if shipper.bulk.complete(int.from_bytes(body[:8], "little")):
                shipper.release()
            shipper.returns.watermark(body)
        elif kind == TEXT and self._takes_text:
            shipper.returns.printed(body)
        elif kind == PONG:
            self.pong(body)
        elif kind == LANED_BACK:
            link.lanes.marked(body)
        elif kind == PRESENT:
            shipper.modules.present(body)
        elif kind == NEED and shipper.cursor is not None:
            shipper.modules.need(link, shipper.cursor, body)
            shipper.shipping.ping_lost()  # the worker dropped the messages behind
        elif kind == NOTICE:
            self._notice(link, decode_map(body))
        else:
            raise Corrupt(f"a message of type {kind} from the worker", type=kind, reason="type")

    def pong(self, body: bytes | memoryview) -> None:
        """Note the worker's position, which it has sent. Raises :class:`Corrupt`."""
        position, usual = read_pong(body)
        if usual is not None:
            self._shipper.shipping.usual = usual
        self._applied(position)

    def marked(self, body: memoryview) -> None:
        """Note the position of a watermark of the attached worker: complete calls were applied."""
        position, shipping = int.from_bytes(body[:8], "little"), self._shipper.shipping
        if position - shipping.acknowledged > MARKS or shipping.outstanding > MARKED_BYTES:
            self._applied(position)

    def _diverged(self) -> None:
        """End the session after a divergence, if the user chose that (``--divergence stop``)."""
        shipper = self._shipper
        if shipper.journal.policy.divergence != "stop" or shipper.over:
            return
        what = shipper.deliveries.divergences[0].what
        shipper.lose(f"the recovered session diverged: {what} (--divergence stop); its journal is kept")
        ended = {"session": shipper.identity.session, "reason": shipper.over, "exit_code": None}
        shipper.requests.submit(shipper.requests.quietly, "session.end", ended, 5.0)

    def _applied(self, position: int) -> None:
        shipper, shipping = self._shipper, self._shipper.shipping
        if position > shipping.acknowledged and position <= shipper.journal.last_seq:
            shipping.were_applied(position)
            shipper.journal.applied(position, shipper.cursor)
            if not shipper.journal.policy.recover:
                shipper.deliveries.forget(position)
            shipper.release()

    def _notice(self, link: DataLink, notice: dict[str, Any]) -> None:
        shipper = self._shipper
        kind, epoch = str(notice.get("kind")), notice.get("epoch")
        if not isinstance(epoch, int) or not shipper.attachment.accepts(link.number, epoch):
            return
        if kind == "cut":
            position = notice.get("position")
            if not isinstance(position, int) or position < 0:
                raise Corrupt(f"a cut notice with position {position!r}", reason="notice")
            shipper.effect(Kind.CUT, position, str(notice.get("image")))
            shipper.journal.cut(position, shipper.cursor)
            shipper.upkeep.covered(position)
            shipper.deliveries.forget(position)
            shipper.release()
        elif kind in ("moved", "fenced", "ended"):
            shipper.feed(at.Noticed(link.number, kind, epoch, str(notice.get("reason") or ""), time.monotonic()))
        elif kind == "shared":
            shipper.upkeep.shared(str(notice.get("peer"))[:100])
        elif kind == "control":
            shipper.requests.nodes.told(notice.get("address"), notice.get("public"))
        else:
            log.info("notice from the worker", session=shipper.identity.session, kind=kind)
