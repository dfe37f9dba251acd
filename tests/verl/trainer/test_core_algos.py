from __future__ import annotations

import inspect
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.batches import batch_of, random_batch

from agentgym_rl.errors import ConfigError
from verl.config import ADV_ESTIMATORS, LOSS_AGG_MODES, AlgorithmConfig
from verl.protocol import DataProto
from verl.trainer.core_algos import (
    ADVANTAGE_ESTIMATORS,
    Advantages,
    BatchTotals,
    LossNormalizer,
    apply_kl_penalty,
    compute_advantages,
    discounted_returns,
    find_estimator,
    kl_estimate,
    ppo_clip_loss,
    whiten,
)

CASES = json.loads((Path(__file__).parents[2] / "cases" / "algorithms.json").read_text())
PER_TOKEN = [case for case in CASES["per_token"] if case["estimator"] in ADVANTAGE_ESTIMATORS]


def advantages_by_sequence(batch: DataProto, name: str, **options) -> list[float]:
    """The one advantage that all sampled tokens of a sequence share; 0 for a sequence without any."""
    result = compute_advantages(batch, AlgorithmConfig(adv_estimator=name, **options))
    rows = [result.select([index]) for index in range(len(batch))]
    values = [row.advantages_T[row.loss_mask_T].unique().tolist() or [0.0] for row in rows]
    assert all(len(value) == 1 for value in values)
    return [value[0] for value in values]


# -------------------------------------------------------------------------------------------------- worked cases


@pytest.mark.parametrize("case", PER_TOKEN, ids=lambda case: case["name"])
def test_returns_see_only_sampled_tokens(case):
    batch = batch_of([case["loss_mask"]], rewards=[case["rewards"]])
    returns = discounted_returns(batch.token_rewards_T, batch, case["gamma"])[1:].tolist()
    for seen, expected in zip(returns, case["expect"], strict=True):
        assert seen == pytest.approx(expected or 0.0, abs=1e-6)


@pytest.mark.parametrize("case", CASES["per_group"], ids=lambda case: case["name"])
def test_group_advantages(case):
    batch = batch_of(
        [[1, 0, 1]] * len(case["scores"]), scores=case["scores"], groups=case["groups"], masked=case.get("masked")
    )
    options = {key: case[key] for key in ("norm_adv_by_std_in_grpo",) if key in case}
    seen = advantages_by_sequence(batch, case["estimator"], **options)
    assert seen == pytest.approx(case["expect"], abs=case.get("tolerance", 1e-6))
    if not any(case["expect"]):
        assert seen == case["expect"]


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


# ---------------------------------------------------------------------------------------------------- properties


@given(st.permutations(range(8)))
@pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS))
def test_permuting_sequences_permutes_advantages(name, order):
    batch = batch_of(
        [[1, 0, 1], [1], [0, 1, 1, 1], [1, 1], [1], [0, 0, 1], [1, 1, 1], [1]],
        rewards=[[0.2, 0, 0.3], [1], [0, 0, 0, 0], [0, 1], [0], [0, 0, 0.5], [0, 0, 1], [0]],
        scores=[0.5, 1, 0, 1, 0, 0.5, 1, 0],
        groups=list("aabbaabb"),
        masked=[False] * 7 + [True],
    )
    config = AlgorithmConfig(adv_estimator=name, gamma=0.9)
    expected = compute_advantages(batch, config).select(order).advantages_T
    assert torch.allclose(compute_advantages(batch.select(order), config).advantages_T, expected, atol=1e-6)


@given(gamma=st.floats(0, 1), seed=st.integers(0, 1000))
def test_packed_returns_equal_a_padded_loop(gamma, seed):
    batch = random_batch([6, 1, 9, 4], seed=seed)
    rewards_T = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(seed))
    seen = discounted_returns(rewards_T, batch, gamma)
    for index in range(len(batch)):
        start, end = batch.offsets_B1[index : index + 2].tolist()
        running = 0.0
        for t in range(end - 1, start - 1, -1):
            if batch.loss_mask_T[t]:
                running = float(rewards_T[t]) + gamma * running
                assert seen[t] == pytest.approx(running, abs=1e-6)
            else:
                assert seen[t] == 0


def test_a_single_turn_gives_the_textbook_return():
    batch = batch_of([[1, 1, 1]], rewards=[[0, 0, 1]])
    assert discounted_returns(batch.token_rewards_T, batch, 0.5)[1:].tolist() == [0.25, 0.5, 1.0]


def test_whitening_leaves_mean_0_and_std_1_and_constants_at_0():
    values = whiten(torch.tensor([1.0, 2.0, 3.0, 6.0]))
    assert values.mean() == pytest.approx(0, abs=1e-7) and values.std() == pytest.approx(1, abs=1e-6)
    assert whiten(torch.full((7,), 0.35)).tolist() == [0.0] * 7
    assert whiten(torch.tensor([5.0])).tolist() == [0.0]


def test_the_baseline_is_taken_from_every_return_when_gamma_is_1():
    batch = batch_of([[1, 1], [1, 1]], rewards=[[0.5, 0.5], [0, 0]], scores=[1, 0], groups=["a", "a"])
    result = compute_advantages(batch, AlgorithmConfig(adv_estimator="reinforce_plus_plus_baseline"))
    assert result.returns_T.tolist() == pytest.approx([0, 0.5, 0.0, 0, -0.5, -0.5])


def test_constant_groups_give_the_baseline_estimator_nothing_to_learn():
    batch = batch_of([[1], [1, 1]] * 4, rewards=[[0.35], [0, 0.35]] * 4, scores=[0.35] * 8, groups=["a"] * 8)
    result = compute_advantages(batch, AlgorithmConfig(adv_estimator="reinforce_plus_plus_baseline"))
    assert result.advantages_T.abs().max() == 0


def test_scores_that_differ_by_less_than_float32_resolves_are_equal():
    batch = batch_of([[1]] * 3, scores=[0.35, 0.35 + 1e-8, 0.35 - 1e-8], groups=["a"] * 3)
    assert advantages_by_sequence(batch, "grpo") == [0, 0, 0]


def test_large_scores_that_differ_keep_their_signal():
    batch = batch_of([[1]] * 2, scores=[99.0, 100.0], groups=["a"] * 2)
    assert advantages_by_sequence(batch, "grpo") == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-5)


def halves(batch: DataProto, config: AlgorithmConfig) -> Advantages:
    return Advantages(batch.loss_mask_T * 0.5, batch.loss_mask_T * 0.5)


def one_per_sequence(batch: DataProto, config: AlgorithmConfig) -> Advantages:
    return Advantages(batch.scores_B, batch.scores_B)


@pytest.fixture
def own_estimators(tmp_path, monkeypatch):
    """A user's file ``own_estimators.py`` with this file's estimators, in a folder that Python imports from."""
    source = "\n".join(inspect.getsource(function) for function in (halves, one_per_sequence))
    imports = "from verl.trainer.core_algos import *\nfrom verl.trainer.core_algos import AlgorithmConfig, DataProto\n"
    (tmp_path / "own_estimators.py").write_text(imports + source)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_user_names_an_estimator_of_their_own_by_module_and_function(own_estimators):
    config = AlgorithmConfig(adv_estimator="own_estimators:halves")
    assert compute_advantages(batch_of([[0, 1]]), config).advantages_T.tolist() == [0, 0, 0.5]
    wrong = AlgorithmConfig(adv_estimator="own_estimators:one_per_sequence")
    with pytest.raises(ValueError, match=r"own_estimators:one_per_sequence gave advantages_T of shape \(1,\) for 3"):
        compute_advantages(batch_of([[0, 1]]), wrong)


@pytest.mark.parametrize("name", ["own_estimators:thirds", "no_such_module:halves", "own_estimators.halves:halves"])
def test_an_estimator_that_cannot_be_imported_is_a_configuration_error(own_estimators, name):
    with pytest.raises(ConfigError, match=rf"algorithm\.adv_estimator='{name}': must be one of grpo, .*: "):
        find_estimator(name)


@pytest.mark.parametrize("name", ["gpro", "gae", "own_estimators", ":halves", "own estimators:halves", ""])
def test_a_name_that_is_neither_known_nor_a_path_is_a_configuration_error(name):
    with pytest.raises(ConfigError, match=r"must be one of grpo, .*package\.module:function"):
        AlgorithmConfig(adv_estimator=name)


def test_the_names_that_the_config_allows_are_the_estimators_there_are():
    assert tuple(ADVANTAGE_ESTIMATORS) == ADV_ESTIMATORS


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


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
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
