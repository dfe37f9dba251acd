"""KL to the reference: estimates from one sample, the exact value, the penalty on rewards and its control.

Axes: ``T`` tokens of a batch, ``V`` vocabulary.
"""

from __future__ import annotations

import torch

from agentgym_rl.errors import ConfigError
from verl.config import KLControlConfig, KLEstimator
from verl.protocol import DataProto

# exp() of a larger log-ratio says nothing a gradient could use, and overflows soon after.
MAX_LOG_RATIO = 20.0
_MAX_CORRECTION = 0.2
"""The most, as a share, that one step's KL may seem off its target."""


def kl_estimate(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, estimator: str) -> torch.Tensor:
    """Per token, an estimate of KL(policy || reference) in nats from one sample; any shape, both the same.

    ``kl`` log-ratio (k1), ``abs`` its absolute value, ``mse`` half its square (k2), ``low_var_kl`` k3:
    http://joschu.net/blog/kl-approx.html. Raises `ConfigError` for another name: ``full`` needs more than one sample.
    """
    log_ratio = log_probs - ref_log_probs
    if estimator == KLEstimator.KL:
        return log_ratio
    if estimator == KLEstimator.ABS:
        return log_ratio.abs()
    if estimator == KLEstimator.MSE:
        return 0.5 * log_ratio.square()
    if estimator == KLEstimator.LOW_VAR_KL:
        reverse = (-log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return reverse.exp() - reverse - 1
    known = ", ".join(name for name in KLEstimator if name != KLEstimator.FULL)
    raise ConfigError(f"KL estimator {estimator!r}: must be one of {known}")


def full_kl(log_p_V: torch.Tensor, ref_log_p_V: torch.Tensor) -> torch.Tensor:
    """KL(policy || reference) in nats over whole distributions, given as log-probabilities along the last axis."""
    return (log_p_V.exp() * (log_p_V - ref_log_p_V)).sum(-1)


def apply_kl_penalty(batch: DataProto, *, kl_coef: float, estimator: str) -> tuple[DataProto, float]:
    """Subtract ``kl_coef`` x KL from the reward of each sampled token, and its sum from the score.

    Needs ``old_log_probs_T`` and ``ref_log_probs_T``, or ``kl_T`` for ``full``. Also returns the mean KL per token.
    """
    kl_T = torch.where(batch.loss_mask_T, _token_kl(batch, estimator), 0.0)
    sums_B = torch.zeros(len(batch), dtype=torch.float64).index_add_(0, batch.sequence_index_T, kl_T.double())
    penalised = batch.replace(
        token_rewards_T=batch.token_rewards_T - kl_coef * kl_T, scores_B=batch.scores_B - kl_coef * sums_B
    )
    return penalised, float(kl_T.sum()) / max(batch.num_sampled_tokens, 1)


def _token_kl(batch: DataProto, estimator: str) -> torch.Tensor:
    if estimator == KLEstimator.FULL:
        if batch.kl_T is None:
            raise ValueError("apply_kl_penalty needs kl_T for the full KL")
        return batch.kl_T
    if batch.old_log_probs_T is None or batch.ref_log_probs_T is None:
        raise ValueError("apply_kl_penalty needs old_log_probs_T and ref_log_probs_T")
    return kl_estimate(batch.old_log_probs_T, batch.ref_log_probs_T, estimator)


def next_kl_coef(kl_coef: float, *, kl: float, num_trajectories: int, config: KLControlConfig) -> float:
    """The coefficient after a step with mean KL ``kl`` per sampled token; under ``fixed`` the same.

    ``adaptive``: times ``1 + clip(kl / target_kl - 1, -0.2, 0.2) * num_trajectories / horizon``, of which the last
    factor is at most 1: with a short horizon the coefficient would become negative.
    Ziegler et al. 2019, https://arxiv.org/abs/1909.08593.
    """
    if config.type == "fixed":
        return kl_coef
    error = min(max(kl / config.target_kl - 1.0, -_MAX_CORRECTION), _MAX_CORRECTION)
    return kl_coef * (1.0 + error * min(num_trajectories / config.horizon, 1.0))
