"""Truncated importance weights between the engine that sampled and the trainer that learns.

Both have the same weights, but other kernels and other precision: what was sampled comes from a slightly different
policy. Truncation as in IMPALA (Espeholt et al. 2018, https://arxiv.org/abs/1802.01561); for this gap Yao et al. 2025,
https://fengyao.notion.site/off-policy-rl. Axes: ``T`` tokens, ``S`` sampled tokens, ``B`` sequences.
"""

from __future__ import annotations

import torch

from verl.protocol import DataProto
from verl.trainer.core_algos.kl import MAX_LOG_RATIO
from verl.trainer.core_algos.sampled import SampledTokens


def apply_rollout_weights(batch: DataProto, *, threshold: float, level: str) -> tuple[DataProto, dict[str, float]]:
    """Advantages times ``min(p_trainer / p_engine, threshold)`` of each sampled token, and metrics ``rollout_is/...``.

    ``level`` ``token`` takes each token's own ratio, ``sequence`` the product over its trajectory. The policy loss is
    linear in the advantage, so weighting that weights the loss. Needs ``old_log_probs_T`` and ``advantages_T``
    (`ValueError` without).
    """
    if batch.old_log_probs_T is None or batch.advantages_T is None:
        raise ValueError("apply_rollout_weights needs old_log_probs_T and advantages_T")
    sampled = SampledTokens.of(batch)
    log_ratio_S = (sampled.take(batch.old_log_probs_T) - sampled.take(batch.rollout_log_probs_T)).double()
    if level == "sequence":
        log_ratio_S = sampled.repeat(sampled.sums(log_ratio_S))
    ratio_S = log_ratio_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weights_S = ratio_S.clamp(max=threshold)
    weighted = batch.replace(advantages_T=sampled.place(sampled.take(batch.advantages_T) * weights_S))
    return weighted, _metrics(ratio_S, weights_S) if len(sampled) else {}


def _metrics(ratio_S: torch.Tensor, weights_S: torch.Tensor) -> dict[str, float]:
    return {
        "rollout_is/weight_mean": float(weights_S.mean()),
        "rollout_is/weight_min": float(weights_S.min()),
        "rollout_is/ratio_max": float(ratio_S.max()),
        "rollout_is/truncated_fraction": float((weights_S < ratio_S).double().mean()),
        # 1 when all weights are equal: Kong 1992's effective sample size, as a share.
        "rollout_is/effective_fraction": float(weights_S.mean().square() / weights_S.square().mean()),
    }
