"""PreferenceTrainer: a model that learns to prefer one trajectory of a pair to the other.

A batch holds the sides of each pair side by side, the chosen one first, under one group id.
Axes: ``T`` tokens of a batch, ``S`` its loss tokens, ``B`` sequences, ``P`` pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from verl.config import DPOAlgorithmConfig, ModelConfig, OptimConfig, PreferenceLossType
from verl.models.policy import ReadOut
from verl.protocol import DataProto
from verl.trainer.core_algos import PairKL, PairRatios, preference_loss
from verl.utils import distributed
from verl.workers.language_model import LanguageModelTrainer, MicroLoss
from verl.workers.packed_model import MicroBatchLimits


@dataclass(frozen=True)
class PreferenceLoss:
    """Mean loss over all pairs of the mini-batch; see `LossFunction`."""

    config: DPOAlgorithmConfig
    num_pairs: int
    """Of the whole mini-batch, over all ranks."""
    kl: PairKL | None

    sum_names: ClassVar[tuple[str, ...]] = (
        *("reward_chosen", "reward_rejected", "is_right", "log_prob_chosen", "log_prob_rejected"),
    )
    max_names: ClassVar[tuple[str, ...]] = ()
    needs_entropy: ClassVar[bool] = False

    def __call__(self, micro: DataProto, read_out: ReadOut) -> MicroLoss:
        """``micro`` needs reference log-probs, and of each pair both sides (`ValueError` without)."""
        ratios = pair_ratios(micro, read_out.numbers)
        loss = preference_loss(ratios, self.config, kl=self.kl, num_pairs=self.num_pairs)
        chosen_P, rejected_P = self.config.beta * ratios.chosen_P, self.config.beta * ratios.rejected_P
        log_prob_chosen_P, log_prob_rejected_P = _by_side(micro, read_out.numbers)
        sums = [
            *(chosen_P.sum(), rejected_P.sum(), (chosen_P > rejected_P).float().sum()),
            *(log_prob_chosen_P.sum(), log_prob_rejected_P.sum()),
        ]
        return MicroLoss(loss, torch.stack(sums).detach(), loss.new_zeros(0))


def pair_ratios(batch: DataProto, log_probs_S: torch.Tensor) -> PairRatios:
    """Log-ratios of the policy's log-probs to the batch's reference log-probs, by pair and side."""
    if batch.ref_log_probs_T is None:
        raise ValueError("a preference loss needs ref_log_probs_T in the batch")
    chosen_P, rejected_P = _by_side(batch, log_probs_S - batch.ref_log_probs_T[batch.loss_mask_T])
    chosen_tokens_P, rejected_tokens_P = batch.sampled_lengths_B.view(-1, 2).unbind(1)
    return PairRatios(chosen_P, rejected_P, chosen_tokens_P, rejected_tokens_P)


def _by_side(batch: DataProto, values_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over the loss tokens of the chosen and the rejected side ``P`` each."""
    if len(batch) % 2 or not torch.equal(batch.group_ids_B[0::2], batch.group_ids_B[1::2]):
        raise ValueError("a batch of pairs holds both sides of each, side by side")
    rows_S = batch.sequence_index_T[batch.loss_mask_T]
    sums_B = values_S.new_zeros(len(batch)).index_add(0, rows_S, values_S)
    chosen_P, rejected_P = sums_B.view(-1, 2).unbind(1)
    return chosen_P, rejected_P


class PreferenceTrainer(LanguageModelTrainer):
    """A model trained on pairs; in a process group of several ranks all methods are collective."""

    def __init__(
        self,
        model_config: ModelConfig,
        optim_config: OptimConfig,
        algorithm: DPOAlgorithmConfig,
        *,
        device: torch.device | str,
        total_updates: int,
        grad_clip: float,
        max_token_len: int,
    ) -> None:
        """``max_token_len`` is the token budget of a micro-batch, which holds whole pairs."""
        limits = MicroBatchLimits(max_tokens=max_token_len, keeps_groups=True)
        super().__init__(
            model_config, optim_config, limits, device=device, total_updates=total_updates, grad_clip=grad_clip
        )
        self._algorithm = algorithm

    def update(self, share: DataProto, num_pairs: int) -> dict[str, float]:
        """One optimizer step on this rank's share of ``num_pairs`` pairs over all ranks; means over pairs come back."""
        kl = self._kl(share, num_pairs) if self._algorithm.loss_type == PreferenceLossType.KTO_PAIR else None
        result = self.train_step(share, PreferenceLoss(self._algorithm, num_pairs, kl))
        mean = {name: value / num_pairs for name, value in result.sums.items()}
        return {
            "train/loss": result.loss,
            "train/grad_norm": result.grad_norm,
            "train/lr": result.lr,
            "train/skipped_updates": float(result.skipped),
            "rewards/chosen": mean["reward_chosen"],
            "rewards/rejected": mean["reward_rejected"],
            "rewards/margins": mean["reward_chosen"] - mean["reward_rejected"],
            "rewards/accuracies": mean["is_right"],
            "log_probs/chosen": mean["log_prob_chosen"],
            "log_probs/rejected": mean["log_prob_rejected"],
            **({} if kl is None else {"kl/chosen": kl.chosen, "kl/rejected": kl.rejected}),
        }

    def _kl(self, share: DataProto, num_pairs: int) -> PairKL:
        """Before the update, over the pairs of all ranks: a pass of its own, for no micro-batch sees all pairs."""
        ratios = pair_ratios(share, self.log_probs(share)[share.loss_mask_T])
        sums = torch.stack([ratios.chosen_P.double().sum(), ratios.rejected_P.double().sum()])
        chosen, rejected = (distributed.all_reduce_sum_(sums) / num_pairs).clamp(min=0).tolist()
        return PairKL(chosen, rejected)
