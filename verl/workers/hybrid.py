"""HybridWorker: actor, reference and engine in one process on one device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from verl.protocol import DataProto
from verl.single_controller.base import WorkerContext
from verl.trainer.core_algos import BatchTotals
from verl.utils.checkpoint import ACTOR_FOLDER, HUGGINGFACE_FOLDER
from verl.utils.devices import peak_memory_gib
from verl.utils.seeding import derive_seed, seed_everything
from verl.workers.actor import Actor
from verl.workers.reference import Reference
from verl.workers.rollout.engine import WeightUpdateTimes
from verl.workers.rollout.worker import RolloutWorker
from verl.workers.setup import ActorSetup, RolloutSetup


class HybridWorker(RolloutWorker):
    """Trains the policy and samples from it. Methods below are collective: all workers are called at once."""

    def __init__(self, context: WorkerContext, rollout: RolloutSetup, training: ActorSetup) -> None:
        super().__init__(context, rollout)
        temperature = rollout.rollout.temperature
        self._actor = Actor(
            rollout.model,
            training.actor,
            device=self._device,
            temperature=temperature,
            total_updates=training.total_updates,
            loss_norm_constant=training.loss_norm_constant,
        )
        self._reference = (
            Reference(rollout.model, training.ref, device=self._device, temperature=temperature)
            if training.ref is not None
            else None
        )

    def start_step(self, step: int) -> None:
        """Set the random state of a training step: a function of seed, step and rank, so a resumed run has the same."""
        seed_everything(derive_seed("training step", self._setup.seed, step, self._context.rank))

    def log_probs(self, batch: DataProto) -> torch.Tensor:
        """Log-probs ``T`` of this worker's share under the actor."""
        return self._actor.log_probs(batch)

    def ref_log_probs(self, batch: DataProto) -> torch.Tensor:
        """Log-probs ``T`` of this worker's share under the reference."""
        if self._reference is None:
            raise ValueError("this worker was set up without a reference model")
        return self._reference.log_probs(batch)

    def update(self, mini_batches: Sequence[DataProto], totals: Sequence[BatchTotals]) -> dict[str, float]:
        """One optimizer step per mini-batch, of which this is the worker's share; metrics, the same on all workers."""
        return self._actor.update(mini_batches, totals)

    def sync_weights(self, version: int) -> WeightUpdateTimes:
        """Give the actor's weights to the engine."""
        return self._engine.load_weights(self._actor.state_dict_items(), version)

    def save(self, folder: Path) -> None:
        """Write the actor into the checkpoint ``folder``, with a Hugging Face folder beside."""
        self._actor.save(folder / ACTOR_FOLDER)
        self._actor.export_huggingface(folder / ACTOR_FOLDER / HUGGINGFACE_FOLDER)

    def load(self, folder: Path) -> None:
        """Go on from the checkpoint ``folder``."""
        self._actor.load(folder / ACTOR_FOLDER)

    def peak_memory_gib(self) -> float:
        """The most memory that this worker held so far."""
        return peak_memory_gib(self._device)
