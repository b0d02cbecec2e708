"""What `auto` takes, and why: bounds of the prediction, and the cases that decide."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rgpu.migrate.move.forecast import (
    PAGE_BYTES,
    Measured,
    changed_in,
    choose,
    copying,
    given_up,
    repair_fits,
    replaying,
)
from rgpu.migrate.move.options import MoveOptions
from rgpu.migrate.move.sampling import Sampled
from rgpu.session.errors import UsageError

GIB = (1 << 30) // PAGE_BYTES  #: pages
TEN_GIGABIT = 1.25e9
#: 10 GiB of training, every page changes within a step of 0.1 s.
TRAINING = Measured(pages=10 * GIB, differing=10 * GIB, changed=((0.1, 10 * GIB), (9.0, 10 * GIB)), speed=TEN_GIGABIT,
                    free_pages=100 * GIB)
#: 10 GiB of weights, 1 % of them changes in a second.
INFERENCE = Measured(pages=10 * GIB, differing=GIB // 10, changed=((0.1, GIB // 100), (9.0, GIB // 10)),
                     speed=TEN_GIGABIT, free_pages=100 * GIB)


def test_what_changes_is_linear_between_measurements_and_level_after() -> None:
    measured = replace(TRAINING, changed=((1.0, 100), (3.0, 300)))
    assert [changed_in(measured, t) for t in (0.0, 0.5, 1.0, 2.0, 3.0, 100.0)] == [0, 50, 100, 200, 300, 300]
    assert changed_in(replace(measured, changed=()), 5.0) == 0.0
    # A second measurement that saw fewer (pages that changed back) does not make time run backwards.
    assert changed_in(replace(measured, changed=((1.0, 100), (3.0, 50))), 9.0) == 100


def test_training_over_a_slow_link_is_replayed() -> None:
    choice = choose(TRAINING, max_downtime=10.0, max_slowdown=0.5)
    seconds = 10 * (1 << 30) / TEN_GIGABIT  # for all of it
    assert choice.mode == "replay" and choice.replay is not None
    assert choice.copy.downtime == pytest.approx(seconds, rel=0.05) and choice.replay.downtime < 0.1
    assert choice.replay.brownout == pytest.approx(seconds, rel=0.05), "the backlog of the stream, in full seconds"
    assert choice.replay.total == pytest.approx(3 * seconds, rel=0.05), "streamed, then drained at half speed"
    assert "8.6 s" in choice.reason and choice.cost is choice.replay


def test_inference_is_copied() -> None:
    choice = choose(INFERENCE, max_downtime=10.0, max_slowdown=0.5)
    assert choice.mode == "copy" and choice.copy.downtime < 0.1 and "not worth a replay" in choice.reason


def test_a_promise_that_only_copying_keeps() -> None:
    """A replay that gets most pages wrong has to send them in its pause: then copying is no worse."""
    wrong = replace(TRAINING, mismatched=0.9, changed=((0.1, GIB), (9.0, 5 * GIB)))
    choice = choose(wrong, max_downtime=5.0, max_slowdown=0.5)
    assert choice.mode == "copy" and "only the copy keeps the promised 5.0 s" in choice.reason
    assert choose(replace(wrong, mismatched=0.0), max_downtime=0.5, max_slowdown=0.5).mode == "replay"


@pytest.mark.parametrize("changes, slowdown, why", [
    ({"free_pages": 5}, 0.5, "there is memory"),
    ({"replay_refused": "a pin"}, 0.5, "a pin"),
    ({}, 0.0, "no slowdown"),
])
def test_without_room_slowdown_or_permission_there_is_no_replay(changes: dict, slowdown: float, why: str) -> None:
    choice = choose(replace(TRAINING, **changes), max_downtime=1.0, max_slowdown=slowdown)
    assert (choice.mode, choice.replay) == ("copy", None) and why in choice.reason
    assert replaying(replace(TRAINING, **changes), slowdown) is None


def test_more_slowdown_drains_sooner_and_costs_the_same() -> None:
    gentle, rough = replaying(TRAINING, 0.1), replaying(TRAINING, 0.9)
    assert gentle is not None and rough is not None
    assert gentle.total > rough.total and gentle.brownout == rough.brownout


def test_a_faster_link_never_costs_more() -> None:
    for measured in (TRAINING, INFERENCE):
        costs = [copying(replace(measured, speed=10.0 ** power)).downtime for power in range(6, 12)]
        assert costs == sorted(costs, reverse=True)


def test_repairs_fit_or_not() -> None:
    assert repair_fits(16, PAGE_BYTES * 16.0, 1.0) and not repair_fits(17, PAGE_BYTES * 16.0, 1.0)


def test_options_are_checked() -> None:
    assert MoveOptions.from_options({}) == MoveOptions()
    assert MoveOptions.from_options({"max_downtime": "2"}).limit == 2.0
    assert "pages" not in MoveOptions().as_dict(), "a worker of an earlier version does not know it"
    assert MoveOptions(**MoveOptions(pages="stream").as_dict()).pages == "stream"
    assert MoveOptions(on_timeout="freeze").limit > 60 and not MoveOptions(on_timeout="freeze").abort_on_timeout
    for options in ({"mode": "fast"}, {"max_slowdown": 1.0}, {"max_downtime": 0}, {"max_downtime": []},
                    {"on_timeout": "shrug"}, {"max_slowdown": -0.1}, {"mismatched": 1.5}, {"pages": "pigeon"}):
        with pytest.raises(UsageError):
            MoveOptions.from_options(options)


def reason(sampled: Sampled, behind: float, *, limit: float = 10.0, asked: bool = False,
           measured: Measured = TRAINING) -> str:
    return given_up(measured, sampled, behind=behind, limit=limit, max_slowdown=0.5, asked=asked)


def test_a_replay_that_is_right_goes_on() -> None:
    for differing in (0, 5):
        assert reason(Sampled(512, differing, TRAINING.pages), behind=8.6) == ""


def test_a_replay_that_gets_everything_wrong_is_given_up_early_and_finished_late() -> None:
    """Its stop is as long as that of a copy: then the slowdown still to come is for nothing, unless hardly any is."""
    everything = Sampled(512, 512, TRAINING.pages)
    why = reason(everything, behind=8.6)
    assert "512 of 512 sampled pages" in why and "8.6 s more of slowing" in why
    assert reason(everything, behind=0.1) == ""
    assert reason(everything, behind=8.6, asked=True) == "", "whoever asks for a replay has weighed it"


def test_a_stop_that_cannot_be_kept_ends_a_replay_whoever_asked() -> None:
    half = Sampled(512, 256, TRAINING.pages)
    why = reason(half, behind=0.0, limit=1.0, asked=True)
    assert "longer than the 1.0 s" in why and why == reason(half, behind=0.0, limit=1.0)
    # The limit is judged by the fewest pages that may differ: one in 512 may be bad luck.
    assert reason(Sampled(512, 1, TRAINING.pages), behind=0.0, limit=0.05, asked=True) == ""


def test_half_wrong_is_still_worth_it() -> None:
    """4.3 s less standing still against 8.6 s of half speed."""
    assert reason(Sampled(512, 256, TRAINING.pages), behind=8.6) == ""


def test_an_earlier_replay_is_remembered() -> None:
    choice = choose(replace(TRAINING, mismatched=1.0), max_downtime=60.0, max_slowdown=0.5)
    assert choice.mode == "copy" and "an earlier replay got 100% of its pages wrong" in choice.reason
