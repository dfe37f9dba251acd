"""SFTWorker: one of the processes that train a model on given conversations."""

from __future__ import annotations

import torch

from verl.protocol import DataProto
from verl.trainer.core_algos import BatchTotals
from verl.workers.data_worker import DataWorker, LearnerSetup
from verl.workers.packed_model import MicroBatchLimits
from verl.workers.sft import SupervisedTrainer


class SFTWorker(DataWorker):
    """Methods are collective: all workers are called at once."""

    _learner: SupervisedTrainer

    def _make_learner(self, setup: LearnerSetup, device: torch.device) -> SupervisedTrainer:
        return SupervisedTrainer(
            setup.model,
            setup.optim,
            MicroBatchLimits(max_tokens=setup.max_token_len),
            device=device,
            total_updates=setup.total_updates,
            grad_clip=setup.grad_clip,
        )

    def update(self, share: DataProto, totals: BatchTotals) -> dict[str, float]:
        """One optimizer step, of which ``share`` is this worker's part; metrics, the same on all workers."""
        return self._learner.update(share, totals)
