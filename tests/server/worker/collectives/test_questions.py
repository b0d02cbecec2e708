"""Which session is asked what about a collective, and when it is lost."""

from __future__ import annotations

import random

from rgpu.server.worker.collectives.questions import Question, Questions

UNIQUE, KEY, MEMBERS = b"u", (-1, -1, 0), ("a", "b", "c", "b")


class Asked:
    def __init__(self) -> None:
        self.held: list[tuple[str, tuple[int, ...]]] = []
        self.lost: list[tuple[str, str]] = []
        self.back: list[str] = []
        self.may_go_back = True
        self.questions = Questions("a", lambda one: self.held.append((one.session, one.own)),
                                   lambda one, why: self.lost.append((one.session, why)), self._go_back)

    def _go_back(self, one: Question, session: str) -> bool:
        self.back.append(session)
        return self.may_go_back

    def ask(self, own: tuple[int, ...] = (0,)) -> dict[str, Question]:
        made = self.questions.ask(UNIQUE, KEY, MEMBERS, range(4), own, {"b", "c"}, 0.0)
        return {one.session: one for one in made}


def test_each_session_is_asked_once_for_its_ranks() -> None:
    asked = Asked()
    made = asked.ask()
    assert {name: (one.want, one.own) for name, one in made.items()} == {"b": ((1, 3), (0,)), "c": ((2,), (0,))}
    asked.questions.came(made["b"].id, [3])
    asked.questions.holds(made["b"].id)
    assert asked.held == [("b", (0,))] and [one.want for one in asked.questions.of("b")] == [(1,)]
    asked.questions.came(made["b"].id, [1])
    assert not asked.questions.of("b") and asked.questions.of("c")
    asked.questions.settle(UNIQUE, KEY)
    assert not asked.questions.open


def test_what_one_does_not_have_is_asked_of_the_others() -> None:
    asked = Asked()
    made = asked.ask()
    asked.questions.holds(made["c"].id)
    (instead,) = asked.questions.never(made["c"].id, "not kept")
    assert (instead.session, instead.want, instead.now) == ("b", (2,), True)
    assert asked.questions.never(instead.id, "nor here") == []
    assert asked.lost == [("b", "not kept")], "the first reason counts"


def test_what_nobody_keeps_is_asked_again_of_who_goes_back() -> None:
    asked = Asked()
    made = asked.ask()
    asked.questions.holds(made["c"].id)
    (instead,) = asked.questions.never(made["c"].id, "not kept", again=True)
    assert asked.questions.never(instead.id, "nor here") == [] and asked.back == ["c"] and not asked.lost
    (again,) = asked.questions.of("c")
    assert again.want == (2,) and not again.now and not again.tried, "it is asked once its next worker is linked"
    asked.may_go_back = False
    (instead,) = asked.questions.never(again.id, "not kept", again=True)
    asked.questions.never(instead.id, "nor here")
    assert asked.lost == [("b", "not kept")]


def test_a_session_that_is_over_needs_nothing_and_brings_nothing() -> None:
    asked = Asked()
    made = asked.ask()
    new = asked.questions.is_gone("b", "it has ended")
    assert asked.held == [("b", (0,))] and [one.session for one in new] == ["c"] and new[0].want == (1, 3)
    asked.questions.is_gone("c", "it has ended")
    assert {name for name, _ in asked.lost} == {"c"} and not asked.questions.open
    assert made["c"].id not in asked.questions.open
    assert asked.ask() == {} and len(asked.lost) == 4, "what is asked later is lost at once"


def test_one_that_will_never_take_part_loses_the_collective() -> None:
    asked = Asked()
    asked.questions.never(asked.ask()["c"].id, "rank 2 has left the communicator")
    assert asked.lost == [("c", "rank 2 has left the communicator")]


def test_every_order_of_answers_ends() -> None:
    """Random answers and losses: each question ends, and nothing is told twice of one that was answered."""
    for seed in range(300):
        dice, asked = random.Random(seed), Asked()
        asked.ask()
        for _ in range(200):
            if not asked.questions.open:
                break
            one = dice.choice(list(asked.questions.open.values()))
            happened = dice.randrange(4)
            if happened == 0:
                asked.questions.came(one.id, one.want[:1])
            elif happened == 1:
                asked.questions.holds(one.id)
            elif happened == 2:
                asked.may_go_back = dice.random() < 0.5
                asked.questions.never(one.id, "no", dice.random() < 0.5)
            else:
                asked.questions.is_gone(one.session, "over")
        assert not asked.questions.open
        assert len(asked.held) == len(set(asked.held))
