"""The attachment of an agent to its session's owner: the fence, as a state machine without I/O.

Rules (OWNERSHIP 1): at most one link is open; a link of epoch e is closed
before one of a higher epoch is opened; messages of epochs below the highest
seen are ignored. An epoch counts as seen when the pool named it over the
authenticated control link, or a worker proved it by a sealed frame.

================  ==============================================================
state             meaning
================  ==============================================================
FINDING           no link; the pool is asked for the owner
CONNECTING        a link to the owner is being opened
ATTACHED          calls are shipped
CLOSING           the link is being closed; nothing else is done until then
LOST              the session is over or cannot be continued: final
ENDED             the program is over: final
================  ==============================================================

Pass events to :meth:`Attachment.handle`; carry out the commands that it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rgpu.client.session.owner import Owner, OwnerGone, OwnerKnown, OwnerUnknown

UNREACHABLE_SECONDS = 10.0  #: OWNERSHIP 7
_BACKOFF = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)  #: seconds before the n-th search in a row


class State(Enum):
    """State of an attachment."""

    FINDING = "finding"
    CONNECTING = "connecting"
    ATTACHED = "attached"
    CLOSING = "closing"
    LOST = "lost"
    ENDED = "ended"


# -- events: each carries ``now``, monotonic seconds; the pool's answers about the owner: rgpu.client.session.owner --
@dataclass(frozen=True, slots=True)
class Attached:
    """The worker's ATTACHED: a sealed frame, so the epoch is proven."""

    link: int
    epoch: int
    next: int
    now: float


@dataclass(frozen=True, slots=True)
class LinkDown:
    """A link that could not be opened, or broke; it is already closed."""

    link: int
    reason: str
    now: float


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """A link is closed, as commanded."""

    link: int
    now: float


@dataclass(frozen=True, slots=True)
class Noticed:
    """The worker's NOTICE of kind moved, fenced or ended."""

    link: int
    kind: str
    epoch: int
    reason: str
    now: float


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Event: the session is to end."""

    now: float


Event = OwnerKnown | OwnerUnknown | OwnerGone | Attached | LinkDown | LinkClosed | Noticed | Shutdown


# -- commands -----------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Open:
    """Connect, exchange the preamble, send ATTACH; the event Attached or LinkDown follows."""

    link: int
    owner: Owner


@dataclass(frozen=True, slots=True)
class Close:
    """Close the link; the event LinkClosed follows. Messages not yet read from it are ignored."""

    link: int


@dataclass(frozen=True, slots=True)
class Find:
    """Ask the pool for the owner after ``delay`` seconds; an event Owner* follows."""

    delay: float


@dataclass(frozen=True, slots=True)
class Ship:
    """Ship the journal from position ``next`` over this link."""

    link: int
    next: int


@dataclass(frozen=True, slots=True)
class Report:
    """Report to any node that the owner, though alive, was not reached for ``seconds``."""

    owner: Owner
    seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the program's side: its calls return an error."""

    reason: str


Command = Open | Close | Find | Ship | Report | GiveUp


class Attachment:
    """State machine of one session; see the module docstring."""

    def __init__(self) -> None:
        self.state = State.FINDING
        self.highest = 0  #: the highest epoch seen
        self.link = 0  #: number of the newest link; numbers are not used again
        self.owner: Owner | None = None  #: of the newest link
        self.reason = ""  #: why it is lost, or not attached
        self._wanted: Owner | None = None  #: the owner that the pool named while the link is being closed
        self._failing_since: float | None = None
        self._reported: float | None = None
        self._searches = 0

    def handle(self, event: Event) -> list[Command]:
        """Return the commands that follow from an event; an event that does not fit the state is dropped."""
        link = getattr(event, "link", self.link)
        transition = TABLE.get((self.state, type(event)))
        if transition is None or link != self.link:
            return []
        return transition(self, event)

    def accepts(self, link: int, epoch: int) -> bool:
        """Return whether an answer or a notice of this link and epoch is to be processed."""
        return self.state is State.ATTACHED and link == self.link and epoch == self.highest

    # -- transitions ------------------------------------------------------------------
    def _open(self, event: OwnerKnown) -> list[Command]:
        owner = event.owner
        if owner.epoch < self.highest:
            self.reason = f"a node still names epoch {owner.epoch}; {self.highest} was seen"
            return [self._find()]
        commands: list[Command] = []
        since = self._failing_since
        if since is not None and owner.alive and owner.epoch == self.highest:
            quiet_since = max(since, self._reported or since)
            if event.now - quiet_since >= UNREACHABLE_SECONDS:
                self._reported = event.now
                commands.append(Report(owner, event.now - since))
        return [*commands, self._connect(owner)]

    def _connect(self, owner: Owner) -> Command:
        if owner.epoch > self.highest:
            self._failing_since = self._reported = None
        self.highest = max(self.highest, owner.epoch)
        self.state, self.owner, self._wanted = State.CONNECTING, owner, None
        self.link += 1
        return Open(self.link, owner)

    def _search_again(self, event: OwnerUnknown) -> list[Command]:
        self.reason = event.reason
        return [self._find()]

    def _find(self) -> Command:
        self.state = State.FINDING
        delay = _BACKOFF[min(self._searches, len(_BACKOFF) - 1)]
        self._searches += 1
        return Find(delay)

    def _attached(self, event: Attached) -> list[Command]:
        if event.epoch < self.highest:
            return self._close("the worker has an older epoch than was seen")
        self.highest = event.epoch
        self.state, self.reason = State.ATTACHED, ""
        self._failing_since = self._reported = None
        self._searches = 0
        return [Ship(self.link, event.next)]

    def _down(self, event: LinkDown) -> list[Command]:
        self.reason = event.reason
        if self._failing_since is None:
            self._failing_since = event.now
        return [self._find()]

    def _news(self, event: OwnerKnown) -> list[Command]:
        """An owner named while a link is open: only a higher epoch matters."""
        if event.owner.epoch <= self.highest:
            return []
        self.highest = event.owner.epoch
        self._wanted = event.owner
        return self._close("the session has a new owner")

    def _close(self, reason: str) -> list[Command]:
        self.state, self.reason = State.CLOSING, reason
        return [Close(self.link)]

    def _closed(self, event: LinkClosed | LinkDown) -> list[Command]:
        wanted = self._wanted
        if wanted is not None and wanted.epoch >= self.highest:
            return [self._connect(wanted)]
        return [self._find()]

    def _news_while_closing(self, event: OwnerKnown) -> list[Command]:
        if event.owner.epoch > self.highest:
            self.highest = event.owner.epoch
            self._wanted = event.owner
        return []

    def _noticed(self, event: Noticed) -> list[Command]:
        if event.epoch < self.highest:
            return []
        if event.kind == "ended":
            return self._gone_with_link(event)
        return self._close(event.reason or f"the owner says: {event.kind}")

    def _gone_with_link(self, event: OwnerGone | Noticed) -> list[Command]:
        self.state, self.reason = State.LOST, event.reason or "the session has ended"
        return [Close(self.link), GiveUp(self.reason)]

    def _gone(self, event: OwnerGone) -> list[Command]:
        self.state, self.reason = State.LOST, event.reason
        return [GiveUp(event.reason)]

    def _end(self, event: Shutdown) -> list[Command]:
        self.state = State.ENDED
        return []

    def _end_with_link(self, event: Shutdown) -> list[Command]:
        self.state = State.ENDED
        return [Close(self.link)]


_Transition = Callable[[Attachment, Any], list[Command]]
F, C, A, L = State.FINDING, State.CONNECTING, State.ATTACHED, State.CLOSING

#: (state, event) → transition; any other event is dropped.
TABLE: dict[tuple[State, type[Any]], _Transition] = {
    (F, OwnerKnown): Attachment._open,
    (F, OwnerUnknown): Attachment._search_again,
    (F, OwnerGone): Attachment._gone,
    (F, Shutdown): Attachment._end,
    (C, Attached): Attachment._attached,
    (C, LinkDown): Attachment._down,
    (C, OwnerKnown): Attachment._news,
    (C, OwnerGone): Attachment._gone_with_link,
    (C, Shutdown): Attachment._end_with_link,
    (A, LinkDown): Attachment._down,
    (A, Noticed): Attachment._noticed,
    (A, OwnerKnown): Attachment._news,
    (A, OwnerGone): Attachment._gone_with_link,
    (A, Shutdown): Attachment._end_with_link,
    (L, LinkClosed): Attachment._closed,
    (L, LinkDown): Attachment._closed,
    (L, OwnerKnown): Attachment._news_while_closing,
    (L, OwnerGone): Attachment._gone,
    (L, Shutdown): Attachment._end,
}
