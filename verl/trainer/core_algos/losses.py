"""Losses of policy and critic, and how parts of a mini-batch add up to the whole.

Axes: ``S`` sampled tokens of a batch, in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agentgym_rl.errors import ConfigError
from verl.config import LossAggMode
from verl.protocol import DataProto
from verl.trainer.core_algos.kl import MAX_LOG_RATIO


@dataclass(frozen=True)
class BatchTotals:
    """Counts of a whole mini-batch, over all ranks and micro-batches: what losses are divided by."""

    num_tokens: int
    """Sampled tokens."""
    num_sequences: int
    """Sequences with at least one sampled token."""

    @classmethod
    def of(cls, batch: DataProto) -> BatchTotals:
        """Count a mini-batch before it is split over ranks."""
        return cls(batch.num_sampled_tokens, int((batch.sampled_lengths_B > 0).sum()))


@dataclass(frozen=True)
class LossNormalizer:
    """Aggregates per-token losses so that parts of a mini-batch add up to the whole."""

    mode: str = LossAggMode.TOKEN_MEAN
    """A `LossAggMode`."""
    norm_constant: float = 1.0
    """Divisor of a sequence's token sum in ``seq-mean-token-sum-norm``; no effect in the other modes."""

    def __post_init__(self) -> None:
        if self.mode not in tuple(LossAggMode):
            raise ConfigError(f"loss_agg_mode={self.mode!r}: must be one of {', '.join(LossAggMode)}")
        if self.norm_constant <= 0:
            raise ConfigError(f"loss_norm_constant={self.norm_constant}: must be above 0")

    def weights(self, part: DataProto, totals: BatchTotals) -> torch.Tensor:
        """float32 ``S``: the loss of the mini-batch is the sum of weight x token loss over all its parts."""
        # Divide by global counts: a mean per rank or per micro-batch would up-weight those with short trajectories.
        num_sampled = part.num_sampled_tokens
        if self.mode == LossAggMode.TOKEN_MEAN:
            return torch.full((num_sampled,), 1.0 / max(totals.num_tokens, 1), device=part.loss_mask_T.device)
        per_sequence = 1.0 / max(totals.num_sequences, 1)
        if self.mode == LossAggMode.SEQ_MEAN_TOKEN_MEAN:
            lengths_S = part.sampled_lengths_B[part.sequence_index_T[part.loss_mask_T]]
            return per_sequence / lengths_S.float()
        if self.mode == LossAggMode.SEQ_MEAN_TOKEN_SUM_NORM:
            per_sequence /= self.norm_constant
        return torch.full((num_sampled,), per_sequence, device=part.loss_mask_T.device)


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """Per sampled token."""

    loss_S: torch.Tensor
    clipped_S: torch.Tensor
    """bool: a bound was active, so the token has no policy gradient."""


def ppo_clip_loss(
    log_probs_S: torch.Tensor,
    old_log_probs_S: torch.Tensor,
    advantages_S: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate with separate bounds ``1 - clip_low`` and ``1 + clip_high`` on the ratio.

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347. With ``clip_c`` (> 1) the loss of a negative advantage is
    also bounded by ``-clip_c * advantage`` (dual clip, Ye et al. 2019, https://arxiv.org/abs/1912.09729).
    """
    ratio_S = (log_probs_S - old_log_probs_S).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped_S = -advantages_S * ratio_S
    bounded_S = -advantages_S * ratio_S.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_S, clipped_S = torch.maximum(unclipped_S, bounded_S), bounded_S > unclipped_S
    if clip_c is not None:
        ceiling_S = -advantages_S * clip_c
        dual_S = (advantages_S < 0) & (loss_S > ceiling_S)
        loss_S, clipped_S = torch.where(dual_S, ceiling_S, loss_S), clipped_S | dual_S
    return PolicyLoss(loss_S, clipped_S)


@dataclass(frozen=True, eq=False)
class ValueLoss:
    """Per sampled token."""

    loss_S: torch.Tensor
    clipped_S: torch.Tensor
    """bool: the bound was active, so the token has no gradient."""


def clipped_value_loss(
    values_S: torch.Tensor, old_values_S: torch.Tensor, returns_S: torch.Tensor, *, cliprange: float | None
) -> ValueLoss:
    """Half the squared error, or that of the value kept within ``cliprange`` of the old one where this is larger.

    As in the PPO of https://github.com/openai/baselines; None does not clip.
    """
    error_S = (values_S - returns_S).square()
    if cliprange is None:
        return ValueLoss(0.5 * error_S, torch.zeros_like(error_S, dtype=torch.bool))
    moved_S = values_S - old_values_S
    kept_error_S = (old_values_S + moved_S.clamp(-cliprange, cliprange) - returns_S).square()
    # Within the bound both errors are the same but for rounding, which must not count as clipping.
    clipped_S = (moved_S.abs() > cliprange) & (kept_error_S > error_S)
    return ValueLoss(0.5 * torch.where(clipped_S, kept_error_S, error_S), clipped_S)
