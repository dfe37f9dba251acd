"""DataWorker: one of the processes that train a model on given data, and that play with it where it is validated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from agentgym_rl.rollout.collector import RolloutRequest
from verl.config import ModelConfig, OptimConfig
from verl.single_controller import ending
from verl.single_controller.base import WorkerContext
from verl.utils.checkpoint import ACTOR_FOLDER, HUGGINGFACE_FOLDER, BackgroundWriter, SaveOrder
from verl.utils.distributed import destroy_process_group
from verl.utils.seeding import derive_seed, seed_everything
from verl.workers.language_model import LanguageModelTrainer
from verl.workers.peers import join_peers
from verl.workers.rollout.engine import WeightUpdateTimes
from verl.workers.rollout.worker import RolloutWorker
from verl.workers.setup import RolloutOrder, RolloutSetup, RolloutShare

# A run that ends well has waited for its last checkpoint before; nothing else is worth a longer wait.
_WRITER_LIMIT_S = 2.0


@dataclass(frozen=True)
class LearnerSetup:
    """What the learning side of a worker is made of."""

    model: ModelConfig
    optim: OptimConfig
    max_token_len: int
    """Token budget of one packed micro-batch."""
    grad_clip: float
    total_updates: int
    """Optimizer steps of the whole run, which the learning rate follows."""
    seed: int


class DataWorker(ABC):
    """Methods are collective: all workers are called at once."""

    def __init__(self, context: WorkerContext, setup: LearnerSetup, rollout: RolloutSetup | None) -> None:
        """``rollout``: what plays in validation; None where nothing is validated."""
        self._player = RolloutWorker(context, rollout) if rollout is not None else None
        self._device = self._player.device if self._player is not None else join_peers(context)
        # For what is made at random, such as an adapter: all ranks make the same.
        seed_everything(derive_seed("training on data", setup.seed))
        self._writer = BackgroundWriter(commits=context.rank == 0)
        self._learner = self._make_learner(setup, self._device)

    @abstractmethod
    def _make_learner(self, setup: LearnerSetup, device: torch.device) -> LanguageModelTrainer:
        """The model that is trained."""

    def save(self, order: SaveOrder) -> None:
        """Copy what a checkpoint holds to host memory and begin to write it; `finish_save` tells what came of it."""
        self._writer.finish()
        folder = order.folder / ACTOR_FOLDER
        self._writer.start(order, [self._learner.prepare_save(folder, export_to=folder / HUGGINGFACE_FOLDER)])

    def finish_save(self, wait: bool) -> float | None:
        """See `BackgroundWriter.finish`."""
        return self._writer.finish(wait=wait)

    def load(self, folder: Path) -> None:
        """Go on from the checkpoint ``folder``, whatever number of workers wrote it."""
        self._learner.load(folder / ACTOR_FOLDER)

    def sync_weights(self, version: int) -> WeightUpdateTimes:
        """Give the model's weights to the engine that plays."""
        return self._need_player().load_weights(self._learner.state_dict_items(on_device=True), version)

    def generate(self, requests: Sequence[RolloutRequest], order: RolloutOrder) -> RolloutShare:
        """See `RolloutWorker.generate`."""
        return self._need_player().generate(requests, order)

    def _need_player(self) -> RolloutWorker:
        if self._player is None:
            raise ValueError("this worker was set up without an engine")
        return self._player

    def close(self) -> None:
        ending.run_bounded(self._writer.close, limit_s=_WRITER_LIMIT_S)
        if self._player is not None:
            self._player.close()
        else:
            destroy_process_group()
