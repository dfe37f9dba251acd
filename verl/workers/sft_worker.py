"""SFTWorker: one of the processes that train a model on given conversations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from verl.config import ModelConfig, OptimConfig
from verl.protocol import DataProto
from verl.single_controller.base import WorkerContext
from verl.trainer.core_algos import BatchTotals
from verl.utils.distributed import destroy_process_group
from verl.utils.seeding import derive_seed, seed_everything
from verl.workers.language_model import MicroBatchLimits
from verl.workers.peers import join_peers
from verl.workers.sft import SupervisedTrainer


@dataclass(frozen=True)
class SFTSetup:
    """What an SFT worker is made of."""

    model: ModelConfig
    optim: OptimConfig
    max_token_len: int
    """Token budget of one packed micro-batch."""
    grad_clip: float
    total_updates: int
    seed: int


class SFTWorker:
    """Methods are collective: all workers are called at once."""

    def __init__(self, context: WorkerContext, setup: SFTSetup) -> None:
        self._device = join_peers(context)
        seed_everything(derive_seed("sft", setup.seed, context.rank))
        self._trainer = SupervisedTrainer(
            setup.model,
            setup.optim,
            MicroBatchLimits(max_tokens=setup.max_token_len),
            device=self._device,
            total_updates=setup.total_updates,
            grad_clip=setup.grad_clip,
        )

    def update(self, share: DataProto, totals: BatchTotals) -> dict[str, float]:
        """One optimizer step, of which ``share`` is this worker's part; metrics, the same on all workers."""
        return self._trainer.update(share, totals)

    def export(self, folder: Path) -> None:
        """Write the model and its tokenizer for `from_pretrained`."""
        self._trainer.export_huggingface(folder)

    def close(self) -> None:
        destroy_process_group()
