"""`rgpu pool adopt` decides from what nodes hold: what is written, what is refused, and that epochs only grow."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rgpu.migrate.records.keys import session_key
from rgpu.migrate.records.repair import MOST_EPOCH, Answers, Holding, Plan, Report, Step, plan
from rgpu.migrate.records.schema import CheckpointName, MoveRecord, SessionRecord, decode, encode

NOW = 1_800_000_000.0
INCARNATIONS = {"node-a": 11, "node-b": 22, "node-c": 33}
AGENT = "agent-key"


def record(owner: str | None = "node-a", epoch: int = 3, state: str = "running", **values: Any) -> SessionRecord:
    made = SessionRecord(name="s", state=state, owner=owner, incarnation=INCARNATIONS.get(owner or "", 0),
                         # type: ignore[arg-type]
                         epoch=epoch, quota=1 << 26, agent=AGENT, device="cpu:0").replace(**values)
    return decode(encode(made), SessionRecord, session_key("s"))


def report(host: str, *holdings: Holding, **values: Any) -> Report:
    values = {"mistrust": "the registry went back from revision 900 to 500", **values}
    return Report(host=host, incarnation=INCARNATIONS[host], public_key=f"key-of-{host}", holdings=list(holdings),
                  **values)


def holding(epoch: int, holds: str = "running", known: SessionRecord | None = None, **values: Any) -> Holding:
    return Holding(session="s", holds=holds, epoch=epoch, record=known, **values)  # type: ignore[arg-type]


def decide(known: SessionRecord | None, *reports: Report, expected: tuple[str, ...] = ("node-a", "node-b"),
           **answers: Any) -> Plan:
    members = {f"node-{found.host}" for found in reports}
    return plan({"s": (known, 500)} if known else {}, reports, expected, members, Answers(**answers), NOW)


def only(found: Plan) -> Step:
    assert found.problems == (), found.problems
    (step,) = found.steps
    return step


def test_what_the_registry_has_right_stays() -> None:
    step = only(decide(record(), report("node-a", holding(3)), report("node-b")))
    assert step.action == "keep" and step.record is None and not step.stale


def test_a_session_that_moved_since_is_owned_where_it_is() -> None:
    """The backup says node-a at 3; it moved to node-b since, which had a checkpoint named at 4."""
    newer = record("node-b", 4, checkpoint=CheckpointName(name="i4", position=90, epoch=4), cut=90)
    step = only(decide(record(), report("node-a"), report("node-b", holding(4, known=newer))))
    assert (step.action, step.host, step.before, step.epoch, step.revision) == ("own", "node-b", 3, 5, 500)
    made = step.record
    assert made is not None and (made.owner, made.incarnation, made.epoch, made.state) == ("node-b", 22, 5, "running")
    assert made.checkpoint == newer.checkpoint and made.cut == 90 and made.move is None and made.agent == AGENT
    assert decode(encode(made), SessionRecord, session_key("s")) == made


def test_one_that_was_created_since_is_written_anew() -> None:
    step = only(decide(None, report("node-a", holding(1, known=record(epoch=1))), report("node-b")))
    assert (step.action, step.before, step.epoch, step.revision) == ("own", 0, 2, 0)


def test_a_name_that_was_used_again_since_gets_the_new_program_s_record() -> None:
    old = record(None, 7, "ended", agent="another")
    step = only(decide(old, report("node-a", holding(8, known=record(epoch=8))), report("node-b")))
    assert step.action == "own" and step.record is not None and step.record.agent == AGENT and step.epoch == 9


def test_a_restarted_daemon_has_another_incarnation() -> None:
    step = only(decide(record(incarnation=5), report("node-a", holding(3)), report("node-b")))
    assert step.action == "own" and step.record is not None and step.record.incarnation == 11 and step.epoch == 4


def test_nobody_holds_it_any_more() -> None:
    step = only(decide(record(), report("node-a"), report("node-b")))
    assert step.action == "recover" and step.record is not None
    assert (step.record.state, step.record.owner, step.record.epoch) == ("recovering", "node-a", 3)
    ended = only(decide(record(), report("node-a"), report("node-b", ended={"s": 4})))
    assert ended.action == "end" and ended.record is not None and ended.record.state == "ended"
    before = only(decide(record(epoch=5), report("node-a", ended={"s": 4}), report("node-b")))
    assert before.action == "recover", "what ended was an earlier life"
    waiting = only(decide(record(state="recovering"), report("node-a"), report("node-b")))
    assert waiting.action == "keep"


def test_an_agent_has_seen_more_than_anybody_else() -> None:
    """It was on a host that is gone for good: what comes after must be above what it saw."""
    seen = [("s", AGENT, 9)]
    step = only(decide(record(), report("node-a", seen=seen), report("node-b")))
    assert step.action == "recover" and step.record is not None and step.record.epoch == 9
    held = only(decide(record(), report("node-a", holding(3)), report("node-b", seen=seen)))
    assert held.action == "own" and held.epoch == 10
    for lie in ([("s", "somebody else", 9)], [("s", AGENT, MOST_EPOCH + 1)], [("other", AGENT, 9)]):
        assert only(decide(record(), report("node-a", holding(3)), report("node-b", seen=lie))).action == "keep"


def test_two_claims_are_refused_until_somebody_decides() -> None:
    claims = (report("node-a", holding(3, attached=True)), report("node-b", holding(4, known=record("node-b", 4))))
    found = decide(record(), *claims)
    assert found.steps == () and "claimed twice" in found.problems[0] and "its agent attached" in found.problems[0]
    for host, other in (("node-a", "node-b"), ("node-b", "node-a")):
        step = only(decide(record(), *claims, keep={"s": host}))
        assert (step.action, step.host, step.epoch, step.stale) == ("own", host, 5, (other,))
    assert "node-c does not hold" in decide(record(), *claims, keep={"s": "node-c"}).problems[1]


def test_the_registry_names_another_owner_later() -> None:
    """A leader that had never seen the other data recovered it elsewhere: a claim as well."""
    known = record("node-b", 4, "recovering")
    found = decide(known, report("node-a", holding(3)), report("node-b"))
    assert "on record at epoch 4, holds nothing" in found.problems[0]
    step = only(decide(known, report("node-a", holding(3)), report("node-b"), keep={"s": "node-a"}))
    assert (step.action, step.host, step.epoch) == ("own", "node-a", 5)
    here = only(decide(record("node-a", 4, "recovering"), report("node-a", holding(3)), report("node-b")))
    assert (here.action, here.epoch) == ("own", 5), "in its place: the worker that lives goes on"


@pytest.mark.parametrize("state", ["preparing", "ready"])
def test_an_open_move_is_off(state: str) -> None:
    """Whether it was committed since nobody knows; the source has what it had when it stopped."""
    move = MoveRecord(id="m", source="node-a", destination="node-b", destination_incarnation=22, device="cpu:0",
                      state=state)  # type: ignore[arg-type]
    moving = record(state="moving", move=move)
    step = only(decide(moving, report("node-a", holding(3, "paused")), report("node-b", holding(4, "incoming"))))
    assert (step.action, step.host, step.epoch) == ("own", "node-a", 5)
    assert step.record is not None and step.record.move is None and step.record.state == "running"
    gone = only(decide(moving, report("node-a"), report("node-b", holding(4, "incoming"))))
    assert gone.action == "recover", "what only arrives is nobody's"


def test_who_does_not_answer() -> None:
    found = decide(record(), report("node-b"))
    assert "node-a does not answer" in found.problems[0]
    step = only(decide(record(), report("node-b"), without=frozenset({"node-a"})))
    assert step.action == "recover"


def test_a_session_that_nobody_knows() -> None:
    found = decide(None, report("node-a", holding(2)), report("node-b"))
    assert "its user is not known" in found.problems[0]
    step = only(decide(None, report("node-a", holding(2)), report("node-b"), forget=frozenset({"s"})))
    assert (step.action, step.stale, step.record) == ("forget", ("node-a",), None)


def test_nodes_that_joined_since_are_let_in_again() -> None:
    found = plan({}, [report("node-a"), report("node-b")], (), {"node-node-a"}, Answers(), NOW)
    assert [(key.name, key.role, key.public) for key in found.keys] == [("node-node-b", "node", "key-of-node-b")]


def test_a_registry_that_did_not_go_back() -> None:
    calm = report("node-a", holding(3), mistrust=""), report("node-b", mistrust="")
    assert decide(record(), *calm).went_back == ""
    assert "epoch 3, the registry says 2" in decide(record(epoch=2), *calm).went_back
    assert "the registry says nothing" in decide(None, *calm).went_back
    assert "revision 900" in decide(record(), report("node-a")).went_back


def test_a_report_crosses_the_wire() -> None:
    sent = report("node-a", holding(3, known=record(checkpoint=CheckpointName(name="i", position=4, epoch=3))),
                  ended={"x": 1}, seen=[("s", AGENT, 4)])
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.to_builtins(sent, builtin_types=(bytes,))))
    assert msgspec.convert(wire, Report) == sent
    for bad in ({**wire, "holdings": [{"session": "s", "holds": "owns", "epoch": 1}]}, {**wire, "host": ""},
                {**wire, "seen": [["s", "a"]]}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(bad, Report)


HOLDS = st.one_of(st.none(), st.tuples(st.sampled_from(["running", "paused", "incoming"]), st.integers(1, 6)))


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.none(), st.tuples(st.sampled_from(["node-a", "node-b", "node-c"]), st.integers(1, 6),
                                      st.sampled_from(["running", "recovering", "ended", "failed"]))),
       st.tuples(HOLDS, HOLDS, HOLDS), st.integers(0, 8))
def test_whatever_nodes_say(on_record: tuple[str, int, str] | None, held: tuple[Any, ...], seen: int) -> None:
    """One owner at most, above every epoch that was seen; a second plan after the first finds nothing to do."""
    known = None
    if on_record is not None:
        host, epoch, state = on_record
        known = record(host if state in ("running", "recovering") else None, epoch, state)
    reports = [report(host, *([holding(what[1], what[0], record(host, what[1]))] if what else []),
                      seen=[("s", AGENT, seen)] if seen else [])
               for host, what in zip(INCARNATIONS, held, strict=True)]
    found = decide(known, *reports, expected=tuple(INCARNATIONS))
    claims = [host for host, what in zip(INCARNATIONS, held, strict=True) if what and what[0] != "incoming"]
    if len(claims) > 1:
        assert found.problems and not found.steps
        return
    if found.problems or not found.steps:
        return
    step = only(found)
    agents = {AGENT} if known or any(held) else set()
    epochs = [known.epoch if known else 0, *(what[1] for what in held if what), seen if agents else 0]
    if step.action == "own":
        assert step.epoch > max(epochs) and [step.host] == claims
    assert step.epoch >= max(epochs) or step.action == "keep" and step.epoch == known.epoch  # type: ignore[union-attr]
    after = step.record or known
    again = [found_again(item, step) for item in reports]
    second = decide(after, *again, expected=tuple(INCARNATIONS))
    assert second.problems == () and [item.action for item in second.steps] in ([], ["keep"], ["recover"])
    if step.action == "own":
        assert [item.action for item in second.steps] == ["keep"]


def found_again(item: Report, step: Step) -> Report:
    """What the node reports after it did its part; what only arrived is discarded by then."""
    holdings = [held.replace(epoch=step.epoch) for held in item.holdings
                if held.holds != "incoming" and step.action in ("own", "keep")]
    return item.replace(holdings=holdings)


