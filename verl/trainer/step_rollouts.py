"""The trajectories of a training step: groups of samples, greedy baselines, and others in place of groups that teach
nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import torch

from agentgym_rl.rollout.collector import RolloutRequest, by_sample, check_failures, report_faults
from agentgym_rl.rounds import RoundScheduler
from agentgym_rl.types import Item, SamplingParams, StopReason, Trajectory
from verl.config import PPOConfig
from verl.protocol import DataProto, group_code
from verl.trainer.credit import TrainingRow, differs, group_of, item_rows
from verl.trainer.item_order import Order
from verl.trainer.rollouts import Rollout, RolloutUsage, make_requests
from verl.workers.setup import RolloutOrder

Generate = Callable[[Sequence[RolloutRequest], RolloutOrder], Rollout]


@dataclass
class StepRollouts:
    """What was sampled in one training step; grows round by round."""

    trajectories: list[Trajectory] = field(default_factory=list)
    """All samples, faults and those of groups that are left out included; greedy ones are not samples."""
    kept: dict[str, list[Trajectory]] = field(default_factory=dict)
    """Groups to train on, by uid in the order of the requests; faults are left out, so that a group may be empty."""
    greedy: dict[str, Trajectory] = field(default_factory=dict)
    """By uid, where greedy rollouts were asked for."""
    usage: RolloutUsage = field(default_factory=RolloutUsage)
    num_rounds: int = 0
    num_groups: int = 0
    is_filtered: bool = False
    """Groups without signal are left out."""

    @property
    def rows(self) -> list[TrainingRow]:
        """What is trained on of the sound trajectories of the groups that are kept, in the batch's order."""
        return [row for trajectories in self.kept.values() for row in item_rows(trajectories)]

    def batch(self) -> DataProto:
        """The rows, with their greedy baselines where there are any."""
        rows = self.rows
        batch = DataProto.from_trajectories([row.trajectory for row in rows])
        groups_B = torch.tensor([group_code(row.group) for row in rows], dtype=torch.int64)
        batch = batch.replace(group_ids_B=groups_B, item_ids_B=batch.group_ids_B)
        if not self.greedy:
            return batch
        greedy = [self.greedy[row.trajectory.uid] for row in rows]
        baselines = [math.nan if trajectory.masked else trajectory.score for trajectory in greedy]
        return batch.replace(baselines_B=torch.tensor(baselines, dtype=torch.float64))

    def metrics(self) -> dict[str, float]:
        """Numbers of greedy rollouts and of dynamic sampling, each where it is on."""
        metrics: dict[str, float] = {}
        if self.greedy:
            scores = [trajectory.score for trajectory in self.greedy.values() if not trajectory.masked]
            metrics["rollout/groups_without_baseline"] = float(len(self.greedy) - len(scores))
            if scores:
                metrics["rollout/greedy_score_mean"] = sum(scores) / len(scores)
        if self.is_filtered:
            metrics["rollout/gen_batches"] = float(self.num_rounds)
            metrics["rollout/groups_left_out"] = float(self.num_groups - len(self.kept))
        return metrics


class TakesSteps(Protocol):
    """Where the trajectories of a training step come from."""

    def sample(self, step: int, *, max_rounds: int, sampling: SamplingParams) -> StepRollouts: ...


def record_outcome(rounds: RoundScheduler, step: int, rollouts: StepRollouts) -> None:
    """Tell the schedule of rounds what came of a step."""
    sound = [trajectory for trajectory in rollouts.trajectories if not trajectory.masked]
    cut = [trajectory for trajectory in sound if trajectory.stop_reason == StopReason.MAX_ROUNDS]
    succeeded = [trajectory for trajectory in sound if trajectory.success]
    rounds.record(
        step,
        success=len(succeeded) / len(sound) if sound else None,
        cut_share=len(cut) / len(sound) if sound else None,
    )


class StepSampler:
    """Makes the trajectories of each training step by ``generate``, as the configuration says."""

    def __init__(self, config: PPOConfig, order: Order[Item], generate: Generate) -> None:
        self._config, self._order, self._generate = config, order, generate

    def sample(self, step: int, *, max_rounds: int, sampling: SamplingParams) -> StepRollouts:
        """``n`` samples of each of the step's items, item by item.

        Under ``algorithm.filter_groups`` groups without signal are left out, and more items are taken until as many
        groups are there as the batch has items, or the rounds of sampling are used up. Which ones follows from seed,
        step and what came of the earlier ones, so that a resumed run draws the same.
        Masked ones are told to the user. Raises `TooManyFailures` as `check_failures`, after each round, of all that
        was sampled in the step.
        """
        filters = self._config.algorithm.filter_groups
        rollouts = StepRollouts(is_filtered=filters.enable)
        items, others = self._order.batch(step), self._order.others(step)
        wanted = len(items)
        for number in range(1, (filters.max_num_gen_batches if filters.enable else 1) + 1):
            self._add_round(rollouts, items, step, number, max_rounds, sampling)
            missing = wanted - len(rollouts.kept)
            if missing <= 0:
                break
            # As many as will do at the share of groups that were kept so far.
            items = list(islice(others, min(wanted, -(-missing * rollouts.num_groups // max(len(rollouts.kept), 1)))))
        rollouts.kept = dict(islice(rollouts.kept.items(), wanted))
        report_faults(rollouts.trajectories, f"step {step}")
        return rollouts

    def _add_round(
        self,
        rollouts: StepRollouts,
        items: Sequence[Item],
        step: int,
        number: int,
        max_rounds: int,
        sampling: SamplingParams,
    ) -> None:
        rollout, algorithm = self._config.actor_rollout_ref.rollout, self._config.algorithm
        requests = make_requests(
            items,
            n=rollout.n,
            purpose=f"step{step}" if number == 1 else f"step{step}/{number}",
            seed=self._config.trainer.seed,
            with_greedy=algorithm.adv_estimator == "remax",
        )
        order = RolloutOrder(
            step=step, max_rounds=max_rounds, sampling=sampling, log_name=f"step{step}", append=number > 1
        )
        made = self._generate(requests, order)
        pairs = list(zip(requests, by_sample(made.trajectories), strict=True))
        samples = [trial for request, trials in pairs if not request.greedy for trial in trials]
        groups = _by_uid(samples)
        if rollouts.is_filtered:
            groups = {uid: g for uid, g in groups.items() if has_difference(g, algorithm.filter_groups.metric)}
        rollouts.trajectories += samples
        rollouts.greedy |= {request.uid: trials[0] for request, trials in pairs if request.greedy}
        # A late round may be a single group: a share of it alone would say little.
        check_failures([*rollouts.trajectories, *rollouts.greedy.values()], rollout.max_failed_fraction)
        rollouts.kept |= groups
        rollouts.usage += made.usage
        rollouts.num_rounds = number
        rollouts.num_groups += len(items)


def has_difference(trajectories: Iterable[Trajectory], metric: str) -> bool:
    """True when an item's trajectories teach something: some of those that are compared have different results."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(group_of(trajectory), []).append(trajectory)
    return any(differs(group, metric) for group in groups.values())


def _by_uid(trajectories: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    """Sound members of each group; a group of faults alone is there, and empty."""
    groups: Mapping[str, list[Trajectory]] = {trajectory.uid: [] for trajectory in trajectories}
    for trajectory in trajectories:
        if not trajectory.masked:
            groups[trajectory.uid].append(trajectory)
    return dict(groups)
