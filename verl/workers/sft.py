"""SupervisedTrainer: cross-entropy on the loss tokens of given conversations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from verl.models.policy import ReadOut
from verl.protocol import DataProto
from verl.trainer.core_algos import BatchTotals, LossNormalizer
from verl.workers.language_model import LanguageModelTrainer, MicroLoss


@dataclass(frozen=True)
class CrossEntropyLoss:
    """Mean negative log-prob over all loss tokens of the mini-batch; see `LossFunction`."""

    totals: BatchTotals

    sum_names: ClassVar[tuple[str, ...]] = ()
    max_names: ClassVar[tuple[str, ...]] = ()
    needs_entropy: ClassVar[bool] = False

    def __call__(self, micro: DataProto, read_out: ReadOut) -> MicroLoss:
        log_probs_S = read_out.numbers
        weights_S = LossNormalizer().weights(micro, self.totals)
        return MicroLoss(-(weights_S * log_probs_S).sum(), log_probs_S.new_zeros(0), log_probs_S.new_zeros(0))


class SupervisedTrainer(LanguageModelTrainer):
    """A model trained on given tokens; in a process group of several ranks all methods are collective."""

    def update(self, batch: DataProto, totals: BatchTotals) -> dict[str, float]:
        """One optimizer step on this rank's share of a batch whose counts over all ranks are ``totals``."""
        result = self.train_step(batch, CrossEntropyLoss(totals))
        return {
            "train/loss": result.loss,
            "train/grad_norm": result.grad_norm,
            "train/lr": result.lr,
            "train/num_tokens": float(totals.num_tokens),
            "train/skipped_updates": float(result.skipped),
        }
