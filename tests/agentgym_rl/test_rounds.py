"""Horizons: pure functions of the training step, and one that follows what the trajectories show."""

from __future__ import annotations

import json

import pytest

from agentgym_rl.errors import ConfigError
from agentgym_rl.rounds import AdaptiveRoundScheduler, Patience, RoundScheduler, make_scheduler


def test_a_fixed_horizon_never_changes():
    scheduler = RoundScheduler("fixed", 15)
    assert {scheduler.rounds(step) for step in (1, 2, 1000)} == {15}
    assert scheduler.max_rounds == 15


def test_a_stage_lasts_its_steps_and_the_last_one_stays():
    scheduler = RoundScheduler("scaling_inter_stepwise", [10, 20, 30], 100)
    assert [scheduler.rounds(step) for step in (1, 100, 101, 200, 201, 300, 301, 10_000)] == [
        *(10, 10, 20, 20, 30, 30, 30, 30),
    ]
    assert scheduler.max_rounds == 30


def test_a_linear_schedule_rises_in_equal_parts_and_meets_every_stage():
    scheduler = RoundScheduler("scaling_inter_linear", [6, 13, 20], 4)
    # 7 in 4 steps: 6, 7.75, 9.5, 11.25, then 13, 14.75, 16.5, 18.25, then 20, each rounded down.
    assert [scheduler.rounds(step) for step in range(1, 11)] == [6, 7, 9, 11, 13, 14, 16, 18, 20, 20]
    assert scheduler.rounds(10_000) == scheduler.max_rounds == 20
    assert [RoundScheduler("scaling_inter_linear", [5], 4).rounds(step) for step in (1, 9)] == [5, 5]


def play(scheduler, successes, cut_shares=None, *, first=1):
    """Tell a scheduler about steps from ``first`` on; the horizons that they had."""
    horizons = []
    for step, success in enumerate(successes, first):
        horizons.append(scheduler.rounds(step))
        scheduler.record(step, success=success, cut_share=cut_shares[step - first] if cut_shares else 0.0)
    return horizons


def adaptive(**patience):
    return make_scheduler("scaling_inter_adaptive", [5, 10, 20], patience=Patience(**{"window": 2} | patience))


def test_the_next_stage_begins_when_success_has_stopped_rising():
    scheduler = adaptive(min_rise=0.05)
    # Means of two steps against the two before: .35 - .15 rises; .45 - .25 too; .47 - .35 as well; .48 - .45 does not.
    assert play(scheduler, [0.1, 0.2, 0.3, 0.4, 0.5, 0.44, 0.52]) == [5] * 7
    assert scheduler.rounds(8) == 10
    # The new stage is judged by its own steps alone: four of them are needed.
    assert play(scheduler, [0.1, 0.1, 0.1, 0.1, 0.9, 0.9, 0.9, 0.9, 0.9], first=8) == [10] * 4 + [20] * 5
    assert [scheduler.rounds(step) for step in (1, 7, 8, 11, 12, 99)] == [5, 5, 10, 10, 20, 20]


def test_the_next_stage_begins_when_too_many_trajectories_are_cut():
    scheduler = adaptive(max_cut_share=0.6)
    rising = [0.1, 0.3, 0.5, 0.7, 0.9]
    # Means of two steps: .5, .6 (not above .6), .7: the third pair is too much.
    assert play(scheduler, rising, [0.4, 0.6, 0.6, 0.8, 0.0]) == [5, 5, 5, 5, 10]


def test_steps_without_a_sound_trajectory_tell_nothing():
    scheduler = adaptive(max_cut_share=0.5)
    scheduler.record(1, success=0.0, cut_share=1.0)
    scheduler.record(2, success=None, cut_share=None)
    assert scheduler.rounds(3) == 5
    scheduler.record(3, success=0.0, cut_share=1.0)
    assert scheduler.rounds(4) == 10


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_scheduler_that_is_resumed_goes_on_as_one_that_never_stopped(cut):
    successes = [0.1, 0.2, 0.2, 0.2, 0.3, 0.3, 0.5, 0.4, 0.4, 0.5, 0.5, 0.5]
    cut_shares = [0.0, 0.2, 0.9, 0.9, 0.0, 0.0, 0.0, 0.3, 0.0, 0.0, 0.0, 0.0]
    whole, before, after = adaptive(), adaptive(), adaptive()
    expected = play(whole, successes, cut_shares)
    horizons = play(before, successes[:cut], cut_shares[:cut])
    after.load_state(json.loads(json.dumps(before.state())))
    assert horizons + play(after, successes[cut:], cut_shares[cut:], first=cut + 1) == expected
    assert after.state() == whole.state()
    assert len(set(expected)) == 3


def test_a_state_of_more_stages_than_there_are_now_stays_at_the_last_one():
    scheduler = AdaptiveRoundScheduler([5])
    scheduler.load_state({"starts": [1, 4, 9], "success": [], "cut_shares": []})
    assert scheduler.rounds(20) == 5


@pytest.mark.parametrize(
    ("type", "rounds", "steps", "message"),
    [
        ("linear", 10, 100, "type='linear': must be one of fixed, scaling_inter_stepwise, scaling_inter_linear"),
        ("fixed", [10, 20], 100, r"rounds=\[10, 20\]: type=fixed takes one int"),
        ("fixed", 0, 100, "rounds=0"),
        ("fixed", True, 100, "rounds=True"),
        ("scaling_inter_stepwise", 10, 100, "type=scaling_inter_stepwise takes a list of ints"),
        ("scaling_inter_stepwise", [], 100, "takes a list of ints"),
        ("scaling_inter_stepwise", [10, 5], 100, r"rounds=\[10, 5\]: stages must not fall"),
        ("scaling_inter_stepwise", [5, 10], 0, "steps_scaling_inter=0"),
        ("scaling_inter_linear", [10, 5], 100, r"rounds=\[10, 5\]: stages must not fall"),
        ("scaling_inter_adaptive", 10, 100, "type=scaling_inter_adaptive takes a list of ints"),
    ],
)
def test_impossible_schedules_are_configuration_errors(type, rounds, steps, message):
    with pytest.raises(ConfigError, match=message):
        make_scheduler(type, rounds, steps)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window": 0}, "window=0: must be an int >= 1"),
        ({"min_rise": -0.1}, "min_rise=-0.1: must be at least 0"),
        ({"max_cut_share": 0.0}, r"max_cut_share=0.0: must be in \(0, 1\]"),
        ({"max_cut_share": float("nan")}, "max_cut_share=nan"),
    ],
)
def test_impossible_patience_is_a_configuration_error(values, message):
    with pytest.raises(ConfigError, match=message):
        Patience(**values)


@pytest.mark.parametrize("type", ["fixed", "scaling_inter_adaptive"])
def test_steps_are_counted_from_one(type):
    with pytest.raises(ValueError, match="counted from 1"):
        make_scheduler(type, 3 if type == "fixed" else [3]).rounds(0)
