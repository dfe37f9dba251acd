"""Credit of trials and reflections, by numbers worked by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from support.rollouts import make_trajectory

from agentgym_rl.types import Aside, FinishReason, Item, Message, PartKind, Role, StopReason, Trajectory
from verl.config import AlgorithmConfig
from verl.trainer.core_algos import compute_advantages
from verl.trainer.credit import training_rows
from verl.trainer.mini_batches import mini_batch_rows
from verl.trainer.step_rollouts import StepRollouts, has_difference

MESSAGES = (
    Message(Role.USER, "start"),
    Message(Role.ASSISTANT, "Action: look"),
    Message(Role.USER, "You have not reached the goal"),
    Message(Role.ASSISTANT, "look twice"),
)


def trial(sample: int, number: int, of: int, score: float, *, uid: str = "step1/toy_3") -> Trajectory:
    """A trial of sample ``sample``: ids 4 | 5 6 and, where another follows, the request 7 8 and the reflection 9 10."""
    plain = make_trajectory(Item("toy", 3), score=score, success=score >= 1, sample_index=sample)
    plain = dataclasses.replace(plain, uid=uid, trial=number, num_trials=of)
    if number == of:
        return plain
    return dataclasses.replace(
        plain,
        messages=MESSAGES,
        parts=((),) * 4,
        asides=(Aside(PartKind.REFLECTION, 3, FinishReason.STOP, 2, 0.1),),
        input_ids=np.array([4, 5, 6, 7, 8, 9, 10], np.int32),
        loss_mask=np.array([0, 1, 1, 0, 0, 1, 1], np.int8),
        sequence_ids=np.array([0, 1, 1, 2, 2, 3, 3], np.int32),
        rollout_log_probs=np.array([0, -0.25, -1.5, 0, 0, -0.5, -0.75], np.float32),
        token_rewards=np.array([0, 0, score, 0, 0, 0, 0], np.float32),
    )


def sample(index: int, *scores: float) -> list[Trajectory]:
    """All trials of a sample, linked as the collector links them."""
    trials = [trial(index, number, len(scores), score) for number, score in enumerate(scores, 1)]
    return [
        dataclasses.replace(t, reflection_reward=following) if following is not None else t
        for t, following in zip(trials, [*scores[1:], None], strict=True)
    ]


def test_a_failed_trial_becomes_a_row_without_the_reflection_and_one_of_nothing_else():
    attempt, reflection = training_rows(sample(0, 0.25, 1.0)[0])
    assert attempt.trajectory.input_ids.tolist() == [4, 5, 6]
    assert attempt.trajectory.loss_mask.tolist() == [0, 1, 1]
    assert attempt.trajectory.token_rewards.tolist() == [0, 0, 0.25]
    assert (attempt.trajectory.score, attempt.group) == (0.25, "step1/toy_3")
    # Its context is the trial; its reward, that of the trial after it, stands on its last token.
    assert reflection.trajectory.input_ids.tolist() == [4, 5, 6, 7, 8, 9, 10]
    assert reflection.trajectory.loss_mask.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert reflection.trajectory.rollout_log_probs.tolist() == [0, 0, 0, 0, 0, -0.5, -0.75]
    assert reflection.trajectory.token_rewards.tolist() == [0, 0, 0, 0, 0, 0, 1.0]
    assert (reflection.trajectory.score, reflection.group) == (1.0, "step1/toy_3/reflection 1")
    assert {attempt.trajectory.uid, reflection.trajectory.uid} == {"step1/toy_3"}


def test_a_reflection_whose_next_trial_was_a_fault_is_not_trained_on():
    first = trial(0, 1, 2, 0.0)
    (row,) = training_rows(first)
    assert row.trajectory.input_ids.tolist() == [4, 5, 6]


def step_of(*samples: list[Trajectory]) -> StepRollouts:
    trajectories = [t for trials in samples for t in trials]
    kept = {"step1/toy_3": [t for t in trajectories if not t.masked]}
    return StepRollouts(trajectories=trajectories, kept=kept)


def advantages(rollouts: StepRollouts, estimator: str) -> dict[tuple[int, int, bool], float]:
    """By sample, trial and whether it is the reflection."""
    batch = compute_advantages(rollouts.batch(), AlgorithmConfig(adv_estimator=estimator))
    values: dict[tuple[int, int, bool], float] = {}
    for index, row in enumerate(rollouts.rows):
        t = row.trajectory
        of_row = batch.advantages_T[batch.token_positions([index])][batch.loss_mask_T[batch.token_positions([index])]]
        assert torch.all(of_row == of_row[0])
        values[t.sample_index, t.trial, row.is_reflection] = float(of_row[0])
    return values


def test_trials_are_compared_with_their_like_and_a_reflection_gets_what_the_next_trial_gets():
    # Four samples: first trials 1, 0, 0, 0; second trials of the last three 1, 0, 0; third trials of the last two 0, 1.
    rollouts = step_of(sample(0, 1.0), sample(1, 0.0, 1.0), sample(2, 0.0, 0.0, 0.0), sample(3, 0.0, 0.0, 1.0))
    got = advantages(rollouts, "grpo")
    # Firsts: mean 1/4, sample std sqrt(((3/4)^2 + 3 (1/4)^2) / 3) = 1/2.
    first = {0: 1.5, 1: -0.5, 2: -0.5, 3: -0.5}
    # Seconds: mean 1/3, sample std sqrt(((2/3)^2 + 2 (1/3)^2) / 2) = sqrt(1/3).
    second = {1: 2 / 3 * math.sqrt(3), 2: -1 / 3 * math.sqrt(3), 3: -1 / 3 * math.sqrt(3)}
    # Thirds: mean 1/2, sample std sqrt(1/2).
    third = {2: -math.sqrt(1 / 2), 3: math.sqrt(1 / 2)}
    expected = {(s, 1, False): value for s, value in first.items()}
    expected |= {(s, 2, False): value for s, value in second.items()} | {(s, 1, True): v for s, v in second.items()}
    expected |= {(s, 3, False): value for s, value in third.items()} | {(s, 2, True): v for s, v in third.items()}
    assert got == pytest.approx(expected, abs=1e-5)


def test_rloo_leaves_out_the_trial_itself_and_a_trial_alone_has_nothing_to_be_compared_with():
    rollouts = step_of(sample(0, 1.0), sample(1, 0.0, 1.0), sample(2, 0.0, 0.0))
    got = advantages(rollouts, "rloo")
    assert got == pytest.approx(
        {
            **{(0, 1, False): 1.0, (1, 1, False): -0.5, (2, 1, False): -0.5},
            **{(1, 2, False): 1.0, (2, 2, False): -1.0, (1, 1, True): 1.0, (2, 1, True): -1.0},
        }
    )
    alone = advantages(step_of(sample(0, 1.0), sample(1, 0.0, 1.0)), "grpo")
    assert alone[1, 2, False] == alone[1, 1, True] == 0.0


def test_a_return_of_a_reflection_is_the_next_trials_score_and_of_an_action_its_own():
    rollouts = step_of(sample(0, 0.25, 1.0))
    batch = rollouts.batch().replace(values_T=torch.zeros(rollouts.batch().num_tokens))
    returns = compute_advantages(batch, AlgorithmConfig(adv_estimator="gae")).returns_T
    # Rows: trial 1 (3 tokens), its reflection (7), trial 2 (3).
    assert returns.tolist() == [*(0, 0.25, 0.25), *(0, 0, 0, 0, 0, 1, 1), *(0, 1, 1)]


def test_rows_that_begin_alike_are_neighbours():
    """A reflection begins with the whole trial before it, and is of the same item although its group is another."""
    rollouts = step_of(sample(0, 0.0, 0.0, 1.0), sample(1, 1.0), sample(2, 0.0, 0.0, 0.0))
    groups = [row.group.removeprefix("step1/toy_3") for row in rollouts.rows]
    first, second = ["", "/reflection 1"], ["/trial 2", "/reflection 2"]
    assert groups == [*first, "", *first, *second, *second, "/trial 3", "/trial 3"]
    assert [row.trajectory.sample_index for row in rollouts.rows] == [0, 0, 1, 2, 2, 0, 0, 2, 2, 0, 2]
    batch = rollouts.batch()
    assert len(batch.group_ids_B.unique()) == 5 and len(batch.item_ids_B.unique()) == 1


def test_all_rows_of_an_item_stay_in_one_mini_batch():
    other = [dataclasses.replace(t, uid="step1/toy_4") for t in sample(0, 0.0, 1.0)]
    rollouts = StepRollouts(kept={"step1/toy_3": sample(0, 0.0, 0.0, 1.0), "step1/toy_4": other})
    uids = [row.trajectory.uid for row in rollouts.rows]
    assert mini_batch_rows(uids, list(rollouts.kept), groups=1, epochs=1, shuffle=False, seed=0) == [
        *([0, 1, 2, 3, 4], [5, 6, 7]),
    ]


def test_an_item_whose_later_trials_differ_teaches_something():
    same = [*sample(0, 0.0, 0.0), *sample(1, 0.0, 0.0)]
    assert not has_difference(same, "score")
    assert has_difference([*sample(0, 0.0, 0.0), *sample(1, 0.0, 1.0)], "score")
    # Not what differs between trials of one sample: they are never compared.
    assert not has_difference([*sample(0, 0.0, 1.0), *sample(1, 0.0, 1.0)], "success")


def test_faults_are_no_rows():
    broken = dataclasses.replace(trial(1, 2, 2, 0.0), stop_reason=StopReason.ENV_ERROR)
    rollouts = step_of(sample(0, 1.0), [trial(1, 1, 2, 0.0), broken])
    assert [(row.trajectory.sample_index, row.trajectory.trial) for row in rollouts.rows] == [(0, 1), (1, 1)]
