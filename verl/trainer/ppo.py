"""The training loop: rollouts, advantages, updates, and what is kept of them.

`PPOTrainer.train_step` is one step as it reads on a whiteboard; what it names is a few lines below it or in the module
that it comes from. This is the driver: models run in the workers, `verl.workers.hybrid`.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from agentgym_rl.errors import AgentGymError
from agentgym_rl.rollout.collector import RolloutRequest, TokenLimits, check_failures
from agentgym_rl.rollout.statistics import rollout_metrics
from agentgym_rl.types import Item, SamplingParams, Trajectory
from verl.config import EvalSamplingConfig, PPOConfig, RolloutConfig
from verl.protocol import DataProto
from verl.single_controller.base import ClusterError, Interrupted, WorkerError, WorkerGroup, WorkerSpec
from verl.single_controller.signals import StopRequest, Terminated, stop_on_sigterm
from verl.single_controller.start import start_workers
from verl.trainer.core_algos import apply_kl_penalty, compute_advantages, find_estimator
from verl.trainer.item_order import ItemOrder
from verl.trainer.metrics import (
    CONSOLE_COLUMNS,
    Stopwatch,
    advantage_metrics,
    group_metrics,
    has_signal,
    usage_metrics,
)
from verl.trainer.mini_batches import mini_batch_rows, share_mini_batch
from verl.trainer.plan import PPOPlan, resolve_threads
from verl.trainer.rollouts import Rollout, generate, make_requests
from verl.utils import checkpoint
from verl.utils.balancing import balanced_partition, restore_order
from verl.utils.devices import resolve_device
from verl.utils.seeding import derive_seed
from verl.utils.tracking import Tracker, make_tracker
from verl.workers.setup import ActorSetup, RolloutOrder, RolloutSetup


class PPOTrainer:
    """Trains a policy by multi-turn RL with the workers it is given."""

    def __init__(
        self,
        config: PPOConfig,
        plan: PPOPlan,
        *,
        order: ItemOrder[Item],
        val_items: Sequence[Item],
        workers: WorkerGroup,
        tracker: Tracker,
        resume_from: Path | None = None,
    ) -> None:
        """``workers`` are `HybridWorker`s; ``resume_from`` is a complete checkpoint folder."""
        self._config, self._plan = config, plan
        self._order, self._val_items = order, tuple(val_items)
        self._workers, self._tracker = workers, tracker
        self._rounds = config.algorithm.rounds_ctrl.scheduler()
        self._steps_done = self._saved_step = self._load(resume_from) if resume_from else 0
        self._is_saving = False

    def fit(self) -> None:
        """All steps that are left: train, validate, save, log.

        After SIGTERM it saves the last finished step and raises `Terminated`: rollouts are given up, an update is
        finished first.
        """
        with stop_on_sigterm(self._workers.interrupt) as stop:
            try:
                self._run_steps(stop)
            except Interrupted:
                pass  # Nothing of the step that was given up has reached the weights.
            except (WorkerError, ClusterError):
                raise  # Without all workers no checkpoint is written to its end.
            except AgentGymError:
                self._finish_save()
                raise
            if self._steps_done < self._plan.total_steps:
                self._save_and_leave()
            self._finish_save()

    def _run_steps(self, stop: StopRequest) -> None:
        trainer, last_step = self._config.trainer, self._plan.total_steps
        if self._steps_done == 0 and trainer.val_before_train:
            self._tracker.log(0, self.validate())
        for step in range(self._steps_done + 1, last_step + 1):
            if stop.is_made:
                return
            metrics = self.train_step(step)
            try:
                metrics |= self._finish_save(wait=False)
                if trainer.test_freq > 0 and _is_due(step, trainer.test_freq, last_step):
                    metrics |= self.validate()
                if _is_due(step, trainer.save_freq, last_step):
                    metrics |= self.save()
            finally:
                self._tracker.log(step, metrics)

    def train_step(self, step: int) -> dict[str, float]:
        """Training step ``step``, counted from 1; returns its metrics."""
        watch = Stopwatch()
        with watch.measure("step"):
            self._workers.call_all("start_step", step)
            with watch.measure("gen"):
                rollout = self._rollout(step)
            trajectories = rollout.trajectories
            check_failures(trajectories, self._config.actor_rollout_ref.rollout.max_failed_fraction)
            batch = DataProto.from_trajectories([t for t in trajectories if not t.masked])
            batch = self._add_log_probs(batch, watch)
            batch, metrics = self._add_advantages(batch)
            with watch.measure("update"):
                metrics |= self._update(batch, trajectories, step)
            with watch.measure("sync"):
                self._workers.call_all("sync_weights", step)
        self._steps_done = step
        metrics |= rollout_metrics(trajectories) | usage_metrics(rollout.usage) | group_metrics(trajectories)
        return metrics | self._step_metrics(step, batch, watch) | watch.seconds

    def validate(self) -> dict[str, float]:
        """Metrics ``val/...`` of the current policy over all validation items, at the longest horizon of the run.

        Every validation draws the same random numbers, so that a change of its result is a change of the policy.
        """
        rollout, watch = self._config.actor_rollout_ref.rollout, Stopwatch()
        requests = make_requests(self._val_items, n=rollout.val_kwargs.n, purpose="val", seed=self._config.trainer.seed)
        order = RolloutOrder(
            step=self._steps_done,
            max_rounds=self._rounds.max_rounds,
            sampling=_sampling(rollout.val_kwargs, rollout.max_tokens),
            log_name=f"val_step{self._steps_done}",
        )
        with watch.measure("validate"):
            trajectories = self._generate(requests, order).trajectories
        check_failures(trajectories, rollout.max_failed_fraction)
        metrics = {name.replace("rollout/", "val/", 1): value for name, value in rollout_metrics(trajectories).items()}
        return metrics | watch.seconds

    def save(self) -> dict[str, float]:
        """Begin to write the checkpoint of the last finished step; it will be complete, or not there at all.

        Training goes on meanwhile; `_finish_save` tells what came of it.
        """
        watch, trainer = Stopwatch(), self._config.trainer
        with watch.measure("save"):
            self._finish_save()
            order = checkpoint.begin_save(
                output_folder(self._config),
                self._steps_done,
                self._trainer_state(),
                keep=trainer.max_actor_ckpt_to_keep,
            )
            self._workers.call_all("save", order)
            self._is_saving, self._saved_step = True, self._steps_done
            written = {} if trainer.async_save else self._finish_save()
        return watch.seconds | written

    def _trainer_state(self) -> dict[str, Any]:
        """The driver in a checkpoint; items, rounds and random numbers follow from step, seeds and config."""
        return {
            "step": self._steps_done,
            "epoch": self._order.epoch_of(self._steps_done),
            "config": dataclasses.asdict(self._config),
        }

    def _finish_save(self, *, wait: bool = True) -> dict[str, float]:
        """How long the last checkpoint took to write, if that is over; raises when it failed."""
        if not self._is_saving:
            return {}
        seconds = self._workers.call_all("finish_save", wait)
        if None in seconds and not wait:
            return {}
        self._is_saving = False
        return {"checkpoint/write_s": max(seconds)}

    def _save_and_leave(self) -> NoReturn:
        if self._steps_done == 0:
            raise Terminated("terminated before the first step was finished: nothing to save")
        if self._saved_step != self._steps_done:
            self.save()
        self._finish_save()
        folder = output_folder(self._config) / f"global_step_{self._steps_done}"
        raise Terminated(f"terminated after step {self._steps_done}; the same command goes on from {folder}")

    # ---------------------------------------------------------------------------------------------- parts of a step

    def _rollout(self, step: int) -> Rollout:
        """``n`` trajectories of each of the step's items with the current policy, item by item."""
        rollout = self._config.actor_rollout_ref.rollout
        requests = make_requests(
            self._order.batch(step), n=rollout.n, purpose=f"step{step}", seed=self._config.trainer.seed
        )
        order = RolloutOrder(
            step=step,
            max_rounds=self._rounds.rounds(step),
            sampling=_sampling(rollout, rollout.max_tokens),
            log_name=f"step{step}",
        )
        return self._generate(requests, order)

    def _generate(self, requests: Sequence[RolloutRequest], order: RolloutOrder) -> Rollout:
        # A run that died in this step, perhaps with more workers, left files that must not be mixed with the new ones.
        shutil.rmtree(trajectory_folder(self._config) / order.log_name, ignore_errors=True)
        return generate(self._workers, requests, order)

    def _add_log_probs(self, batch: DataProto, watch: Stopwatch) -> DataProto:
        """Old log-probs, unless the only update can take its own for them; the reference's where a KL term is on."""
        if self._plan.updates_per_step > 1 or self._config.reward_kl_coef > 0:
            with watch.measure("old_log_prob"):
                batch = batch.replace(old_log_probs_T=self._log_probs("log_probs", batch))
        if self._config.needs_reference:
            with watch.measure("ref"):
                batch = batch.replace(ref_log_probs_T=self._log_probs("ref_log_probs", batch))
        return batch

    def _log_probs(self, method: str, batch: DataProto) -> torch.Tensor:
        """Log-probs ``T`` of the whole batch, computed in token-balanced shares."""
        shares = balanced_partition(batch.lengths_B.tolist(), self._workers.world_size)
        parts = [batch.select(share) for share in shares]
        results = self._workers.call_each(method, [(part,) for part in parts])
        joined = DataProto.concat(parts).replace(old_log_probs_T=torch.cat(results))
        log_probs_T = joined.select(restore_order(shares)).old_log_probs_T
        assert log_probs_T is not None
        return log_probs_T

    def _add_advantages(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        algorithm, metrics, kl_coef = self._config.algorithm, {}, self._config.reward_kl_coef
        if kl_coef > 0:
            batch, kl = apply_kl_penalty(batch, kl_coef=kl_coef, estimator=algorithm.kl_penalty)
            metrics["rollout/kl_mean"] = kl
        batch = compute_advantages(batch, algorithm)
        return batch, metrics | advantage_metrics(batch)

    def _update(self, batch: DataProto, trajectories: Sequence[Trajectory], step: int) -> dict[str, float]:
        """All updates of the step, in one call. Says so, and makes none, when there is nothing to learn from."""
        actor = self._config.actor_rollout_ref.actor
        if not has_signal(batch) and not actor.use_kl_loss and not actor.entropy_coeff:
            print(f"step {step}: every group has equal scores, all advantages are 0: no update is made", flush=True)
            return {"training/updates": 0.0}
        rows = mini_batch_rows(
            [t.uid for t in trajectories if not t.masked],
            list(dict.fromkeys(t.uid for t in trajectories)),
            groups=actor.ppo_mini_batch_size,
            epochs=actor.ppo_epochs,
            shuffle=actor.shuffle,
            seed=derive_seed("mini-batches", self._config.trainer.seed, step),
        )
        shared = [share_mini_batch(batch.select(mini_batch), self._workers.world_size) for mini_batch in rows]
        totals = [mini_batch.totals for mini_batch in shared]
        calls = [([each.shares[rank] for each in shared], totals) for rank in range(self._workers.world_size)]
        metrics: dict[str, float] = self._workers.call_each("update", calls)[0]
        return metrics | {"training/updates": float(len(shared))}

    def _step_metrics(self, step: int, batch: DataProto, watch: Stopwatch) -> dict[str, float]:
        return {
            "rounds/max_rounds": float(self._rounds.rounds(step)),
            "training/epoch": float(self._order.epoch_of(step)),
            "training/tokens": float(batch.num_tokens),
            "training/sampled_tokens": float(batch.num_sampled_tokens),
            "perf/tokens_per_s": batch.num_tokens / watch.seconds["timing_s/step"],
            "perf/max_memory_gib": max(self._workers.call_all("peak_memory_gib")),
        }

    def _load(self, folder: Path) -> int:
        """Take up the checkpoint; the number of steps it has behind it."""
        step: int = checkpoint.load_trainer_state(folder)["step"]
        self._workers.call_all("load", folder)
        self._workers.call_all("sync_weights", step)
        print(f"resumed from {folder}, after step {step}", flush=True)
        return step


def run_ppo(config: PPOConfig, *, train_items: Sequence[Item], val_items: Sequence[Item]) -> None:
    """Plan the run, say so, start the workers, train, and end them whatever happens.

    Raises `ConfigError` when there are too few items for a batch, or when the checkpoint to resume or the advantage
    estimator does not exist.
    """
    order = ItemOrder(
        train_items, batch_size=config.data.train_batch_size, seed=config.data.seed, shuffle=config.data.shuffle
    )
    plan = PPOPlan.of(
        config, num_items=len(train_items), num_val_items=len(val_items), steps_per_epoch=order.batches_per_epoch
    )
    find_estimator(config.algorithm.adv_estimator)
    device, root = resolve_device(config.trainer.device), output_folder(config)
    resume_from = checkpoint.find_resume_folder(
        root, mode=config.trainer.resume_mode, path=config.trainer.resume_from_path
    )
    print(plan.describe(config, device), flush=True)
    if resume_from and checkpoint.step_of(resume_from) >= plan.total_steps:
        print(f"nothing to do: {resume_from} has all {plan.total_steps} steps behind it", flush=True)
        return
    tracker = make_tracker(
        config.trainer,
        root,
        config=dataclasses.asdict(config),
        console_columns=CONSOLE_COLUMNS,
        resumed_after=checkpoint.step_of(resume_from) if resume_from else 0,
    )
    with (
        tracker,
        start_workers(_worker_spec(config, plan, device), config.trainer, config.ray_init) as workers,
    ):
        PPOTrainer(
            config,
            plan,
            order=order,
            val_items=val_items,
            workers=workers,
            tracker=tracker,
            resume_from=resume_from,
        ).fit()


def output_folder(config: PPOConfig) -> Path:
    """Where checkpoints and metrics go; absolute, since workers run in other folders."""
    return Path(config.trainer.default_local_dir).resolve()


def trajectory_folder(config: PPOConfig) -> Path:
    """Where trajectory files go, absolute."""
    return Path(config.actor_rollout_ref.rollout.rollout_log_dir or output_folder(config) / "trajectories").resolve()


def _worker_spec(config: PPOConfig, plan: PPOPlan, device: str) -> WorkerSpec:
    branch, data = config.actor_rollout_ref, config.data
    rollout = RolloutSetup(
        model=branch.model.absolute(),
        agentgym=branch.agentgym,
        rollout=branch.rollout,
        limits=TokenLimits(
            data.max_prompt_length, data.max_response_length, branch.rollout.max_tokens, branch.rollout.max_model_len
        ),
        log_dir=str(trajectory_folder(config)),
        seed=config.trainer.seed,
    )
    training = ActorSetup(
        actor=branch.actor,
        ref=branch.ref if config.needs_reference else None,
        total_updates=plan.total_updates,
        loss_norm_constant=float(data.max_response_length),
    )
    threads = resolve_threads(config.trainer)
    return WorkerSpec("verl.workers.hybrid:HybridWorker", (rollout, training), num_threads=threads, device=device)


def _sampling(config: RolloutConfig | EvalSamplingConfig, max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=config.temperature, top_p=config.top_p, top_k=config.top_k)


def _is_due(step: int, frequency: int, last_step: int) -> bool:
    """Every ``frequency`` steps (never for -1), and at the last one."""
    return step == last_step or (frequency > 0 and step % frequency == 0)
