"""Users' quotas: the record, hostile and of the previous version; what counts; what is refused, row by row."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from rgpu.migrate.records.quota_decision import (
    LIMITS,
    NAMES,
    NOTHING,
    Quotas,
    Use,
    decide,
    decide_checkpoint,
    limits_of,
    read_limits,
    shown,
    use_of,
)
from rgpu.migrate.records.quotas import EVERYBODY, QuotaRecord, check_quota_user, quota_key, read_quota
from rgpu.migrate.records.schema import MoveRecord, Parked, QueueRecord, SessionRecord, Wants, encode
from rgpu.session.errors import Corrupt, LimitReached, RgpuError, UsageError, VersionMismatch
from tests.support.leader.records import session

GIB = 1 << 30
ALICE = QuotaRecord(user="alice", limits={"sessions": 2, "memory": None}, changed=5.0)


# -- the record --------------------------------------------------------------------------


def test_round_trip() -> None:
    for record in (ALICE, QuotaRecord(user=EVERYBODY, limits={"gpus": 250, "queued": 0})):
        assert read_quota(encode(record), quota_key(record.user)) == record


def test_what_another_version_wrote() -> None:
    """The first version's bytes; and a limit and a field of a later one, which is kept and limits nothing here."""
    first = bytes.fromhex("84a17601a475736572a5616c696365a66c696d69747382a873657373696f6e7302a66d656d6f7279c0a76368616e"
                          "676564cb4014000000000000")
    assert read_quota(first, "quotas/alice") == ALICE
    later = {"v": 1, "user": "alice", "limits": {"sessions": 2, "requests_per_second": 9}, "note": "x"}
    read = read_quota(msgspec.msgpack.encode(later), "quotas/alice")
    assert limits_of("alice", {"alice": read}) == {"sessions": 2}
    assert read.changed_by({"memory": 1}, frozenset({"sessions"}), 1.0).limits == {
        "requests_per_second": 9, "memory": 1}
    assert read_quota(msgspec.msgpack.encode({"v": 1, "user": "alice"}), "quotas/alice").limits == {}
    with pytest.raises(VersionMismatch, match="schema 2"):
        read_quota(msgspec.msgpack.encode({**later, "v": 2}), "quotas/alice")


@pytest.mark.parametrize("changes", [
    {"user": ""}, {"user": "../x"}, {"user": "a b"}, {"user": "alice\n"}, {"user": "@other"}, {"user": "x" * 64},
    {"limits": {"sessions": -1}}, {"limits": {"sessions": 2**63}}, {"limits": {"sessions": 1.5}}, {"limits": []},
    {"limits": {"sessions": "2"}}, {"limits": {"Sessions": 2}}, {"limits": {"": 2}}, {"limits": {"a\n": 2}},
    {"limits": {f"limit_{chr(97 + n)}": 1 for n in range(17)}}, {"changed": -1.0}, {"v": "1"}, {"user": "bob"}])
def test_what_a_quota_s_record_must_not_say(changes: dict[str, Any]) -> None:
    value = {**msgspec.to_builtins(ALICE), **changes}
    with pytest.raises(Corrupt):
        read_quota(msgspec.msgpack.encode(value), "quotas/alice")


@given(st.binary(max_size=200))
def test_any_bytes_give_a_record_or_an_error_of_ours(data: bytes) -> None:
    try:
        read_quota(data, "quotas/alice")
    except RgpuError:
        pass


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_record_is_refused_or_well_formed(at: int, value: int) -> None:
    data = bytearray(encode(ALICE))
    data[at % len(data)] = value
    try:
        encode(read_quota(bytes(data), "quotas/alice"))
    except RgpuError:
        pass


def test_names_of_users() -> None:
    assert check_quota_user("a.b-c_1") == "a.b-c_1"
    for name in ("", EVERYBODY, "a/b", ".a", "a\n", "x" * 64, "\x1b[2J"):
        with pytest.raises(UsageError):
            check_quota_user(name)


# -- what counts -------------------------------------------------------------------------


def of(name: str, gib: int = 1, compute: int = 0, user: str = "alice", **values: Any) -> SessionRecord:
    found = session(name, values.pop("host", "a"), gib * GIB, device=values.pop("device", "cpu:0"))
    return found.replace(user=user, wants=Wants(compute=compute, gpus=found.device.count("+") + 1), **values)


def parked(name: str, gib: int) -> SessionRecord:
    return of(name, gib, 50).replace(state="parked", owner=None, parked=Parked(
        host="a", device="cpu:0", epoch=1, when=1.0, favour="other"))


MOVE = MoveRecord(id="m", source="a", destination="b", destination_incarnation=1, device="cpu:1")
COUNTED: dict[str, tuple[list[SessionRecord], Use]] = {
    "nothing": ([], NOTHING),
    "every state that lives": ([of(state, state=state) for state in ("starting", "running", "recovering")],
                               Use(3, 3 * GIB)),
    "not what is over": ([of("e").replace(state="ended", owner=None), of("f").replace(state="failed")], NOTHING),
    "a parked one: it comes back unasked": ([parked("p", 2)], Use(1, 2 * GIB, 50)),
    "a move counts once": ([of("m", 2, 30, state="moving", move=MOVE)], Use(1, 2 * GIB, 30)),
    "each of several devices": ([of("two", 4, 100, device="cpu:0+1")], Use(1, 8 * GIB, 200)),
    "a run shares a device": ([of("r", 4, 50, run="r"), of("r/2", 4, 50, run="r"), of("r/3", 2, 20, run="r")],
                              Use(3, 4 * GIB, 50)),
    "a run on two devices": ([of("r", 4, run="r"), of("r/2", 4, run="r", device="cpu:1")], Use(2, 8 * GIB)),
    "a run on two hosts": ([of("r", 4, run="r"), of("r/2", 4, run="r", host="b")], Use(2, 8 * GIB)),
    "two without a run do not": ([of("x", 4), of("y", 4)], Use(2, 8 * GIB)),
}


@pytest.mark.parametrize("case", COUNTED)
def test_what_is_counted(case: str) -> None:
    sessions, expected = COUNTED[case]
    assert use_of(sessions) == expected


def test_use_is_each_user_s_own_also_where_the_record_names_the_key_only() -> None:
    line = (QueueRecord(name="q", quota=1, user="alice"), QueueRecord(name="r", quota=1, agent="KEY"))
    quotas = Quotas({"alice": ALICE, EVERYBODY: QuotaRecord(user=EVERYBODY)},
                    (of("s"), of("t", user="bob"), of("old", 2, user="", agent="KEY"), of("lost", user="", agent="?")),
                    line, {"KEY": "alice"})
    assert quotas.use("alice") == Use(2, 3 * GIB, 0, 2) and quotas.use("bob") == Use(1, GIB)
    assert quotas.use("carol") == NOTHING and quotas.users() == {"alice", "bob"}


# -- what is refused -----------------------------------------------------------------------


REFUSED: dict[str, tuple[dict[str, int], Use, Use, Use, str]] = {
    "sessions": ({"sessions": 2}, Use(2), Use(1), NOTHING,
                 "alice may have 2 sessions at a time and has 2 sessions; this asks for 1 session: end one of them, or "
                 "wait until one ends (--queue), or ask an operator for more (`rgpu quota set alice`)"),
    "sessions of those ahead": ({"sessions": 2}, Use(1), Use(1), Use(1),
                                "has 1 session, 1 session are asked for by requests that wait before it"),
    "memory": ({"memory": 4 * GIB}, Use(1, 3 * GIB), Use(1, 2 * GIB), NOTHING,
               "alice may have 4 GiB of device memory at a time and has 3 GiB of device memory; this asks for 2 GiB"),
    "memory by a byte": ({"memory": 4 * GIB}, Use(1, 4 * GIB), Use(1, 1), NOTHING, "asks for 1 bytes of device memory"),
    "gpus": ({"gpus": 150}, Use(1, 1, 100), Use(1, 1, 100), NOTHING,
             "alice may have 1.5 GPUs at a time and has 1 GPU; this asks for 1 GPU"),
    "queued": ({"queued": 1}, Use(9, 9, 9, 1), Use(queued=1), NOTHING,
               "has 1 place in the queue; this asks for 1 place in the queue: withdraw one of them"),
    "a lowered limit": ({"sessions": 1}, Use(5), Use(1), NOTHING, "may have 1 session at a time and has 5 sessions"),
}
NEVER: dict[str, tuple[dict[str, int], Use, str]] = {
    "memory": ({"memory": GIB}, Use(1, 2 * GIB), "may have 1 GiB of device memory, and this asks for 2 GiB of device "
               "memory: ask for less with --memory or --gpus, or ask an operator"),
    "gpus": ({"gpus": 50}, Use(1, 1, 51), "ask for less with --gpus"),
    "no session at all": ({"sessions": 0}, Use(1), "may have 0 sessions, and this asks for 1 session: ask an operator"),
    "no place in the queue": ({"queued": 0}, Use(queued=1), "may have 0 places in the queue"),
}
ALLOWED: dict[str, tuple[dict[str, int], Use, Use]] = {
    "no limits": ({}, Use(99, 99, 99, 99), Use(1, 1, 1)),
    "the last one": ({"sessions": 2, "memory": 2 * GIB}, Use(1, GIB), Use(1, GIB)),
    "another limit is exceeded, of which nothing is asked": ({"gpus": 10, "queued": 0}, Use(3, 3, 50, 5), Use(1, 1)),
    "by memory alone counts no share": ({"gpus": 0}, Use(1, 1), Use(1, GIB)),
    "a further process of a run": ({"memory": GIB, "gpus": 100}, Use(1, GIB, 100), Use(1)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_for_now(case: str) -> None:
    limits, use, asked, ahead, reason = REFUSED[case]
    verdict = decide("alice", limits, use, asked, ahead)
    assert not verdict.allowed and not verdict.never and reason in verdict.reason, verdict.reason
    (limit,) = limits
    assert (verdict.limit, verdict.most) == (limit, limits[limit])
    assert (verdict.used, verdict.asked) == ((use + ahead).of(limit), asked.of(limit))
    error = verdict.error("alice", session="s")
    assert isinstance(error, LimitReached) and error.message == verdict.reason
    amounts = {name: getattr(verdict, name) / (100 if limit == "gpus" else 1) for name in ("used", "asked", "most")}
    assert error.detail == {"user": "alice", "limit": limit, "never": False, "session": "s", **amounts}


@pytest.mark.parametrize("case", NEVER)
def test_refused_for_good(case: str) -> None:
    limits, asked, reason = NEVER[case]
    verdict = decide("alice", limits, NOTHING, asked)
    assert not verdict.allowed and verdict.never and reason in verdict.reason, verdict.reason


@pytest.mark.parametrize("case", ALLOWED)
def test_allowed(case: str) -> None:
    assert decide("alice", *ALLOWED[case]).allowed


def test_the_table_names_each_use_and_every_limit_refuses() -> None:
    assert {limit.name for limit in LIMITS} == set(Use.__dataclass_fields__) == NAMES
    for limit in LIMITS:
        verdict = decide("alice", {limit.name: 1}, Use(1, 1, 1, 1, 1), Use(1, 1, 1, 1, 1))
        assert verdict.limit == limit.name and not verdict.never


@given(st.dictionaries(st.sampled_from(sorted(NAMES)), st.integers(0, 5)),
       st.lists(st.builds(Use, *[st.integers(0, 4)] * 5), max_size=8))
def test_what_is_let_in_one_by_one_never_exceeds_a_limit(limits: dict[str, int], asked: list[Use]) -> None:
    use = NOTHING
    for one in asked:
        if decide("u", limits, use, one).allowed:
            use += one
    assert all(use.of(name) <= most for name, most in limits.items())


CHECKPOINTS: dict[str, tuple[int, int, int | None, str]] = {  # most, used, adds; what is said, empty: let in
    "nothing is left": (GIB, GIB, None, "may have 1 GiB of checkpoints at a time and has 1 GiB of checkpoints: remove"),
    "nothing at all": (0, 0, None, "may have 0 bytes of checkpoints at a time and has 0 bytes of checkpoints: remove"),
    "a lowered limit": (GIB, 3 * GIB // 2, None, "has 1.5 GiB of checkpoints: remove"),
    "a byte is left": (GIB, GIB - 1, None, ""),
    "it fills what is left": (GIB, GIB // 2, GIB // 2, ""),
    "it is a byte too large": (GIB, GIB // 2, GIB // 2 + 1, "; this one adds more than the 512 MiB of checkpoints that "
                               "are left: remove some (`rgpu image rm CHECKPOINT`"),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_checkpoint_more(case: str) -> None:
    most, used, adds, said = CHECKPOINTS[case]
    verdict = decide_checkpoint("alice", most, used, adds)
    assert verdict.allowed == (not said) and said in verdict.reason, verdict.reason
    if said:
        assert "or ask an operator for more (`rgpu quota set alice`)" in verdict.reason
        assert verdict.error("alice").detail == {"user": "alice", "limit": "checkpoints", "never": False, "used": used,
                                                 "asked": adds or 0, "most": most}


def test_checkpoints_count_where_they_were_counted_and_bound_no_session() -> None:
    records = {"alice": QuotaRecord(user="alice", limits={"checkpoints": GIB})}
    quotas = Quotas(records, (of("s"),), stored={"alice": 2 * GIB})
    assert quotas.use("alice") == Use(1, GIB, checkpoints=2 * GIB) and quotas.decide("alice", Use(1, GIB)).allowed
    assert quotas.over("alice") == ["alice has 2 GiB of checkpoints and may have 1 GiB of checkpoints: nothing is "
                                    "ended, and a checkpoint more is not let in until that is below"]


def test_a_user_s_own_limits_go_before_everybody_s() -> None:
    records = {EVERYBODY: QuotaRecord(user=EVERYBODY, limits={"sessions": 1, "memory": GIB, "queued": None}),
               "alice": ALICE}
    assert limits_of("alice", records) == {"sessions": 2}, "memory without limit"
    assert limits_of("bob", records) == {"sessions": 1, "memory": GIB} and limits_of("bob", {}) == {}
    quotas = Quotas(records, (of("s"), of("t"), of("u")))
    (line,) = quotas.over("alice")
    assert line == ("alice has 3 sessions and may have 2 sessions: nothing is ended, and a session more is not let in "
                    "until that is below")
    assert not quotas.decide("alice", Use(1)).allowed and quotas.decide("bob", Use(1, 1)).allowed
    assert quotas.decide("", Use(99, 99 * GIB)).allowed, "what belongs to nobody is nobody's use"


# -- from messages ---------------------------------------------------------------------------


def test_limits_from_a_message_and_back() -> None:
    given = {"sessions": 3, "memory": GIB, "gpus": 1.5, "queued": None, "checkpoints": 7}
    assert read_limits(given) == {"sessions": 3, "memory": GIB, "gpus": 150, "queued": None, "checkpoints": 7}
    assert shown(read_limits(given)) == given


@pytest.mark.parametrize("given", [
    None, [], "x", {"sessions": -1}, {"sessions": 1.5}, {"sessions": "3"}, {"sessions": True}, {"memory": 2**63},
    {"memory": float("nan")}, {"gpus": float("inf")}, {"gpus": 0.001}, {"gpus": 1e300}, {"pinned": 1}, {1: 1},
    {"sessions": [1]}, {"\x1b[2J" * 99: 1}])
def test_limits_that_make_no_sense(given: Any) -> None:
    with pytest.raises(UsageError) as caught:
        read_limits(given)
    assert len(caught.value.message) < 300
