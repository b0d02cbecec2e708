"""Retained and delivered answers."""

from __future__ import annotations

import itertools
import random
import struct

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rgpu.session.answers import LEAF, XXH3, AnswerHash, DeliveredAnswers, RetainedAnswers, answer_digest
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.errors import Corrupt


@given(st.lists(st.one_of(
    st.tuples(st.just("answered"), st.integers(1, 20), st.integers(0, 3), st.binary(max_size=5), st.binary(max_size=5)),
    st.tuples(st.just("observed"), st.integers(1, 20), st.booleans())), max_size=60))
def test_against_a_model(events: list[tuple]) -> None:  # type: ignore[type-arg]
    book, model, early = RetainedAnswers(), {}, set()
    for event in events:
        seq = event[1]
        if event[0] == "answered":
            book.answered(*event[1:])
            if seq in early:
                early.discard(seq)
            else:
                model[seq] = event[1:]
        else:
            book.observed(seq, event[2])
            if seq not in model and event[2]:
                early.add(seq)
            model.pop(seq, None)
        book.check()
        assert book.unobserved() == [model[s] for s in sorted(model)]
    assert RetainedAnswers.from_list(book.as_list()).unobserved() == book.unobserved()
    assert len(book) == len(model)


def test_an_answer_that_comes_after_its_observation_is_not_kept() -> None:
    book = RetainedAnswers()
    book.observed(1)  # a launch that a query saw complete: no answer will come
    book.observed(2, answer_expected=True)
    book.answered(2, 0, b"", b"late")
    assert not book.unobserved() and book.bytes == 0
    book.answered(2, 0, b"", b"again")
    assert book.unobserved() == [(2, 0, b"", b"again")]


@pytest.mark.parametrize("rows", [None, {}, [1], [[1, 0, b""]], [["1", 0, b"", b""]], [[1, 0, b"", "x"]],
                                  [[1, 0, b"", b""], [1, 0, b"", b""]], [[0, 0, b"", b""]], [[True, 0, b"", b""]]])
def test_malformed_rows(rows: object) -> None:
    with pytest.raises(Corrupt):
        RetainedAnswers.from_list(rows)


def test_divergence() -> None:
    book = DeliveredAnswers()
    copy, elapsed = BY_NAME["memcpy_d2h"].id, BY_NAME["event_elapsed"].id
    book.delivered(5, 0, b"", b"data")
    book.delivered(6, 0, b"\0\0\0\0", b"")
    assert 5 in book and 7 not in book
    assert book.again(5, copy, 0, b"", b"data") is None
    assert book.again(6, elapsed, 0, b"\1\0\0\0", b"") is None, "volatile answers are never compared"
    found = book.again(5, copy, 0, b"", b"datb")
    assert found is not None and found.seq == 5 and found.call == "memcpy_d2h" and book.divergences == [found]
    assert book.again(5, copy, 700, b"", b"data") is not None
    assert DeliveredAnswers(book.items()).again(5, copy, 0, b"", b"data") is None
    book.cut(5)
    assert 5 not in book and 6 in book


def test_the_digest_separates_reply_and_payload() -> None:
    assert answer_digest(0, b"ab", b"c") != answer_digest(0, b"a", b"bc") != answer_digest(1, b"a", b"bc")


def defined(data: bytes, reply: int) -> bytes:
    """The digest as docs/developers/journal.md defines it."""
    leaves = [data[at:at + LEAF] for at in range(0, len(data), LEAF)]
    whole = data if len(data) <= LEAF else b"".join(xxhash.xxh3_128_digest(leaf) for leaf in leaves)
    return xxhash.xxh3_128_digest(whole + struct.pack("<iIQ", 0, reply, len(data) - reply))


@given(st.integers(3, 5 * LEAF), st.lists(st.sampled_from([1, 100, LEAF - 1, LEAF, LEAF + 1, 4 * LEAF, 6 * LEAF]),
                                          min_size=1, max_size=8))
@settings(deadline=None, max_examples=60)
def test_the_digest_does_not_depend_on_the_pieces(size: int, pieces: list[int]) -> None:
    data, at, summed = random.Random(size).randbytes(size), 0, AnswerHash()
    for length in itertools.cycle(pieces):
        summed.update(memoryview(data)[at:at + length])
        at += length
        if at >= size:
            break
    digest = summed.digest(0, 3, size - 3)
    assert digest == defined(data, 3)
    assert digest == answer_digest(0, data[:3], data[3:])
    assert (digest == answer_digest(0, data[:3], data[3:], XXH3)) == (size <= LEAF)
