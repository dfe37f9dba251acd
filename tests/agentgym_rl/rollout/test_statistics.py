"""The metrics of a step's trajectories, by hand-worked numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.rollouts import make_trajectory

from agentgym_rl.rollout.statistics import rollout_metrics, trial_metrics
from agentgym_rl.types import FinishReason, Item, StopReason, Trajectory, Turn


def timed(item: int, *turns: tuple[int, float, float], duration_s: float = 1.0) -> Trajectory:
    """``turns``: sampled tokens, seconds of generation, seconds of the environment."""
    made = tuple(
        Turn("Action: look", "seen", 0.0, False, FinishReason.STOP, tokens, generation_s, env_s)
        for tokens, generation_s, env_s in turns
    )
    return replace(make_trajectory(Item("toy", item)), turns=made, duration_s=duration_s)


def test_turns_tokens_and_times_have_mean_95th_percentile_and_maximum() -> None:
    first = timed(1, (10, 1.0, 0.25), (20, 3.0, 0.75), duration_s=5.0)
    second = timed(2, (60, 2.0, 2.0), duration_s=4.0)
    metrics = rollout_metrics([first, second])
    expected = {
        "turns_mean": 1.5,
        "turns_max": 2,
        "turn_tokens_mean": 30,
        "turn_tokens_p95": 56,  # of 10, 20, 60: at rank 2 * .95 = 1.9
        "turn_tokens_max": 60,
        "turn_generation_s_mean": 2,
        "turn_generation_s_p95": 2.9,
        "turn_generation_s_max": 3,
        "turn_env_s_mean": 1,
        "turn_env_s_max": 2,
        "generation_s_mean": 3,  # of 4 and 2
        "generation_s_p95": 3.9,
        "generation_s_max": 4,
        "env_s_mean": 1.5,
        "env_s_max": 2,
        "duration_s_mean": 4.5,
        "duration_s_max": 5,
    }
    assert {name: metrics[f"rollout/{name}"] for name in expected} == pytest.approx(expected)


def test_faults_are_counted_by_type_and_are_in_no_average() -> None:
    sound = timed(1, (10, 1.0, 0.5))
    fault = replace(
        make_trajectory(Item("toy", 2), stop_reason=StopReason.ENV_ERROR, error="EnvTimeout: slow"),
        turns=timed(2, (90, 9.0, 9.0)).turns,
        attempt=2,
    )
    metrics = rollout_metrics([sound, fault])
    assert metrics["rollout/errors/EnvTimeout"] == 1 and metrics["rollout/stop/env_error"] == 0.5
    assert (metrics["rollout/masked"], metrics["rollout/retried"], metrics["rollout/attempts"]) == (1, 1, 3)
    assert metrics["rollout/turn_tokens_max"] == 10 and metrics["rollout/env_s_max"] == 0.5


@pytest.mark.parametrize("trajectories", [[], [make_trajectory(Item("toy", 1), stop_reason=StopReason.DEADLINE)]])
def test_without_a_sound_trajectory_there_is_no_average(trajectories: list[Trajectory]) -> None:
    metrics = rollout_metrics(trajectories)
    assert metrics["rollout/trajectories"] == len(trajectories)
    assert not any(name.endswith(("_mean", "_p95", "_max")) for name in metrics)


def test_an_episode_without_a_turn_has_no_turn_metrics() -> None:
    metrics = rollout_metrics([make_trajectory(Item("toy", 1), turns=0, stop_reason=StopReason.LENGTH)])
    assert metrics["rollout/turns_mean"] == 0 and "rollout/turn_tokens_mean" not in metrics


def test_trying_again_is_told_by_first_and_last_trials():
    def trial(sample, number, of, *, success=False, **values):
        made = make_trajectory(Item("toy", 1), sample_index=sample, success=success, **values)
        return replace(made, trial=number, num_trials=of)

    trials = [
        *(trial(0, 1, 1, success=True), trial(1, 1, 2), trial(1, 2, 2, success=True)),
        *(trial(2, 1, 3), trial(2, 2, 3), trial(2, 3, 3)),
        *(trial(3, 1, 2), trial(3, 2, 2, stop_reason=StopReason.ENV_ERROR, error="EnvError: x")),
    ]
    # Samples of 1, 2, 3 and 2 trials; the last one's second trial was a fault and is neither success nor failure.
    assert trial_metrics(trials) == {
        "rollout/trials_mean": 2.0,
        "rollout/success_first_trial": 0.25,
        "rollout/success_last_trial": pytest.approx(2 / 3),
    }
    assert trial_metrics([trial(0, 1, 1)]) == {}
