"""Numbers that tell how a training step went, beyond those of its trajectories."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from agentgym_rl.types import Trajectory
from verl.protocol import DataProto
from verl.trainer.credit import differs, group_of
from verl.trainer.rollouts import RolloutUsage

_SHORTEST_S = 1e-9

CONSOLE_COLUMNS = {
    "rounds": "rounds/max_rounds",
    "score": "rollout/score_mean",
    "success": "rollout/success_mean",
    "turns": "rollout/turns_mean",
    "masked": "rollout/masked",
    "groups alike": "rollout/groups_without_signal",
    "val score": "val/score_mean",
    "val success": "val/success_mean",
    "loss": "actor/pg_loss",
    "entropy": "actor/entropy",
    "grad": "actor/grad_norm",
    "s": "timing_s/step",
    "s gen": "timing_s/gen",
    "engine busy": "rollout/engine_busy_share",
    "tokens/s": "perf/tokens_per_s",
}
"""What the console shows of a step: label and metric."""


def group_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Groups of the step, those without two different scores, and those that faults left with one member or none."""
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[group_of(trajectory)].append(trajectory)
    num_alike = num_reduced = 0
    for members in groups.values():
        sound = [trajectory for trajectory in members if not trajectory.masked]
        num_alike += not differs(sound)
        num_reduced += len(sound) < min(len(members), 2)
    return {
        "rollout/groups": float(len(groups)),
        "rollout/groups_without_signal": float(num_alike),
        "rollout/groups_reduced_to_one": float(num_reduced),
    }


def usage_metrics(usage: RolloutUsage) -> dict[str, float]:
    """What a step's rollouts took of engines, servers and network."""
    return {
        "rollout/sessions_peak": float(usage.sessions_peak),
        "rollout/client_retries": float(usage.client_retries),
        "rollout/engine_tokens_per_s": usage.engine_tokens / max(usage.duration_s, _SHORTEST_S),
        "rollout/engine_busy_share": usage.engine_busy_s / max(usage.worker_s, _SHORTEST_S),
    }


def advantage_metrics(batch: DataProto) -> dict[str, float]:
    """Mean, extremes and spread of the advantages over sampled tokens."""
    if batch.advantages_T is None:
        raise ValueError("the batch has no advantages")
    advantages_S = batch.advantages_T[batch.loss_mask_T].double()
    if not len(advantages_S):
        return {}
    return {
        "advantages/mean": float(advantages_S.mean()),
        "advantages/std": float(advantages_S.std(unbiased=False)),
        "advantages/min": float(advantages_S.min()),
        "advantages/max": float(advantages_S.max()),
    }


def has_signal(batch: DataProto) -> bool:
    """False when every advantage is 0, so that the policy loss has no gradient."""
    return batch.advantages_T is not None and bool(torch.any(batch.advantages_T != 0))


class Stopwatch:
    """Seconds by name, under ``timing_s/``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time spent inside to ``timing_s/<name>``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            key = f"timing_s/{name}"
            self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - began
