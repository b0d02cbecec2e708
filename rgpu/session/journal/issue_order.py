"""Whether calls take effect in the order of issue: catching up, as a state machine (SEMANTICS 20).

A worker *catches up* while it applies calls that the program issued earlier than it could run them: a replay, what
piled up behind a pause, a broken link, a start. Then a call begins only when what was issued before it on the session's
other streams is complete, which is what a program sees natively while its GPU is ahead of its CPU.

===========  ====================================================================================
state        meaning
===========  ====================================================================================
LIVE         calls are given to the device as they come
ORDERED      a backlog is applied: where the stream changes, what was given before is waited for
OVERLAPPING  a backlog is applied as it was issued: what is waited for needed a later call
===========  ====================================================================================

============  ==================================================  ===========================================
event         LIVE                                                ORDERED, OVERLAPPING
============  ==================================================  ===========================================
Attached      with a backlog: begin, until all of it is applied   until all of that is applied, too
Replaying     begin, until Settled                                until Settled
Settled       -                                                   LIVE
Resumed       begin, unless the program is ahead of its work      -
Gap           the same                                            -
Late          the same, unless those that Late began stalled      -
              or took too much of the time
Told          -                                                   LIVE, if the rest is what it usually queues
Dry           -                                                   LIVE, if nothing more is known to be published
Behind        begin                                               -
Lasting       -                                                   LIVE, if Behind or Late began it and it
                                                                  lasts as long as such a one may
Stalled       -                                                   ORDERED: OVERLAPPING
============  ==================================================  ===========================================

*Begin* leads to ORDERED (with ``enabled`` False, for measurements, to OVERLAPPING). No state is left before the
position that had been published when the catch-up began is reached and complete: what the device still has to do is
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
FRESH = 0.25  #: seconds: what was told is as old as this at most where it ends a catch-up
SHORT = 0.25  #: seconds that a catch-up which a few milliseconds began lasts at most
LONG = 5.0  #: seconds that one which calls under way began does: the program has become one that is so far ahead
#: Part of the time that catch-ups begun by a few milliseconds may take: where several sessions share a GPU everything
#: is late, each wait takes a turn of it, and a program kept in order for that would be later still.
SHARE = 0.05
#: A program that is always this far ahead of its work, or further: it is fed from a backlog at home as well.
UNBOUNDED = 2**32 - 1

#: Calls that are work of a stream, by their argument of that name. Waiting for a stream, making and ending it are none,
#: nor is the reading of a mirror: its writers are known to be complete then, and what has the stream before it stand,
#: a host function, may be waiting for these bytes.
_NO_WORK = frozenset({"stream_create", "stream_destroy", "stream_synchronize", "host_mirror_read"})
WORK = frozenset(call.id for call in BY_ID.values()
                 if call.name not in _NO_WORK and any(arg.name == "stream" for arg in call.args))


def stream_of(call_id: int, args: Any) -> int | None:
    """The stream that a call gives work to; None: to none, so it waits for no order."""
    return int(decoders.decode(call_id, args).stream) if call_id in WORK else None


class State(Enum):
    """State of the order in which calls are applied."""

    LIVE = "live"
    ORDERED = "ordered"
    OVERLAPPING = "overlapping"


# -- events: ``applied`` is the session's position, ``done`` the one up to which all work is complete ----------
@dataclass(frozen=True, slots=True)
class Attached:
    """An agent whose program has published up to ``published``."""

    applied: int
    published: int


@dataclass(frozen=True, slots=True)
class Replaying:
    """Calls come that another owner has applied."""

    applied: int


@dataclass(frozen=True, slots=True)
class Settled:
    """Event: the replay is over."""

    applied: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """The session stood still for ``seconds``. ``usual``: calls that the program is mostly ahead of its work."""

    applied: int
    seconds: float
    usual: int


@dataclass(frozen=True, slots=True)
class Gap:
    """Calls did not come, or were not taken, for ``seconds``; ``who`` stood still."""

    applied: int
    who: str
    seconds: float
    usual: int


@dataclass(frozen=True, slots=True)
class Late:
    """Calls came ``seconds`` later than calls come at the quickest, whatever kept them.

    ``share``: of the last while that was spent in catch-ups which such lateness began.
    """

    applied: int
    seconds: float
    usual: int
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Behind:
    """Clearly more calls than ``usual`` are under way when work comes for another stream."""

    applied: int
    usual: int


@dataclass(frozen=True, slots=True)
class Lasting:
    """The catch-up goes on for ``seconds`` now."""

    applied: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Told:
    """The program's side has published up to ``published``, it said ``late`` seconds ago."""

    applied: int
    done: int
    published: int
    usual: int
    late: float


@dataclass(frozen=True, slots=True)
class Dry:
    """Everything that came is applied, and nothing is waiting to be read."""

    applied: int
    done: int


@dataclass(frozen=True, slots=True)
class Stalled:
    """Nothing of what is waited for completes; ``what`` names the call."""

    applied: int
    what: str


Event = Attached | Replaying | Settled | Resumed | Gap | Late | Behind | Lasting | Told | Dry | Stalled


class IssueOrder:
    """See the module docstring. Not locked."""

    def __init__(self, enabled: bool = True) -> None:
        self.state = State.LIVE
        self.reason = "no backlog so far"  #: of the last transition
        self.target = 0  #: the catch-up goes on up to here at least
        self.published = 0  #: the program's side had published up to here, as far as is known
        self.catch_ups = 0  #: begun so far
        self.stalls = 0  #: of them, those that came to overlap
        self._enabled = enabled
        self.by_distance = False  #: nothing but the number of calls under way began this catch-up
        self.by_lateness = False  #: nothing but calls that came some milliseconds late did
        #: Work of this program waits for later calls, and one stall was found out so: some milliseconds are not worth
        #: another, however often a busy machine is late.
        self.lateness_matters = True

    @property
    def catching_up(self) -> bool:
        return self.state is not State.LIVE

    def handle(self, event: Event) -> bool:
        """Take an event; whether the state is another one now."""
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
            self._begin(event.applied, f"the session stood still at call {event.applied} for {event.seconds:.3f} s")

    def _gap(self, event: Gap) -> None:
        if event.usual < UNBOUNDED:
            self._begin(event.applied, f"{event.who} stood still for {event.seconds:.1f} s, at call {event.applied}")

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
            self._end(f"for {event.seconds:.0f} s the program was further ahead of its work than before: it is its way")
        elif self.by_lateness and event.seconds > SHORT:
            self._end(f"some milliseconds are not worth more than {SHORT} s of order")

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

#: (state, event) → transition; what is not here changes nothing.
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
