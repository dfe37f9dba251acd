"""Who gets the credit: what is trained on of each trajectory, and with whom its result is compared.

A trajectory is a row of the batch, and its advantage is taken within its group: the samples of the same item in the
same step. Under an agent that tries again after a failure (``reflect``) a sample has several trajectories:

* Every trial is a row with its own score. It is compared with the same trial of the item's other samples: a second
  trial starts from more than a first one, so that the mean of the firsts would flatter it.
* Every reflection is a row of its own, in the context of the trial that it ends, and its score is that of the next
  trial, which is all that it is there for. It must not have its own trial's score, which was settled before it was
  written; nor may that trial's actions have the reflection's: they failed. Reflections after the same trial of an item
  are a group, whose scores are those of the trials that follow: a reflection and the trial it led to get the same
  advantage.
* A reflection whose next trial ended in a fault has no score, and is not trained on.

All rows of an item stay together in a mini-batch. A group of one, such as the second trial when all other samples
succeeded at once, has advantage 0 under the estimators that compare.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from agentgym_rl.types import Aside, Trajectory


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """A sequence of the batch."""

    trajectory: Trajectory
    """What is trained on; its uid is that of the item in this step."""
    group: str
    """Rows of the same group are compared."""
    is_reflection: bool = False


def group_of(trajectory: Trajectory) -> str:
    """The group of a trajectory's own actions."""
    return trajectory.uid if trajectory.trial == 1 else f"{trajectory.uid}/trial {trajectory.trial}"


def differs(group: Iterable[Trajectory], metric: str = "score") -> bool:
    """True when members of the group have different results, by more than the rounding of floats."""
    by_success = metric in ("success", "acc")
    values = [float(t.success) if by_success else t.score for t in group]
    return len(values) > 1 and max(values) - min(values) > 1e-6 * max(map(abs, values))


def training_rows(trajectory: Trajectory) -> list[TrainingRow]:
    """One row, or two where a reflection ends the trajectory and has earned something."""
    reflection = trajectory.reflection
    if reflection is None:
        return [TrainingRow(trajectory, group_of(trajectory))]
    rows = [TrainingRow(_without_reflection(trajectory, reflection), group_of(trajectory))]
    if trajectory.reflection_reward is not None and reflection.num_tokens:
        group = f"{trajectory.uid}/reflection {trajectory.trial}"
        alone = _reflection_alone(trajectory, reflection, trajectory.reflection_reward)
        rows.append(TrainingRow(alone, group, is_reflection=True))
    return rows


def item_rows(trajectories: Iterable[Trajectory]) -> list[TrainingRow]:
    """The rows of one item's trajectories, trial by trial, each reflection behind the trial that it ends: neighbours
    share what they have in common."""
    rows = [row for trajectory in trajectories for row in training_rows(trajectory)]
    return sorted(rows, key=lambda row: row.trajectory.trial)


def _without_reflection(trajectory: Trajectory, reflection: Aside) -> Trajectory:
    """The trial as it was before the agent was asked to reflect on it."""
    end = int(np.argmax(trajectory.sequence_ids >= reflection.message - 1))
    return replace(
        trajectory,
        messages=trajectory.messages[: reflection.message - 1],
        parts=trajectory.parts[: reflection.message - 1],
        asides=trajectory.asides[:-1],
        input_ids=trajectory.input_ids[:end],
        loss_mask=trajectory.loss_mask[:end],
        sequence_ids=trajectory.sequence_ids[:end],
        rollout_log_probs=trajectory.rollout_log_probs[:end],
        token_rewards=trajectory.token_rewards[:end],
        reflection_reward=None,
    )


def _reflection_alone(trajectory: Trajectory, reflection: Aside, reward: float) -> Trajectory:
    """The same tokens, of which the reflection's alone are sampled ones; their reward stands on the last of them."""
    is_reflection = trajectory.sequence_ids == reflection.message
    loss_mask = np.where(is_reflection, trajectory.loss_mask, 0).astype(np.int8)
    token_rewards = np.zeros_like(trajectory.token_rewards)
    token_rewards[np.flatnonzero(loss_mask)[-1]] = reward
    return replace(
        trajectory,
        loss_mask=loss_mask,
        rollout_log_probs=np.where(loss_mask == 1, trajectory.rollout_log_probs, 0).astype(np.float32),
        token_rewards=token_rewards,
        score=reward,
    )
