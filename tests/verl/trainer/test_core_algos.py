from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from support.batches import batch_of

from agentgym_rl.errors import ConfigError
from verl.config import KLControlConfig, LossAggMode
from verl.trainer.core_algos import (
    BatchTotals,
    LossNormalizer,
    apply_kl_penalty,
    apply_rollout_weights,
    clipped_value_loss,
    full_kl,
    kl_estimate,
    next_kl_coef,
    ppo_clip_loss,
)

CASES = json.loads((Path(__file__).parents[2] / "cases" / "algorithms.json").read_text())


# -------------------------------------------------------------------------------------------------- worked cases


@pytest.mark.parametrize("case", CASES["loss"], ids=lambda case: case["name"])
def test_losses_of_micro_batches_add_up_to_that_of_the_batch(case):
    rows = [row for micro in case["micro_batches"] for row in micro]
    totals = BatchTotals.of(batch_of([[1] * len(row) for row in rows]))
    loss = 0.0
    for micro in case["micro_batches"]:
        part = batch_of([[1] * len(row) for row in micro])
        loss += float(
            (LossNormalizer(case["agg"]).weights(part, totals) * torch.tensor([x for row in micro for x in row])).sum()
        )
    assert loss == pytest.approx(case["expect"])


# ------------------------------------------------------------------------------------------------------------ KL


def test_kl_estimators_by_hand():
    log_probs, ref = torch.tensor([-1.0]), torch.tensor([-3.0])
    expected = {"kl": 2.0, "abs": 2.0, "mse": 2.0, "low_var_kl": math.exp(-2) + 2 - 1}
    for name, value in expected.items():
        assert kl_estimate(log_probs, ref, name).item() == pytest.approx(value)
    assert kl_estimate(ref, log_probs, "abs").item() == pytest.approx(2.0)
    with pytest.raises(ConfigError, match="KL estimator 'k3'"):
        kl_estimate(log_probs, ref, "k3")


def test_low_var_kl_stays_finite_for_absurd_ratios():
    log_probs = torch.tensor([-500.0], requires_grad=True)
    kl_estimate(log_probs, torch.tensor([-1.0]), "low_var_kl").sum().backward()
    assert torch.isfinite(log_probs.grad).all()


def test_kl_penalty_is_paid_on_sampled_tokens_only():
    batch = batch_of([[1, 0, 1]], rewards=[[0, 0, 1]], scores=[1.0])
    batch = batch.replace(
        old_log_probs_T=torch.tensor([-9.0, -1.0, -9.0, -2.0]), ref_log_probs_T=torch.tensor([0.0, -2.0, 0.0, -5.0])
    )
    penalised, mean_kl = apply_kl_penalty(batch, kl_coef=0.1, estimator="kl")
    assert penalised.token_rewards_T.tolist() == pytest.approx([0, -0.1, 0, 0.7])
    assert penalised.scores_B.tolist() == pytest.approx([0.6])
    assert mean_kl == pytest.approx(2.0)


def test_the_full_kl_is_paid_as_it_was_computed():
    batch = batch_of([[1, 0, 1]], rewards=[[0, 0, 1]], scores=[1.0]).replace(kl_T=torch.tensor([9.0, 1.0, 9.0, 3.0]))
    penalised, mean_kl = apply_kl_penalty(batch, kl_coef=0.1, estimator="full")
    assert penalised.token_rewards_T.tolist() == pytest.approx([0, -0.1, 0, 0.7])
    assert penalised.scores_B.tolist() == pytest.approx([0.6]) and mean_kl == pytest.approx(2.0)


def test_the_full_kl_is_a_sum_over_the_vocabulary():
    policy, ref = torch.tensor([0.75, 0.25]).log(), torch.tensor([0.5, 0.5]).log()
    assert full_kl(policy, ref).item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert full_kl(policy, policy).item() == 0


def test_estimates_of_the_kl_are_on_average_the_full_one():
    generator = torch.Generator().manual_seed(0)
    policy, ref = (torch.randn(5, generator=generator).log_softmax(-1) for _ in range(2))
    for name in ("kl", "low_var_kl"):
        average = (policy.exp() * kl_estimate(policy, ref, name)).sum()
        assert average.item() == pytest.approx(full_kl(policy, ref).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.1, 0.5),  # on target
        (0.11, 0.5 * (1 + 0.1 * 64 / 640)),
        (9.0, 0.5 * (1 + 0.2 * 64 / 640)),  # at most a fifth
        (0.0, 0.5 * (1 - 0.2 * 64 / 640)),
    ],
)
def test_an_adaptive_coefficient_follows_its_target_by_hand(kl, expected):
    config = KLControlConfig(type="adaptive", kl_coef=0.5, target_kl=0.1, horizon=640)
    assert next_kl_coef(0.5, kl=kl, num_trajectories=64, config=config) == pytest.approx(expected)


def test_an_adaptive_coefficient_stays_positive_under_a_horizon_shorter_than_a_step():
    config = KLControlConfig(type="adaptive", kl_coef=0.5, target_kl=0.1, horizon=10)
    assert next_kl_coef(0.5, kl=0.0, num_trajectories=640, config=config) == pytest.approx(0.4)


def test_a_fixed_coefficient_stays():
    assert next_kl_coef(0.5, kl=9.0, num_trajectories=64, config=KLControlConfig(kl_coef=0.5)) == 0.5


# ----------------------------------------------------------------------------------- weights between engine and trainer


def weighted(level: str) -> tuple[list[float], dict[str, float]]:
    """Advantages of sampled tokens with ratios 2, 0.5 | 4, under threshold 1.5."""
    batch = batch_of([[1, 0, 1], [1]])
    log_2 = math.log(2)
    batch = batch.replace(
        old_log_probs_T=torch.tensor([7.0, -1.0, 7.0, -2.0, 7.0, -1.0]),
        rollout_log_probs_T=torch.tensor([0.0, -1 - log_2, 0.0, -2 + log_2, 0.0, -1 - 2 * log_2]),
        advantages_T=torch.tensor([0.0, 1.0, 0.0, -2.0, 0.0, 3.0]),
    )
    result, metrics = apply_rollout_weights(batch, threshold=1.5, level=level)
    assert result.advantages_T[~batch.loss_mask_T].abs().max() == 0
    return result.advantages_T[batch.loss_mask_T].tolist(), metrics


def test_importance_weights_are_each_tokens_own_ratio_cut_at_the_threshold():
    advantages, metrics = weighted("token")
    assert advantages == pytest.approx([1.5, -1.0, 4.5])
    assert metrics == pytest.approx(
        {
            "rollout_is/weight_mean": 3.5 / 3,
            "rollout_is/weight_min": 0.5,
            "rollout_is/ratio_max": 4.0,
            "rollout_is/truncated_fraction": 2 / 3,
            "rollout_is/effective_fraction": (3.5 / 3) ** 2 / (4.75 / 3),
        }
    )


def test_importance_weights_of_a_sequence_are_the_product_over_its_sampled_tokens():
    advantages, metrics = weighted("sequence")
    assert advantages == pytest.approx([1.0, -2.0, 4.5])
    assert metrics["rollout_is/truncated_fraction"] == pytest.approx(1 / 3)


def test_equal_log_probs_weight_nothing():
    batch = batch_of([[1, 0, 1]]).replace(advantages_T=torch.tensor([0.0, 1.0, 0.0, -2.0]))
    batch = batch.replace(old_log_probs_T=batch.rollout_log_probs_T)
    result, metrics = apply_rollout_weights(batch, threshold=2.0, level="token")
    assert torch.equal(result.advantages_T, batch.advantages_T) and metrics["rollout_is/effective_fraction"] == 1


# -------------------------------------------------------------------------------------------------------- losses


def clip_loss(ratio: float, advantage: float, **options) -> tuple[float, bool, float]:
    """Loss, whether it was clipped, and d loss / d log-prob of one token."""
    log_prob = torch.tensor([math.log(ratio)], requires_grad=True)
    bounds = {"clip_low": 0.2, "clip_high": 0.3} | options
    result = ppo_clip_loss(log_prob, torch.zeros(1), torch.tensor([advantage]), **bounds)
    result.loss_S.sum().backward()
    return result.loss_S.item(), bool(result.clipped_S), log_prob.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "gradient"),
    [
        (1.1, 2.0, -2.2, False, -2.2),
        (1.5, 2.0, -2.6, True, 0.0),  # high bound 1.3
        (0.5, 2.0, -1.0, False, -1.0),
        (0.5, -2.0, 1.6, True, 0.0),  # low bound 0.8
        (1.5, -2.0, 3.0, False, 3.0),
    ],
)
def test_clip_bounds_by_hand(ratio, advantage, loss, clipped, gradient):
    assert clip_loss(ratio, advantage) == pytest.approx((loss, clipped, gradient), abs=1e-5)


def test_dual_clip_bounds_the_loss_of_bad_tokens_that_became_likely():
    assert clip_loss(9.0, -2.0, clip_c=3.0) == pytest.approx((6.0, True, 0.0))
    assert clip_loss(2.0, -2.0, clip_c=3.0) == pytest.approx((4.0, False, 4.0), abs=1e-5)
    assert clip_loss(9.0, 2.0, clip_c=3.0) == pytest.approx((-2.6, True, 0.0), abs=1e-5)


@pytest.mark.parametrize("mode", LossAggMode)
def test_aggregation_equals_the_padded_formula_for_every_split(mode):
    batch = batch_of([[1, 0, 1], [1, 1, 1, 1], [0, 0], [0, 1]], masked=[False, False, False, False])
    loss_T = torch.arange(batch.num_tokens, dtype=torch.float32)
    padded = [loss_T[(batch.sequence_index_T == i) & batch.loss_mask_T].tolist() for i in range(len(batch))]
    padded = [row for row in padded if row]
    expected = {
        "token-mean": sum(map(sum, padded)) / sum(map(len, padded)),
        "seq-mean-token-sum": sum(map(sum, padded)) / len(padded),
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in padded) / len(padded),
        "seq-mean-token-sum-norm": sum(sum(row) / 50.0 for row in padded) / len(padded),
    }[mode]
    normalizer, totals = LossNormalizer(mode, norm_constant=50.0), BatchTotals.of(batch)
    for split in ([[0, 1, 2, 3]], [[0], [1], [2], [3]], [[3, 0], [2, 1]]):
        parts = [(batch.select(indices), loss_T[batch.token_positions(indices)]) for indices in split]
        total = sum(float((normalizer.weights(p, totals) * values[p.loss_mask_T]).sum()) for p, values in parts)
        assert total == pytest.approx(expected, rel=1e-6)


def test_sequences_without_sampled_tokens_and_faults_count_nowhere():
    batch = batch_of([[1, 1], [0, 0], [1]], masked=[False, False, True])
    assert BatchTotals.of(batch) == BatchTotals(num_tokens=2, num_sequences=1)


def test_an_unknown_aggregation_is_named():
    with pytest.raises(ConfigError, match="loss_agg_mode='mean': must be one of token-mean"):
        LossNormalizer("mean")


def test_values_within_the_bound_never_count_as_clipped():
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (torch.rand(100_000, generator=generator) for _ in range(3))
    values = old + 0.19 * (values - 0.5)
    assert not clipped_value_loss(values, old, returns, cliprange=0.2).clipped_S.any()


@pytest.mark.parametrize(
    ("value", "loss", "clipped", "gradient"),
    [
        (0.3, 0.5 * 0.7**2, False, -0.7),  # within 0.2 of the old value 0.4
        (0.9, 0.5 * 0.4**2, True, 0.0),  # kept at 0.6, which is further from the return 1
        (0.1, 0.5 * 0.9**2, False, -0.9),  # kept at 0.2, which is nearer
    ],
)
def test_the_value_loss_and_its_clip_by_hand(value, loss, clipped, gradient):
    values = torch.tensor([value], requires_grad=True)
    result = clipped_value_loss(values, torch.tensor([0.4]), torch.tensor([1.0]), cliprange=0.2)
    result.loss_S.sum().backward()
    seen = (result.loss_S.item(), bool(result.clipped_S), values.grad.item())
    assert seen == pytest.approx((loss, clipped, gradient), abs=1e-6)
    unclipped = clipped_value_loss(values, torch.tensor([0.4]), torch.tensor([1.0]), cliprange=None)
    assert unclipped.loss_S.item() == pytest.approx(0.5 * (value - 1) ** 2) and not unclipped.clipped_S
