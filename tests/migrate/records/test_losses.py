"""Which losses count towards the third one in one place (rgpu/migrate/records/losses.py)."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from rgpu.migrate.records import losses
from rgpu.migrate.records.schema import CheckpointName, Failure, SessionRecord

Loss = tuple[int, int] | None  #: (complete, begun); None: of a place that is not known


def record(checkpoint: int = 0) -> SessionRecord:
    return SessionRecord(name="s", state="running", owner="a", incarnation=1, epoch=1, quota=1, agent="k",
                         device="cpu:0", checkpoint=CheckpointName(name="i", position=checkpoint,
                                                                   epoch=1) if checkpoint else None)


def failure(loss: Loss, number: int, when: float) -> Failure:
    known = {} if loss is None else {"complete": loss[0], "position": loss[0], "begun": loss[1]}
    return Failure(host="a", device="cpu:0", when=when, epoch=number, **known)


def answers(every: Iterable[Loss], checkpoint: int = 0, ran: float = 1.0) -> list[str]:
    """What is answered to each loss; each server had run for ``ran`` seconds."""
    found, now, held = [], 1000.0, record(checkpoint)
    for number, loss in enumerate(every, 1):
        new = failure(loss, number, now + ran)
        found.append(losses.next_place(held, new))
        held = held.replace(failures=losses.count_failure(held, new), epoch=number + 1, running_since=now + ran)
        assert len(held.failures) <= 16, "as many as a record holds"
        now += ran
    return found


POISON = (100, 103)  #: 101 ends whoever applies it; two more had been begun by then


@pytest.mark.parametrize(("every", "expected"), [
    ([POISON] * 3, ["same", "another", "none"]),
    ([(100, 101), (40, 101), (99, 130)], ["same", "another", "none"]),  # seen complete late; given ahead
    ([POISON, (30, 35), POISON, (50, 61), POISON], ["same", "same", "another", "same", "none"]),
    ([(100, 103), (200, 203), (300, 303), (400, 403)], ["same"] * 4),  # each time further
    ([(1000, 1005), (300, 310), (500, 520), (200, 230), (450, 460), (120, 130)], ["same"] * 6),  # in its replay
    ([(1000, 1005), (300, 310), (1000, 1004), (500, 520), (1010, 1020)], ["same", "same", "another", "same", "same"]),
    ([None] * 3, ["same", "another", "none"]),  # starts that fail
    ([POISON, None, POISON], ["same", "another", "none"]),
    ([None, (50, 60), None, (90, 99), None], ["same", "same", "another", "same", "another"]),  # it went on between
])
def test_the_table(every: list[Loss], expected: list[str]) -> None:
    assert answers(every) == expected


def test_a_call_that_ends_its_worker_only_in_a_replay_ends_the_session_too() -> None:
    """Beyond it calls were complete once, so it does not count at once, but not for ever."""
    found = answers([(1000, 1001), *[(400, 420)] * losses.MAX_STUCK])
    assert found[:-1] == ["same"] * losses.MAX_STUCK and found[-1] == "none"


@pytest.mark.parametrize("checkpoint", [0, 700])
def test_a_worker_that_ends_before_it_applies_anything(checkpoint: int) -> None:
    found = answers([(checkpoint, checkpoint)] * losses.MAX_STUCK, checkpoint)
    assert found == ["same"] * (losses.MAX_STUCK - 1) + ["none"]


def test_an_idle_session_that_loses_its_worker_each_day_goes_on() -> None:
    assert answers([(500, 500)] * 50, ran=86400.0) == ["same"] * 50
    assert answers([None] * 50, ran=86400.0) == ["same"] * 50


@pytest.mark.parametrize("seed", range(50))
def test_a_storm_while_it_replays_never_ends_a_session(seed: int) -> None:
    """Killed at moments of a long replay that have nothing to do with its calls, fifty times."""
    chance = random.Random(seed)
    storm = [(at, at + chance.randint(0, 128)) for at in (chance.randint(0, 9800) for _ in range(50))]
    assert set(answers([(10_000, 10_100), *storm])) == {"same"}


@pytest.mark.parametrize("seed", range(50))
def test_a_call_that_ends_its_worker_ends_the_session_whatever_else_kills(seed: int) -> None:
    chance = random.Random(seed)
    poison, found = 0, ["same"]
    every: list[Loss] = []
    while found[-1] != "none":
        if every and chance.random() < 0.5:
            at = chance.randint(0, 700)
            every.append((at, at + chance.randint(0, 128)))
        else:
            every.append((1000 - chance.randint(0, 100), 1001 + chance.randint(0, 100)))
            poison += 1
        found = answers(every)
    assert poison == 3, every


def test_a_loss_is_counted_once() -> None:
    held = record()
    once = held.replace(failures=losses.count_failure(held, failure(POISON, 1, 5.0)))
    assert losses.count_failure(once, failure(POISON, 1, 9.0)) == once.failures


def test_the_barred_device() -> None:
    held = record()
    for number in (1, 2):
        held = held.replace(failures=losses.count_failure(held, failure(POISON, number, float(number))))
    assert losses.barred(held) == ("a", "cpu:0") and not losses.only_avoided(held)
    elsewhere = held.replace(owner="b", running_since=3.0)
    assert losses.barred(elsewhere) == ("a", "cpu:0") and losses.only_avoided(elsewhere)
    further = failure((104, 104), 3, 4.0)
    assert losses.barred(elsewhere, losses.count_failure(elsewhere, further)) is None, "it got further"
