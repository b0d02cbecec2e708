"""Count of the losses of a session's server at one place in its calls (OWNERSHIP 9). Pure.

A loss records the progress of the work: every call ≤ ``complete`` was complete, device work included; the call
``begun`` was the last one begun. A call that ends its worker is after ``complete`` and not after ``begun``, each time.

==============================================  ======================================================================
the loss                                        counts
==============================================  ======================================================================
begun beyond all that was ever complete         towards MAX_LOSSES: the next call to complete may be the cause
begun at or below what was complete once:       not: those calls were passed before. A worker that is repeatedly
a replay, or nothing under way                  killed while it replays only loses time
at an unknown place (a start that               towards MAX_LOSSES, unless the session had run for
failed, a sick device)                          SAME_PLACE_SECONDS since its last start
==============================================  ======================================================================

Progress (a call complete beyond the last one that a loss had begun) takes that loss out of the count. Losses that the
table never counts (a call that ends its worker only when it is replayed, a worker that ends before it applies any call)
are bounded by :data:`MAX_STUCK`: this many losses in a row of which none had more progress than any other. A worker
that is killed at different moments of a long replay is not stuck.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rgpu.migrate.records.schema import Failure, SessionRecord
from rgpu.session.devices import parts

#: Losses in one place that are followed by another start (OWNERSHIP 9); after one more the session is given up.
MAX_LOSSES = 2
#: Most losses in a row in one place that was passed before, or where no call was begun.
MAX_STUCK = 8
#: Seconds: where the position of a loss is not known, a session that ran for less than this made no progress.
#: (The loss of a node is detected only when its lease expires.)
SAME_PLACE_SECONDS = 15.0

NextPlace = Literal["same", "another", "none"]


def complete(failure: Failure) -> int:
    """Return the call up to which every call is known to have been complete."""
    return failure.complete if failure.complete is not None else failure.position or 0


def begun(failure: Failure) -> int:
    """Return the last call that may have been begun: where only a position is known, the next call after it."""
    return failure.begun if failure.begun is not None else (failure.position or 0) + 1


def passed(record: SessionRecord, failures: Sequence[Failure]) -> int:
    """Return the furthest call that is known to have been complete once, by any worker."""
    return max([record.checkpoint.position if record.checkpoint else 0,
                *(complete(failure) for failure in failures if failure.position is not None)])


def counted(record: SessionRecord, failures: Sequence[Failure] | None = None) -> list[Failure]:
    """Return the losses that count towards one place, oldest first. ``failures``: instead of the record's own."""
    listed = record.failures if failures is None else failures
    limit = passed(record, listed)
    return [failure for failure in listed if failure.position is None or begun(failure) > limit]


def stuck(failures: Sequence[Failure]) -> int:
    """Return how many of the newest losses are in one place: none completed a call that another had not begun."""
    low, high, count = 0, 2**64, 0
    for failure in reversed(failures):
        if failure.position is not None:
            low, high = max(low, complete(failure)), min(high, begun(failure))
        if low > high:
            break
        count += 1
    return count


def count_failure(record: SessionRecord, new: Failure) -> list[Failure]:
    """Return the losses to record, the new one last.

    A loss that is on record already (a session without a place is examined repeatedly) counts once.
    """
    if on_record(record, new):
        return record.failures
    rested = record.state == "running" and new.when - record.running_since >= SAME_PLACE_SECONDS
    before = record.failures
    if rested and new.position is None:
        before = []
    elif rested and begun(new) == complete(new):  # the worker was idle: no call ended it
        before = counted(record)
    if new.position is not None and (rested or complete(new) > passed(record, before)):
        before = [failure for failure in before if failure.position is not None]
    every = [*before, new]
    kept = {id(failure) for failure in [*counted(record, every), *every[-MAX_STUCK:]]}
    furthest = max((f for f in every if f.position is not None), key=complete, default=new)
    return [failure for failure in every if id(failure) in kept or failure is furthest][-2 * MAX_STUCK:]


def on_record(record: SessionRecord, failure: Failure) -> bool:
    """Whether that epoch's loss was counted already."""
    return bool(failure.epoch and record.failures and record.failures[-1].epoch == failure.epoch)


def next_place(record: SessionRecord, new: Failure) -> NextPlace:
    """Return where the session is started after this loss by OWNERSHIP 9: ``same`` device, ``another``, ``none``."""
    return after(record, count_failure(record, new))


def after(record: SessionRecord, failures: Sequence[Failure]) -> NextPlace:
    """Return where the session is started after these losses, the last of which is new."""
    against = counted(record, failures)
    if len(against) > MAX_LOSSES or stuck(failures) >= MAX_STUCK:
        return "none"
    return "another" if len(against) == MAX_LOSSES and against[-1] is failures[-1] else "same"


def why_not(record: SessionRecord, new: Failure) -> str:
    """Return why a session is given up with this loss."""
    against = counted(record, count_failure(record, new))
    at = "" if new.position is None else f", in what follows call {complete(new)} and goes no further than {begun(new)}"
    if len(against) > MAX_LOSSES:
        return f"lost for the third time in one place{at}: {new.reason}"
    return f"lost {MAX_STUCK} times in a row without coming any further{at}: {new.reason}"


def barred(record: SessionRecord, failures: Sequence[Failure] | None = None) -> tuple[str, str] | None:
    """Return the (host, device) on which a session lost twice in one place must not be started; None: any may do."""
    against = counted(record, failures)
    return (against[-1].host, against[-1].device) if len(against) >= MAX_LOSSES else None


def only_avoided(record: SessionRecord, failures: Sequence[Failure] | None = None) -> bool:
    """Whether the session has run elsewhere since the loss that barred a device.

    The barred device is then avoided where another one will do, but used where there is no other: the loss elsewhere
    did not count towards a place (a lost node).
    """
    against = counted(record, failures)
    return bool(against) and record.running_since > against[-1].when


def touches(place: tuple[str, str] | None, host: str, device: str) -> bool:
    """Whether one of the devices belongs to the place."""
    return place is not None and place[0] == host and not set(parts(place[1])).isdisjoint(parts(device))
