"""The horizon is a pure function of the training step."""

from __future__ import annotations

import pytest

from agentgym_rl.errors import ConfigError
from agentgym_rl.rounds import RoundScheduler


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


@pytest.mark.parametrize(
    ("type", "rounds", "steps", "message"),
    [
        ("linear", 10, 100, "type='linear': must be one of fixed, scaling_inter_stepwise"),
        ("fixed", [10, 20], 100, r"rounds=\[10, 20\]: type=fixed takes one int"),
        ("fixed", 0, 100, "rounds=0"),
        ("fixed", True, 100, "rounds=True"),
        ("scaling_inter_stepwise", 10, 100, "takes a list of ints"),
        ("scaling_inter_stepwise", [], 100, "takes a list of ints"),
        ("scaling_inter_stepwise", [10, 5], 100, r"rounds=\[10, 5\]: stages must not fall"),
        ("scaling_inter_stepwise", [5, 10], 0, "steps_scaling_inter=0"),
    ],
)
def test_impossible_schedules_are_configuration_errors(type, rounds, steps, message):
    with pytest.raises(ConfigError, match=message):
        RoundScheduler(type, rounds, steps)


def test_steps_are_counted_from_one():
    with pytest.raises(ValueError, match="counted from 1"):
        RoundScheduler("fixed", 3).rounds(0)
