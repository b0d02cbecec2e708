"""State machine for catch-up: whether calls take effect in the order of issue (SEMANTICS 20).

A worker *catches up* while it applies calls that the program issued earlier than the worker could run them: a replay,
or a backlog after a pause, a broken link, a start. Then a call begins only when the calls issued before it on the
session's other streams are complete, which is what a program sees natively while its GPU is ahead of its CPU.

===========  ====================================================================================
state        meaning
===========  ====================================================================================
LIVE         calls are given to the device as they arrive
ORDERED      a backlog is applied: where the stream changes, earlier calls are waited for
OVERLAPPING  a backlog is applied without waiting: the awaited work needed a later call
===========  ====================================================================================

============  ==================================================  ===========================================
event         LIVE                                                ORDERED, OVERLAPPING
============  ==================================================  ===========================================
Attached      with a backlog: begin, until all of it is applied   until the new backlog is applied, too
Replaying     begin, until Settled                                until Settled
Settled       -                                                   LIVE
Resumed       begin, unless the program is ahead of its work      -
Gap           as Resumed                                          -
Late          as Resumed, unless catch-ups begun by Late          -
              stalled or took too much of the time
Told          -                                                   LIVE, if the program usually queues the rest
Dry           -                                                   LIVE, if no more calls are known to be published
Behind        begin                                               -
Lasting       -                                                   LIVE, if Behind or Late began it and it has
                                                                  reached its maximal duration
Stalled       -                                                   ORDERED: OVERLAPPING
============  ==================================================  ===========================================

*Begin* leads to ORDERED (with ``enabled`` False, for measurements, to OVERLAPPING). A catch-up does not end before all
calls up to the position that had been published at its begin are applied and complete: unfinished work of the device is
part of the backlog.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_ID

EVER = 2**63  #: a position that no session reaches
FRESH = 0.25  #: seconds: maximal age of the program's report that ends a catch-up
SHORT = 0.25  #: seconds: maximal duration of a catch-up that began because calls were a few milliseconds late
LONG = 5.0  #: seconds: maximal duration of one that began because of many calls under way: this has become usual
#: Maximal share of the time for catch-ups that began because calls were late: where several sessions share a GPU all
#: calls are late, each wait costs a time slice, and keeping the order would make the program later still.
SHARE = 0.05
#: Distance of a program that is always far ahead of its work: it is fed from a backlog without rgpu as well.
UNBOUNDED = 2**32 - 1

#: Calls with an argument ``stream`` that are not work of that stream: waiting for it, making and ending it, and reading
#: a mirror. A mirror's writers are complete when it is read, and a host function that blocks the stream before it may
#: be waiting for these bytes. A word that the CPU wrote while a kernel ran takes effect while it runs.
_NO_WORK = frozenset({"stream_create", "stream_destroy", "stream_synchronize", "host_mirror_read", "host_word_write"})
WORK = frozenset(call.id for call in BY_ID.values()
                 if call.name not in _NO_WORK and any(arg.name == "stream" for arg in call.args))


def stream_of(call_id: int, args: Any) -> int | None:
    """Return the stream to which a call gives work; None: to no stream, so it waits for no order."""
    return int(decoders.decode(call_id, args).stream) if call_id in WORK else None


class State(Enum):
    """State of the order in which calls are applied."""

    LIVE = "live"
    ORDERED = "ordered"
    OVERLAPPING = "overlapping"


# -- events: ``applied`` is the session's position, ``done`` the position up to which all work is complete -----
@dataclass(frozen=True, slots=True)
class Attached:
    """An agent attached; its program has published calls up to ``published``."""

    applied: int
    published: int


@dataclass(frozen=True, slots=True)
class Replaying:
    """A replay begins: calls that another owner has applied are received."""

    applied: int


@dataclass(frozen=True, slots=True)
class Settled:
    """The replay has ended."""

    applied: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """The session was paused for ``seconds``. ``usual``: calls by which the program is mostly ahead of its work."""

    applied: int
    seconds: float
    usual: int


@dataclass(frozen=True, slots=True)
class Gap:
    """Calls were not received, or not applied, for ``seconds``; ``who``: the part that made no progress."""

    applied: int
    who: str
    seconds: float
    usual: int


@dataclass(frozen=True, slots=True)
class Late:
    """Calls arrived ``seconds`` later than with the shortest observed delay, for whatever reason.

    ``share``: share of the recent time that was spent in catch-ups begun by such lateness.
    """

    applied: int
    seconds: float
    usual: int
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Behind:
    """Clearly more calls than ``usual`` are under way when work for another stream arrives."""

    applied: int
    usual: int


@dataclass(frozen=True, slots=True)
class Lasting:
    """The catch-up has lasted for ``seconds``."""

    applied: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Told:
    """The program's side reported ``late`` seconds ago that it has published calls up to ``published``."""

    applied: int
    done: int
    published: int
    usual: int
    late: float


@dataclass(frozen=True, slots=True)
class Dry:
    """All received calls are applied, and no data is waiting to be read."""

    applied: int
    done: int


@dataclass(frozen=True, slots=True)
class Stalled:
    """None of the awaited work completes; ``what`` names the call."""

    applied: int
    what: str


Event = Attached | Replaying | Settled | Resumed | Gap | Late | Behind | Lasting | Told | Dry | Stalled


class IssueOrder:
    """See the module docstring. Not locked."""

    def __init__(self, enabled: bool = True) -> None:
        self.state = State.LIVE
        self.reason = "no backlog so far"  #: reason of the last transition
        self.target = 0  #: position up to which the catch-up lasts at least
        self.published = 0  #: position up to which the program's side is known to have published
        self.catch_ups = 0  #: number of catch-ups begun
        self.stalls = 0  #: number of catch-ups that changed to OVERLAPPING
        self._enabled = enabled
        self.by_distance = False  #: this catch-up began only because of the number of calls under way
        self.by_lateness = False  #: this catch-up began only because calls were some milliseconds late
        #: False after a catch-up begun by lateness has stalled: this program's work waits for later calls, and avoiding
        #: some milliseconds of lateness is not worth another stall.
        self.lateness_matters = True

    @property
    def catching_up(self) -> bool:
        return self.state is not State.LIVE

    def handle(self, event: Event) -> bool:
        """Handle an event; return whether the state changed."""
        before = self.state
        transition = TABLE.get((self.state, type(event)))
        if transition is not None:
            transition(self, event)
        return self.state is not before

    # -- transitions ----------------------------------------------------------------
    def _begin(self, target: int, reason: str) -> None:
        self.target = target
        self.catch_ups += 1
        self.by_distance = self.by_lateness = False
        self.state, self.reason = State.ORDERED, reason
        if not self._enabled:
            self.state, self.reason = State.OVERLAPPING, f"{reason}; RGPU_CATCH_UP=overlap asks for no order"

    def _end(self, reason: str) -> None:
        self.state, self.reason, self.target = State.LIVE, reason, 0

    def _attached(self, event: Attached) -> None:
        self.published = event.published
        if event.published > event.applied:
            self._begin(event.published, f"calls {event.applied + 1} to {event.published} were issued before the agent "
                                         "attached here")

    def _attached_again(self, event: Attached) -> None:
        self.published = event.published
        self.target = max(self.target, event.published)
        self.by_distance = self.by_lateness = False

    def _replaying(self, event: Replaying) -> None:
        self._begin(EVER, f"calls from {event.applied + 1} on were applied by the session's owner before")

    def _replaying_too(self, event: Replaying) -> None:
        self.target = EVER
        self.by_distance = self.by_lateness = False

    def _settled(self, event: Settled) -> None:
        self._end(f"the replay came to its end at call {event.applied}")

    def _resumed(self, event: Resumed) -> None:
        if event.usual < UNBOUNDED:
            self._begin(event.applied, f"the session was paused at call {event.applied} for {event.seconds:.3f} s")

    def _gap(self, event: Gap) -> None:
        if event.usual < UNBOUNDED:
            self._begin(event.applied, f"{event.who} made no progress for {event.seconds:.1f} s, at call "
                                       f"{event.applied}")

    def _late(self, event: Late) -> None:
        if event.usual < UNBOUNDED and self.lateness_matters and event.share <= SHARE:
            self._begin(event.applied, f"calls behind {event.applied} came {1000 * event.seconds:.1f} ms late")
            self.by_lateness = True

    def _behind(self, event: Behind) -> None:
        self._begin(event.applied, f"more calls are under way at call {event.applied} than the {event.usual} that the "
                                   "program is mostly ahead of its work")
        self.by_distance = True

    def _lasting(self, event: Lasting) -> None:
        if self.by_distance and event.seconds > LONG:
            self._end(f"for {event.seconds:.0f} s the program was further ahead of its work than before: this is usual "
                      "now")
        elif self.by_lateness and event.seconds > SHORT:
            self._end(f"lateness of some milliseconds keeps the order for {SHORT} s at most")

    def _note(self, event: Told) -> None:
        self.published = max(self.published, event.published)

    def _told(self, event: Told) -> None:
        self._note(event)
        left = event.published - event.done
        if event.done < self.target:
            return
        if event.usual >= UNBOUNDED or left <= event.usual and event.late <= FRESH:
            self._end(f"{max(left, 0)} calls are not complete at call {event.applied}, no more than the program mostly "
                      "has queued")

    def _dry(self, event: Dry) -> None:
        if event.done >= max(self.target, self.published, event.applied):
            self._end(f"all calls that were published are complete, up to {event.applied}")

    def _stalled(self, event: Stalled) -> None:
        self.stalls += 1
        self.lateness_matters &= not self.by_lateness
        self.state = State.OVERLAPPING
        self.reason = f"{event.what} does not end: it may wait for a later call"


_Transition = Callable[[IssueOrder, Any], None]
_L, _O, _V = State.LIVE, State.ORDERED, State.OVERLAPPING

#: (state, event) → transition; other pairs change nothing.
TABLE: dict[tuple[State, type[Any]], _Transition] = {
    (_L, Attached): IssueOrder._attached,
    (_L, Replaying): IssueOrder._replaying,
    (_L, Resumed): IssueOrder._resumed,
    (_L, Gap): IssueOrder._gap,
    (_L, Late): IssueOrder._late,
    (_L, Behind): IssueOrder._behind,
    (_L, Told): IssueOrder._note,
    (_O, Attached): IssueOrder._attached_again,
    (_O, Replaying): IssueOrder._replaying_too,
    (_O, Settled): IssueOrder._settled,
    (_O, Told): IssueOrder._told,
    (_O, Dry): IssueOrder._dry,
    (_O, Lasting): IssueOrder._lasting,
    (_O, Stalled): IssueOrder._stalled,
    (_V, Attached): IssueOrder._attached_again,
    (_V, Replaying): IssueOrder._replaying_too,
    (_V, Settled): IssueOrder._settled,
    (_V, Told): IssueOrder._told,
    (_V, Dry): IssueOrder._dry,
    (_V, Lasting): IssueOrder._lasting,
}
