"""Gangs as people see them: rows of records and of what workers say, and who waits for whom."""

from __future__ import annotations

from typing import Any

from rgpu.migrate.records.gangs import GangRecord, GangRun
from rgpu.migrate.records.schema import GangAsk, Program, QueueRecord
from rgpu.server.node.gangs.rows import gang_row, waiting_rows
from tests.support.leader.records import session

GANG = GangRecord(name="train", ranks=3, epochs={"train.0": 1, "train.1": 2, "train.2": 1}, generation=2, created=5.0,
                  user="ann", runs=[GangRun(name="job", agent="key", program=Program(pid=7, host="laptop"), ranks=3)])


def member(rank: int, **values: Any) -> Any:
    return session(f"train.{rank}", "ab"[rank % 2], 1).replace(gang="train", rank=rank, created=5.0, **values)


def figures(rank: int, number: int, kind: str = "all_reduce", **last: Any) -> list[dict[str, Any]]:
    usual = {"rank": rank, "number": number, "call": f"{kind} call", "kind": kind, "bytes": 64, "complete": False,
             "seconds": 20.0, "missing": [], "differs": {}}
    return [{"communicator": "c1", "ranks": 3, "last": [{**usual, **last}]}]


def test_a_gang_and_its_ranks() -> None:
    behind = {"missing": [1], "waits_for": ["train.1"]}
    views = {"train.0": {"attached": True, "calls": 5, "communicators": figures(0, 4, **behind)},
             "train.0/2": {"communicators": figures(2, 4, **behind)},
             "train.1": {"stats": {"calls": 9}, "communicators": figures(1, 3, "broadcast", complete=True)},
             "train.2": {"attached": False, "calls": 0}}
    sessions = [member(1, epoch=2), member(0), member(2, epoch=3), session("other", "a", 1),
                member(0).replace(name="train.0/2"), member(1).replace(created=1.0, name="train.1/9")]
    row = gang_row(GANG, sessions, views, 15.0)
    assert [one["session"] for one in row["members"]] == ["train.0", "train.0/2", "train.1", "train.2"]
    assert [one["in_generation"] for one in row["members"]] == [True, False, True, False]
    assert [one["came"] for one in row["members"]] == [True, False, True, False]
    assert (row["user"], row["age_s"], row["hosts"], row["generation"]) == ("ann", 10.0, ["a", "b"], 2)
    assert row["runs"] == [{"run": "job", "client": "laptop", "pid": 7, "first": 0, "ranks": 3}]
    assert row["members"][0]["collective"] == {"communicator": "c1", "rank": 0, "number": 4, "kind": "all_reduce",
                                               "bytes": 64, "complete": False, "since_s": 20.0}
    assert row["waits"] == ["ranks 0, 2 of 3 wait for 20 s in their all_reduce call for rank 1 (session train.1)"]
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
