"""Forecast of a move's cost by copying and by replay, and the choice of ``auto`` between the two. Pure.

The inputs are measured: the link's speed v, how many pages differ now and how many change
in a short time, free memory for a snapshot, the fixed part of any pause, and
the share of pages that an earlier replay got wrong, if there was one. From these follow, for each
mode, the downtime (no call is applied) and the brownout (time lost because the
session is slowed, as the equivalent seconds of downtime).

Copying: rounds shrink until a round sends what changes while it is sent. Let
d(t) be the pages that change in t seconds, linear between what was measured.
The last pause sends d(t*) pages with t* the fixed point of t = d(t) · page / v,
reached from above in a bounded number of rounds.

Replay: the snapshot of D pages streams in S = D · page / v, and meanwhile a backlog of S seconds of
the program's own time grows. The source then runs at u = 1 − slowdown of its speed, so the backlog drains
at rate 1 − u: in S / slowdown seconds, and the program loses slowdown · S / slowdown = S seconds of
work, whatever the slowdown. The downtime is the last pause, in which the pages that the
replay got wrong are sent. Their number is not known beforehand: samples
(:mod:`.sampling`) estimate it while the replay catches up, and :func:`given_up` decides
whether the replay is still worth continuing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rgpu.migrate.move.sampling import Sampled

PAGE_BYTES = 64 << 10
ROUNDS = 6
#: Seconds of brownout that are accepted to save one second of downtime.
WORTH = 20.0
#: Seconds: a replay gains nothing where copying has no more downtime than this.
SHORT = 0.1
#: Speed of a link that was not measured yet, bytes/s: 10 Gb/s.
ASSUMED_SPEED = 1.25e9

Mode = Literal["copy", "replay"]


@dataclass(frozen=True, slots=True)
class Measured:
    """Inputs of a forecast. ``changed``: (seconds, pages that changed in them), ascending; ``speed`` in bytes/s."""

    pages: int  #: all pages of the session
    differing: int  #: pages whose present content the destination does not hold
    changed: tuple[tuple[float, int], ...]
    speed: float
    free_pages: int  #: pages that a snapshot may copy aside: to device memory, then to host memory
    settle_seconds: float = 0.02  #: fixed part of any last pause: draining, hashing, objects, the commit
    mismatched: float = 0.0  #: share of the pages that a replay got wrong
    replay_refused: str = ""  #: why a replay is not possible; empty: it is


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a move in seconds; ``total`` counts from now on."""

    downtime: float
    brownout: float
    total: float

    def as_dict(self) -> dict[str, float]:
        """Return the cost in ms, as in statistics."""
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
    """Return the pages that change in ``seconds``: linear between the measurements, constant after the last."""
    before, pages_before = 0.0, 0.0
    for until, pages in sorted(measured.changed):
        if seconds <= until:
            return pages_before + (pages - pages_before) * (seconds - before) / max(until - before, 1e-9)
        before, pages_before = until, max(pages_before, float(pages))
    return min(pages_before, measured.pages) if measured.changed else 0.0


def copying(measured: Measured) -> Cost:
    """Return the cost of copying until the rounds gain nothing more."""
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
    """Return the cost of a snapshot and a replay that catches up at ``slowdown`` (0 to 1); None: not possible."""
    if measured.replay_refused or slowdown <= 0 or measured.differing > measured.free_pages:
        return None
    stream = measured.differing * PAGE_BYTES / measured.speed
    repair = measured.mismatched * measured.pages * PAGE_BYTES / measured.speed
    downtime = 2 * measured.settle_seconds + repair  # the snapshot's own pause, and the last one
    return Cost(downtime, stream, stream + stream / slowdown + downtime)


def choose(measured: Measured, *, max_downtime: float, max_slowdown: float) -> Choice:
    """Return the mode that ``--mode auto`` takes, with the sentence that gives the reason."""
    copy, replay = copying(measured), replaying(measured, max_slowdown)
    told = f"copying would stop it for {_time(copy.downtime)}"
    if replay is None:
        why = measured.replay_refused or ("no slowdown is allowed" if max_slowdown <= 0 else
                                          f"{measured.differing} pages differ and there is memory for a snapshot of "
                                          f"{measured.free_pages}")
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
        return Choice("replay", f"{told}: {_time(saved)} less downtime is worth the slowdown", copy, replay)
    return Choice("copy", f"{told}: {_time(max(saved, 0.0))} less downtime is not worth the slowdown", copy,
                  replay)


def repair_fits(pages: int, speed: float, seconds_left: float) -> bool:
    """Whether ``pages`` that a replay got wrong can be sent in what is left of the promised downtime."""
    return pages * PAGE_BYTES / speed <= seconds_left


def given_up(measured: Measured, sampled: Sampled, *, behind: float, limit: float, max_slowdown: float,
             asked: bool) -> str:
    """Return why a replay under way is to be given up for copying; empty: it continues.

    ``behind``: backlog in seconds of the program's own time, which is what continuing costs in brownout;
    ``limit``: seconds that the last pause may take; ``asked``: the user chose replay, so it is not weighed against
    copying and only the limit counts. The limit is compared with the fewest pages that may differ (the lower bound of
    the sample's interval), so that an unlucky sample does not end a replay.
    """
    if not repair_fits(sampled.fewest_pages, measured.speed, limit):
        return (f"{sampled}: sending {sampled.fewest_pages} again takes "
                f"{_time(sampled.fewest_pages * PAGE_BYTES / measured.speed)}, longer than the {_time(limit)} that the "
                "stop may last")
    replay = replaying(replace(measured, mismatched=sampled.share), max_slowdown)
    if asked or replay is None:
        return ""
    again = copying(replace(measured, differing=measured.pages))  # the destination's pages are freed with its context
    saved = again.downtime - (replay.downtime - measured.settle_seconds)  # the snapshot's own pause is over
    if saved * WORTH + again.brownout >= behind:
        return ""
    return (f"{sampled}: its stop would be {_time(replay.downtime)} against {_time(again.downtime)} by copying, which "
            f"is not worth {_time(behind)} more of slowing the program")


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
