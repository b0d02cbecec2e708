"""The decisions about a session's record, one by one and in every order (hypothesis)."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rgpu.migrate.records import ownership
from rgpu.migrate.records.keys import LEADER, node_key, queue_key, session_key
from rgpu.migrate.records.losses import count_failure, next_place
from rgpu.migrate.records.ownership import Decision, Held, Leader, Node, went_back
from rgpu.migrate.records.reconcile import Holding, reconcile
from rgpu.migrate.records.schema import (
    CheckpointName,
    DeviceRecord,
    Failure,
    NodeRecord,
    Program,
    SessionRecord,
    decode,
)
from rgpu.migrate.registry.base import Delete, Put, Target
from rgpu.session.errors import AlreadyExists, Fenced, Refused, RgpuError

LEADERS = Leader("a", 3)


def node(host: str, incarnation: int = 1, revision: int = 5) -> Node:
    devices = [DeviceRecord(device="cpu:0", memory=100, compute_capability=(7, 5), driver_version=13000)]
    return Node(NodeRecord(host=host, incarnation=incarnation, control="c", data="d", devices=devices), revision)


def checkpoint(position: int, epoch: int = 1) -> CheckpointName:
    return CheckpointName(name=f"i{position}", position=position, epoch=epoch)


def create(held: Held | None = None, host: str = "a", **values: Any) -> Decision:
    return ownership.create(held, name="s", node=node(host), device="cpu:0", quota=1, agent="k", program=Program(),
                            recover=values.get("recover", True), leader=LEADERS, now=1.0, reason="chosen")


def after(decision: Decision, revision: int = 20) -> Held:
    return Held(decision.record, revision)


def running(**values: Any) -> Held:
    return after(ownership.started(after(create(**values)), epoch=1, node=node("a"), leader=LEADERS, now=1.0,
                                   reason="started"))


def moving(state: str = "preparing") -> Held:
    begun = after(ownership.begin_move(running(), epoch=1, move="m", node=node("b"), device="cpu:0", leader=LEADERS,
                                       now=2.0, reason="asked"))
    if state == "preparing":
        return begun
    return after(ownership.move_ready(begun, epoch=1, move="m", leader=LEADERS, now=3.0, reason="verified"))


def compared(decision: Decision) -> set[tuple[str, Target, int]]:
    return {(c.key, c.target, int(c.operand)) for c in decision.compares}


def test_the_commit_compares_what_the_rule_says() -> None:
    """OWNERSHIP 2: session revision (and with it epoch and move state), leader revision, destination's incarnation."""
    decision = ownership.commit(moving("ready"), epoch=1, move="m", node=node("b", revision=9), leader=LEADERS, now=4.0,
                                reason="ready")
    assert compared(decision) == {(session_key("s"), Target.MOD, 20), (LEADER, Target.CREATE, 3),
                                  (node_key("b"), Target.CREATE, 9)}
    record = decision.record
    assert (record.owner, record.epoch, record.state) == ("b", 2, "running")
    assert record.move is not None and record.move.state == "committed"
    put = next(o for o in decision.operations if isinstance(o, Put) and o.key == session_key("s"))
    assert decode(put.value, SessionRecord, put.key) == record
    assert len(decision.operations) == 2, "the reason goes into the history in the same transaction"


@pytest.mark.parametrize("changes, error", [
    ({"epoch": 2}, Fenced), ({"move": "other"}, Fenced), ({"node": node("b", incarnation=2)}, Fenced),
    ({"node": node("c")}, Fenced), ({"held": moving("preparing")}, Refused), ({"held": running()}, Refused),
])
def test_a_commit_is_refused(changes: dict[str, Any], error: type[RgpuError]) -> None:
    values = {"held": moving("ready"), "epoch": 1, "move": "m", "node": node("b"), **changes}
    with pytest.raises(error):
        ownership.commit(values.pop("held"), leader=LEADERS, now=1.0, reason="x", **values)


@pytest.mark.parametrize("state", ["preparing", "ready"])
def test_the_source_may_abort_and_nobody_else_but_the_leader(state: str) -> None:
    decision = ownership.abort(moving(state), epoch=1, move="m", source="a", now=1.0, reason="too slow")
    assert (decision.record.state, decision.record.owner, decision.record.epoch) == ("running", "a", 1)
    assert compared(decision) == {(session_key("s"), Target.MOD, 20)}, "it needs no leader"
    with pytest.raises(Refused):
        ownership.abort(moving(state), epoch=1, move="m", source="b", now=1.0, reason="x")
    with pytest.raises(Refused):
        ownership.abort(after(decision), epoch=1, move="m", source="a", now=1.0, reason="again")


def test_names_and_epochs() -> None:
    with pytest.raises(AlreadyExists):
        create(running())
    over = after(ownership.end(running(), leader=LEADERS, now=1.0, reason="done"))
    assert create(over).record.epoch == 2
    with pytest.raises(AlreadyExists, match="rgpu kill"):
        create(after(ownership.fail(running(), epoch=1, leader=LEADERS, now=1.0, reason="no way")))


def test_checkpoints_count_in_order_and_by_their_owner() -> None:
    held = running()
    publish: dict[str, Any] = {"owner": "a", "epoch": 1, "now": 1.0, "reason": "x"}
    named = after(ownership.publish_checkpoint(held, checkpoint=checkpoint(10), **publish))
    assert named.record.checkpoint == checkpoint(10)
    with pytest.raises(Refused, match="behind"):
        ownership.publish_checkpoint(named, checkpoint=checkpoint(9), **publish)
    with pytest.raises(Fenced):
        ownership.publish_checkpoint(named, checkpoint=checkpoint(11), **{**publish, "owner": "b"})
    with pytest.raises(Fenced):
        ownership.publish_checkpoint(named, checkpoint=checkpoint(11, epoch=2), **publish)
    with pytest.raises(Fenced):
        ownership.publish_checkpoint(named, checkpoint=checkpoint(11), **{**publish, "epoch": 2})


def failure(position: int | None, when: float = 0.0, host: str = "a") -> Failure:
    return Failure(host=host, device="cpu:0", position=position, when=when)


def test_the_second_loss_in_one_place_and_the_third() -> None:
    record = running().record
    assert next_place(record, failure(10)) == "same"
    once = record.replace(failures=count_failure(record, failure(10)))
    assert next_place(once, failure(10)) == "another"
    assert next_place(once, failure(4)) == "same", "a replay of calls that were passed before"
    assert next_place(once, failure(11)) == "same", "it got further"
    twice = once.replace(failures=count_failure(once, failure(10)))
    assert next_place(twice, failure(10)) == "none"
    # Without positions: only a session that hardly ran made no progress.
    assert next_place(once.replace(running_since=100.0), failure(None, when=101.0)) == "another"
    assert next_place(once.replace(running_since=100.0), failure(None, when=200.0)) == "same"
    assert next_place(once.replace(state="recovering"), failure(None, when=200.0)) == "another"


def recover(held: Held, host: str, loss: Failure | None = None, **values: Any) -> Decision:
    return ownership.recover(held, epoch=held.record.epoch, node=node(host), device="cpu:0", failure=loss,
                             leader=LEADERS, now=1.0, reason="lost", **values)


def test_recover_obeys_the_same_rule() -> None:
    first = recover(running(), "a", failure(10, when=2.0))
    assert (first.record.epoch, first.record.owner, first.record.state) == (2, "a", "recovering")
    with pytest.raises(Refused, match="another device"):
        recover(after(first), "a", failure(10, when=3.0))
    second = recover(after(first), "b", failure(10, when=3.0))
    with pytest.raises(Refused, match="third time"):
        recover(after(second), "c", failure(10, when=4.0, host="b"))


def test_recover_from_where() -> None:
    with pytest.raises(Refused, match="--recover off"):
        recover(running(recover=False), "b")
    held = Held(running().record.replace(checkpoint=checkpoint(10)), 20)
    with pytest.raises(Refused, match="rolled back"):
        recover(held, "b", checkpoint=checkpoint(9))
    assert recover(held, "b").record.checkpoint == checkpoint(10)
    assert recover(held, "b", checkpoint=checkpoint(12)).record.checkpoint == checkpoint(12)


def test_a_recovery_ends_a_move() -> None:
    record = recover(moving("ready"), "c").record
    assert record.move is not None and record.move.state == "aborted" and record.open_move is None
    assert reconcile(record, Holding("b", 1, "incoming", 2, "m")).action == "discard"
    assert reconcile(record, Holding("a", 1, "paused", 1, "m")).action == "forget"


def imaged(position: int = 5) -> Held:
    return after(ownership.publish_checkpoint(running(), owner="a", epoch=1, checkpoint=checkpoint(position), now=1.0,
                                              reason="x"))


def park(held: Held, **values: Any) -> Decision:
    values = {"epoch": held.record.epoch, "favour": "q", "leader": LEADERS, "now": 2.0, "reason": "for q", **values}
    return ownership.park(held, **values)


def resume(held: Held, host: str = "b") -> Decision:
    return ownership.resume(held, epoch=held.record.epoch, node=node(host), device="cpu:0", leader=LEADERS, now=3.0,
                            reason="room")


def test_a_parked_session_keeps_its_epoch_and_comes_back_at_the_next() -> None:
    decision = park(imaged())
    record = decision.record
    assert (record.state, record.owner, record.epoch) == ("parked", None, 1) and record.checkpoint == checkpoint(5)
    assert record.parked is not None and (record.parked.host, record.parked.epoch) == ("a", 1)
    assert compared(decision) == {(session_key("s"), Target.MOD, 20), (LEADER, Target.CREATE, 3)}
    for holds in ("running", "paused"):
        assert reconcile(record, Holding("a", 1, holds,
                                      1)).action == "forget", "whoever has it owns nothing"  # type: ignore[arg-type]
    back = resume(after(decision))
    assert (back.record.state, back.record.owner, back.record.epoch, back.record.parked) == ("recovering", "b", 2, None)
    assert (node_key("b"), Target.CREATE, 5) in compared(back), "the node that gets it is the one that was seen"
    ended = ownership.end(after(decision), leader=LEADERS, now=3.0, reason="x").record
    assert (ended.state, ended.parked) == ("ended", None)


def test_what_cannot_be_parked() -> None:
    with pytest.raises(Refused, match="it has no checkpoint"):
        park(running())
    with pytest.raises(Refused, match="--recover off"):
        park(after(ownership.publish_checkpoint(running(recover=False), owner="a", epoch=1, checkpoint=checkpoint(5),
                                                now=1.0,
                                           reason="x")))
    with pytest.raises(Refused, match="move m is not reconciled"):
        checkpointed_move = ownership.publish_checkpoint(moving("ready"), owner="a", epoch=1, checkpoint=checkpoint(5),
                                                         now=1.0, reason="x")
        aborted = ownership.abort(after(checkpointed_move), epoch=1, move="m", leader=LEADERS, now=1.0, reason="x")
        park(after(aborted))
    with pytest.raises(Refused, match="of epoch 1, not 2"):
        again = ownership.started(after(recover(imaged(), "b")), epoch=2, node=node("b"), leader=LEADERS, now=1.0,
                                  reason="x")
        park(after(again))
    with pytest.raises(Fenced):
        park(imaged(), epoch=2)
    with pytest.raises(Refused):
        park(moving())


def test_a_session_and_its_request_change_places_in_one_transaction() -> None:
    decision = ownership.create(None, name="s", node=node("a"), device="cpu:0", quota=1, agent="k", program=Program(),
                                recover=True, leader=LEADERS, now=1.0, reason="x", queued=17)
    assert (queue_key("s"), Target.MOD, 17) in compared(decision)
    assert Delete(queue_key("s")) in decision.operations
    assert (queue_key("s"), Target.MOD, 0) in compared(create()), "and without a request there must be none"


def test_a_registry_that_went_back() -> None:
    assert went_back(seen_cluster="x", cluster="x", seen_revision=9, revision=9) is None
    assert "identity" in str(went_back(seen_cluster="x", cluster="y", seen_revision=0, revision=9))
    assert "revision 9 to 8" in str(went_back(seen_cluster="x", cluster="x", seen_revision=9, revision=8))
    back = went_back(seen_cluster="x", cluster="x", seen_revision=0, revision=8, seen_epoch=4, epoch=3)
    assert back is not None and "epoch 4" in back


class Everything(RuleBasedStateMachine):
    """Any decision at any time, based on any record that was ever read, applied if its compares hold.

    Beside the record, the machine keeps what each party holds, and lets them reconcile at any time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.revision = 10
        self.held: Held | None = None
        self.stale: list[Held] = []
        self.epochs: list[tuple[int, str | None]] = []
        self.cut = 0

    def attempt(self, decide: Any, data: st.DataObject) -> None:
        """Decide on what was read now or long ago."""
        seen = data.draw(st.sampled_from([*self.stale[-3:], self.held])) if self.held else None
        try:
            decision: Decision = decide(seen)
        except (RgpuError, AssertionError) as error:
            assert isinstance(error, Fenced | Refused | AlreadyExists), error
            return
        if (seen.revision if seen else 0) != (self.held.revision if self.held else 0):
            return  # the compare of the record's revision does not hold
        before = self.held.record if self.held else None
        self.revision += 1
        self.check(before, decision)
        if self.held:
            self.stale.append(self.held)
        self.held = Held(decode_again(decision.record), self.revision)

    def check(self, before: SessionRecord | None, decision: Decision) -> None:
        record = decision.record
        if before is None:
            return
        changed = (record.owner, record.epoch) != (before.owner, before.epoch)
        if record.owner is not None and record.owner != before.owner:
            assert record.epoch == before.epoch + 1, "every change of owner raises the epoch by one"
        assert record.epoch in (before.epoch, before.epoch + 1)
        assert decision.name in ("commit", "recover", "create", "park", "resume", "end", "fail") or not changed
        assert (record.owner is None) == (record.state in ("parked", "failed", "ended"))
        if decision.name == "park":
            assert record.checkpoint is not None and record.checkpoint.epoch == record.epoch and record.recover
        if decision.name == "commit":
            assert before.move is not None and before.move.state == "ready" and record.owner == before.move.destination
        if before.checkpoint is not None and decision.name != "create":
            assert record.checkpoint is not None and record.checkpoint.position >= before.checkpoint.position

    @rule(data=st.data(), host=st.sampled_from("abc"))
    def create(self, data: st.DataObject, host: str) -> None:
        self.attempt(lambda held: create(held, host), data)

    @rule(data=st.data(), host=st.sampled_from("abc"), epoch=st.integers(1, 4))
    def started(self, data: st.DataObject, host: str, epoch: int) -> None:
        self.attempt(lambda held: ownership.started(held_(held), epoch=epoch, node=node(host), leader=LEADERS, now=1.0,
                                                    reason="x"), data)

    @rule(data=st.data(), host=st.sampled_from("abc"), move=st.sampled_from(["m", "n"]))
    def begin(self, data: st.DataObject, host: str, move: str) -> None:
        self.attempt(lambda held: ownership.begin_move(
            held_(held), epoch=held_(held).record.epoch, move=move, node=node(host), device="cpu:0", leader=LEADERS,
            now=1.0, reason="x"), data)

    @rule(data=st.data(), move=st.sampled_from(["m", "n"]), what=st.sampled_from(["move_ready", "abort", "clear_move"]))
    def move_on(self, data: st.DataObject, move: str, what: str) -> None:
        self.attempt(lambda held: getattr(ownership, what)(
            held_(held), epoch=held_(held).record.epoch, move=move, leader=LEADERS, now=1.0, reason="x"), data)

    @rule(data=st.data(), host=st.sampled_from("abc"), move=st.sampled_from(["m", "n"]))
    def commit(self, data: st.DataObject, host: str, move: str) -> None:
        self.attempt(lambda held: ownership.commit(
            held_(held), epoch=held_(held).record.epoch, move=move, node=node(host), leader=LEADERS, now=1.0,
            reason="x"), data)

    @rule(data=st.data(), host=st.sampled_from("abc"))
    def recover(self, data: st.DataObject, host: str) -> None:
        self.attempt(lambda held: recover(held_(held), host), data)

    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        self.attempt(lambda held: park(held_(held)), data)

    @rule(data=st.data(), host=st.sampled_from("abc"))
    def resume(self, data: st.DataObject, host: str) -> None:
        self.attempt(lambda held: resume(held_(held), host), data)

    @rule(data=st.data(), position=st.integers(0, 5))
    def publish(self, data: st.DataObject, position: int) -> None:
        self.attempt(lambda held: ownership.publish_checkpoint(
            held_(held), owner=str(held_(held).record.owner), epoch=held_(held).record.epoch, now=1.0, reason="x",
            checkpoint=checkpoint(position, held_(held).record.epoch)), data)

    @rule(data=st.data(), what=st.sampled_from(["end", "fail", "lost"]))
    def finish(self, data: st.DataObject, what: str) -> None:
        def decide(held: Held | None) -> Decision:
            values: dict[str, Any] = {} if what == "end" else {"epoch": held_(held).record.epoch}
            if what == "lost":
                values["failure"] = None
            return getattr(ownership, what)(held_(held), leader=LEADERS, now=1.0, reason="x", **values)

        self.attempt(decide, data)

    @invariant()
    def one_party_at_most_may_serve(self) -> None:
        """Whoever held the session at any epoch asks now: at most one of them is told to serve, the owner."""
        if self.held is None:
            return
        record = self.held.record
        told = set()
        for old in [*self.stale, self.held]:
            if old.record.owner is None:
                continue
            for holds in ("running", "paused"):
                move_id = old.record.move.id if old.record.move else ""
                who = Holding(old.record.owner, 1, holds, old.record.epoch, move_id)  # type: ignore[arg-type]
                if reconcile(record, who).action == "resume":
                    told.add((who.host, who.epoch))
            move = old.record.move
            if move is not None:
                answer = reconcile(record, Holding(move.destination, 1, "incoming", 0, move.id))
                if answer.action == "activate":
                    told.add((move.destination, answer.epoch))
        assert told <= {(record.owner, record.epoch)}, told


def held_(held: Held | None) -> Held:
    if held is None:
        raise Refused("there is no record")
    return held


def decode_again(record: SessionRecord) -> SessionRecord:
    """Through the bytes: no decision may make a record that its reader refuses."""
    from rgpu.migrate.records.schema import encode

    return decode(encode(record), SessionRecord, session_key(record.name))


TestEverything = Everything.TestCase
TestEverything.settings = settings(max_examples=60, stateful_step_count=25, deadline=None,
                                   suppress_health_check=list(HealthCheck))


@given(st.sampled_from(["running", "paused"]), st.integers(1, 5), st.integers(1, 5), st.sampled_from("ab"))
def test_reconcile_never_lets_a_doubt_start_anything(holds: Any, ours: int, theirs: int, owner: str) -> None:
    record = running().record.replace(epoch=theirs, owner=owner)
    action = reconcile(record, Holding("a", 1, holds, ours, "m")).action
    if theirs > ours:
        assert action == "forget"
    elif holds == "paused" and (theirs < ours or owner != "a"):
        assert action == "stay paused"
    elif theirs == ours and owner == "a":
        assert action == "resume"


@pytest.mark.parametrize("record, holding, action", [
    (None, Holding("a", 1, "running", 1), "forget"),
    (None, Holding("b", 1, "incoming", 2, "m"), "discard"),
    (moving("ready").record, Holding("a", 1, "paused", 1, "m"), "stay paused"),
    (moving("ready").record, Holding("a", 1, "running", 1, "m"), "resume"),
    (moving("ready").record, Holding("b", 1, "incoming", 2, "m"), "stay paused"),
    (moving("ready").record, Holding("b", 1, "incoming", 2, "older"), "discard"),
])
def test_reconcile_row_by_row(record: SessionRecord | None, holding: Holding, action: str) -> None:
    assert reconcile(record, holding).action == action


def test_a_restarted_destination_does_not_activate() -> None:
    committed = ownership.commit(moving("ready"), epoch=1, move="m", node=node("b"), leader=LEADERS, now=1.0,
                                 reason="x").record
    assert reconcile(committed, Holding("b", 1, "incoming", 0, "m")).action == "activate"
    assert reconcile(committed, Holding("b", 2, "incoming", 0, "m")).action == "discard"
    assert reconcile(committed, Holding("a", 1, "paused", 1, "m")).action == "forget"
