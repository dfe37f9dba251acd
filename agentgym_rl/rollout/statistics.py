"""What a set of trajectories looks like in numbers: segments of a record, and the ``rollout/...`` metrics of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from agentgym_rl.rollout.collector import count_errors
from agentgym_rl.types import StopReason, Trajectory


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of tokens ``start:end`` of one kind: ``prompt``, ``turn 1``, ``observation``, ``turn 2``, ..."""

    name: str
    start: int
    end: int


def split_segments(loss_mask: np.ndarray) -> list[Segment]:
    """Cut a record ``[T]`` where its loss mask changes: sampled stretches are turns, others prompt or observations."""
    mask = np.asarray(loss_mask)
    if not len(mask):
        return []
    bounds = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    segments: list[Segment] = []
    turn = 0
    for start, end in pairwise(bounds):
        turn += int(mask[start])
        context = "observation" if start else "prompt"
        segments.append(Segment(f"turn {turn}" if mask[start] else context, start, end))
    return segments


def stop_reason_shares(trajectories: Sequence[Trajectory]) -> dict[StopReason, float]:
    """Share of each stop reason, 0 where it did not occur; they sum to 1 unless there is no trajectory."""
    counts = Counter(trajectory.stop_reason for trajectory in trajectories)
    return {reason: counts[reason] / max(1, len(trajectories)) for reason in StopReason}


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Metrics of one step. Means and quantiles leave masked trajectories out; shares and counts do not."""
    sound = [trajectory for trajectory in trajectories if not trajectory.masked]
    metrics = {
        "rollout/trajectories": float(len(trajectories)),
        "rollout/masked": float(len(trajectories) - len(sound)),
        "rollout/retried": float(sum(trajectory.attempt > 1 for trajectory in trajectories)),
        "rollout/attempts": float(sum(trajectory.attempt for trajectory in trajectories)),
    }
    metrics |= {f"rollout/stop/{reason}": share for reason, share in stop_reason_shares(trajectories).items()}
    metrics |= {f"rollout/errors/{kind}": float(count) for kind, count in count_errors(trajectories).items()}
    return metrics | _episode_metrics(sound) | _turn_metrics(sound) | _task_metrics(sound)


def _task_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Of each task by itself, where there are several."""
    tasks = sorted({trajectory.item.task for trajectory in trajectories})
    metrics: dict[str, float] = {}
    for task in tasks if len(tasks) > 1 else ():
        own = [trajectory for trajectory in trajectories if trajectory.item.task == task]
        metrics |= {
            f"rollout/{task}/trajectories": float(len(own)),
            f"rollout/{task}/score_mean": _mean([t.score for t in own]),
            f"rollout/{task}/success_mean": _mean([t.success for t in own]),
            f"rollout/{task}/turns_mean": _mean([len(t.turns) for t in own]),
        }
    return metrics


def trial_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What trying again brought: success of the first trials and of the last ones, faults left out; nothing where no
    sample tried twice."""
    if all(trajectory.num_trials == 1 for trajectory in trajectories):
        return {}
    sound = [trajectory for trajectory in trajectories if not trajectory.masked]
    by_trial = {
        "first": [float(t.success) for t in sound if t.trial == 1],
        "last": [float(t.success) for t in sound if t.is_last_trial],
    }
    return {
        "rollout/trials_mean": _mean([float(t.num_trials) for t in trajectories if t.is_last_trial]),
        **{f"rollout/success_{which}_trial": _mean(values) for which, values in by_trial.items() if values},
    }


def _episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What whole trajectories gave and took; nothing where there is none."""
    if not trajectories:
        return {}
    turns = [len(t.turns) for t in trajectories]
    return {
        "rollout/score_mean": _mean([t.score for t in trajectories]),
        "rollout/success_mean": _mean([t.success for t in trajectories]),
        "rollout/turns_mean": _mean(turns),
        "rollout/turns_max": float(max(turns)),
        "rollout/sampled_tokens_mean": _mean([t.num_sampled_tokens for t in trajectories]),
        "rollout/tokens_mean": _mean([t.num_tokens for t in trajectories]),
        **_spread("rollout/generation_s", [sum(turn.generation_s for turn in t.turns) for t in trajectories]),
        **_spread("rollout/env_s", [sum(turn.env_s for turn in t.turns) for t in trajectories]),
        **_spread("rollout/duration_s", [t.duration_s for t in trajectories]),
    }


def _turn_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What single turns took; nothing where there is none."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    if not turns:
        return {}
    return {
        **_spread("rollout/turn_tokens", [turn.num_tokens for turn in turns]),
        **_spread("rollout/turn_generation_s", [turn.generation_s for turn in turns]),
        **_spread("rollout/turn_env_s", [turn.env_s for turn in turns]),
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, 95th percentile (linear between ranks) and maximum."""
    return {
        f"{name}_mean": _mean(values),
        f"{name}_p95": float(np.quantile(values, 0.95)),
        f"{name}_max": float(max(values)),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
