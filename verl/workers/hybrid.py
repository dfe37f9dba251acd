"""HybridWorker: actor, critic, reference and engine in one process on one device.

TrainingWorker is the same without the engine, for trajectories that are there already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from verl.protocol import DataProto
from verl.single_controller import ending
from verl.single_controller.base import WorkerContext
from verl.trainer.core_algos import BatchTotals
from verl.utils.checkpoint import (
    ACTOR_FOLDER,
    CRITIC_FOLDER,
    HUGGINGFACE_FOLDER,
    RANDOM_FOLDER,
    BackgroundWriter,
    SaveOrder,
)
from verl.utils.devices import device_name, peak_memory_gib, release_cached
from verl.utils.distributed import destroy_process_group
from verl.utils.flops import ModelSize, model_size
from verl.utils.seeding import derive_seed, load_random_state, random_state, save_random_state, seed_everything
from verl.workers.actor import Actor
from verl.workers.critic import Critic
from verl.workers.peers import join_peers
from verl.workers.reference import ReferencePolicy, make_reference
from verl.workers.rollout.engine import WeightUpdateTimes
from verl.workers.rollout.worker import RolloutWorker
from verl.workers.setup import ActorSetup, RolloutSetup

# A run that ends well has waited for its last checkpoint before; nothing else is worth a longer wait.
_WRITER_LIMIT_S = 2.0


class TrainingWorker:
    """Trains the policy on what is given to it. Methods are collective: all workers are called at once."""

    _context: WorkerContext
    _setup: RolloutSetup
    _device: torch.device

    def __init__(self, context: WorkerContext, rollout: RolloutSetup, training: ActorSetup) -> None:
        """Join the peers and load the models. ``rollout`` says which, and at what temperature they were sampled."""
        self._context, self._setup = context, rollout
        self._device = join_peers(context)
        self._load_models(rollout, training)

    def _load_models(self, rollout: RolloutSetup, training: ActorSetup) -> None:
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
            make_reference(rollout.model, training.actor, training.ref, self._actor, temperature=temperature)
            if training.ref is not None
            else None
        )
        self._has_full_kl_loss = training.actor.has_full_kl_loss
        self._critic = self._make_critic(training) if training.critic is not None else None
        self._writer = BackgroundWriter(commits=self._context.rank == 0)

    def _make_critic(self, training: ActorSetup) -> Critic:
        assert training.critic is not None
        return Critic(
            training.critic.model,
            training.critic.critic,
            device=self._device,
            total_updates=training.critic.total_updates,
            loss_norm_constant=training.loss_norm_constant,
            sequence_parallel_size=training.actor.ulysses_sequence_parallel_size,
        )

    def start_step(self, step: int) -> None:
        """Set the random state of a training step: a function of seed, step and rank, so a resumed run has the same."""
        seed_everything(derive_seed("training step", self._setup.seed, step, self._context.rank))

    def log_probs(self, batch: DataProto) -> torch.Tensor:
        """Log-probs ``T`` of this worker's share under the actor."""
        return self._actor.log_probs(batch)

    def entropies(self, batch: DataProto) -> torch.Tensor:
        """Entropies ``T`` of the actor's distributions that this worker's share was drawn from."""
        return self._actor.log_probs_and_entropy(batch)[1]

    def ref_log_probs(self, batch: DataProto) -> torch.Tensor:
        """Log-probs ``T`` of this worker's share under the reference."""
        return self._need_reference().log_probs(batch)

    def full_kl(self, batch: DataProto) -> torch.Tensor:
        """KL ``T`` of the actor to the reference on this worker's share, over the whole vocabulary."""
        with self._need_reference().states() as reference:
            return self._actor.full_kl(batch, reference)

    def update(self, mini_batches: Sequence[DataProto], totals: Sequence[BatchTotals]) -> dict[str, float]:
        """One optimizer step per mini-batch, of which this is the worker's share; metrics, the same on all workers."""
        if not self._has_full_kl_loss:
            return self._actor.update(mini_batches, totals)
        with self._need_reference().states() as reference:
            return self._actor.update(mini_batches, totals, reference=reference)

    def _need_reference(self) -> ReferencePolicy:
        if self._reference is None:
            raise ValueError("this worker was set up without a reference model")
        return self._reference

    def values(self, batch: DataProto) -> torch.Tensor:
        """Values ``T`` of this worker's share under the critic."""
        return self._need_critic().values(batch)

    def update_critic(self, mini_batches: Sequence[DataProto], totals: Sequence[BatchTotals]) -> dict[str, float]:
        """`update` of the critic."""
        return self._need_critic().update(mini_batches, totals)

    def _need_critic(self) -> Critic:
        if self._critic is None:
            raise ValueError("this worker was set up without a critic")
        return self._critic

    def save(self, order: SaveOrder) -> None:
        """Copy what a checkpoint holds to host memory and begin to write it; `finish_save` tells what came of it."""
        self._writer.finish()
        folder, random_file = order.folder, _random_file(order.folder, self._context.rank)
        writes: list[Callable[[], object]] = [
            functools.partial(save_random_state, random_file, random_state()),
            self._actor.prepare_save(folder / ACTOR_FOLDER, export_to=folder / ACTOR_FOLDER / HUGGINGFACE_FOLDER),
        ]
        if self._critic is not None:
            writes.append(self._critic.prepare_save(folder / CRITIC_FOLDER))
        self._writer.start(order, writes)

    def finish_save(self, wait: bool) -> float | None:
        """See `BackgroundWriter.finish`."""
        return self._writer.finish(wait=wait)

    def load(self, folder: Path) -> None:
        """Go on from the checkpoint ``folder``, whatever number of workers wrote it."""
        self._actor.load(folder / ACTOR_FOLDER)
        if self._critic is not None:
            self._critic.load(folder / CRITIC_FOLDER)
        # With another number of workers nobody's states fit; those of each step follow from the seed in any case.
        if len(list((folder / RANDOM_FOLDER).glob("*.pt"))) == self._context.world_size:
            load_random_state(_random_file(folder, self._context.rank))

    def peak_memory_gib(self) -> dict[str, float]:
        """The most memory that this worker held so far, by metric."""
        return peak_memory_gib(self._device)

    def model_size(self) -> ModelSize:
        """What the cost of a pass through the actor depends on."""
        return model_size(self._actor.model)

    def device_name(self) -> str:
        """What the driver calls this worker's device."""
        return device_name(self._device)

    def close(self) -> None:
        """Let go of a checkpoint that is being written, and leave the process group."""
        self._close_writer()
        destroy_process_group()

    def _close_writer(self) -> None:
        ending.run_bounded(self._writer.close, limit_s=_WRITER_LIMIT_S)


class HybridWorker(RolloutWorker, TrainingWorker):
    """Trains the policy and samples from it."""

    def __init__(self, context: WorkerContext, rollout: RolloutSetup, training: ActorSetup) -> None:
        RolloutWorker.__init__(self, context, rollout)
        self._load_models(rollout, training)
        release_cached(self._device)

    def start_step(self, step: int) -> None:
        super().start_step(step)
        # All workers, and then all engines: one that spans several devices wakes on all of them.
        release_cached(self._device)

    def sync_weights(self, version: int) -> WeightUpdateTimes:
        """Give the actor's weights to the engine."""
        return self.load_weights(self._actor.state_dict_items(on_device=True), version)

    def close(self) -> None:
        self._close_writer()
        super().close()


def _random_file(folder: Path, rank: int) -> Path:
    return folder / RANDOM_FOLDER / f"{rank}.pt"
