"""DPOWorker: one of the processes that train a model on pairs."""

from __future__ import annotations

import gc

import torch

from verl.config import DPOAlgorithmConfig, DPORefConfig, ModelConfig
from verl.protocol import DataProto
from verl.single_controller.base import WorkerContext
from verl.utils.devices import release_cached
from verl.workers.data_worker import DataWorker, LearnerSetup
from verl.workers.dpo import PreferenceTrainer
from verl.workers.reference import Reference
from verl.workers.setup import RolloutSetup


class DPOWorker(DataWorker):
    """Methods are collective: all workers are called at once."""

    _learner: PreferenceTrainer

    def __init__(
        self,
        context: WorkerContext,
        setup: LearnerSetup,
        rollout: RolloutSetup | None,
        algorithm: DPOAlgorithmConfig,
    ) -> None:
        self._algorithm = algorithm
        self._reference: Reference | None = None
        super().__init__(context, setup, rollout)

    def _make_learner(self, setup: LearnerSetup, device: torch.device) -> PreferenceTrainer:
        return PreferenceTrainer(
            setup.model,
            setup.optim,
            self._algorithm,
            device=device,
            total_updates=setup.total_updates,
            grad_clip=setup.grad_clip,
            max_token_len=setup.max_token_len,
        )

    def load_reference(self, model: ModelConfig, config: DPORefConfig) -> None:
        """Load the model that `ref_log_probs` asks, until `drop_reference`."""
        self._reference = Reference(model, config, device=self._device, temperature=1.0)

    def drop_reference(self) -> None:
        """Free its memory."""
        self._reference = None
        gc.collect()  # On any device: a module of FSDP refers to itself.
        release_cached(self._device)

    def ref_log_probs(self, share: DataProto) -> torch.Tensor:
        """Log-probs ``T`` of this worker's share under the reference; where none is loaded, under the model itself."""
        return (self._learner if self._reference is None else self._reference).log_probs(share)

    def update(self, share: DataProto, num_pairs: int) -> dict[str, float]:
        """One optimizer step, of which ``share`` is this worker's part; metrics, the same on all workers."""
        return self._learner.update(share, num_pairs)
