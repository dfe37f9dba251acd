"""Critic: the value of the state before each sampled token, learned from returns.

Axes: ``T`` tokens of a batch, ``S`` its sampled (loss) tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from verl.config import CriticConfig, ModelConfig
from verl.models.policy import ReadOut, ValueModule
from verl.models.sequence_parallel import SequenceParallel
from verl.protocol import DataProto
from verl.trainer.core_algos import BatchTotals, LossNormalizer, clipped_value_loss
from verl.workers.language_model import LanguageModelTrainer, MicroLoss, UpdateResult
from verl.workers.packed_model import MicroBatchLimits


@dataclass(frozen=True)
class CriticLoss:
    """Clipped squared error of values; see `LossFunction`, which here gets values in the place of log-probs."""

    config: CriticConfig
    normalizer: LossNormalizer
    totals: BatchTotals

    sum_names: ClassVar[tuple[str, ...]] = (
        "vf_loss",
        "clip_frac",
        "value",
        "return",
        "return_squared",
        "error_squared",
    )
    max_names: ClassVar[tuple[str, ...]] = ()
    needs_entropy: ClassVar[bool] = False

    def __call__(self, micro: DataProto, read_out: ReadOut) -> MicroLoss:
        """``micro`` needs returns, and the values before the first update (`ValueError` without)."""
        values_S = read_out.numbers
        if micro.returns_T is None or micro.values_T is None:
            raise ValueError("the critic's loss needs returns_T and values_T in the batch")
        sampled = micro.loss_mask_T
        returns_S = micro.returns_T[sampled]
        result = clipped_value_loss(values_S, micro.values_T[sampled], returns_S, cliprange=self.config.cliprange_value)
        loss = (self.normalizer.weights(micro, self.totals) * result.loss_S).sum()
        statistics = [
            loss,
            result.clipped_S.float().sum(),
            values_S.sum(),
            returns_S.sum(),
            returns_S.square().sum(),
            (values_S - returns_S).square().sum(),
        ]
        return MicroLoss(loss, torch.stack(statistics).detach(), values_S.new_zeros(0))


class Critic(LanguageModelTrainer):
    """The backbone of a language model with a value head; in a group of several ranks all methods are collective."""

    def __init__(
        self,
        model_config: ModelConfig,
        critic_config: CriticConfig,
        *,
        device: torch.device | str,
        total_updates: int,
        loss_norm_constant: float,
        sequence_parallel_size: int = 1,
    ) -> None:
        """``total_updates`` is the number of optimizer steps of the whole run; ``loss_norm_constant`` the divisor of
        ``seq-mean-token-sum-norm``; so many ranks as ``sequence_parallel_size`` says share each micro-batch."""
        by_count = critic_config.ppo_micro_batch_size_per_gpu
        super().__init__(
            model_config,
            critic_config.optim,
            MicroBatchLimits(None if by_count else critic_config.ppo_max_token_len_per_gpu, by_count),
            device=device,
            total_updates=total_updates,
            grad_clip=critic_config.grad_clip,
            fsdp=critic_config.fsdp_config,
            sequence_parallel_size=sequence_parallel_size,
        )
        self._config = critic_config
        self._normalizer = LossNormalizer(critic_config.loss_agg_mode, loss_norm_constant)

    def make_module(self, model: PreTrainedModel, parallel: SequenceParallel | None) -> ValueModule:
        return ValueModule(model, parallel)

    def values(self, batch: DataProto) -> torch.Tensor:
        """Values ``T`` of the batch's loss tokens, 0 elsewhere; float32 on the CPU."""
        return self.packed.numbers(batch).numbers

    def update(self, minibatches: Sequence[DataProto], totals: Sequence[BatchTotals]) -> dict[str, float]:
        """One optimizer step per mini-batch, in order; returns their mean metrics, the same on all ranks.

        Arguments are as those of `Actor.update`. Raises `ValueError` without any mini-batch.
        """
        if not minibatches:
            raise ValueError("update needs at least one mini-batch")
        with self.packed.residence.module_on_device():
            results = [
                (self.train_step(minibatch, CriticLoss(self._config, self._normalizer, total)), total)
                for minibatch, total in zip(minibatches, totals, strict=True)
            ]
        return _metrics(results)


def _metrics(results: Sequence[tuple[UpdateResult, BatchTotals]]) -> dict[str, float]:
    """Means over updates; the explained variance is that of all of them together."""

    def per_token(name: str) -> float:
        return sum(r.sums[name] for r, _ in results) / max(sum(total.num_tokens for _, total in results), 1)

    variance = per_token("return_squared") - per_token("return") ** 2
    metrics = {
        "critic/vf_loss": sum(r.sums["vf_loss"] for r, _ in results) / len(results),
        "critic/vf_clip_frac": per_token("clip_frac"),
        "critic/value_mean": per_token("value"),
        "critic/return_mean": per_token("return"),
        "critic/grad_norm": sum(r.grad_norm for r, _ in results) / len(results),
        "critic/lr": results[-1][0].lr,
        "critic/skipped_updates": float(sum(r.skipped for r, _ in results)),
    }
    if variance > 1e-12:
        metrics["critic/explained_variance"] = 1.0 - per_token("error_squared") / variance
    return metrics
