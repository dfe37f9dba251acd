"""Advantages, KL and losses: pure functions over a flat batch, each under the paper that it comes from."""

from verl.trainer.core_algos.advantages import (
    ADVANTAGE_ESTIMATORS,
    AdvantageEstimator,
    Advantages,
    compute_advantages,
    discounted_returns,
    discounts,
    find_estimator,
    gae_advantages,
    whiten_,
)
from verl.trainer.core_algos.correction import apply_rollout_weights
from verl.trainer.core_algos.groups import GroupStatistics
from verl.trainer.core_algos.kl import apply_kl_penalty, full_kl, kl_estimate, next_kl_coef
from verl.trainer.core_algos.losses import (
    BatchTotals,
    LossNormalizer,
    PolicyLoss,
    ValueLoss,
    clipped_value_loss,
    ppo_clip_loss,
)
from verl.trainer.core_algos.preferences import PairKL, PairRatios, pair_losses, preference_loss
from verl.trainer.core_algos.sampled import SampledTokens, Turns

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AdvantageEstimator",
    "Advantages",
    "BatchTotals",
    "GroupStatistics",
    "LossNormalizer",
    "PairKL",
    "PairRatios",
    "PolicyLoss",
    "SampledTokens",
    "Turns",
    "ValueLoss",
    "apply_kl_penalty",
    "apply_rollout_weights",
    "clipped_value_loss",
    "compute_advantages",
    "discounted_returns",
    "discounts",
    "find_estimator",
    "full_kl",
    "gae_advantages",
    "kl_estimate",
    "next_kl_coef",
    "pair_losses",
    "ppo_clip_loss",
    "preference_loss",
    "whiten_",
]
