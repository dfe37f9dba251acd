"""Actor: the policy being trained with PPO's clipped loss.

Axes: ``T`` tokens of a batch, ``S`` its sampled (loss) tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from verl.config import ActorConfig, ModelConfig
from verl.models.policy import ReadOut
from verl.protocol import DataProto
from verl.trainer.core_algos import BatchTotals, LossNormalizer, kl_estimate, ppo_clip_loss
from verl.workers.language_model import LanguageModelTrainer, MicroLoss, UpdateResult
from verl.workers.packed_model import MicroBatchLimits, StatesOf


@dataclass(frozen=True)
class PPOLoss:
    """Clipped policy loss, minus the entropy bonus, plus the KL to the reference; see `LossFunction`."""

    config: ActorConfig
    normalizer: LossNormalizer
    totals: BatchTotals

    sum_names: ClassVar[tuple[str, ...]] = ("pg_loss", "kl_loss", "entropy", "ppo_kl", "clip_frac", "probs_diff")
    max_names: ClassVar[tuple[str, ...]] = ("probs_diff",)
    needs_entropy: ClassVar[bool] = True

    def __call__(self, micro: DataProto, read_out: ReadOut) -> MicroLoss:
        """``micro`` needs advantages, and ``use_kl_loss`` the KL or reference log-probs (`ValueError` without); without
        old log-probs the policy is taken as unchanged since sampling."""
        log_probs_S, entropy_S, _ = read_out
        if micro.advantages_T is None or entropy_S is None:
            raise ValueError("the PPO loss needs advantages_T in the batch, and the entropy")
        sampled = micro.loss_mask_T
        weights_S = self.normalizer.weights(micro, self.totals)
        old_S = log_probs_S.detach() if micro.old_log_probs_T is None else micro.old_log_probs_T[sampled]
        policy = ppo_clip_loss(
            log_probs_S,
            old_S,
            micro.advantages_T[sampled],
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
            clip_c=self.config.clip_ratio_c,
        )
        pg_loss = (weights_S * policy.loss_S).sum()
        kl_loss = self._kl_loss(micro, read_out, weights_S)
        loss = pg_loss + self.config.kl_loss_coef * kl_loss
        if self.config.entropy_coeff:
            loss = loss - self.config.entropy_coeff * (weights_S * entropy_S).sum()
        diff_S = (old_S.exp() - micro.rollout_log_probs_T[sampled].exp()).abs()
        ppo_kl = (old_S - log_probs_S).sum()
        sums = [pg_loss, kl_loss, entropy_S.sum(), ppo_kl, policy.clipped_S.float().sum(), diff_S.sum()]
        return MicroLoss(loss, torch.stack(sums).detach(), diff_S.max()[None].detach())

    def _kl_loss(self, micro: DataProto, read_out: ReadOut, weights_S: torch.Tensor) -> torch.Tensor:
        if not self.config.use_kl_loss:
            return weights_S.new_zeros(())
        if read_out.kl is not None:
            return (weights_S * read_out.kl).sum()
        if micro.ref_log_probs_T is None:
            raise ValueError("actor.use_kl_loss needs ref_log_probs_T in the batch, or for the full KL the reference")
        ref_S = micro.ref_log_probs_T[micro.loss_mask_T]
        return (weights_S * kl_estimate(read_out.numbers, ref_S, self.config.kl_loss_type)).sum()


class Actor(LanguageModelTrainer):
    """The policy with its optimizer; in a process group of several ranks all methods are collective."""

    def __init__(
        self,
        model_config: ModelConfig,
        actor_config: ActorConfig,
        *,
        device: torch.device | str,
        temperature: float,
        total_updates: int,
        loss_norm_constant: float,
    ) -> None:
        """``temperature`` is that of sampling; ``total_updates`` the optimizer steps of the whole run;
        ``loss_norm_constant`` the divisor of ``seq-mean-token-sum-norm`` unless the config sets one."""
        by_count = actor_config.ppo_micro_batch_size_per_gpu
        limits = MicroBatchLimits(None if by_count else actor_config.ppo_max_token_len_per_gpu, by_count)
        super().__init__(
            model_config,
            actor_config.optim,
            limits,
            device=device,
            total_updates=total_updates,
            grad_clip=actor_config.grad_clip,
            temperature=temperature,
            fsdp=actor_config.fsdp_config,
            sequence_parallel_size=actor_config.ulysses_sequence_parallel_size,
        )
        self._config = actor_config
        self._normalizer = LossNormalizer(
            actor_config.loss_agg_mode, actor_config.loss_norm_constant or loss_norm_constant
        )

    def update(
        self, minibatches: Sequence[DataProto], totals: Sequence[BatchTotals], *, reference: StatesOf | None = None
    ) -> dict[str, float]:
        """One optimizer step per mini-batch, in order; returns their mean metrics, the same on all ranks.

        ``reference`` is what the KL in the loss is taken to where ``actor.kl_loss_type`` is ``full``.
        ``minibatches`` holds this rank's share of each (it may be empty), ``totals`` the counts of each over all ranks.
        A mini-batch without ``old_log_probs_T`` is taken as the first update on its trajectories: its own log-probs are
        the old ones, which is exactly on-policy and saves a forward pass. Every later mini-batch or epoch of the same
        step needs them. Raises `ValueError` without any mini-batch.
        """
        if not minibatches:
            raise ValueError("update needs at least one mini-batch")
        with self.packed.residence.module_on_device():
            results = [
                (self.train_step(minibatch, PPOLoss(self._config, self._normalizer, total), reference=reference), total)
                for minibatch, total in zip(minibatches, totals, strict=True)
            ]
        return _metrics(results)


def _metrics(results: Sequence[tuple[UpdateResult, BatchTotals]]) -> dict[str, float]:
    """Means over updates; per-token values are means over each mini-batch's sampled tokens on all ranks."""

    def mean(name: str, *, per_token: bool) -> float:
        values = [r.sums[name] / (max(total.num_tokens, 1) if per_token else 1) for r, total in results]
        return sum(values) / len(values)

    return {
        "actor/pg_loss": mean("pg_loss", per_token=False),
        "actor/kl_loss": mean("kl_loss", per_token=False),
        "actor/entropy": mean("entropy", per_token=True),
        "actor/ppo_kl": mean("ppo_kl", per_token=True),
        "actor/clip_frac": mean("clip_frac", per_token=True),
        "actor/grad_norm": sum(r.grad_norm for r, _ in results) / len(results),
        "actor/lr": results[-1][0].lr,
        "actor/skipped_updates": float(sum(r.skipped for r, _ in results)),
        "training/rollout_probs_diff_mean": mean("probs_diff", per_token=True),
        "training/rollout_probs_diff_max": max(r.maxima["probs_diff"] for r, _ in results),
    }
