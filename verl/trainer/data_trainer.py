"""DataTrainer: the loop over given data that supervised and preference training share.

Steps, validation by rollouts, checkpoints, what SIGTERM does, and the model at the end. The driver's side: models run
in the workers, `verl.workers.data_worker`.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

from tqdm import tqdm

from agentgym_rl.errors import AgentGymError
from agentgym_rl.rollout.collector import TokenLimits, check_failures
from agentgym_rl.rollout.statistics import rollout_metrics
from agentgym_rl.types import Item, SamplingParams
from verl.config import SFTConfig
from verl.single_controller.base import ClusterError, Interrupted, WorkerError, WorkerGroup, WorkerSpec
from verl.single_controller.signals import StopRequest, stop_on_sigterm
from verl.single_controller.start import start_workers
from verl.trainer.item_order import ItemOrder
from verl.trainer.metrics import Stopwatch
from verl.trainer.plan import describe_machine
from verl.trainer.rollouts import generate_anew, make_requests
from verl.trainer.saving import CheckpointSaver, terminated
from verl.utils import checkpoint
from verl.utils.tracking import Tracker, make_tracker
from verl.workers.data_worker import LearnerSetup
from verl.workers.language_model import ADAPTER_FOLDER
from verl.workers.setup import RolloutOrder, RolloutSetup

RowT = TypeVar("RowT")

CONSOLE_COLUMNS = {
    "loss": "train/loss",
    "grad": "train/grad_norm",
    "lr": "train/lr",
    "accuracy": "rewards/accuracies",
    "margin": "rewards/margins",
    "val score": "val/score_mean",
    "val success": "val/success_mean",
    "tokens/s": "perf/tokens_per_s",
}

_ORDER_KEYS = ("data.seed", "data.shuffle", "data.train_batch_size", "data.train_file", "data.max_length")
"""What decides which rows a step sees."""


@dataclass(frozen=True, eq=False)
class Update:
    """One optimizer step, as the workers are asked for it."""

    calls: tuple[tuple[Any, ...], ...]
    """Arguments of the workers' ``update``, by rank."""
    num_tokens: int


@dataclass(frozen=True)
class DataPlan:
    """The resolved numbers of a run."""

    root: Path
    """``trainer.default_local_dir``, absolute, since workers may run in other folders."""
    total_steps: int
    resume_from: Path | None
    """A complete checkpoint folder."""
    val_items: tuple[Item, ...]

    @classmethod
    def of(cls, config: SFTConfig, order: ItemOrder[Any], val_items: Sequence[Item], *, kind: str) -> DataPlan:
        """Raises `ConfigError` when the checkpoint to resume does not exist, or is of another ``kind`` of training."""
        trainer = config.trainer
        root = Path(trainer.default_local_dir).resolve()
        resume_from = checkpoint.find_resume_folder(root, mode=trainer.resume_mode, path=trainer.resume_from_path)
        if resume_from is not None:
            checkpoint.check_kind(resume_from, kind)
        total_steps = trainer.total_training_steps or trainer.total_epochs * order.batches_per_epoch
        return cls(root, total_steps, resume_from, tuple(val_items))

    @property
    def steps_done(self) -> int:
        """By the run that this one goes on from."""
        return checkpoint.step_of(self.resume_from) if self.resume_from else 0

    @property
    def is_done(self) -> bool:
        return self.steps_done >= self.total_steps

    def describe(self, config: SFTConfig, order: ItemOrder[Any], device: str) -> str:
        """A few lines for the user."""
        trainer, val = config.trainer, config.rollout.val_kwargs
        limit = "" if trainer.max_time_s is None else f", at most {trainer.max_time_s:g} s"
        lines = [
            f"{self.total_steps} steps of {config.data.train_batch_size}, {order.batches_per_epoch} an epoch{limit}"
        ]
        if trainer.validates:
            when = f"every {trainer.test_freq} steps" if trainer.test_freq > 0 else "before training"
            lines.append(f"validation on {len(self.val_items)} items x n {val.n} {when}")
        lines += [describe_machine(trainer, device), f"results in {self.root}"]
        return "\n".join(f"      {line}" for line in lines)


class DataTrainer(ABC, Generic[RowT]):
    """Trains a model on rows with the workers it is given."""

    kind: ClassVar[str]
    """What is trained, in checkpoints and progress bars."""

    def __init__(
        self, config: SFTConfig, plan: DataPlan, order: ItemOrder[RowT], *, workers: WorkerGroup, tracker: Tracker
    ) -> None:
        """``workers`` are `DataWorker`s of the kind that this trainer's updates are for."""
        self._config, self._plan, self._order = config, plan, order
        self._workers, self._tracker = workers, tracker
        self._steps_done = self._load(plan.resume_from) if plan.resume_from else 0
        self._saver = CheckpointSaver(workers, config.trainer, plan.root, saved_step=self._steps_done)

    @abstractmethod
    def make_update(self, rows: Sequence[RowT]) -> Update:
        """What the workers are asked to do with the rows of one step."""

    def fit(self) -> int:
        """Train until the last step, or until ``trainer.max_time_s`` is over; the number of steps that are done.

        The last step's checkpoint is written, and its model linked to ``huggingface`` in the run's folder. After
        SIGTERM the same is done with the last finished step, and `Terminated` raised.
        """
        with stop_on_sigterm(self._workers.interrupt, saying="saving the last finished step") as stop:
            try:
                is_over = self._run_steps(stop)
            except Interrupted:
                is_over = False  # A validation was given up; the step before it is finished.
            except (WorkerError, ClusterError):
                raise  # Without all workers no checkpoint is written to its end.
            except AgentGymError:
                self._saver.finish()
                raise
            if not is_over or self._saver.saved_step < self._steps_done:
                self._save_and_leave()
            self._saver.finish()
        publish_model(self._plan.root, self._steps_done)
        return self._steps_done

    def _run_steps(self, stop: StopRequest) -> bool:
        """True at the run's end, False when it was asked to stop."""
        trainer, last_step = self._config.trainer, self._plan.total_steps
        began = time.monotonic()
        if self._steps_done == 0 and trainer.val_before_train:
            self._tracker.log(0, self.validate())
        steps = range(self._steps_done + 1, last_step + 1)
        for step in tqdm(steps, desc=self.kind, unit=" steps", leave=False, disable=None):
            if stop.is_made:
                return False
            metrics = self.train_step(step)
            time_is_over = trainer.max_time_s is not None and time.monotonic() - began >= trainer.max_time_s
            is_last = step == last_step or time_is_over
            try:
                metrics |= self._saver.finish(wait=False)
                if trainer.test_freq > 0 and (is_last or step % trainer.test_freq == 0):
                    metrics |= self.validate()
                if is_last or (trainer.save_freq > 0 and step % trainer.save_freq == 0):
                    metrics |= self.save()
            finally:
                self._tracker.log(step, metrics)
            if time_is_over:
                break
        return True

    def train_step(self, step: int) -> dict[str, float]:
        """One optimizer step on batch ``step``, counted from 1; returns its metrics."""
        began = time.perf_counter()
        update = self.make_update(self._order.batch(step))
        metrics: dict[str, float] = self._workers.call_each("update", update.calls)[0]
        self._steps_done = step
        step_s = time.perf_counter() - began
        return metrics | {
            "train/epoch": float(self._order.epoch_of(step)),
            "timing_s/step": step_s,
            "perf/tokens_per_s": update.num_tokens / step_s,
        }

    def validate(self) -> dict[str, float]:
        """Metrics ``val/...`` of rollouts with the current weights over all validation items.

        Every validation draws the same random numbers, so that a change of its result is a change of the model.
        """
        rollout, step, watch = self._config.rollout, self._steps_done, Stopwatch()
        sampling = rollout.val_kwargs
        order = RolloutOrder(
            step=step,
            max_rounds=self._config.agentgym.max_rounds,
            sampling=SamplingParams(
                max_tokens=rollout.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
            ),
            log_name=f"val_step{step}",
        )
        requests = make_requests(self._plan.val_items, n=sampling.n, purpose="val", seed=self._config.trainer.seed)
        with watch.measure("validate"):
            self._workers.call_all("sync_weights", step)
            sampled = generate_anew(self._workers, requests, order, folder=trajectory_folder(self._config))
            trajectories = sampled.trajectories
        check_failures(trajectories, rollout.max_failed_fraction)
        metrics = {name.replace("rollout/", "val/", 1): value for name, value in rollout_metrics(trajectories).items()}
        return metrics | watch.seconds

    def save(self) -> dict[str, float]:
        """`CheckpointSaver.save` of the last finished step."""
        return self._saver.save(self._steps_done, self._state())

    def _state(self) -> dict[str, Any]:
        """The driver in a checkpoint; the rows of each step follow from step, seed and config."""
        return {
            "kind": self.kind,
            "step": self._steps_done,
            "epoch": self._order.epoch_of(self._steps_done),
            "config": dataclasses.asdict(self._config),
        }

    def _save_and_leave(self) -> NoReturn:
        folder = self._saver.save_last(self._steps_done, self._state)
        publish_model(self._plan.root, self._steps_done)
        raise terminated(self._steps_done, folder)

    def _load(self, folder: Path) -> int:
        """Take up the checkpoint; the number of steps it has behind it."""
        state = checkpoint.load_trainer_state(folder)
        self._workers.call_all("load", folder)
        step: int = state["step"]
        print(f"resumed from {folder}, after step {step}", flush=True)
        changed = checkpoint.changed_keys(state["config"], dataclasses.asdict(self._config), _ORDER_KEYS)
        for key, (before, now) in changed.items():
            print(f"warning: {key} was {before!r} until then and is {now!r} now: other rows follow", flush=True)
        return step


def run_training(
    make_trainer: Callable[[WorkerGroup, Tracker], DataTrainer[Any]],
    spec: WorkerSpec,
    config: SFTConfig,
    plan: DataPlan,
) -> Path:
    """Start the workers, train what is left of the plan, and end them whatever happens; the folder of the model."""
    if plan.is_done:
        print(f"nothing to do: {plan.resume_from} has all {plan.total_steps} steps behind it", flush=True)
        return publish_model(plan.root, plan.steps_done)
    tracker = make_tracker(
        config.trainer,
        plan.root,
        config=dataclasses.asdict(config),
        console_columns=CONSOLE_COLUMNS,
        console_every=config.trainer.log_freq,
        resumed_after=plan.steps_done,
    )
    with tracker, start_workers(spec, config.trainer, config.ray_init) as workers:
        steps_made = make_trainer(workers, tracker).fit()
    folder = plan.root / checkpoint.HUGGINGFACE_FOLDER
    print(f"trained {steps_made} of {plan.total_steps} steps; the model is in {folder}", flush=True)
    return folder


def publish_model(root: Path, step: int) -> Path:
    """``<root>/huggingface``: the model of the checkpoint of ``step``, by links; and its adapter, if it has one."""
    actor = root / f"global_step_{step}" / checkpoint.ACTOR_FOLDER
    for name in (checkpoint.HUGGINGFACE_FOLDER, ADAPTER_FOLDER):
        if (actor / name).is_dir():
            _link_tree(actor / name, root / name)
    return root / checkpoint.HUGGINGFACE_FOLDER


def _link_tree(source: Path, target: Path) -> None:
    """``target`` with the files of ``source``, made aside first, so that a killed run leaves no half of it there."""
    aside = target.with_name(target.name + ".unfinished")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(source, aside, copy_function=_link_or_copy)
    if target.exists():
        shutil.rmtree(target)
    aside.rename(target)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def trajectory_folder(config: SFTConfig) -> Path:
    """Where the trajectories of validations go, absolute."""
    root = Path(config.trainer.default_local_dir)
    return Path(config.rollout.rollout_log_dir or root / "trajectories").resolve()


def learner_setup(config: SFTConfig, plan: DataPlan) -> LearnerSetup:
    """What the learning side of each worker is made of."""
    trainer = config.trainer
    return LearnerSetup(
        model=config.model.absolute(),
        optim=config.optim,
        max_token_len=trainer.max_token_len_per_gpu,
        grad_clip=trainer.grad_clip,
        total_updates=plan.total_steps,
        seed=trainer.seed,
    )


def rollout_setup(config: SFTConfig) -> RolloutSetup | None:
    """What plays in validation; None where nothing is validated."""
    if not config.trainer.validates:
        return None
    data, rollout = config.data, config.rollout
    return RolloutSetup(
        model=config.model.absolute(),
        agentgym=config.agentgym,
        rollout=rollout,
        limits=TokenLimits(data.max_prompt_length, data.max_response_length, rollout.max_tokens, rollout.max_model_len),
        log_dir=str(trajectory_folder(config)),
        seed=config.trainer.seed,
    )
