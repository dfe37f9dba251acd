"""Advantages, KL and losses: pure functions over a flat batch.

Axes: ``T`` tokens of the batch laid end to end, ``B`` sequences, ``S`` sampled tokens (the batch's loss tokens, in
order), ``BM`` sequences x the most sampled tokens of one.
Only sampled tokens exist here: observations neither decay, reset nor receive anything, and one step of discount is one
sampled token. Group statistics are float64.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from agentgym_rl.errors import ConfigError
from verl.config import KL_ESTIMATORS, LOSS_AGG_MODES, AlgorithmConfig
from verl.protocol import DataProto

# ----------------------------------------------------------------------------------------------------------- advantages


@dataclass(frozen=True, eq=False)
class Advantages:
    """What an estimator gives; float32, 0 where not sampled."""

    advantages_T: torch.Tensor
    returns_T: torch.Tensor


AdvantageEstimator = Callable[[DataProto, AlgorithmConfig], Advantages]
"""Sees all unmasked trajectories of a step at once."""


def compute_advantages(batch: DataProto, config: AlgorithmConfig) -> DataProto:
    """The batch with ``advantages_T`` and ``returns_T`` of ``config.adv_estimator``.

    It must hold whole groups, i.e. all trajectories of the step. Raises `ConfigError` as `find_estimator`, and
    `ValueError` when the estimator does not give one number per token.
    """
    result = find_estimator(config.adv_estimator)(batch, config)
    for name, values_T in (("advantages_T", result.advantages_T), ("returns_T", result.returns_T)):
        if values_T.shape != (batch.num_tokens,):
            raise ValueError(
                f"{config.adv_estimator} gave {name} of shape {tuple(values_T.shape)} for {batch.num_tokens} tokens"
            )
    return batch.replace(advantages_T=result.advantages_T, returns_T=result.returns_T)


def find_estimator(name: str) -> AdvantageEstimator:
    """One of `ADVANTAGE_ESTIMATORS`, or the user's own, imported from ``package.module:function``.

    Raises `ConfigError` when there is none of that name.
    """
    if name in ADVANTAGE_ESTIMATORS:
        return ADVANTAGE_ESTIMATORS[name]
    module, _, function = name.partition(":")
    try:
        estimator: AdvantageEstimator = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        known = ", ".join(ADVANTAGE_ESTIMATORS)
        raise ConfigError(
            f"algorithm.adv_estimator={name!r}: must be one of {known}, or package.module:function: {error}"
        ) from error
    return estimator


def grpo(batch: DataProto, config: AlgorithmConfig) -> Advantages:
    """Score minus group mean, divided by the group's sample std + 1e-6 when ``norm_adv_by_std_in_grpo``.

    Shao et al. 2024, https://arxiv.org/abs/2402.03300; without the division Liu et al. 2025,
    https://arxiv.org/abs/2503.20783.
    """
    groups = GroupStatistics.of(batch)
    advantages_B = groups.centred_B
    if config.norm_adv_by_std_in_grpo:
        advantages_B = advantages_B / (groups.std_B + 1e-6)
    return _same_for_all_tokens(batch, advantages_B)


def rloo(batch: DataProto, config: AlgorithmConfig) -> Advantages:
    """Score minus the mean score of the others in the group. Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740."""
    groups = GroupStatistics.of(batch)
    # score - (sum - score) / (n - 1) = (score - mean) * n / (n - 1), from centred values.
    return _same_for_all_tokens(batch, groups.centred_B * groups.size_B / (groups.size_B - 1).clamp(min=1))


def reinforce_plus_plus(batch: DataProto, config: AlgorithmConfig) -> Advantages:
    """Discounted return over sampled tokens, whitened over the batch. Hu 2025, https://arxiv.org/abs/2501.03262."""
    returns_T = discounted_returns(batch.token_rewards_T.double(), batch, config.gamma)
    return _whitened(returns_T, batch.loss_mask_T)


def reinforce_plus_plus_baseline(batch: DataProto, config: AlgorithmConfig) -> Advantages:
    """`reinforce_plus_plus` after the group's mean score is taken from each trajectory, at its last sampled token.

    The trajectory's rewards then sum to its centred score, so with gamma 1 the mean is taken from every return.
    Members without group (one left, the others faults) get 0 and are not part of the whitening.
    """
    groups = GroupStatistics.of(batch)
    rewards_T = torch.where(batch.loss_mask_T, batch.token_rewards_T.double(), 0.0)
    correction_B = groups.centred_B - _sums_by_sequence(rewards_T, batch)
    last_B, has_sampled_B = _last_sampled(batch)
    rewards_T = rewards_T.index_add(0, last_B[has_sampled_B], correction_B[has_sampled_B])
    counted_T = batch.loss_mask_T & (groups.size_B > 1)[batch.sequence_index_T]
    return _whitened(discounted_returns(rewards_T, batch, config.gamma), counted_T)


ADVANTAGE_ESTIMATORS: Mapping[str, AdvantageEstimator] = {
    "grpo": grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
}


@dataclass(frozen=True, eq=False)
class GroupStatistics:
    """Per sequence, over the unmasked members of its group; float64."""

    size_B: torch.Tensor
    """Members; 0 for a masked sequence."""
    centred_B: torch.Tensor
    """Score minus group mean; exactly 0 for masked, for lone members, and where scores agree to float precision."""
    std_B: torch.Tensor
    """Sample standard deviation; 0 where ``centred_B`` is 0 for one of the reasons above."""

    @classmethod
    def of(cls, batch: DataProto) -> GroupStatistics:
        codes, group_B = batch.group_ids_B.unique(return_inverse=True)
        live_B = ~batch.masked_B
        scores_B = torch.where(live_B, batch.scores_B, 0.0)

        def group_sums(values_B: torch.Tensor) -> torch.Tensor:
            totals = torch.zeros(len(codes), dtype=torch.float64, device=values_B.device)
            return totals.index_add_(0, group_B, values_B)[group_B]

        size_B = group_sums(live_B.double())
        centred_B = scores_B - group_sums(scores_B) / size_B.clamp(min=1)
        # Scores such as eight times 0.35 leave a residue of rounding, which dividing by their std would blow up.
        has_signal_B = live_B & (size_B > 1) & _spread_is_real(scores_B, live_B, group_B, len(codes))
        centred_B = torch.where(has_signal_B, centred_B, 0.0)
        std_B = (group_sums(centred_B.square()) / (size_B - 1).clamp(min=1)).sqrt()
        return cls(torch.where(live_B, size_B, 0.0), centred_B, torch.where(has_signal_B, std_B, 0.0))


def _spread_is_real(
    scores_B: torch.Tensor, live_B: torch.Tensor, group_B: torch.Tensor, num_groups: int
) -> torch.Tensor:
    """bool ``B``: the group's scores differ by more than 1e-6 of their size, i.e. by more than float32 rounding."""

    def extreme(values_B: torch.Tensor) -> torch.Tensor:
        start = torch.full((num_groups,), -torch.inf, dtype=torch.float64, device=values_B.device)
        return start.scatter_reduce_(0, group_B, values_B.masked_fill(~live_B, -torch.inf), "amax")[group_B]

    spread_B = extreme(scores_B) + extreme(-scores_B)
    return spread_B > 1e-6 * extreme(scores_B.abs())


def discounted_returns(rewards_T: torch.Tensor, batch: DataProto, gamma: float) -> torch.Tensor:
    """float64 ``T``: at each sampled token the sum of the rewards on it and on later sampled tokens of its sequence,
    one factor ``gamma`` per sampled token between; 0 elsewhere. Rewards on other tokens are dropped."""
    sampled = batch.loss_mask_T
    row_S, column_S = _sampled_coordinates(batch)
    returns_BM = rewards_T.new_zeros((len(batch), int(column_S.max()) + 1 if len(column_S) else 0), dtype=torch.float64)
    returns_BM[row_S, column_S] = rewards_T[sampled].double()
    for column in range(returns_BM.shape[1] - 2, -1, -1):
        returns_BM[:, column] += gamma * returns_BM[:, column + 1]
    returns_T = torch.zeros(batch.num_tokens, dtype=torch.float64, device=rewards_T.device)
    returns_T[sampled] = returns_BM[row_S, column_S]
    return returns_T


def whiten(values_S: torch.Tensor) -> torch.Tensor:
    """Mean 0 and sample standard deviation 1 (float64); all 0 when the values agree or there is only one."""
    if len(values_S) < 2:
        return torch.zeros_like(values_S, dtype=torch.float64)
    values_S = values_S.double()
    centred_S = values_S - values_S.mean()
    scale = centred_S.square().sum().div(len(values_S) - 1).sqrt()
    return torch.where(scale > 1e-6 * values_S.abs().max(), centred_S / (scale + 1e-8), 0.0)


def _whitened(returns_T: torch.Tensor, counted_T: torch.Tensor) -> Advantages:
    advantages_T = torch.zeros_like(returns_T)
    advantages_T[counted_T] = whiten(returns_T[counted_T])
    return Advantages(advantages_T.float(), torch.where(counted_T, returns_T, 0.0).float())


def _same_for_all_tokens(batch: DataProto, advantages_B: torch.Tensor) -> Advantages:
    advantages_T = torch.where(batch.loss_mask_T, advantages_B[batch.sequence_index_T], 0.0).float()
    return Advantages(advantages_T, advantages_T)


def _sampled_coordinates(batch: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
    """For each sampled token its sequence, and how many sampled tokens precede it there."""
    row_S = batch.sequence_index_T[batch.loss_mask_T]
    lengths_B = batch.sampled_lengths_B
    before_B = lengths_B.cumsum(0) - lengths_B
    return row_S, torch.arange(len(row_S), device=row_S.device) - before_B[row_S]


def _last_sampled(batch: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
    """The position in ``T`` of each sequence's last sampled token, and whether it has one (bool ``B``)."""
    positions_T = torch.arange(batch.num_tokens, device=batch.loss_mask_T.device)
    last_B = torch.full((len(batch),), -1, dtype=torch.int64, device=positions_T.device)
    last_B.scatter_reduce_(0, batch.sequence_index_T, positions_T.masked_fill(~batch.loss_mask_T, -1), "amax")
    return last_B, last_B >= 0


def _sums_by_sequence(values_T: torch.Tensor, batch: DataProto) -> torch.Tensor:
    sums_B = torch.zeros(len(batch), dtype=torch.float64, device=values_T.device)
    return sums_B.index_add_(0, batch.sequence_index_T, values_T.double())


# ------------------------------------------------------------------------------------------------------------------- KL


# exp() of a larger log-ratio says nothing a gradient could use, and overflows soon after.
MAX_LOG_RATIO = 20.0


def kl_estimate(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, estimator: str) -> torch.Tensor:
    """Per token, an estimate of KL(policy || reference) in nats from one sample; any shape, both the same.

    ``kl`` log-ratio (k1), ``abs`` its absolute value, ``mse`` half its square (k2), ``low_var_kl`` k3:
    http://joschu.net/blog/kl-approx.html. Raises `ConfigError` for another name.
    """
    log_ratio = log_probs - ref_log_probs
    if estimator == "kl":
        return log_ratio
    if estimator == "abs":
        return log_ratio.abs()
    if estimator == "mse":
        return 0.5 * log_ratio.square()
    if estimator == "low_var_kl":
        reverse = (-log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return reverse.exp() - reverse - 1
    raise ConfigError(f"KL estimator {estimator!r}: must be one of {', '.join(KL_ESTIMATORS)}")


def apply_kl_penalty(batch: DataProto, *, kl_coef: float, estimator: str) -> tuple[DataProto, float]:
    """Subtract ``kl_coef`` x KL from the reward of each sampled token, and its sum from the score.

    Needs ``old_log_probs_T`` and ``ref_log_probs_T``. Also returns the mean KL per sampled token.
    """
    if batch.old_log_probs_T is None or batch.ref_log_probs_T is None:
        raise ValueError("apply_kl_penalty needs old_log_probs_T and ref_log_probs_T")
    kl_T = kl_estimate(batch.old_log_probs_T, batch.ref_log_probs_T, estimator)
    kl_T = torch.where(batch.loss_mask_T, kl_T, 0.0)
    penalised = batch.replace(
        token_rewards_T=batch.token_rewards_T - kl_coef * kl_T,
        scores_B=batch.scores_B - kl_coef * _sums_by_sequence(kl_T, batch),
    )
    return penalised, float(kl_T.sum()) / max(batch.num_sampled_tokens, 1)


# --------------------------------------------------------------------------------------------------------------- losses


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

    mode: str = "token-mean"
    """One of ``verl.config.LOSS_AGG_MODES``."""
    norm_constant: float = 1.0
    """Divisor of a sequence's token sum in ``seq-mean-token-sum-norm``; no effect in the other modes."""

    def __post_init__(self) -> None:
        if self.mode not in LOSS_AGG_MODES:
            raise ConfigError(f"loss_agg_mode={self.mode!r}: must be one of {', '.join(LOSS_AGG_MODES)}")
        if self.norm_constant <= 0:
            raise ConfigError(f"loss_norm_constant={self.norm_constant}: must be above 0")

    def weights(self, part: DataProto, totals: BatchTotals) -> torch.Tensor:
        """float32 ``S``: the loss of the mini-batch is the sum of weight x token loss over all its parts."""
        # Divide by global counts: a mean per rank or per micro-batch would up-weight those with short trajectories.
        num_sampled = part.num_sampled_tokens
        if self.mode == "token-mean":
            return torch.full((num_sampled,), 1.0 / max(totals.num_tokens, 1), device=part.loss_mask_T.device)
        per_sequence = 1.0 / max(totals.num_sequences, 1)
        if self.mode == "seq-mean-token-mean":
            lengths_S = part.sampled_lengths_B[part.sequence_index_T[part.loss_mask_T]]
            return per_sequence / lengths_S.float()
        if self.mode == "seq-mean-token-sum-norm":
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
