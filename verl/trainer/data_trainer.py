"""DataTrainer: the loop over given data that supervised and preference training share.

Beyond `TrainingLoop`: a time limit, and the model at the end. The driver's side: models run in the workers,
`verl.workers.data_worker`.
"""

from __future__ import annotations

import os
import shutil
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from tqdm import tqdm

from agentgym_rl.types import Item
from verl.config import SFTConfig, SFTDataConfig
from verl.single_controller.base import WorkerGroup, WorkerSpec
from verl.trainer.item_order import ItemOrder
from verl.trainer.loop import TrainingLoop, run_loop
from verl.trainer.plan import describe_machine
from verl.trainer.resuming import data_checkpoint
from verl.trainer.rollouts import trajectory_folder
from verl.trainer.validation import Validation
from verl.utils import checkpoint
from verl.utils.tracking import Tracker
from verl.workers.data_worker import LearnerSetup
from verl.workers.language_model import ADAPTER_FOLDER
from verl.workers.setup import RolloutSetup

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

_TITLES = {"sft": "supervised training", "dpo": "preference training"}


@dataclass(frozen=True, eq=False)
class Update:
    """One optimizer step, as the workers are asked for it."""

    calls: tuple[tuple[Any, ...], ...]
    """Arguments of the workers' ``update``, by rank."""
    num_tokens: int


@dataclass(frozen=True)
class DataPlan:
    """The resolved numbers of a run."""

    kind: str
    """``sft`` or ``dpo``."""
    root: Path
    """``trainer.default_local_dir``, absolute, since workers may run in other folders."""
    total_steps: int
    resume_from: Path | None
    """A complete checkpoint folder."""
    val_items: tuple[Item, ...]

    @classmethod
    def of(cls, config: SFTConfig, order: ItemOrder[Any], val_items: Sequence[Item], *, kind: str) -> DataPlan:
        """Raises `ConfigError` when the run cannot go on from its checkpoint: see `data_checkpoint`."""
        trainer = config.trainer
        root = Path(trainer.default_local_dir).resolve()
        resume_from = data_checkpoint(config, kind=kind)
        total_steps = trainer.total_training_steps or trainer.total_epochs * order.batches_per_epoch
        return cls(kind, root, total_steps, resume_from, tuple(val_items))

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
        return "\n      ".join([f"plan: {_TITLES[self.kind]}", *lines])


def order_rows(rows: Sequence[RowT], data: SFTDataConfig) -> ItemOrder[RowT]:
    """The order in which a run sees its rows; raises `ConfigError` when there are too few for a batch."""
    return ItemOrder(rows, batch_size=data.train_batch_size, seed=data.seed, shuffle=data.shuffle)


class DataTrainer(TrainingLoop[SFTConfig], Generic[RowT]):
    """Trains a model on rows with the workers it is given; its model is linked to ``huggingface`` in the run's folder
    at the end."""

    order_keys = ("data.seed", "data.shuffle", "data.train_batch_size", "data.train_file", "data.max_length")
    row_name = "rows"

    def __init__(
        self, config: SFTConfig, plan: DataPlan, order: ItemOrder[RowT], *, workers: WorkerGroup, tracker: Tracker
    ) -> None:
        """``workers`` are `DataWorker`s of the kind that this trainer's updates are for."""
        validation = Validation(
            plan.val_items,
            config.rollout,
            config.agentgym.max_rounds,
            config.trainer.seed,
            trajectory_folder(config.rollout, plan.root),
        )
        super().__init__(
            config,
            plan.root,
            order,
            total_steps=plan.total_steps,
            validation=validation,
            workers=workers,
            tracker=tracker,
        )
        self._plan = plan
        if plan.resume_from is not None:
            self._resume(plan.resume_from)

    @abstractmethod
    def make_update(self, rows: Sequence[RowT]) -> Update:
        """What the workers are asked to do with the rows of one step."""

    def train_step(self, step: int) -> dict[str, float]:
        """One optimizer step on batch ``step``."""
        began = time.perf_counter()
        update = self.make_update(self._order.batch(step))
        metrics: dict[str, float] = self._workers.call_each("update", update.calls)[0]
        step_s = time.perf_counter() - began
        return metrics | {
            "train/epoch": float(self._order.epoch_of(step)),
            "timing_s/step": step_s,
            "perf/tokens_per_s": update.num_tokens / step_s,
        }

    def _give_weights_to_engines(self) -> None:
        self._workers.call_all("sync_weights", self._steps_done)

    def _time_is_over(self, seconds: float) -> bool:
        limit_s = self._config.trainer.max_time_s
        return limit_s is not None and seconds >= limit_s

    def _with_progress(self, steps: Iterable[int]) -> Iterable[int]:
        return tqdm(steps, desc=self.kind, unit=" steps", leave=False, disable=None)

    def _publish(self) -> None:
        publish_model(self._root, self._steps_done)


def run_training(
    make_trainer: Callable[[WorkerGroup, Tracker], DataTrainer[Any]],
    spec: WorkerSpec,
    config: SFTConfig,
    plan: DataPlan,
) -> Path:
    """Train what is left of the plan; the folder of the model."""
    if plan.is_done:
        print(f"nothing to do: {plan.resume_from} has all {plan.total_steps} steps behind it", flush=True)
        return publish_model(plan.root, plan.steps_done)
    steps_made = run_loop(
        make_trainer,
        spec,
        config,
        plan.root,
        steps_done=plan.steps_done,
        console_columns=CONSOLE_COLUMNS,
        console_every=config.trainer.log_freq,
    )
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
    root = Path(config.trainer.default_local_dir).resolve()
    return RolloutSetup(
        model=config.model.absolute(),
        agentgym=config.agentgym,
        rollout=config.rollout,
        limits=config.rollout.limits(config.data),
        log_dir=str(trajectory_folder(config.rollout, root)),
        seed=config.trainer.seed,
    )
