"""The fence: from every prefix of every short story, and from random long ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from rgpu.client.session.attachment import (
    TABLE,
    Attached,
    Attachment,
    Close,
    Command,
    Event,
    Find,
    GiveUp,
    LinkClosed,
    LinkDown,
    Noticed,
    Open,
    Owner,
    OwnerGone,
    OwnerKnown,
    OwnerUnknown,
    Report,
    Ship,
    Shutdown,
    State,
)


def owner(epoch: int, alive: bool = True) -> Owner:
    return Owner(f"host{epoch}", ("127.0.0.1", epoch), epoch, alive)


class Watched:
    """An attachment with the rules of OWNERSHIP 1 checked after each event."""

    def __init__(self) -> None:
        self.machine = Attachment()
        self.open: dict[int, int] = {}  #: link → epoch, of links that were opened and not closed
        self.shipping: set[int] = set()
        self.highest_shipped = 0

    def handle(self, event: Event) -> list[Command]:
        machine, before = self.machine, self.machine.highest
        if isinstance(event, (LinkDown, LinkClosed)):
            self.open.pop(event.link, None)
        finished = machine.state in (State.LOST, State.ENDED)
        commands = machine.handle(event)
        assert not (finished and commands), "a final state is final"
        assert machine.highest >= before, "the highest epoch never falls"
        for command in commands:
            if isinstance(command, Open):
                assert not self.open, "a link is open while another is opened"
                assert command.owner.epoch >= machine.highest
                self.open[command.link] = command.owner.epoch
            elif isinstance(command, Close):
                assert command.link in self.open, "a link is closed twice, or was never open"
                self.shipping.discard(command.link)
                if machine.state in (State.LOST, State.ENDED):
                    self.open.pop(command.link)
            elif isinstance(command, Ship):
                assert command.link in self.open and command.link not in self.shipping
                assert machine.highest >= self.highest_shipped, "ships to an older epoch than before"
                self.highest_shipped = machine.highest
                self.shipping.add(command.link)
            elif isinstance(command, GiveUp):
                assert machine.state is State.LOST
        attached = [link for link in self.open if machine.accepts(link, machine.highest)]
        assert len(attached) <= 1
        for link, epoch in itertools.product(range(machine.link + 2), range(machine.highest)):
            assert not machine.accepts(link, epoch), "something below the highest epoch is listened to"
        if machine.state is State.CLOSING:
            assert not any(machine.accepts(link, epoch) for link in self.open for epoch in range(12))
        return commands


Maker = Callable[[Attachment, float], Event]
LETTERS: list[Maker] = [
    lambda m, now: OwnerKnown(owner(1), now),
    lambda m, now: OwnerKnown(owner(2), now),
    lambda m, now: OwnerKnown(owner(3), now),
    lambda m, now: OwnerUnknown("nobody", now),
    lambda m, now: Attached(m.link, 1, 1, now),
    lambda m, now: Attached(m.link, 2, 5, now),
    lambda m, now: Attached(m.link - 1, 3, 5, now),
    lambda m, now: LinkDown(m.link, "reset", now),
    lambda m, now: LinkDown(m.link - 1, "late", now),
    lambda m, now: LinkClosed(m.link, now),
    lambda m, now: Noticed(m.link, "moved", 1, "", now),
    lambda m, now: Noticed(m.link, "fenced", 2, "", now),
    lambda m, now: Noticed(m.link - 1, "ended", 9, "", now),
    lambda m, now: OwnerGone("ended", now),
    lambda m, now: Shutdown(now),
]


def play(makers: Iterable[Maker]) -> Watched:
    watched = Watched()
    for number, maker in enumerate(makers):
        event = maker(watched.machine, float(number))
        # The shell says LinkClosed only after Close, and LinkDown only of a link that was opened.
        if isinstance(event, LinkClosed) and watched.machine.state is not State.CLOSING:
            continue
        if isinstance(event, LinkDown) and event.link not in watched.open:
            continue
        watched.handle(event)
    return watched


def test_every_story_of_four_events() -> None:
    for story in itertools.product(LETTERS, repeat=4):
        play(story)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(LETTERS), max_size=60))
def test_long_stories(story: list[Maker]) -> None:
    play(story)


def test_a_move_with_stale_replies_from_every_prefix() -> None:
    """The usual story of a move; after each prefix a stale owner is named, and the story still ends well."""
    story: list[Maker] = [
        lambda m, now: OwnerKnown(owner(1), now),
        lambda m, now: Attached(m.link, 1, 1, now),
        lambda m, now: Noticed(m.link, "moved", 1, "", now),
        lambda m, now: LinkClosed(m.link, now),
        lambda m, now: OwnerKnown(owner(2), now),
        lambda m, now: Attached(m.link, 2, 7, now),
    ]
    stale: Maker = lambda m, now: OwnerKnown(owner(1), now)  # noqa: E731
    for cut in range(len(story) + 1):
        watched = play([*story[:cut], stale])
        machine = watched.machine
        for _ in range(10):
            if machine.state is State.ATTACHED and machine.highest == 2:
                break
            if machine.state is State.FINDING:
                watched.handle(OwnerKnown(owner(2), 1))
            elif machine.state is State.CONNECTING:
                watched.handle(Attached(machine.link, machine.highest, 1, 1))
            elif machine.state is State.ATTACHED:
                watched.handle(OwnerKnown(owner(2), 1))
            else:
                watched.handle(LinkClosed(machine.link, 1))
        assert machine.state is State.ATTACHED and machine.highest == 2


def test_an_older_epoch_is_never_attached_to_again() -> None:
    watched = Watched()
    assert watched.handle(OwnerKnown(owner(5), 0)) == [Open(1, owner(5))]
    watched.handle(Attached(1, 5, 1, 0))
    watched.handle(LinkDown(1, "reset", 0))
    assert watched.handle(OwnerKnown(owner(4), 0))[0].__class__ is Find
    assert watched.handle(OwnerKnown(owner(5), 0)) == [Open(2, owner(5))]
    assert watched.handle(Attached(2, 4, 1, 0)) == [Close(2)]


def test_a_higher_owner_closes_the_link_first() -> None:
    watched = Watched()
    watched.handle(OwnerKnown(owner(1), 0))
    watched.handle(Attached(1, 1, 1, 0))
    assert watched.machine.accepts(1, 1)
    assert watched.handle(OwnerKnown(owner(2), 1)) == [Close(1)]
    assert not watched.machine.accepts(1, 1)
    assert watched.handle(LinkClosed(1, 1)) == [Open(2, owner(2))]


def test_an_owner_that_is_alive_and_not_reached_is_reported_every_ten_seconds() -> None:
    watched = Watched()
    watched.handle(OwnerKnown(owner(1), 0))
    reports = []
    for second in range(1, 26):
        watched.handle(LinkDown(watched.machine.link, "refused", second))
        reports += [(second, command) for command in watched.handle(OwnerKnown(owner(1), second))
                    if isinstance(command, Report)]
    assert [second for second, _ in reports] == [11, 21]
    watched.handle(LinkDown(watched.machine.link, "refused", 40))
    dead = watched.handle(OwnerKnown(owner(1, alive=False), 40))
    assert not any(isinstance(command, Report) for command in dead)


def test_the_table_names_every_state_but_the_final_ones() -> None:
    assert {state for state, _ in TABLE} == set(State) - {State.LOST, State.ENDED}
