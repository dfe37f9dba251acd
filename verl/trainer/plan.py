"""What a run is going to do, in numbers, before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from agentgym_rl.errors import ConfigError
from agentgym_rl.rounds import RoundScheduler, RoundType
from agentgym_rl.threads import available_cores, threads_per_worker
from verl.config import GenerationConfig, PPOConfig, WorkersConfig


def resolve_threads(config: WorkersConfig) -> int:
    """Compute threads of one worker: ``trainer.num_threads``, else a fair share of this machine's cores."""
    return config.num_threads or threads_per_worker(config.n_gpus_per_node)


def describe_machine(config: WorkersConfig, device: str) -> str:
    """Workers, device and threads in a line."""
    workers = f"{config.world_size} worker{'s' if config.world_size > 1 else ''}"
    kind = f"{config.worker_group}, {device}, {resolve_threads(config)} threads each of {available_cores()} cores"
    return f"{workers} ({kind})"


def describe_generation(config: GenerationConfig, *, num_items: int, num_done: int, device: str) -> str:
    """What an evaluation is going to do, ``num_done`` of its trajectories done already."""
    num_trajectories = num_items * config.data.n_samples
    done = f", {num_done} of them done already" if num_done else ""
    sampling = f"sampled at temperature {config.rollout.temperature:g}" if config.rollout.temperature else "greedy"
    return (
        f"plan: {num_items} items x {config.data.n_samples} samples = {num_trajectories} trajectories of at most "
        f"{config.agentgym.max_rounds} rounds{done}, {sampling}\n"
        f"      {describe_machine(config.trainer, device)}"
    )


@dataclass(frozen=True)
class PPOPlan:
    """The resolved numbers of a PPO run."""

    num_items: int
    num_val_items: int
    steps_per_epoch: int
    total_steps: int
    items_per_step: int
    group_size: int
    updates_per_step: int
    trajectories_per_update: int
    critic_updates_per_step: int
    """0 where no critic is trained."""
    critic_warmup: int
    """Steps at the start that train the critic alone."""

    @classmethod
    def of(cls, config: PPOConfig, *, num_items: int, num_val_items: int, steps_per_epoch: int) -> PPOPlan:
        """Raises `ConfigError` when the critic's warm-up leaves no step for the policy."""
        actor, trainer = config.actor_rollout_ref.actor, config.trainer
        mini_batches = config.data.train_batch_size // actor.ppo_mini_batch_size
        critic_groups = config.critic.ppo_mini_batch_size or actor.ppo_mini_batch_size
        total_steps = trainer.total_training_steps or trainer.total_epochs * steps_per_epoch
        if trainer.critic_warmup >= total_steps:
            raise ConfigError(
                f"trainer.critic_warmup={trainer.critic_warmup} must be below the run's {total_steps} steps: no step "
                "would train the policy"
            )
        critic_mini_batches = config.data.train_batch_size // critic_groups if config.needs_critic else 0
        return cls(
            num_items=num_items,
            num_val_items=num_val_items,
            steps_per_epoch=steps_per_epoch,
            total_steps=total_steps,
            items_per_step=config.data.train_batch_size,
            group_size=config.actor_rollout_ref.rollout.n,
            updates_per_step=mini_batches * actor.ppo_epochs,
            trajectories_per_update=actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n,
            critic_updates_per_step=critic_mini_batches * (config.critic.ppo_epochs or actor.ppo_epochs),
            critic_warmup=trainer.critic_warmup,
        )

    @property
    def trajectories_per_step(self) -> int:
        return self.items_per_step * self.group_size

    @property
    def total_updates(self) -> int:
        """Of the policy."""
        return (self.total_steps - self.critic_warmup) * self.updates_per_step

    @property
    def total_critic_updates(self) -> int:
        return self.total_steps * self.critic_updates_per_step

    def describe(self, config: PPOConfig, device: str) -> str:
        """A few lines for the user."""
        return "\n".join(
            [
                f"plan: {self.items_per_step} items x n {self.group_size} = {self.trajectories_per_step} trajectories, "
                f"{self.updates_per_step} updates of {self.trajectories_per_update}; {self.total_steps} steps",
                f"      {self.num_items} items to train on, {self.steps_per_epoch} steps an epoch; "
                f"{self.num_val_items} items to validate on",
                f"      rounds: {_describe_rounds(config.algorithm.rounds_ctrl.scheduler(), self.total_steps)}",
                *self._describe_algorithm(config),
                f"      {describe_machine(config.trainer, device)}",
                f"      results in {config.trainer.default_local_dir}",
            ]
        )

    def _describe_algorithm(self, config: PPOConfig) -> list[str]:
        """What makes a step more than its trajectories and updates."""
        filters, lines = config.algorithm.filter_groups, []
        choice = config.actor_rollout_ref.agentgym.agent_choice
        if choice.tries_again:
            lines.append(f"      agent {choice.agent}: up to {choice.trials} trajectories of each sample")
        if config.algorithm.adv_estimator == "remax":
            lines.append(f"      and {self.items_per_step} greedy trajectories a step, one per item")
        if filters.enable:
            lines.append(
                f"      groups without different {filters.metric} are replaced, in up to {filters.max_num_gen_batches} "
                "rounds of sampling a step"
            )
        if self.critic_updates_per_step:
            alone = f"; alone in the first {self.critic_warmup} steps" if self.critic_warmup else ""
            lines.append(f"      {self.critic_updates_per_step} updates of the critic a step{alone}")
        return lines


def _describe_rounds(scheduler: RoundScheduler, total_steps: int) -> str:
    if scheduler.type == RoundType.ADAPTIVE:
        first, *later = scheduler.stages
        return f"{first}" + (f", then {', '.join(map(str, later))} as the trajectories allow" if later else "")
    if scheduler.type == RoundType.LINEAR:
        first, *later = scheduler.stages
        return f"from {first} in step 1 in equal parts" + "".join(
            f" to {rounds} in step {1 + number * scheduler.steps_per_stage}" for number, rounds in enumerate(later, 1)
        )
    return ", ".join(
        f"{rounds} in steps {first}-{last}" if first < last else f"{rounds} in step {first}"
        for first, last, rounds in _stages(scheduler, total_steps)
    )


def _stages(scheduler: RoundScheduler, total_steps: int) -> Iterator[tuple[int, int, int]]:
    """First step, last step and rounds of each stretch of equal rounds, of a schedule that goes up in steps."""
    starts = [1 + number * scheduler.steps_per_stage for number in range(len(scheduler.stages))]
    rises = [step for step in starts[1:] if step <= total_steps and scheduler.rounds(step) > scheduler.rounds(step - 1)]
    for first, following in pairwise([1, *rises, total_steps + 1]):
        yield first, following - 1, scheduler.rounds(first)
