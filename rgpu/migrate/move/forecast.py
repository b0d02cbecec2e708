"""What a move will cost by copying and by replay, and which of the two ``auto`` takes. Pure.

Measured are: the link's speed, how many pages differ now and how many change
in a short time, free memory for a cut, the pause that a cut needs anyway, and
how many pages a replay got wrong, if one was tried. From these follow, for each
mode, the downtime (nothing is applied) and the brownout (time lost because the
session is slowed, in full seconds of standing still).

Copying: rounds shrink until a round sends what changes while it is sent. Let
d(t) be the pages that change in t seconds, linear between what was measured.
The last pause sends d(t*) pages with t* the fixed point of t = d(t) · page / v,
reached from above in a bounded number of rounds.

Replay: the cut of D pages streams in S = D · page / v, and meanwhile a backlog of S seconds of the
program's own time grows. The source then runs at u = 1 − slowdown of its speed, so the backlog drains
at rate 1 − u: in S / slowdown seconds, and the program loses slowdown · S / slowdown = S seconds of
work, whatever the slowdown. Downtime is the last pause with the pages that the
replay got wrong. How many these are nobody knows beforehand: samples
(:mod:`.sampling`) tell while the replay catches up, and :func:`given_up` says
when it is not worth going on with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rgpu.migrate.move.sampling import Sampled

PAGE_BYTES = 64 << 10
ROUNDS = 6
#: Downtime is dear: so many seconds of brownout are taken for one second of it.
WORTH = 20.0
#: A move that stops the program for no longer than this has nothing to gain from a replay.
SHORT = 0.1
#: Of a link that nobody measured yet: 10 Gb/s.
ASSUMED_SPEED = 1.25e9

Mode = Literal["copy", "replay"]


@dataclass(frozen=True, slots=True)
class Measured:
    """``changed``: (seconds, pages that changed in them), ascending; ``speed`` in bytes/s."""

    pages: int  #: of the session
    differing: int  #: pages that the destination does not have as they are now
    changed: tuple[tuple[float, int], ...]
    speed: float
    free_pages: int  #: room for copies aside: device memory, then host memory
    settle_seconds: float = 0.02  #: of any last pause: draining, hashing, objects, the commit
    mismatched: float = 0.0  #: share of the pages that a replay got wrong
    replay_refused: str = ""  #: why there can be no replay


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds. ``total`` from now on."""

    downtime: float
    brownout: float
    total: float

    def as_dict(self) -> dict[str, float]:
        """Return the cost in ms, as statistics carry it."""
        return {"downtime_ms": round(self.downtime * 1000, 1), "brownout_ms": round(self.brownout * 1000, 1),
                "total_ms": round(self.total * 1000, 1)}


@dataclass(frozen=True, slots=True)
class Choice:
    """The mode chosen, why, and what either would cost."""

    mode: Mode
    reason: str
    copy: Cost
    replay: Cost | None

    @property
    def cost(self) -> Cost:
        return self.replay if self.mode == "replay" and self.replay is not None else self.copy


def changed_in(measured: Measured, seconds: float) -> float:
    """Pages that change in so many seconds: linear between the measurements, level after the last."""
    before, pages_before = 0.0, 0.0
    for until, pages in sorted(measured.changed):
        if seconds <= until:
            return pages_before + (pages - pages_before) * (seconds - before) / max(until - before, 1e-9)
        before, pages_before = until, max(pages_before, float(pages))
    return min(pages_before, measured.pages) if measured.changed else 0.0


def copying(measured: Measured) -> Cost:
    """The cost of copying until the rounds gain nothing more."""
    page_seconds = PAGE_BYTES / measured.speed
    total, round_seconds = 0.0, measured.differing * page_seconds
    for _ in range(ROUNDS):
        total += round_seconds
        following = changed_in(measured, round_seconds) * page_seconds
        if following > round_seconds * 0.7:
            round_seconds = min(following, round_seconds)
            break
        round_seconds = following
    downtime = measured.settle_seconds + round_seconds
    return Cost(downtime, 0.05 * total, total + downtime)


def replaying(measured: Measured, slowdown: float) -> Cost | None:
    """The cost of a cut and a replay that is caught up with at ``slowdown`` (0 to 1); None: there can be none."""
    if measured.replay_refused or slowdown <= 0 or measured.differing > measured.free_pages:
        return None
    stream = measured.differing * PAGE_BYTES / measured.speed
    repair = measured.mismatched * measured.pages * PAGE_BYTES / measured.speed
    downtime = 2 * measured.settle_seconds + repair  # the cut's own pause, and the last one
    return Cost(downtime, stream, stream + stream / slowdown + downtime)


def choose(measured: Measured, *, max_downtime: float, max_slowdown: float) -> Choice:
    """What ``--mode auto`` takes, and the sentence that says why."""
    copy, replay = copying(measured), replaying(measured, max_slowdown)
    told = f"copying would stop it for {_time(copy.downtime)}"
    if replay is None:
        why = measured.replay_refused or ("no slowdown is allowed" if max_slowdown <= 0 else
                                          f"{measured.differing} pages differ and {measured.free_pages} have room for "
                                          "a cut")
        return Choice("copy", f"{told}; a replay is not possible: {why}", copy, None)
    told += f", a replay for {_time(replay.downtime)} and slow it for {_time(replay.brownout)} in all"
    if measured.mismatched:
        told += f" (an earlier replay got {measured.mismatched:.0%} of its pages wrong)"
    if copy.downtime <= SHORT:
        return Choice("copy", f"{told}: a stop so short is not worth a replay", copy, replay)
    fits_copy, fits_replay = copy.downtime <= max_downtime, replay.downtime <= max_downtime
    if fits_copy != fits_replay:
        mode: Mode = "copy" if fits_copy else "replay"
        return Choice(mode, f"{told}: only the {'copy' if fits_copy else 'replay'} keeps the promised "
                            f"{_time(max_downtime)}", copy, replay)
    saved, lost = copy.downtime - replay.downtime, replay.brownout - copy.brownout
    if saved * WORTH > lost:
        return Choice("replay", f"{told}: {_time(saved)} less standing still is worth the slowdown", copy, replay)
    return Choice("copy", f"{told}: {_time(max(saved, 0.0))} less standing still is not worth the slowdown", copy,
                  replay)


def repair_fits(pages: int, speed: float, seconds_left: float) -> bool:
    """Whether so many pages that a replay got wrong can be sent within what is left of the promised downtime."""
    return pages * PAGE_BYTES / speed <= seconds_left


def given_up(measured: Measured, sampled: Sampled, *, behind: float, limit: float, max_slowdown: float,
             asked: bool) -> str:
    """Why a replay that is under way is to be given up for copying; empty: it goes on.

    ``behind``: seconds of the program's own time still to be caught up with, so what going on costs in brownout;
    ``limit``: of the last pause; ``asked``: the request alone weighs it against copying, so only the limit
    counts. The limit is judged by the fewest pages that may differ: a replay is not given up for bad luck.
    """
    if not repair_fits(sampled.fewest_pages, measured.speed, limit):
        return (f"{sampled}: sending {sampled.fewest_pages} again takes "
                f"{_time(sampled.fewest_pages * PAGE_BYTES / measured.speed)}, longer than the {_time(limit)} that the "
                "stop may last")
    replay = replaying(replace(measured, mismatched=sampled.share), max_slowdown)
    if asked or replay is None:
        return ""
    again = copying(replace(measured, differing=measured.pages))  # the destination's pages go with its context
    saved = again.downtime - (replay.downtime - measured.settle_seconds)  # the cut's own pause is over
    if saved * WORTH + again.brownout >= behind:
        return ""
    return (f"{sampled}: its stop would be {_time(replay.downtime)} against {_time(again.downtime)} by copying, which "
            f"is not worth {_time(behind)} more of slowing the program")


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
