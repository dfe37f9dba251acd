"""Validation by rollouts: how the present policy does on items that it is not trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentgym_rl.rollout.collector import check_failures, report_faults
from agentgym_rl.rollout.statistics import rollout_metrics, trial_metrics
from agentgym_rl.types import Item
from verl.config import RolloutConfig
from verl.single_controller.base import WorkerGroup
from verl.trainer.rollouts import generate_anew, make_requests
from verl.workers.setup import RolloutOrder


@dataclass(frozen=True)
class Validation:
    """What is played, and how. Every validation draws the same random numbers, so that a change of its result is a
    change of the policy."""

    items: tuple[Item, ...]
    rollout: RolloutConfig
    max_rounds: int
    seed: int
    folder: Path
    """Of the trajectory files of all steps."""

    def run(self, workers: WorkerGroup, step: int) -> dict[str, float]:
        """Metrics ``val/...`` of the engines' policy, which training step ``step`` made.

        Of an agent that tries again, each sample's last trial counts. Raises `TooManyFailures`.
        """
        requests = make_requests(self.items, n=self.rollout.val_kwargs.n, purpose="val", seed=self.seed)
        order = RolloutOrder(step, self.max_rounds, self.rollout.val_sampling, log_name=f"val_step{step}")
        trajectories = generate_anew(workers, requests, order, folder=self.folder).trajectories
        check_failures(trajectories, self.rollout.max_failed_fraction)
        report_faults(trajectories, f"validation at step {step}")
        results = [trajectory for trajectory in trajectories if trajectory.is_last_trial]
        metrics = rollout_metrics(results) | trial_metrics(trajectories)
        return {name.replace("rollout/", "val/", 1): value for name, value in metrics.items()}
