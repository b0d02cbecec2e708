"""Gangs as people see them: rows of records and of what workers say, and who waits for whom."""

from __future__ import annotations

from typing import Any

import pytest

from rgpu.migrate.records.gangs import GangRecord, GangRun
from rgpu.migrate.records.schema import GangAsk, Program, QueueRecord
from rgpu.server.node.gangs.rows import gang_row, waiting_rows
from rgpu.server.node.gangs.waits import Last, last_of, who_waits
from tests.support.leader.records import session

GANG = GangRecord(name="train", ranks=3, epochs={"train.0": 1, "train.1": 2, "train.2": 1}, generation=2, created=5.0,
                  user="ann", runs=[GangRun(name="job", agent="key", program=Program(pid=7, host="laptop"), ranks=3)])


def member(rank: int, **values: Any) -> Any:
    return session(f"train.{rank}", "ab"[rank % 2], 1).replace(gang="train", rank=rank, created=5.0, **values)


def last(rank: int, number: int, kind: str = "all_reduce", size: int = 64, since: float | None = 20.0,
         communicator: str = "") -> Last:
    return Last(rank, number, kind, size, communicator, since)


@pytest.mark.parametrize(("ranks", "said"), [
    ([last(0, 4), last(1, 4)], []),
    ([], []),
    ([last(0, 4), last(1, 4), last(2, 3, "broadcast", 8)],
     ["ranks 0, 1 in collective 4, all_reduce of 64 bytes: waiting for rank 2 (last: 3, broadcast of 8 bytes)"]),
    ([last(0, 4), last(1, 4, size=32)],
     ["collective 4 is not the same call on all ranks, so none of them returns: rank 0 all_reduce of 64 bytes; rank 1 "
      "all_reduce of 32 bytes"]),
    ([last(0, 4), last(1, 4, size=32, since=2.0)], []),
    ([last(0, 9, communicator="c1"), last(1, 8, communicator="c1"), last(2, 1, communicator="c2")],
     ["rank 0 in collective 9 of c1, all_reduce of 64 bytes: waiting for rank 1 (last: 8, all_reduce of 64 bytes)"])])
def test_who_waits_for_whom(ranks: list[Last], said: list[str]) -> None:
    assert who_waits(ranks) == said


@pytest.mark.parametrize("figures", [None, 3, {}, {"number": "4"}, {"number": -1}, {"number": True},
                                     {"number": 1, "bytes": "x"}, {"number": 1, "bytes": None}])
def test_what_a_worker_says_may_be_anything(figures: Any) -> None:
    assert last_of(0, figures) is None


def test_what_a_worker_says_is_shown_without_what_a_terminal_obeys() -> None:
    found = last_of(1, {"number": 3, "kind": "\x1b[31mred" + "x" * 100, "bytes": -4, "since_s": "soon"})
    assert found is not None and (found.rank, found.number, found.bytes, found.since_s) == (1, 3, 0, None)
    assert "\x1b" not in found.kind and len(found.kind) <= 64


def test_a_gang_and_its_ranks() -> None:
    views = {"train.0": {"attached": True, "calls": 5, "collectives": {"number": 4, "kind": "all_reduce", "bytes": 64}},
             "train.1": {"stats": {"calls": 9, "collectives": {"number": 3, "kind": "broadcast", "bytes": 8}}},
             "train.2": {"attached": False, "calls": 0}}
    sessions = [member(1, epoch=2), member(0), member(2, epoch=3), session("other", "a", 1),
                member(0).replace(name="train.0/2"), member(1).replace(created=1.0, name="train.1/9")]
    row = gang_row(GANG, sessions, views, 15.0)
    assert [one["session"] for one in row["members"]] == ["train.0", "train.0/2", "train.1", "train.2"]
    assert [one["in_generation"] for one in row["members"]] == [True, False, True, False]
    assert [one["came"] for one in row["members"]] == [True, None, True, False]
    assert (row["user"], row["age_s"], row["hosts"], row["generation"]) == ("ann", 10.0, ["a", "b"], 2)
    assert row["runs"] == [{"run": "job", "client": "laptop", "pid": 7, "first": 0, "ranks": 3}]
    assert row["members"][0]["collective"] == {"number": 4, "kind": "all_reduce", "bytes": 64, "communicator": None,
                                               "since_s": None}
    assert row["waits"] == ["rank 0 in collective 4, all_reduce of 64 bytes: waiting for rank 1 (last: 3, broadcast of "
                            "8 bytes)"]
    assert row["note"] == f"{row['waits'][0]}; no process uses rank 2 yet"


def test_a_gang_that_waits() -> None:
    def asks(name: str, ranks: int, arrived: float) -> QueueRecord:
        return QueueRecord(name=name, quota=1, arrived=arrived, reason="it gathers", user="ann",
                           program=Program(pid=1, host=f"{name}'s"), gang=GangAsk(name="train", ranks=ranks, of=3))

    requests = [asks("two", 2, 9.0), asks("one", 1, 4.0), QueueRecord(name="alone", quota=1)]
    (row,) = waiting_rows(requests, {"one": {"position": 2, "reason": "2 of 3"}}, 10.0)
    assert (row["gang"], row["state"], row["ranks"], row["age_s"], row["position"]) == ("train", "queued", 3, 6.0, 2)
    assert [(one["run"], one["first"], one["ranks"]) for one in row["runs"]] == [("one", 0, 1), ("two", 1, 2)]
    assert row["note"] == "position 2: 2 of 3"
    assert waiting_rows(requests, {}, 10.0)[0]["note"] == "it gathers"
