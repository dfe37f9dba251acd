"""Advantage estimators: pure functions over a flat batch, without a loop over tokens.

Axes: ``T`` tokens of the batch laid end to end, ``B`` sequences, ``S`` sampled tokens (the batch's loss tokens, in
order), ``U`` turns.
Only sampled tokens exist here: observations neither decay, reset nor receive anything. From one sampled token to the
next of its sequence the discount is ``gamma``, times ``gamma_turn`` where a new turn begins.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from agentgym_rl.errors import ConfigError
from verl.config import AlgorithmConfig
from verl.protocol import DataProto
from verl.trainer.core_algos.groups import GroupStatistics
from verl.trainer.core_algos.sampled import SampledTokens, Turns
from verl.trainer.core_algos.scan import Decay, suffix_sums

_SUM_BLOCK = 256


@dataclass(frozen=True, eq=False)
class Advantages:
    """What an estimator gives; float32, 0 where not sampled."""

    advantages_T: torch.Tensor
    returns_T: torch.Tensor | None = None
    """What a critic is trained towards; None from an estimator that needs none."""


AdvantageEstimator = Callable[[DataProto, AlgorithmConfig], Advantages]
"""Sees all unmasked trajectories of a step at once, on the CPU."""


def compute_advantages(batch: DataProto, config: AlgorithmConfig, *, with_returns: bool = False) -> DataProto:
    """The batch with ``advantages_T`` and ``returns_T`` of ``config.adv_estimator``.

    ``with_returns`` gives discounted returns to a critic beside an estimator that has none of its own.
    It must hold whole groups, i.e. all trajectories of the step. Raises `ConfigError` as `find_estimator`, and
    `ValueError` when the estimator does not give one number per token.
    """
    result = find_estimator(config.adv_estimator)(batch, config)
    for name, values_T in (("advantages_T", result.advantages_T), ("returns_T", result.returns_T)):
        if values_T is not None and values_T.shape != (batch.num_tokens,):
            raise ValueError(
                f"{config.adv_estimator} gave {name} of shape {tuple(values_T.shape)} for {batch.num_tokens} tokens"
            )
    returns_T = result.returns_T
    if with_returns and returns_T is None:
        returns_T = discounted_returns(batch.token_rewards_T, batch, config)
    return batch.replace(advantages_T=result.advantages_T, returns_T=returns_T)


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


# ----------------------------------------------------------------------------------------------------------- estimators


def grpo(batch: DataProto, config: AlgorithmConfig) -> Advantages:
    """Score minus group mean, divided by the group's sample std + 1e-6 when ``norm_adv_by_std_in_grpo``.

    Shao et al. 2024, https://arxiv.org/abs/2402.03300; without the division Liu et al. 2025,
    https://arxiv.org/abs/2503.20783.
    """
    groups = GroupStatistics.of(batch)
    return _same_for_all_tokens(batch, groups.standardised_B if config.norm_adv_by_std_in_grpo else groups.centred_B)


def rloo(batch: DataProto, config: AlgorithmConfig) -> Advantages:
    """Score minus the mean score of the others in the group. Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740."""
    groups = GroupStatistics.of(batch)
    # score - (sum - score) / (n - 1) = (score - mean) * n / (n - 1), from centred values.
    return _same_for_all_tokens(batch, groups.centred_B * groups.size_B / (groups.size_B - 1).clamp(min=1))


def reinforce_plus_plus(batch: DataProto, config: AlgorithmConfig) -> Advantages:
    """Discounted return over sampled tokens, whitened over the batch. Hu 2025, https://arxiv.org/abs/2501.03262."""
    sampled = SampledTokens.of(batch)
    returns_S = _returns(sampled.take(batch.token_rewards_T), batch, sampled, config)
    return Advantages(sampled.place(whiten_(returns_S)))


def reinforce_plus_plus_baseline(batch: DataProto, config: AlgorithmConfig) -> Advantages:
    """`reinforce_plus_plus` after the group's mean score is taken from each trajectory, at its last sampled token.

    The trajectory's rewards then sum to its centred score, so without discount the mean is taken from every return.
    Members without group (one left, the others faults) get 0 and are not part of the whitening.
    """
    groups = GroupStatistics.of(batch)
    has_group_T = np.repeat((groups.size_B > 1).numpy(), batch.lengths_B.numpy())
    sampled = SampledTokens.of(batch.replace(loss_mask_T=batch.loss_mask_T & torch.from_numpy(has_group_T)))
    rewards_S = sampled.take(batch.token_rewards_T)
    surplus_B = sampled.sums(rewards_S) - groups.centred_B
    rewards_S[sampled.last_R] -= surplus_B[sampled.sequences_R].float()
    returns_S = _returns(rewards_S, batch, sampled, config)
    return Advantages(sampled.place(whiten_(returns_S)))


def gae(batch: DataProto, config: AlgorithmConfig) -> Advantages:
    """Generalised advantages from a critic's values, whitened over the batch; returns are advantage plus value.

    Schulman et al. 2015, https://arxiv.org/abs/1506.02438. Needs ``values_T`` (`ValueError` without). The value after
    the last sampled token is 0, and values at other tokens are never looked at.
    """
    if batch.values_T is None:
        raise ValueError("gae needs values_T in the batch")
    sampled = SampledTokens.of(batch)
    values_S = sampled.take(batch.values_T)
    advantages_S = gae_advantages(
        sampled.take(batch.token_rewards_T), values_S, discounts(batch, sampled, config), config.lam
    )
    returns_T = sampled.place(values_S.add_(advantages_S))
    return Advantages(sampled.place(whiten_(advantages_S)), returns_T)


def remax(batch: DataProto, config: AlgorithmConfig) -> Advantages:
    """Discounted return minus the score of a greedy rollout of the same item. Li et al. 2023,
    https://arxiv.org/abs/2310.10505.

    Needs ``baselines_B`` (`ValueError` without). Where it is NaN, because the greedy rollout failed, advantages are 0.
    """
    if batch.baselines_B is None:
        raise ValueError("remax needs baselines_B in the batch")
    sampled = SampledTokens.of(batch)
    returns_S = _returns(sampled.take(batch.token_rewards_T), batch, sampled, config)
    baselines_S = sampled.repeat(batch.baselines_B.float())
    advantages_S = baselines_S.sub_(returns_S).neg_().nan_to_num_(nan=0.0)
    return Advantages(sampled.place(advantages_S))


def gigpo(batch: DataProto, config: AlgorithmConfig) -> Advantages:
    """GRPO's advantage of the whole episode, plus ``step_advantage_w`` times that of each turn among its likes.

    Likes are the turns of the group's trajectories that answer the same observation (the anchor state); what is
    compared is their return, discounted by ``gamma_turn``. A turn without likes gets the episode's advantage alone.
    Feng et al. 2025, https://arxiv.org/abs/2505.10978. Needs ``message_ids_T`` and ``anchor_ids_T`` (`ValueError`).
    """
    if batch.anchor_ids_T is None:
        raise ValueError("gigpo needs anchor_ids_T in the batch")
    turns, episodes = Turns.of(batch), GroupStatistics.of(batch)
    last_O = np.flatnonzero(turns.is_last_U)
    decay = Decay(config.gamma_turn, last_O, torch.zeros(len(last_O)))
    returns_U = suffix_sums(turns.sums(batch.token_rewards_T), decay)
    steps = _step_groups(batch, turns, returns_U)
    by_std = config.gigpo.mode == "mean_std_norm"
    episode_B = episodes.standardised_B if by_std else episodes.centred_B
    step_U = steps.standardised_B if by_std else steps.centred_B
    advantages_U = episode_B[turns.sequence_U] + config.gigpo.step_advantage_w * step_U
    return Advantages(turns.place(advantages_U.float()))


ADVANTAGE_ESTIMATORS: Mapping[str, AdvantageEstimator] = {
    "grpo": grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "gae": gae,
    "remax": remax,
    "gigpo": gigpo,
}


# ---------------------------------------------------------------------------------------------------------------- parts


def discounts(batch: DataProto, sampled: SampledTokens, config: AlgorithmConfig) -> Decay:
    """The factor on whatever the next sampled token of the sequence brings; 0 at the last one."""
    if config.gamma_turn == 1.0:
        return Decay(config.gamma, sampled.last_R, torch.zeros(len(sampled.last_R)))
    turns = Turns.of(batch)
    factors_U = np.where(turns.is_last_U, 0.0, config.gamma * config.gamma_turn)
    return Decay(config.gamma, turns.last_S, torch.from_numpy(factors_U))


def discounted_returns(rewards_T: torch.Tensor, batch: DataProto, config: AlgorithmConfig) -> torch.Tensor:
    """float32 ``T``: at each sampled token the discounted sum of the rewards on it and on later sampled tokens of its
    sequence; 0 elsewhere. Rewards on other tokens are dropped."""
    sampled = SampledTokens.of(batch)
    return sampled.place(_returns(sampled.take(rewards_T), batch, sampled, config))


def gae_advantages(rewards_S: torch.Tensor, values_S: torch.Tensor, discount: Decay, lam: float) -> torch.Tensor:
    """``S``: ``A[s] = r[s] + g[s] V[s + 1] - V[s] + g[s] lam A[s + 1]``, not whitened; ``g`` from `discounts`.

    ``rewards_S`` is used up.
    """
    odd_O = torch.from_numpy(discount.odd_O)
    after_O = values_S[(odd_O + 1).clamp(max=len(values_S) - 1)]  # the last one ends a sequence and counts 0 times
    deltas_O = rewards_S[odd_O] - values_S[odd_O] + discount.factors_O.float() * after_O
    # In place: on arrays of this size the page faults of fresh ones take longer than the arithmetic.
    deltas_S = rewards_S.sub_(values_S)
    deltas_S[:-1].add_(values_S[1:], alpha=discount.common)
    deltas_S[odd_O] = deltas_O
    return suffix_sums(deltas_S, discount.times(lam))


def whiten_(values_S: torch.Tensor) -> torch.Tensor:
    """``values_S``, changed in place to mean 0 and sample standard deviation 1, from float64 sums; all 0 when the
    values agree or there is only one."""
    if len(values_S) < 2:
        return values_S.zero_()
    mean = _sum_of_products(values_S.numpy(), np.ones(1, np.float32)) / len(values_S)
    centred_S = values_S.sub_(float(np.float32(mean))).numpy()
    scale = (_sum_of_products(centred_S, centred_S) / (len(values_S) - 1)) ** 0.5
    if scale <= 1e-6 * abs(mean):  # nothing but rounding
        return values_S.zero_()
    return values_S.div_(float(np.float32(scale + 1e-8)))


def _sum_of_products(left_S: np.ndarray, right_S: np.ndarray) -> float:
    """In float32 within short blocks and float64 over them: float32 over millions would be off by a thousandth.

    ``right_S`` may be one number for all.
    """
    right_S = np.broadcast_to(right_S, left_S.shape)
    whole = len(left_S) // _SUM_BLOCK * _SUM_BLOCK
    blocks = [each_S[:whole].reshape(-1, _SUM_BLOCK) for each_S in (left_S, right_S)]
    rest = np.dot(left_S[whole:], right_S[whole:])
    return float(np.einsum("ns,ns->n", *blocks).sum(dtype=np.float64) + rest)


def _returns(
    rewards_S: torch.Tensor, batch: DataProto, sampled: SampledTokens, config: AlgorithmConfig
) -> torch.Tensor:
    return suffix_sums(rewards_S, discounts(batch, sampled, config))


def _same_for_all_tokens(batch: DataProto, advantages_B: torch.Tensor) -> Advantages:
    # Two passes over all tokens; finding and placing the sampled ones would take twice the time.
    advantages_T = np.repeat(advantages_B.float().numpy(), batch.lengths_B.numpy())
    np.multiply(advantages_T, batch.loss_mask_T.numpy(), out=advantages_T)
    return Advantages(torch.from_numpy(advantages_T))


def _step_groups(batch: DataProto, turns: Turns, returns_U: torch.Tensor) -> GroupStatistics:
    """Statistics of the turns' returns among the turns of one group that answer the same observation."""
    assert batch.anchor_ids_T is not None
    # Both are hashes, so that an odd multiple of one plus the other is as good as the pair.
    keys_U = 3 * batch.group_ids_B.numpy()[turns.sequence_U] + batch.anchor_ids_T.numpy()[turns.starts_U]
    return GroupStatistics.of_scores(returns_U, torch.from_numpy(keys_U), torch.ones(len(keys_U), dtype=torch.bool))
