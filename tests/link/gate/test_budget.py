"""Who goes first before a port, as a table, and what follows from an errno of accept(2)."""

from __future__ import annotations

import errno
from dataclasses import dataclass

import pytest

from rgpu.link.accepting import Next, after
from rgpu.link.control.front import Handshake
from rgpu.link.gate.budget import Budget, Stage, budget_for, crowded, least, over


@dataclass(eq=False)
class One:
    address: str
    stage: Stage = Stage.SILENT
    since: float = 0.0
    heard: float = 0.0


def test_who_came_least_far_goes_first_and_of_those_the_oldest() -> None:
    crowd = [One("a", Stage.KNOWS, 1), One("a", Stage.SILENT, 3), One("a", Stage.SILENT, 2), One("a", Stage.PROVEN, 0)]
    assert least(crowd) is crowd[2]
    assert least(crowd[:1]) is crowd[0]
    assert least(crowd[3:]) is None and least([]) is None


def test_an_address_has_its_share_and_all_have_theirs() -> None:
    budget = Budget(waiting=4, of_address=3, known=2)
    crowd = [One("a", since=number) for number in range(3)]
    assert over(budget, crowd, crowd[-1]) is None
    crowd.append(One("a", since=3))
    found = over(budget, crowd, crowd[-1])
    assert found is not None and found[0] is crowd[0] and "one address" in found[1]
    del crowd[0]
    crowd += [One("b", Stage.SPEAKS, 4), One("c", since=5)]
    found = over(budget, crowd, crowd[-1])
    assert found is not None and found[0] is crowd[0] and "5 connections" in found[1]


def test_a_proven_connection_that_was_idle_longest_makes_room_at_the_address_that_has_most() -> None:
    crowd = [One("a", Stage.PROVEN, heard=1), One("b", Stage.PROVEN, heard=9), One("b", Stage.PROVEN, heard=5)]
    assert crowded(Budget(9, 9, known=3), crowd) is None
    found = crowded(Budget(9, 9, known=2), crowd)
    assert found is not None and found[0] is crowd[2]


@pytest.mark.parametrize("descriptors", [64, 256, 1024, 20000, 1 << 20])
def test_budgets_leave_the_daemon_room(descriptors: int) -> None:
    data, control = budget_for(descriptors), budget_for(descriptors, each=3)
    assert data.of_address < data.waiting and data.waiting >= 16
    if descriptors >= 1024:
        assert data.waiting + 3 * control.waiting + 3 * control.known <= descriptors * 0.65


@pytest.mark.parametrize(("number", "then"), [
    (errno.EMFILE, Next.WAIT), (errno.ENFILE, Next.WAIT), (errno.ENOMEM, Next.WAIT), (errno.ENOBUFS, Next.WAIT),
    (errno.EBADF, Next.OVER), (errno.EINVAL, Next.OVER), (errno.ECONNABORTED, Next.AGAIN), (errno.EPROTO, Next.AGAIN),
    (errno.EPERM, Next.AGAIN), (errno.ENETDOWN, Next.AGAIN), (errno.EHOSTUNREACH, Next.AGAIN), (None, Next.AGAIN)])
def test_what_follows_from_an_errno(number: int | None, then: Next) -> None:
    assert after(number) is then


def test_the_handshake_is_read_along_however_it_is_cut() -> None:
    welcome = b"\x04" + bytes([168]) + b"\x07WELCOME" + bytes(160)
    ready = b"\x06" + (300).to_bytes(8, "big") + b"\x05READY" + bytes(294)
    said = b"\xff" + bytes(63) + welcome + ready + b"\x04\x09\x07MESSAGEx"
    for size in (1, 7, 64, 1000):
        handshake, stages = Handshake(), []
        for at in range(0, len(said), size):
            stages.append(handshake.hear(said[at:at + size]))
        assert stages == sorted(stages) and stages[-1] is Stage.PROVEN
    assert Handshake().hear(b"\xff" + bytes(63) + b"\x04\x06\x05ERROR") is Stage.SPEAKS
