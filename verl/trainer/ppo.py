"""PPOTrainer: rollouts, advantages, updates.

`PPOTrainer.train_step` is one step as it reads on a whiteboard; what it names is a few lines below it or in the module
that it comes from. The loop around the steps is `verl.trainer.loop`. This is the driver: models run in the workers,
`verl.workers.hybrid`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.errors import ConfigError
from agentgym_rl.rollout.collector import RolloutRequest
from agentgym_rl.rollout.statistics import rollout_metrics, trial_metrics
from agentgym_rl.types import Item
from verl.config import PPOConfig
from verl.protocol import DataProto
from verl.single_controller.base import WorkerGroup, WorkerSpec
from verl.single_controller.start import start_workers
from verl.trainer.collecting import collect_steps
from verl.trainer.core_algos import (
    apply_kl_penalty,
    apply_rollout_weights,
    compute_advantages,
    find_estimator,
    next_kl_coef,
)
from verl.trainer.item_order import Order, order_items
from verl.trainer.loop import TrainingLoop, run_loop
from verl.trainer.metrics import (
    CONSOLE_COLUMNS,
    Stopwatch,
    advantage_metrics,
    group_metrics,
    has_signal,
    usage_metrics,
)
from verl.trainer.mini_batches import SharedMiniBatch, mini_batch_rows, share_mini_batch
from verl.trainer.performance import Passes, Performance, largest
from verl.trainer.plan import PPOPlan, resolve_threads
from verl.trainer.replay import (
    ReplaySampler,
    check_replay,
    check_tokenizer,
    forget_later_steps,
    replay_folder,
    write_step,
)
from verl.trainer.resuming import ppo_checkpoint
from verl.trainer.rollouts import Rollout, generate_anew, trajectory_folder
from verl.trainer.step_rollouts import StepRollouts, StepSampler, TakesSteps, record_outcome
from verl.trainer.token_log import copy_tokenizer, log_token_values
from verl.trainer.validation import Validation
from verl.utils import checkpoint
from verl.utils.balancing import restore_order
from verl.utils.devices import resolve_device
from verl.utils.families import balanced_shares
from verl.utils.seeding import derive_seed
from verl.utils.tracking import Tracker, make_tracker
from verl.workers.setup import ActorSetup, CriticSetup, RolloutOrder, RolloutSetup


class PPOTrainer(TrainingLoop[PPOConfig]):
    """Trains a policy by multi-turn RL with the workers it is given."""

    kind = "ppo"
    order_keys = ("data.seed", "data.shuffle", "data.task_weights", "data.train_batch_size", "data.train_file")
    row_name = "items"

    def __init__(
        self,
        config: PPOConfig,
        plan: PPOPlan,
        *,
        order: Order[Item],
        val_items: Sequence[Item],
        workers: WorkerGroup,
        tracker: Tracker,
        resume_from: Path | None = None,
    ) -> None:
        """``workers`` are `HybridWorker`s, or `TrainingWorker`s where trajectories are replayed; ``resume_from`` is a
        complete checkpoint folder."""
        super().__init__(
            config,
            output_folder(config),
            order,
            total_steps=plan.total_steps,
            validation=_validation(config, val_items),
            workers=workers,
            tracker=tracker,
        )
        self._plan = plan
        self._rounds = config.algorithm.rounds_ctrl.scheduler()
        self._replayed = replay_folder(config.trainer.replay) if config.trainer.replay else None
        self._sampler: TakesSteps = (
            ReplaySampler(self._replayed) if self._replayed else StepSampler(config, order, self._generate)
        )
        self._kl_coef = config.reward_kl_coef
        if resume_from is not None:
            self._resume(resume_from)
        if not self._replayed:
            forget_later_steps(_trajectory_folder(config), self._steps_done)
        self._performance = Performance.of(
            workers, peak_tflops=config.trainer.peak_tflops_per_device, shares_prefixes=config.shares_prefixes
        )

    def train_step(self, step: int) -> dict[str, float]:
        """One step of the algorithm: rollouts, advantages, updates."""
        watch = Stopwatch()
        with watch.measure("step"):
            self._workers.call_all("start_step", step)
            with watch.measure("gen"):
                rollouts = self._rollout(step)
            batch = self._add_model_outputs(rollouts.batch(), step, watch)
            batch, metrics = self._add_advantages(batch)
            self._log_tokens(batch, step, rollouts, watch)
            if self._config.needs_critic:
                with watch.measure("update_critic"):
                    metrics |= self._update_critic(batch, rollouts, step)
            with watch.measure("update"):
                metrics |= self._update_actor(batch, rollouts, step)
            if not self._replayed:
                with watch.measure("sync"):
                    self._workers.call_all("sync_weights", step)
        record_outcome(self._rounds, step, rollouts)
        metrics |= self._speed(batch, watch, updates=metrics["training/updates"])
        return metrics | self._step_metrics(step, batch, rollouts) | watch.seconds

    def _state(self) -> dict[str, Any]:
        return super()._state() | {"kl_coef": self._kl_coef, "rounds": self._rounds.state()}

    def _take_up(self, state: Mapping[str, Any]) -> None:
        # Where the run before had a fixed coefficient, or none, this one begins with its own.
        if self._config.algorithm.kl_ctrl.type == state["config"]["algorithm"]["kl_ctrl"]["type"] == "adaptive":
            self._kl_coef = state["kl_coef"]
        # A schedule of another type had other reasons, and begins where this one's stages do.
        if self._rounds.type == state["config"]["algorithm"]["rounds_ctrl"]["type"] and state.get("rounds"):
            self._rounds.load_state(state["rounds"])

    def _resume(self, folder: Path) -> None:
        super()._resume(folder)
        if not self._replayed:
            self._workers.call_all("sync_weights", self._steps_done)

    # ---------------------------------------------------------------------------------------------- parts of a step

    def _rollout(self, step: int) -> StepRollouts:
        """The step's trajectories with the current policy, or those that are replayed."""
        rollouts = self._sampler.sample(
            step,
            max_rounds=self._rounds.rounds(step),
            sampling=self._config.actor_rollout_ref.rollout.sampling,
        )
        if not self._replayed:
            write_step(_trajectory_folder(self._config), step, rollouts)
        return rollouts

    def _generate(self, requests: Sequence[RolloutRequest], order: RolloutOrder) -> Rollout:
        return generate_anew(self._workers, requests, order, folder=_trajectory_folder(self._config))

    def _add_model_outputs(self, batch: DataProto, step: int, watch: Stopwatch) -> DataProto:
        """Old log-probs, unless the only update can take its own for them or there is none; the reference's and values
        as needed."""
        config = self._config
        is_trained_again = self._plan.updates_per_step > 1 and step > self._plan.critic_warmup
        is_logged = config.trainer.token_values == "all"
        if is_trained_again or config.reward_kl_coef > 0 or config.algorithm.rollout_is or is_logged:
            with watch.measure("old_log_prob"):
                batch = batch.replace(old_log_probs_T=self._per_token("log_probs", batch))
        if config.needs_ref_log_probs:
            with watch.measure("ref"):
                batch = batch.replace(ref_log_probs_T=self._per_token("ref_log_probs", batch))
        if config.has_full_kl_reward:
            with watch.measure("ref"):
                batch = batch.replace(kl_T=self._per_token("full_kl", batch))
        if config.needs_critic:
            with watch.measure("values"):
                batch = batch.replace(values_T=self._per_token("values", batch))
        return batch

    def _per_token(self, method: str, batch: DataProto) -> torch.Tensor:
        """``T``: what the workers' ``method`` gives for each token, computed in shares of about equal work."""
        shares = balanced_shares(batch, self._workers.world_size)
        parts = [batch.select(share).for_model() for share in shares]
        results = self._workers.call_each(method, [(part,) for part in parts])
        joined = DataProto.concat(parts).replace(old_log_probs_T=torch.cat(results))
        values_T = joined.select(restore_order(shares)).old_log_probs_T
        assert values_T is not None
        return values_T

    def _add_advantages(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        algorithm = self._config.algorithm
        metrics: dict[str, float] = {}
        if self._kl_coef > 0:
            batch, kl = apply_kl_penalty(batch, kl_coef=self._kl_coef, estimator=algorithm.kl_penalty)
            metrics |= {"rollout/kl_mean": kl, "rollout/kl_coef": self._kl_coef}
            self._kl_coef = next_kl_coef(self._kl_coef, kl=kl, num_trajectories=len(batch), config=algorithm.kl_ctrl)
        batch = compute_advantages(batch, algorithm, with_returns=self._config.needs_critic)
        metrics |= advantage_metrics(batch)
        if algorithm.rollout_is:
            batch, weights = apply_rollout_weights(
                batch, threshold=algorithm.rollout_is_threshold, level=algorithm.rollout_is_level
            )
            metrics |= weights
        return batch, metrics

    def _log_tokens(self, batch: DataProto, step: int, rollouts: StepRollouts, watch: Stopwatch) -> None:
        """Write what the step knows of each token before it trains on it, as ``trainer.token_values`` asks."""
        kept = self._config.trainer.token_values
        if kept == "none" or not len(batch):
            return
        with watch.measure("log_tokens"):
            entropies_T = self._per_token("entropies", batch) if kept == "all" else None
            log_token_values(output_folder(self._config), step, rollouts.rows, batch, entropies_T)

    def _update_critic(self, batch: DataProto, rollouts: StepRollouts, step: int) -> dict[str, float]:
        """All updates of the critic in the step."""
        actor, critic = self._config.actor_rollout_ref.actor, self._config.critic
        mini_batches = self._mini_batches(
            batch,
            rollouts,
            groups=critic.ppo_mini_batch_size or actor.ppo_mini_batch_size,
            epochs=critic.ppo_epochs or actor.ppo_epochs,
            shuffle=actor.shuffle if critic.shuffle is None else critic.shuffle,
            seed=derive_seed("critic mini-batches", self._config.trainer.seed, step),
        )
        return self._train("update_critic", mini_batches)

    def _update_actor(self, batch: DataProto, rollouts: StepRollouts, step: int) -> dict[str, float]:
        """All updates of the policy in the step. Says so, and makes none, when there is nothing to learn from."""
        actor = self._config.actor_rollout_ref.actor
        if step <= self._plan.critic_warmup:
            return {"training/updates": 0.0}
        if not len(batch) or not (has_signal(batch) or actor.use_kl_loss or actor.entropy_coeff):
            print(f"step {step}: {_no_signal(rollouts)}: no update is made", flush=True)
            return {"training/updates": 0.0}
        mini_batches = self._mini_batches(
            batch,
            rollouts,
            groups=actor.ppo_mini_batch_size,
            epochs=actor.ppo_epochs,
            shuffle=actor.shuffle,
            seed=derive_seed("mini-batches", self._config.trainer.seed, step),
        )
        return self._train("update", mini_batches) | {"training/updates": float(len(mini_batches))}

    def _mini_batches(
        self, batch: DataProto, rollouts: StepRollouts, *, groups: int, epochs: int, shuffle: bool, seed: int
    ) -> list[SharedMiniBatch]:
        row_uids = [row.trajectory.uid for row in rollouts.rows]
        rows = mini_batch_rows(row_uids, list(rollouts.kept), groups=groups, epochs=epochs, shuffle=shuffle, seed=seed)
        return [share_mini_batch(batch.select(mini_batch), self._workers.world_size) for mini_batch in rows]

    def _train(self, method: str, mini_batches: Sequence[SharedMiniBatch]) -> dict[str, float]:
        """An update of the workers' model for each mini-batch, in one call; nothing where there is none."""
        if not mini_batches:
            return {}
        totals = [mini_batch.totals for mini_batch in mini_batches]
        calls = [([each.shares[rank] for each in mini_batches], totals) for rank in range(self._workers.world_size)]
        metrics: dict[str, float] = self._workers.call_each(method, calls)[0]
        return metrics

    def _step_metrics(self, step: int, batch: DataProto, rollouts: StepRollouts) -> dict[str, float]:
        trajectories = rollouts.trajectories
        sampled = rollout_metrics(trajectories) | trial_metrics(trajectories) | group_metrics(trajectories)
        sampled |= {} if self._replayed else usage_metrics(rollouts.usage)
        return (
            sampled
            | rollouts.metrics()
            | {
                "rounds/max_rounds": float(self._rounds.rounds(step)),
                "training/epoch": float(self._order.epoch_of(step)),
                "training/tokens": float(batch.num_tokens),
                "training/sampled_tokens": float(batch.num_sampled_tokens),
            }
            | largest(self._workers.call_all("peak_memory_gib"))
        )

    def _speed(self, batch: DataProto, watch: Stopwatch, *, updates: float) -> dict[str, float]:
        """Metrics ``perf/...`` of a step with so many updates of the policy."""
        config, actor = self._config, self._config.actor_rollout_ref.actor
        epochs = actor.ppo_epochs * updates / self._plan.updates_per_step
        passes = {
            "gen": Passes(forward=0.0 if self._replayed else 1.0),
            "old_log_prob": Passes(forward=1.0),
            # The full KL needs the policy's distributions beside the reference's.
            "ref": Passes(forward=1.0 + config.has_full_kl_reward),
            "values": Passes(forward=1.0),
            "log_tokens": Passes(forward=float(config.trainer.token_values == "all")),
            "update_critic": Passes(training=float(config.critic.ppo_epochs or actor.ppo_epochs)),
            "update": Passes(forward=epochs * actor.has_full_kl_loss, training=epochs),
        }
        return self._performance.metrics(batch, watch.seconds, passes=passes)


def run_ppo(config: PPOConfig, *, train_items: Sequence[Item], val_items: Sequence[Item]) -> None:
    """Plan the run, say so, start the workers, train, and end them whatever happens.

    Raises `ConfigError` when there are too few items for a batch, or when the checkpoint to resume, the advantage
    estimator or the trajectories to replay do not exist.
    """
    order = order_items(train_items, config.actor_rollout_ref.agentgym.tasks, config.data)
    plan = PPOPlan.of(
        config, num_items=len(train_items), num_val_items=len(val_items), steps_per_epoch=order.batches_per_epoch
    )
    find_estimator(config.algorithm.adv_estimator)
    if config.trainer.replay:
        _check_replay(config, plan)
    device, root = resolve_device(config.trainer.device), output_folder(config)
    resume_from = ppo_checkpoint(config)
    print(plan.describe(config, device), flush=True)
    if config.trainer.rollout_only:
        _collect(config, plan, order, device)
        return
    if resume_from and checkpoint.step_of(resume_from) >= plan.total_steps:
        print(f"nothing to do: {resume_from} has all {plan.total_steps} steps behind it", flush=True)
        return
    if config.trainer.token_values != "none":
        copy_tokenizer(root, config.actor_rollout_ref.model.absolute().path)
    run_loop(
        lambda workers, tracker: PPOTrainer(
            config,
            plan,
            order=order,
            val_items=val_items,
            workers=workers,
            tracker=tracker,
            resume_from=resume_from,
        ),
        _worker_spec(config, plan, device),
        config,
        root,
        steps_done=checkpoint.step_of(resume_from) if resume_from else 0,
        console_columns=CONSOLE_COLUMNS,
    )


def _check_replay(config: PPOConfig, plan: PPOPlan) -> None:
    """Raise `ConfigError` when the trajectories to replay are not all there, or are another tokenizer's."""
    from verl.models.loading import load_tokenizer  # which imports transformers: otherwise workers alone need it

    check_replay(config, plan.total_steps)
    model = config.actor_rollout_ref.model.absolute()
    chat = ChatTemplate(load_tokenizer(model), warns=False)
    check_tokenizer(replay_folder(str(config.trainer.replay)), chat, model.path)


def _collect(config: PPOConfig, plan: PPOPlan, order: Order[Item], device: str) -> None:
    """The trajectories alone. Raises `ConfigError` where they would replace those of a run that trained."""
    root = output_folder(config)
    if checkpoint.latest(root) is not None:
        raise ConfigError(
            f"trainer.default_local_dir={config.trainer.default_local_dir!r} with trainer.rollout_only=True: holds "
            "checkpoints of a training run, whose trajectories would be replaced; take another folder"
        )
    spec = WorkerSpec(
        "verl.workers.rollout.worker:RolloutWorker",
        (_rollout_setup(config),),
        num_threads=resolve_threads(config.trainer),
        device=device,
    )
    tracker = make_tracker(
        config.trainer, root, config=dataclasses.asdict(config), console_columns=CONSOLE_COLUMNS, resumed_after=0
    )
    with tracker, start_workers(spec, config.trainer, config.ray_init) as workers:
        collect_steps(
            config,
            num_steps=plan.total_steps,
            order=order,
            workers=workers,
            tracker=tracker,
            folder=_trajectory_folder(config),
        )


def output_folder(config: PPOConfig) -> Path:
    """Where checkpoints and metrics go; absolute, since workers run in other folders."""
    return Path(config.trainer.default_local_dir).resolve()


def _validation(config: PPOConfig, items: Sequence[Item]) -> Validation:
    rollout, rounds = config.actor_rollout_ref.rollout, config.algorithm.rounds_ctrl
    max_rounds = rounds.val_rounds or rounds.scheduler().max_rounds
    return Validation(tuple(items), rollout, max_rounds, config.trainer.seed, _trajectory_folder(config))


def _trajectory_folder(config: PPOConfig) -> Path:
    return trajectory_folder(config.actor_rollout_ref.rollout, output_folder(config))


def _rollout_setup(config: PPOConfig) -> RolloutSetup:
    branch = config.actor_rollout_ref
    return RolloutSetup(
        model=branch.model.absolute(),
        agentgym=branch.agentgym,
        rollout=branch.rollout,
        limits=branch.rollout.limits(config.data),
        log_dir=str(_trajectory_folder(config)),
        seed=config.trainer.seed,
    )


def _worker_spec(config: PPOConfig, plan: PPOPlan, device: str) -> WorkerSpec:
    branch = config.actor_rollout_ref
    training = ActorSetup(
        actor=branch.actor,
        ref=branch.ref if config.needs_reference else None,
        critic=_critic_setup(config, plan) if config.needs_critic else None,
        total_updates=plan.total_updates,
        loss_norm_constant=float(config.data.max_response_length),
    )
    worker = "TrainingWorker" if config.trainer.replay else "HybridWorker"
    return WorkerSpec(
        f"verl.workers.hybrid:{worker}",
        (_rollout_setup(config), training),
        num_threads=resolve_threads(config.trainer),
        device=device,
    )


def _critic_setup(config: PPOConfig, plan: PPOPlan) -> CriticSetup:
    model = config.critic.model.resolved(config.actor_rollout_ref.model)
    return CriticSetup(model.absolute(), config.critic, plan.total_critic_updates)


def _no_signal(rollouts: StepRollouts) -> str:
    if rollouts.is_filtered and not rollouts.kept:
        return f"no group has different results after {rollouts.num_rounds} rounds of sampling"
    return "every group has equal scores, all advantages are 0"
