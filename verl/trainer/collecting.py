"""``trainer.rollout_only``: the trajectories of a training run's steps by the policy it starts from, and nothing else.

No weight changes and no optimizer exists. The files are those of a training run, and `verl.trainer.replay` trains on
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentgym_rl.rollout.collector import RolloutRequest
from agentgym_rl.rollout.statistics import rollout_metrics, trial_metrics
from agentgym_rl.types import Item
from verl.config import PPOConfig
from verl.single_controller.base import Interrupted, WorkerGroup
from verl.single_controller.signals import Terminated, stop_on_sigterm
from verl.trainer.item_order import Order
from verl.trainer.metrics import Stopwatch, group_metrics, usage_metrics
from verl.trainer.replay import write_step
from verl.trainer.rollouts import Rollout, generate_anew
from verl.trainer.step_rollouts import StepSampler, record_outcome
from verl.utils.tracking import Tracker
from verl.workers.setup import RolloutOrder


def collect_steps(
    config: PPOConfig, *, num_steps: int, order: Order[Item], workers: WorkerGroup, tracker: Tracker, folder: Path
) -> None:
    """Sample, write and log each step. ``workers`` are `RolloutWorker`s; ``folder`` is that of the trajectory files.

    Raises `Terminated` after SIGTERM; the steps before are there.
    """

    def generate(requests: Sequence[RolloutRequest], rollout_order: RolloutOrder) -> Rollout:
        return generate_anew(workers, requests, rollout_order, folder=folder)

    sampler, rounds = StepSampler(config, order, generate), config.algorithm.rounds_ctrl.scheduler()
    sampling = config.actor_rollout_ref.rollout.sampling
    step = 0
    try:
        with stop_on_sigterm(workers.interrupt, saying="giving up what is in flight"):
            for step in range(1, num_steps + 1):
                watch = Stopwatch()
                with watch.measure("step"), watch.measure("gen"):
                    rollouts = sampler.sample(step, max_rounds=rounds.rounds(step), sampling=sampling)
                write_step(folder, step, rollouts)
                record_outcome(rounds, step, rollouts)
                made = rollouts.trajectories
                metrics = rollout_metrics(made) | trial_metrics(made) | group_metrics(made) | rollouts.metrics()
                metrics |= usage_metrics(rollouts.usage) | {"rounds/max_rounds": float(rounds.rounds(step))}
                tracker.log(step, metrics | watch.seconds)
    except Interrupted:
        raise Terminated(f"terminated in step {step}; the steps before it are in {folder}") from None
    print(f"trajectories of {num_steps} steps in {folder}", flush=True)
