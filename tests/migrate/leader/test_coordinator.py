"""The leader against the real embedded registry and fake nodes: create, move, checkpoint, end; every refusal."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rgpu.migrate.leader.requests import Order
from rgpu.migrate.move.options import MoveOptions
from rgpu.migrate.records.schema import Program
from rgpu.session.errors import (
    AlreadyExists,
    DeviceError,
    Fenced,
    MoveFailed,
    NotFound,
    Refused,
    RgpuError,
    StoreError,
    UnknownOutcome,
    UsageError,
)
from tests.support.leader.pool import GIB, Fault, World, run


# -- create ---------------------------------------------------------------------------
def test_a_session_is_placed_started_and_runs(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("big", host=None, quota=4 * GIB)
        record = await w.coordinator.create_session("s", quota=GIB, agent="key", program={"pid": 7, "host": "c1"})
        assert (record.state, record.epoch, record.owner) == ("running", 1, "b"), "the emptiest device"
        assert record.needs.compute_capability == (7, 5)
        assert await w.pool.history("s") == ["create", "started"]
        await w.pool.owned_once("s")

    run(tmp_path, test)


def test_a_name_is_taken_while_its_session_lives(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        with pytest.raises(AlreadyExists):
            await w.session("s")
        await w.coordinator.end("s", "done")
        again = await w.session("s", host="b")
        assert (again.owner, again.epoch) == ("b", 2), "epochs of one name never repeat"

    run(tmp_path, test)


def test_a_creation_whose_answer_was_lost_is_recognised(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        program = {"pid": 7, "command": ["python", "x.py"], "host": "client"}
        first = await w.session("s", program=program)
        assert await w.session("s", program=program) == first
        with pytest.raises(AlreadyExists):
            await w.session("s", program={**program, "pid": 8})

    run(tmp_path, test)


@pytest.mark.parametrize("name", ["", "a b", "-x", "x/y", "ä", "x" * 65, "a/1/2/3/4/5"])
def test_bad_names(tmp_path: Path, name: str) -> None:
    async def test(w: World) -> None:
        with pytest.raises(UsageError):
            await w.session(name)

    run(tmp_path, test)


def test_a_start_that_fails_is_tried_elsewhere(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        w.pool.faults = [Fault("worker.start", "before"), Fault("worker.start", "dead"), Fault("worker.start", "dead")]
        record = await w.session("s", host=None)
        assert (record.owner, record.epoch) == ("c", 3)
        w.pool.faults = [Fault("worker.start", "before", error=RgpuError("no memory")) for _ in range(3)]
        with pytest.raises(Refused, match="c: no memory; a: no memory; b: no memory"):  # beside s, that is
            await w.session("t", host=None)
        assert (await w.pool.record("t")).state == "ended"

    run(tmp_path, test)


def test_a_start_whose_answer_was_lost_is_not_done_twice(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        w.pool.faults = [Fault("worker.start", "lost")]
        record = await w.session("s")
        assert (record.owner, record.epoch, record.state) == ("a", 1, "running")

    run(tmp_path, test)


@pytest.mark.parametrize("queue", [False, True])
def test_who_asks_again_gets_the_session_that_lost_its_node_meanwhile(tmp_path: Path, queue: bool) -> None:
    """The answer was lost with the leader; before the client asked again, the session was lost, too."""
    async def test(w: World) -> None:
        order = Order("s", "key", quota=GIB, program=Program(pid=7, host="client"))

        async def ask() -> Any:
            return await (w.coordinator.admission.create_or_wait(order) if queue
                          else w.coordinator.admission.create(order))

        first = await ask()
        others = [host for host in w.pool.nodes if host != first.owner]
        for host in w.pool.nodes:
            await w.pool.cut_off(host)
        await w.coordinator.worker_died("s", first.owner, epoch=1, position=None)
        assert (await w.pool.record("s")).state == "recovering"
        with pytest.raises(UnknownOutcome, match="s was made, and is being brought back"):
            await ask()
        for host in others:
            await w.pool.register(w.pool.nodes[host])
        again = await ask()
        assert (again.state, again.epoch > 1, again.owner in others) == ("running", True, True)
        stranger = replace(order, program=Program(pid=8, host="client"))
        with pytest.raises(AlreadyExists):
            await w.coordinator.admission.create(stranger)

    run(tmp_path, test)


def test_two_at_once_do_not_share_the_last_memory(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        results = await asyncio.gather(*(w.session(f"s{n}", host=None, quota=5 * GIB) for n in range(4)),
                                       return_exceptions=True)
        assert sorted(r.owner for r in results if not isinstance(r, BaseException)) == ["a", "b", "c"]
        (refused,) = [r for r in results if isinstance(r, BaseException)]
        assert isinstance(refused, Refused) and "full" in refused.message

    run(tmp_path, test)


# -- moves -------------------------------------------------------------------------------
def test_a_move(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        progress: list[dict] = []
        result = await w.coordinator.migrate("s", "b", on_progress=progress.append)
        expected = {"outcome": "committed", "from": "a", "to": "b", "epoch": 2, "rounds": 2, "pages_total": 10,
                    "pages_sent": 12, "bytes_sent": 1234, "verified": True}
        assert {key: result[key] for key in expected} == expected
        assert 5.0 <= result["downtime_ms"] <= result["total_ms"] + 5.0 and result["reason"]
        record = await w.pool.owned_once("s")
        assert (record.owner, record.epoch, record.move) == ("b", 2, None)
        assert w.pool.serving("s") == [("b", 2)] and progress[0]["phase"] == "copying"
        assert await w.pool.history("s") == ["create", "started", "begin_move", "move_ready", "commit", "clear_move"]
        assert (await w.coordinator.migrate("s", "a"))["epoch"] == 3

    run(tmp_path, test)


async def _other_capability(w: World) -> None:
    await w.pool.add("d", capability=(9, 0))


async def _older_driver(w: World) -> None:
    await w.pool.add("d", driver=12080)


async def _full(w: World) -> None:
    await w.pool.add("d", memory=GIB - 1)


async def _other_kind(w: World) -> None:
    await w.pool.add("d", kind="cuda")


async def _cordoned(w: World) -> None:
    await w.pool.add("d")
    await w.coordinator.cordon("d", "cordoned", "maintenance")


async def _sick(w: World) -> None:
    node = await w.pool.add("d")
    await w.pool.change("d", devices=[node.record.devices[0].replace(healthy=False, reason="ECC errors")])


async def _pinned(w: World) -> None:
    await w.pool.add("d")
    w.pool.nodes["a"].pins = ["a kernel uses the device heap"]


async def _ended(w: World) -> None:
    await w.pool.add("d")
    await w.coordinator.end("s", "it was killed")


async def _source_silent(w: World) -> None:
    await w.pool.add("d")
    w.pool.faults = [Fault("worker.describe", "dead")]


@pytest.mark.parametrize("prepare, reason", [
    (_other_capability, "compute capability 9.0, the session needs 7.5"), (_older_driver, "driver 12080, older than"),
    (_full, "full: 1073741823 bytes free of the 1024 MiB"), (_other_kind, "another kind of device"),
    (_cordoned, r"cordoned \(maintenance\)"), (_sick, r"unhealthy \(ECC errors\)"), (_pinned, "device heap"),
    (_ended, "is ended, not running: it was killed"), (_source_silent, "does not answer"),
])
def test_a_move_is_refused_before_anything_stops(tmp_path: Path, prepare,
                                                 reason: str) -> None:  # type: ignore[no-untyped-def]
    async def test(w: World) -> None:
        await w.session("s")
        await prepare(w)
        before = await w.pool.record("s")
        with pytest.raises(Refused, match=reason):
            await w.coordinator.migrate("s", "d")
        assert await w.pool.record("s") == before
        assert not {verb for _, verb in w.pool.said} & {"move.receive", "move.send"}

    run(tmp_path, test)


def test_a_move_to_nowhere_or_to_itself_or_of_nothing(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        with pytest.raises(NotFound, match="no host is called 'nowhere'; the pool has: a, b, c"):
            await w.coordinator.migrate("s", "nowhere")
        with pytest.raises(Refused, match="already"):
            await w.coordinator.migrate("s", "a")
        with pytest.raises(NotFound, match="no session"):
            await w.coordinator.migrate("t", "b")

    run(tmp_path, test)


def test_one_move_at_a_time(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")

        async def second() -> None:
            with pytest.raises(Refused, match="being moved already"):
                await w.coordinator.migrate("s", "c")
            status = await w.coordinator.move_status("s")
            assert status["role"] == "sending" and status["move"]["state"] == "preparing"

        w.pool.faults = [Fault("move.send", "before", action=second)]
        assert (await w.coordinator.migrate("s", "b"))["outcome"] == "committed"

    run(tmp_path, test)


@pytest.mark.parametrize("verb", ["move.receive", "move.send"])
@pytest.mark.parametrize("when", ["before", "after", "lost", "dead"])
def test_a_command_that_fails_aborts_the_move(tmp_path: Path, verb: str, when: str) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        w.pool.faults = [Fault(verb, when)]
        with pytest.raises(MoveFailed) as caught:
            await w.coordinator.migrate("s", "b")
        assert caught.value.detail["outcome"] == "aborted" and verb in caught.value.detail["reason"]
        record = await w.pool.owned_once("s")
        assert (record.owner, record.epoch, record.move) == ("a", 1, None)
        assert not w.pool.nodes["b"].incoming, "the destination keeps nothing"
        assert (await w.coordinator.migrate("s", "b"))["outcome"] == "committed", "and it can move later"

    run(tmp_path, test)


@pytest.mark.parametrize("host", ["a", "b"])
@pytest.mark.parametrize("when", ["before", "after", "lost", "dead"])
def test_a_settle_that_fails_is_done_later(tmp_path: Path, host: str, when: str) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        w.pool.faults = [Fault("move.settle", when, host) for _ in range(3 if when in ("lost", "dead") else 1)]
        result = await w.coordinator.migrate("s", "b")
        assert result["outcome"] == "committed"
        await w.coordinator.resume_unfinished()
        record = await w.pool.owned_once("s")
        assert (record.owner, record.epoch, record.move) == ("b", 2, None) and w.pool.serving("s") == [("b", 2)]

    run(tmp_path, test)


def test_a_move_can_be_aborted_until_it_is_ready(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")

        async def abort() -> None:
            await w.coordinator.move_abort("s", reason="second thoughts")
            await asyncio.sleep(0.05)

        w.pool.faults = [Fault("move.send", "before", action=abort)]
        with pytest.raises(MoveFailed, match="second thoughts"):
            await w.coordinator.migrate("s", "b")
        assert (await w.pool.owned_once("s")).owner == "a"

    run(tmp_path, test)


def test_a_replay_that_fails_is_followed_by_a_copy(tmp_path: Path) -> None:
    """Two moves on record: one aborted, one committed; the options are kept but for the mode."""
    async def test(w: World) -> None:
        await w.session("s")
        w.pool.nodes["a"].replay_fails = True
        result = await w.coordinator.migrate("s", "b", options=MoveOptions("replay", max_downtime=2.0))
        assert result["outcome"] == "committed" and "on purpose" in result["fell_back"]
        assert [(one["mode"], one["max_downtime"]) for one in w.pool.nodes["a"].wishes] == [
            ("replay", 2.0), ("copy", 2.0)]
        assert await w.pool.history("s") == ["create", "started", "begin_move", "abort", "clear_move", "begin_move",
                                             "move_ready", "commit", "clear_move"]
        assert (await w.pool.owned_once("s")).epoch == 2 and w.pool.serving("s") == [("b", 2)]

    run(tmp_path, test)


def test_what_a_replay_came_to_is_known_to_the_next_move(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        w.pool.nodes["a"].replay_fails = True
        await w.coordinator.migrate("s", "b", options=MoveOptions("auto"))
        await w.coordinator.migrate("s", "c", options=MoveOptions("auto"))
        assert [one["mismatched"] for one in w.pool.nodes["a"].wishes] == [0.0, 0.0]
        assert [one["mismatched"] for one in w.pool.nodes["b"].wishes] == [0.75]

    run(tmp_path, test)


def test_a_node_has_only_so_many_moves_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait their turn; all are done in the end."""
    async def test(w: World) -> None:
        monkeypatch.setattr("rgpu.migrate.leader.moving.moves.MOVES_PER_NODE", 1)
        for name in ("s", "t"):
            await w.session(name)
        at_once: list[int] = []

        async def look() -> None:
            at_once.append(sum(len(node.incoming) for node in w.pool.nodes.values()))
            await asyncio.sleep(0.05)

        w.pool.faults = [Fault("move.send", "before", action=look) for _ in range(2)]
        results = await asyncio.gather(*(w.coordinator.migrate(name, "c") for name in ("s", "t")))
        assert [result["outcome"] for result in results] == ["committed"] * 2
        assert at_once == [1, 1], "one arrives at a time"

    run(tmp_path, test)


def test_a_plan_runs_the_checks_and_changes_nothing(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        plan = await w.coordinator.plan_move("s", "b")
        assert (plan["from"], plan["to"], plan["epoch"], plan["wishes"]["mode"]) == ("a", "b", 1, "auto")
        w.pool.nodes["a"].pins = ["device-side malloc in kernel k"]
        with pytest.raises(Refused, match="device-side malloc in kernel k"):
            await w.coordinator.plan_move("s", "b")
        assert await w.pool.history("s") == ["create", "started"] and w.pool.serving("s") == [("a", 1)]

    run(tmp_path, test)


# -- checkpoints and the end --------------------------------------------------------------------
def test_a_checkpoint_counts_when_it_is_named(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        w.pool.nodes["a"].workers["s"].position = 42
        result = await w.coordinator.checkpoint("s")
        record = await w.pool.record("s")
        assert record.checkpoint is not None and (record.checkpoint.name,
                                                  record.checkpoint.position) == (result["image"], 42)
        assert w.pool.notices == [("s", "cut", {"epoch": 1, "position": 42, "image": result["image"]})]
        w.pool.nodes["a"].workers["s"].position = 41
        with pytest.raises(Refused, match="behind"):
            await w.coordinator.checkpoint("s")
        w.pool.faults = [Fault("session.image", "before", error=StoreError("disk full"))]
        with pytest.raises(StoreError):
            await w.coordinator.checkpoint("s")
        assert len(w.pool.notices) == 1, "no cut follows a checkpoint that does not count"

    run(tmp_path, test)


def test_restore(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        for position in (10, 20):
            w.pool.nodes["a"].workers["s"].position = position
            result = await w.coordinator.checkpoint("s")
        w.pool.nodes["a"].workers["s"].position = 35
        restored = await w.coordinator.restore(result["image"], "s", host="c")
        assert restored == {"session": "s", "host": "c", "owner": "c", "epoch": 2, "position": 20,
                            "image": result["image"]}
        assert w.pool.serving("s") == [("c", 2)]
        with pytest.raises(Refused, match="cannot be rolled back"):
            await w.coordinator.restore("older", "s", position=10)
        with pytest.raises(NotFound):
            await w.coordinator.restore("unknown", "s")
        await w.coordinator.cordon("b", "cordoned")
        with pytest.raises(Refused, match="cordoned"):
            await w.coordinator.restore(result["image"], "s", host="b")
        assert w.pool.serving("s") == [("c", 2)], "a refused restore stops nothing"

    run(tmp_path, test)


def test_the_end_gives_everything_back(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s", quota=8 * GIB)
        record = await w.coordinator.end("s", "exit code 0")
        assert (record.state, record.owner, record.reason) == ("ended", None, "exit code 0")
        assert w.pool.serving("s") == [] and (await w.coordinator.end("s")).reason == "exit code 0"
        await w.session("t", quota=8 * GIB)
        w.pool.faults = [Fault("session.drop", "dead")]
        assert (await w.coordinator.end("t")).state == "ended", "a node that does not answer cannot hold it up"

    run(tmp_path, test)


def test_a_silent_client_host(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        assert await w.coordinator.agent_silent("s", "a", epoch=1, seconds=590) == pytest.approx(10, abs=2)
        record = await w.pool.record("s")
        assert record.state == "running" and record.silent_since
        await w.coordinator.agent_silent("s", "a", epoch=1, seconds=0)
        assert (await w.pool.record("s")).silent_since == 0, "heard again"
        for host, epoch in (("b", 1), ("a", 2)):
            await w.coordinator.agent_silent("s", host, epoch=epoch, seconds=601)
            assert (await w.pool.record("s")).state == "running", "not of its owner"
        await w.coordinator.agent_silent("s", "a", epoch=1, seconds=601)
        record = await w.pool.record("s")
        assert record.state == "ended" and record.checkpoint is not None and record.checkpoint.name in record.reason

    run(tmp_path, test)


def test_a_client_that_comes_back_while_its_session_is_checkpointed(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        w.pool.nodes["a"].workers["s"].attached = True
        await w.coordinator.agent_silent("s", "a", epoch=1, seconds=601)
        record = await w.pool.record("s")
        assert record.state == "running" and record.checkpoint is not None

    run(tmp_path, test)


def test_a_silence_outlives_the_worker(tmp_path: Path) -> None:
    """The next one never had an agent: it counts on from where the first was left."""
    async def test(w: World) -> None:
        await w.session("s")
        await w.coordinator.agent_silent("s", "a", epoch=1, seconds=580)
        del w.pool.nodes["a"].workers["s"]
        await w.coordinator.worker_died("s", "a", epoch=1)
        wait = await w.coordinator.agent_silent("s", "a", epoch=2, seconds=60, had_agent=False)
        assert wait == pytest.approx(20, abs=3) and (await w.pool.record("s")).state == "running"
        w.coordinator.silence.grace = 570.0
        await w.coordinator.agent_silent("s", "a", epoch=2, seconds=70, had_agent=False)
        assert (await w.pool.record("s")).state == "ended"

    run(tmp_path, test)


def test_a_session_that_its_program_does_not_use_yet_is_not_silent(tmp_path: Path) -> None:
    """As long as its client says that it lives; and what stands in the record is taken back."""
    async def test(w: World) -> None:
        admission, program = w.coordinator.admission, Program(pid=7, host="client")
        await admission.create(Order("s", "agent", 1 << 30, program=program))
        await w.coordinator.agent_silent("s", "a", epoch=1, seconds=100, had_agent=False)
        assert (await w.pool.record("s")).silent_since
        with pytest.raises(NotFound):
            await admission.keep("s", agent="another", program=program)
        assert not admission.kept("s")
        assert (await admission.keep("s", agent="agent", program=program)).state == "running"
        wait = await w.coordinator.agent_silent("s", "a", epoch=1, seconds=10_000, had_agent=False)
        record = await w.pool.record("s")
        assert (record.state, record.silent_since) == ("running", 0) and wait <= 15
        admission._kept.clear()  # its client is gone
        await w.coordinator.agent_silent("s", "a", epoch=1, seconds=10_000, had_agent=False)
        assert (await w.pool.record("s")).state == "ended"

    run(tmp_path, test)


def test_an_owner_that_its_agent_cannot_reach(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        assert (await w.coordinator.unreachable("s", epoch=1, reached="c", seconds=3)).owner == "a"
        assert (await w.coordinator.unreachable("s", epoch=1, reached="c")).owner == "c"
        w.pool.faults = [Fault("worker.describe", "dead")]
        record = await w.coordinator.unreachable("s", epoch=2, reached="b")
        assert (record.owner, record.epoch, record.state) == ("b", 3, "running"), "recovered where it cannot be moved"

    run(tmp_path, test)


# -- losses (OWNERSHIP 9) ------------------------------------------------------------------------
def test_a_dead_worker_is_started_again_in_place_then_elsewhere_then_not(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        w.pool.nodes["a"].workers["s"].position = 42
        await w.coordinator.checkpoint("s")
        places = []
        for epoch in (1, 2, 3):
            owner = str((await w.pool.record("s")).owner)
            del w.pool.nodes[owner].workers["s"]
            await w.coordinator.worker_died("s", owner, epoch=epoch, position=50, reason="signal 11")
            places.append((await w.pool.record("s")).owner)
            assert epoch == 3 or w.pool.nodes[str(places[-1])].workers["s"].position == 42
        record = await w.pool.record("s")
        assert places == ["a", "b", None]
        assert record.state == "failed" and "third time" in record.reason and "signal 11" in record.reason
        assert record.checkpoint is not None, "checkpoint and journal are kept"

    run(tmp_path, test)


def test_progress_forgives(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        for n in range(5):
            record = await w.pool.owned_once("s")
            del w.pool.nodes[str(record.owner)].workers["s"]
            await w.coordinator.worker_died("s", str(record.owner), epoch=record.epoch, position=100 * (n + 1))
        assert (await w.pool.owned_once("s")).epoch == 6

    run(tmp_path, test)


def test_late_news_of_an_old_worker_changes_nothing(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        await w.coordinator.migrate("s", "b")
        before = await w.pool.record("s")
        await w.coordinator.worker_died("s", "a", epoch=1)
        await w.coordinator.worker_died("s", "b", epoch=1)
        assert await w.pool.record("s") == before

    run(tmp_path, test)


def test_without_a_journal_there_is_no_way_back(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s", recover=False)
        del w.pool.nodes["a"].workers["s"]
        await w.coordinator.worker_died("s", "a", epoch=1)
        record = await w.pool.record("s")
        assert record.state == "failed" and "--recover off" in record.reason

    run(tmp_path, test)


def test_a_start_that_fails_during_recovery(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        del w.pool.nodes["a"].workers["s"]
        w.pool.faults = [Fault("worker.start", "dead"), Fault("worker.start", "dead"),
                         Fault("worker.start", "before", error=DeviceError("700"))]
        await w.coordinator.worker_died("s", "a", epoch=1, position=5)
        record = await w.pool.owned_once("s")
        assert (record.owner, record.epoch) == ("c", 4)

    run(tmp_path, test)


def test_a_checkpoint_that_nobody_can_read_fails_the_session_with_its_name(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        del w.pool.nodes["a"].workers["s"]
        w.pool.faults = [Fault("worker.start", "before", error=StoreError("chunk 77 is missing")) for _ in range(9)]
        await w.coordinator.worker_died("s", "a", epoch=1, position=5)
        record = await w.pool.record("s")
        assert record.state == "failed" and "chunk 77" in record.reason
        assert record.epoch == 3, "in place, then elsewhere, then not"

    run(tmp_path, test)


def test_a_full_pool_makes_a_session_wait_not_fail(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s", quota=5 * GIB)
        await w.session("x", host="b", quota=5 * GIB)
        del w.pool.nodes["a"].workers["s"]
        await w.pool.kill("a")
        watching = asyncio.ensure_future(w.coordinator.run())
        await _until(w, "s", "recovering")
        assert (await w.pool.record("s")).epoch == 1 and "full" in (await w.pool.record("s")).reason
        await w.coordinator.end("x")
        await _until(w, "s", "running")
        assert (await w.pool.owned_once("s")).owner == "b"
        watching.cancel()

    run(tmp_path, test, nodes="ab")


async def _until(w: World, name: str, state: str, seconds: float = 30.0) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while (await w.pool.record(name)).state != state:
        assert asyncio.get_running_loop().time() < deadline, await w.pool.record(name)
        await asyncio.sleep(0.02)


def test_a_leader_that_is_none_any_more_decides_nothing(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        await w.another_leader()
        before = await w.pool.record("s")
        with pytest.raises(Fenced):
            await w.coordinator.migrate("s", "b")
        with pytest.raises(Fenced):
            await w.coordinator.end("s")
        with pytest.raises(Fenced):
            await w.session("t")
        assert await w.pool.record("s") == before

    run(tmp_path, test)


def test_a_checkpoint_holds_up_nobody(tmp_path: Path) -> None:
    """While a checkpoint is written, slowly, the session moves; then the checkpoint does not count."""
    async def test(w: World) -> None:
        await w.session("s")
        node, release = w.pool.nodes["a"], asyncio.Event()
        real = node.session_image

        async def slow(session: str, image: str) -> dict[str, Any]:
            written = await real(session, image)
            await release.wait()
            return written

        node.session_image = slow  # type: ignore[method-assign]
        writing = asyncio.ensure_future(w.coordinator.checkpoint("s"))
        await asyncio.sleep(0.05)
        moved = await asyncio.wait_for(w.coordinator.migrate("s", "b"), 10)
        assert moved["outcome"] == "committed" and not writing.done()
        release.set()
        with pytest.raises(Fenced):
            await writing
        assert (await w.pool.record("s")).checkpoint is None and w.pool.notices == []
        again = await w.coordinator.checkpoint("s")
        assert (await w.pool.record("s")).checkpoint.name == again["image"]  # type: ignore[union-attr]

    run(tmp_path, test)


def test_a_second_checkpoint_waits_for_the_first_and_an_end_for_none(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.session("s")
        node, release, writing = w.pool.nodes["a"], asyncio.Event(), []
        real = node.session_image

        async def slow(session: str, image: str) -> dict[str, Any]:
            writing.append(image)
            written = await real(session, image)
            await release.wait()
            return {**written, "pause_ms": 1.5}

        node.session_image = slow  # type: ignore[method-assign]
        first = asyncio.ensure_future(w.coordinator.checkpoint("s"))
        second = asyncio.ensure_future(w.coordinator.checkpoint("s"))
        while not writing:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert len(writing) == 1, "one after the other"
        release.set()
        results = [await first, await second]
        assert results[0]["pause_ms"] == 1.5 and len(writing) == 2
        release.clear()
        third = asyncio.ensure_future(w.coordinator.checkpoint("s"))
        await asyncio.sleep(0.05)
        ended = await asyncio.wait_for(w.coordinator.end("s"), 30)
        assert ended.state == "ended"
        release.set()
        with pytest.raises(Refused, match="ended"):
            await third

    run(tmp_path, test)
