"""The worker's book of printed text: every byte once, whatever breaks and whatever is replayed."""

from __future__ import annotations

import random

import pytest

from rgpu.session.errors import Corrupt
from rgpu.session.printed import PrintedText


def everything(book: PrintedText, most: int = 1 << 20) -> list[tuple[int, bytes]]:
    found = []
    while piece := book.take(most):
        found.append(piece)
    return found


def test_pieces_carry_their_position() -> None:
    book = PrintedText()
    book.attach(0)
    book.add(b"one\n")
    book.add(b"")
    book.add(b"twenty\n")
    assert everything(book, 4) == [(0, b"one\n"), (4, b"twen"), (8, b"ty\n")]
    assert (book.produced, book.size, book.unsent) == (11, 11, False)


def test_what_is_confirmed_is_forgotten_within_a_piece_too() -> None:
    book = PrintedText()
    book.attach(0)
    book.add(b"abcdef")
    everything(book, 4)
    book.confirm(2)
    assert book.as_state() == [6, b"cdef"]
    book.confirm(5)
    assert book.as_state() == [6, b"f"]
    book.confirm(6)
    assert book.as_state() == [6, b""] and book.size == 0
    book.confirm(3)  # an old count says nothing
    assert book.as_state() == [6, b""]


def test_a_count_of_what_was_not_sent_is_refused() -> None:
    book = PrintedText()
    book.attach(0)
    book.add(b"abcdef")
    book.take(3)
    with pytest.raises(Corrupt):
        book.confirm(4)


def test_another_connection_gets_what_its_side_lacks() -> None:
    book = PrintedText()
    book.attach(0)
    book.add(b"abc")
    book.add(b"def")
    everything(book)
    book.add(b"ghi")
    book.attach(4)
    assert everything(book) == [(4, b"ef"), (6, b"ghi")]
    book.attach(9)
    assert everything(book) == [] and book.size == 0


def test_a_replay_repeats_nothing() -> None:
    """The checkpoint stood at 4 of which 2 may be missing; the program has had 9 by the time of the death."""
    book = PrintedText.from_state([4, b"cd"])
    book.attach(9)
    book.add(b"ef")
    book.add(b"ghijk")
    book.add(b"l")
    assert everything(book) == [(9, b"jk"), (11, b"l")]


def test_a_replay_may_have_been_applied_before_the_agent_attaches() -> None:
    book = PrintedText.from_state([4, b"cd"])
    book.add(b"efg")
    book.attach(3)
    assert everything(book) == [(3, b"d"), (4, b"efg")]


def test_a_state_takes_its_place() -> None:
    book = PrintedText()
    book.discard()
    book.add(b"replayed")
    assert not book.unsent and book.as_state() == [8, b""]
    book = PrintedText.from_state(PrintedText.from_state([20, b"xyz"]).as_state())
    book.attach(18)
    assert everything(book) == [(18, b"yz")]


def test_a_side_that_takes_no_text_gets_none() -> None:
    book = PrintedText()
    book.add(b"abc")
    book.attach(None)
    book.add(b"def")
    assert not book.unsent and book.produced == 6 and book.size == 0
    book.attach(6)
    book.add(b"ghi")
    assert everything(book) == [(6, b"ghi")]


@pytest.mark.parametrize("state", [[3], [2, b"abc"], [-1, b""], ["3", b"abc"], [3, "abc"], [True, b""], 5,
                                   [1 << 63, b""], {"a": 1}])
def test_states_that_cannot_be(state: object) -> None:
    with pytest.raises(Corrupt):
        PrintedText.from_state(state)


def test_a_state_of_before_is_no_text() -> None:
    assert PrintedText.from_state(None).as_state() == [0, b""]


@pytest.mark.parametrize("seed", range(40))
def test_every_byte_once_through_breaks_deaths_and_moves(seed: int) -> None:
    """A program's side that counts as the agent does sees the text of one uninterrupted run."""
    rng = random.Random(seed)
    whole = bytes(rng.randrange(256) for _ in range(2000))
    got = bytearray()
    worker, position = PrintedText(), 0  # how much of `whole` this worker's calls have printed
    checkpoint: tuple[int, list[object]] = (0, [0, b""])
    worker.attach(0)
    while len(got) < len(whole):
        what = rng.choice(("print", "print", "send", "send", "confirm", "break", "die", "move", "image"))
        if what == "print":
            size = min(rng.randrange(60), len(whole) - position)
            worker.add(whole[position:position + size])
            position += size
        elif what == "send" and (piece := worker.take(rng.randrange(1, 50))):
            at, text = piece
            assert at <= len(got), "a hole"
            got += text[len(got) - at:]
        elif what == "confirm":
            worker.confirm(rng.choice((len(got), len(got) // 2)))
        elif what == "break":
            worker.attach(len(got))
        elif what == "image":
            checkpoint = (position, worker.as_state())
        elif what == "die":
            position, state = checkpoint
            worker = PrintedText.from_state(state)
            worker.attach(len(got))
        elif what == "move":
            worker = PrintedText.from_state(worker.as_state())
            worker.attach(len(got))
        assert whole.startswith(bytes(got)) and worker.size <= len(whole)
