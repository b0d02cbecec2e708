"""When a checkpoint is asked for, when the program waits, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rgpu.client.journal.keeping import RETRY, RETRY_FAILED, ApplyRate, Exposure, Facts, Rules, decide

LIMIT = 1000
RULES = Rules(LIMIT, max_age=60, max_replay=10)
QUIET = Facts(memory_bytes=100, kept_bytes=100, kept_calls=10, age=1, replay=1)


def test_nothing_is_due() -> None:
    assert decide(RULES, QUIET) == decide(RULES, Facts())
    decision = decide(RULES, QUIET)
    assert (decision.checkpoint, decision.exposure, decision.reason) == (False, Exposure.RUNNING, "")


@pytest.mark.parametrize(("change", "word"), [
    ({"kept_bytes": 751}, "75%"), ({"age": 61.0}, "61 s behind, 60 s are allowed"),
    ({"replay": 12.0}, "replay 10 calls for about 12 s, 10 s are allowed")])
def test_each_limit_asks_for_a_checkpoint(change: dict[str, float], word: str) -> None:
    decision = decide(RULES, replace(QUIET, **change))
    assert decision.checkpoint and word in decision.why and decision.exposure is Exposure.RUNNING


@pytest.mark.parametrize("change", [
    {"requesting": True}, {"attached": False}, {"since_request": RETRY - 1}, {"protected": False}, {"kept_calls": 0},
    {"store_error": "no", "since_request": RETRY_FAILED - 1}])
def test_but_not_now(change: dict[str, object]) -> None:
    assert not decide(RULES, replace(QUIET, kept_bytes=900, age=100.0, **change)).checkpoint  # type: ignore[arg-type]


def test_without_recovery_none_is_wanted() -> None:
    assert not decide(replace(RULES, recover=False), replace(QUIET, kept_bytes=900, age=100.0)).checkpoint


def test_without_limits_only_size_counts() -> None:
    free = Rules(LIMIT)
    assert not decide(free, replace(QUIET, age=1e6, replay=1e6)).checkpoint
    assert decide(free, replace(QUIET, kept_bytes=751)).checkpoint


def test_an_unreachable_store_stops_nothing_and_is_shown() -> None:
    """The journal grows on disk; the reason says so; it is asked for again later, and more rarely."""
    facts = replace(QUIET, kept_bytes=5000, store_error="bucket gone")
    decision = decide(RULES, facts)
    assert decision.exposure is Exposure.RUNNING and decision.checkpoint
    assert "bucket gone" in decision.reason and "on disk" in decision.reason
    assert not decide(RULES, replace(facts, since_request=RETRY + 1)).checkpoint
    assert decide(RULES, replace(facts, since_request=RETRY_FAILED)).checkpoint


@pytest.mark.parametrize(("rules", "change", "word"), [
    (RULES, {"spill_error": "disk full"}, "cannot be spilled: disk full"),
    (replace(RULES, directory=False), {}, "no directory to spill to"),
    (RULES, {}, "is being spilled"),
    (replace(RULES, recover=False), {}, "has not taken the calls yet")])
def test_a_full_journal_blocks_with_its_reason(rules: Rules, change: dict[str, str], word: str) -> None:
    facts = replace(QUIET, memory_bytes=880, full_seconds=1.5, **change)  # type: ignore[arg-type]
    decision = decide(rules, facts)
    assert decision.exposure is Exposure.BLOCK and word in decision.reason
    assert decide(rules, replace(facts, full_seconds=0.5)).exposure is Exposure.RUNNING, "ordinary back-pressure"
    assert decide(rules, replace(facts, memory_bytes=870)).exposure is Exposure.RUNNING


def test_full_and_without_a_store_both_are_said() -> None:
    facts = replace(QUIET, memory_bytes=880, full_seconds=2, spill_error="disk full", store_error="bucket gone")
    assert "disk full" in (reason := decide(RULES, facts).reason) and "bucket gone" in reason


def test_unprotected_is_for_good() -> None:
    rules = replace(RULES, on_full="unprotected")
    full = replace(QUIET, memory_bytes=880, full_seconds=2, spill_error="disk full")
    decision = decide(rules, full)
    assert decision.exposure is Exposure.UNPROTECTED and not decision.checkpoint and "disk full" in decision.reason
    later = decide(rules, replace(QUIET, protected=False))
    assert later.exposure is Exposure.UNPROTECTED and "not recovered" in later.reason


@given(st.builds(Facts, memory_bytes=st.integers(0, 2000), kept_bytes=st.integers(0, 9000),
                 kept_calls=st.integers(0, 100), protected=st.booleans(), full_seconds=st.floats(0, 10),
                 age=st.floats(0, 100), replay=st.none() | st.floats(0, 100), spill_error=st.sampled_from(["", "e"]),
                 store_error=st.sampled_from(["", "s"]), since_request=st.floats(0, 100), requesting=st.booleans(),
                 attached=st.booleans()),
       st.builds(Rules, limit=st.just(LIMIT), recover=st.booleans(), on_full=st.sampled_from(["block", "unprotected"]),
                 max_age=st.sampled_from([0.0, 60.0]), max_replay=st.sampled_from([0.0, 10.0]),
                 directory=st.booleans()))
def test_always(facts: Facts, rules: Rules) -> None:
    decision = decide(rules, facts)
    assert not decision.checkpoint or decision.why, "no checkpoint without a reason"
    assert (decision.exposure is Exposure.RUNNING) or decision.reason, "no state without a reason"
    if decision.exposure is Exposure.BLOCK:
        assert facts.memory_bytes >= LIMIT * 0.875
        assert not (rules.recover and rules.on_full == "unprotected")
    if decision.exposure is Exposure.UNPROTECTED:
        assert rules.recover, "there is nothing to give up without recovery"
    if facts.store_error and decision.exposure is Exposure.RUNNING and decision.why:
        assert "s" in decision.reason


def test_rates_are_measured_while_there_is_work() -> None:
    rate = ApplyRate()
    assert rate.predict(5) is None
    for second in range(11):
        rate.sample(1000 * second, float(second))
    assert rate.rate == pytest.approx(1000, rel=0.01) and rate.predict(5000) == pytest.approx(5, rel=0.01)
    for second in range(11, 500):
        rate.sample(10_000, float(second))  # idle: not slower
    assert rate.rate == pytest.approx(1000, rel=0.01)
    rate.sample(3, 500.0)  # recovered: applied again from a checkpoint
    rate.sample(1003, 501.0)
    assert rate.rate == pytest.approx(1000, rel=0.05)
    for second in range(200):
        rate.sample(1100 + second * 10, 502.0 + second)
    assert rate.rate == pytest.approx(10, rel=0.5), "what is heavier later counts more"
