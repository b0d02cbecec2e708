"""Requests of one gang that wait together: whether they agree, and which ranks are missing. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rgpu.migrate.leader.requests import Order
from rgpu.migrate.records.schema import QueueRecord
from rgpu.session.errors import NotPermitted, Refused, UsageError


def check_together(order: Order, others: Sequence[QueueRecord]) -> None:
    """Check that a run's request agrees with those of the gang's other runs.

    Raises :class:`NotPermitted` for another user's gang, :class:`UsageError` where they ask for different gangs,
    :class:`Refused` where the gang has no ranks left.
    """
    ask = order.ask
    assert ask is not None
    for other in others:
        assert other.gang is not None
        if other.user != order.user:
            raise NotPermitted(f"gang {ask.name} is gathered by {other.user or 'somebody else'}: choose another name "
                               "with --gang", gang=ask.name)
        if other.gang.of != ask.of:
            raise UsageError(f"gang {ask.name}: {other.name} says that it has {other.gang.of} ranks in all, and "
                             f"{order.name} says {ask.of}")
        if (other.wants.gpus, other.wants.compute, other.wants.models) != (
                order.wants.gpus, order.wants.compute, order.wants.models):
            raise UsageError(f"gang {ask.name}: {order.name} asks for other GPUs for a rank than {other.name} does")
    have = sum(other.gang.ranks for other in others if other.gang)
    if have + ask.ranks > ask.of:
        raise Refused(f"gang {ask.name} has {ask.of} ranks, and {have} of them have been asked for "
                      f"({', '.join(other.name for other in others)}): {ask.ranks} more are too many", gang=ask.name)


def missing(requests: Sequence[QueueRecord], now: float) -> str:
    """Return why a gang is given up: ranks are missing after its deadline; empty: it is not.

    ``requests``: the waiting requests, the oldest first. ``now``: Unix time, s.
    """
    asks = [one.gang for one in requests if one.gang is not None]
    if not asks:
        return ""
    have, deadline = sum(ask.ranks for ask in asks), max(ask.deadline for ask in asks)
    if have >= asks[0].of or now - min(one.arrived for one in requests) < deadline:
        return ""
    first, came = 0, []
    for one, ask in zip(requests, asks, strict=True):
        came.append(f"{ranks(first, ask.ranks)} by {one.name} on {one.program.host or 'an unknown host'}")
        first += ask.ranks
    return (f"gang {asks[0].name}: {ranks(have, asks[0].of - have)} of {asks[0].of} did not come within "
            f"{deadline:.0f} s; asked for: {', '.join(came)}")


def ranks(first: int, count: int) -> str:
    """Return ranks in words: ``rank 3``, ``ranks 0 to 2``."""
    return f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"


def in_turn(record: QueueRecord, order: Order) -> bool:
    """Whether the request was made for the same program."""
    return (record.agent, record.program.pid, record.program.host) == (
        order.agent, order.program.pid, order.program.host)


def order_of(record: QueueRecord) -> Order:
    """Return the order of a waiting request."""
    return Order(record.name, record.agent, record.quota, program=record.program, recover=record.recover,
                 host=record.host or None, wants=record.wants, user=record.user, ask=record.gang,
                 proves_key=record.proves_key)
