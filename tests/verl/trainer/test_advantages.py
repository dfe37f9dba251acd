"""Advantages against numbers worked by hand, against plain loops, and under what must not change them."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import batch_of, random_batch

from agentgym_rl.errors import ConfigError
from verl.config import ADV_ESTIMATORS, AlgorithmConfig, GiGPOConfig
from verl.protocol import DataProto
from verl.trainer.core_algos import (
    ADVANTAGE_ESTIMATORS,
    Advantages,
    SampledTokens,
    Turns,
    compute_advantages,
    discounted_returns,
    discounts,
    find_estimator,
    gae_advantages,
    scan,
    whiten_,
)
from verl.trainer.core_algos.scan import BLOCK, Decay, suffix_sums

CASES = json.loads((Path(__file__).parents[2] / "cases" / "algorithms.json").read_text())


def advantages_by_sequence(batch: DataProto, name: str, **options) -> list[float]:
    """The one advantage that all sampled tokens of a sequence share; 0 for a sequence without any."""
    result = compute_advantages(batch, AlgorithmConfig(adv_estimator=name, **options))
    rows = [result.select([index]) for index in range(len(batch))]
    values = [row.advantages_T[row.loss_mask_T].unique().tolist() or [0.0] for row in rows]
    assert all(len(value) == 1 for value in values)
    return [value[0] for value in values]


def unwhitened_gae(batch: DataProto, **options) -> list[float]:
    """``S``: advantages of `gae` before they are whitened."""
    config, sampled = AlgorithmConfig(adv_estimator="gae", **options), SampledTokens.of(batch)
    return gae_advantages(
        sampled.take(batch.token_rewards_T),
        sampled.take(batch.values_T),
        discounts(batch, sampled, config),
        config.lam,
    ).tolist()


def returns_of(batch: DataProto, **options) -> list[float]:
    """``S``: discounted returns."""
    config = AlgorithmConfig(adv_estimator="reinforce_plus_plus", **options)
    return discounted_returns(batch.token_rewards_T, batch, config)[batch.loss_mask_T].tolist()


def a_batch_of_turns(seed: int) -> DataProto:
    """Messages of one to four tokens, of which any may be sampled but a sequence's first; some sequences have none."""
    draw = np.random.default_rng(seed)
    masks, messages, rewards = [], [], []
    for _ in range(draw.integers(1, 5)):
        lengths = draw.integers(1, 5, draw.integers(1, 6))
        messages.append(np.repeat(np.arange(1, len(lengths) + 1), lengths).tolist())
        masks.append((draw.random(sum(lengths)) < draw.choice([0.0, 0.5, 1.0])).astype(int).tolist())
        rewards.append((draw.integers(-2, 3, sum(lengths)) * 0.5).tolist())
    return batch_of(masks, messages=messages, rewards=rewards)


def turns_by_a_loop(batch: DataProto) -> list[tuple[int, list[int]]]:
    """Sequence and places of the sampled tokens of each turn."""
    turns: dict[tuple[int, int], list[int]] = {}
    for sequence, (start, end) in enumerate(zip(batch.offsets_B1[:-1], batch.offsets_B1[1:], strict=True)):
        for place in range(int(start), int(end)):
            if batch.loss_mask_T[place]:
                turns.setdefault((sequence, int(batch.message_ids_T[place])), []).append(place)
    return [(sequence, places) for (sequence, _), places in turns.items()]


@pytest.mark.parametrize("seed", range(60))
def test_turns_are_the_sampled_tokens_of_one_message_whatever_lies_between_them(seed):
    batch = a_batch_of_turns(seed)
    turns, expected = Turns.of(batch), turns_by_a_loop(batch)
    assert turns.sequence_U.tolist() == [sequence for sequence, _ in expected]
    assert turns.starts_U.tolist() == [places[0] for _, places in expected]
    assert turns.sums(batch.token_rewards_T).tolist() == [
        sum(batch.token_rewards_T[place].item() for place in places) for _, places in expected
    ]
    rank = {place: index for index, place in enumerate(batch.loss_mask_T.nonzero()[:, 0].tolist())}
    assert turns.last_S.tolist() == [rank[places[-1]] for _, places in expected]
    filled = torch.zeros(batch.num_tokens)
    for number, (_, places) in enumerate(expected, 1):
        filled[places] = number
    assert turns.place(torch.arange(1.0, len(expected) + 1)).tolist() == filled.tolist()


# -------------------------------------------------------------------------------------------------- worked cases


@pytest.mark.parametrize("case", CASES["per_token"], ids=lambda case: case["name"])
def test_tokens_that_were_not_sampled_neither_decay_reset_nor_bootstrap(case):
    values = [case["values"]] if "values" in case else None
    batch = batch_of([case["loss_mask"]], rewards=[case["rewards"]], values=values)
    if case["estimator"] == "gae":
        seen = unwhitened_gae(batch, gamma=case["gamma"], lam=case["lam"])
    else:
        seen = returns_of(batch, gamma=case["gamma"])
    expected = [value for value in case["expect"] if value is not None]
    assert seen == pytest.approx(expected, abs=case.get("tolerance", 1e-6))


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


# ---------------------------------------------------------------------------------------------------- properties


def mixed_batch() -> DataProto:
    """Two interleaved groups of four, the last a fault, with everything that any estimator asks for."""
    masks = [[1, 0, 1], [1], [0, 1, 1, 1], [1, 1], [1], [0, 0, 1], [1, 1, 1], [1]]
    return batch_of(
        masks,
        rewards=[[0.2, 0, 0.3], [1], [0, 0, 0, 0], [0, 1], [0], [0, 0, 0.5], [0, 0, 1], [0]],
        scores=[0.5, 1, 0, 1, 0, 0.5, 1, 0],
        groups=list("aabbaabb"),
        masked=[False] * 7 + [True],
        values=[[0.1 * (row + column) for column in range(len(mask))] for row, mask in enumerate(masks)],
        messages=[[1, 2, 3], [1], [2, 3, 3, 5], [1, 1], [1], [2, 2, 3], [1, 3, 3], [1]],
        anchors=[[4, 0, 5], [4], [0, 5, 5, 4], [4, 4], [4], [0, 0, 5], [4, 5, 5], [4]],
        baselines=[0.5, 0.5, 0.25, 0.25, 0.5, 0.5, 0.25, math.nan],
    )


@settings(deadline=None)
@given(st.permutations(range(8)))
@pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS))
def test_permuting_sequences_permutes_advantages(name, order):
    batch, config = mixed_batch(), AlgorithmConfig(adv_estimator=name, gamma=1.0 if name == "gigpo" else 0.9, lam=0.8)
    expected = compute_advantages(batch, config, with_returns=True).select(order)
    seen = compute_advantages(batch.select(order), config, with_returns=True)
    assert torch.allclose(seen.advantages_T, expected.advantages_T, atol=1e-6)
    assert torch.allclose(seen.returns_T, expected.returns_T, atol=1e-6)
    assert expected.advantages_T.abs().max() > 0


@pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS))
def test_what_stands_on_other_tokens_changes_nothing(name):
    batch, config = mixed_batch(), AlgorithmConfig(adv_estimator=name, lam=0.8)
    noise_T = torch.where(batch.loss_mask_T, 0.0, 1000.0)
    disturbed = batch.replace(token_rewards_T=batch.token_rewards_T + noise_T, values_T=batch.values_T + noise_T)
    expected, seen = compute_advantages(batch, config), compute_advantages(disturbed, config)
    assert torch.equal(seen.advantages_T, expected.advantages_T)
    assert expected.advantages_T[~batch.loss_mask_T].abs().max() == 0


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 3 * BLOCK), min_size=1, max_size=6),
    decay=st.sampled_from([0.0, 0.3, 0.99, 1.0]),
    other=st.sampled_from([0.0, 0.7, 1.0]),
    seed=st.integers(0, 1000),
    few=st.sampled_from([1, scan._FEW]),
)
def test_suffix_sums_equal_a_plain_loop(lengths, decay, other, seed, few):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    decays = torch.where(torch.rand(sum(lengths), generator=generator) < 0.1, decay * other, decay).double()
    decays[torch.tensor(lengths).cumsum(0) - 1] = 0.0
    expected, running = [], 0.0
    for value, factor in zip(reversed(values.tolist()), reversed(decays.tolist()), strict=True):
        running = value + factor * running
        expected.append(running)
    odd = np.flatnonzero(decays.numpy() != decay)
    with mock.patch.object(scan, "_FEW", few):
        sums = suffix_sums(values, Decay(decay, odd, decays[odd]))
    assert sums.tolist() == pytest.approx(expected[::-1], abs=1e-9)


def alike(decay: float) -> Decay:
    return Decay(decay, np.zeros(0, np.int64), torch.zeros(0))


@pytest.mark.parametrize("few", [1, scan._FEW])
def test_a_decay_that_is_an_integer_leaves_the_others_as_they_are(few):
    with mock.patch.object(scan, "_FEW", few):
        sums = suffix_sums(torch.ones(4), Decay(1, np.array([1, 3]), torch.tensor([0.5, 0.0]).double()))
    assert sums.tolist() == [2.0 + 0.5 * 2.0, 1.0 + 0.5 * 2.0, 2.0, 1.0]


def test_suffix_sums_keep_their_precision_over_thousands_of_tokens():
    values = torch.zeros(BLOCK**3 + 7)
    values[-1] = 1.0
    sums = suffix_sums(values, alike(0.9999))
    assert sums[0].item() == pytest.approx(0.9999 ** (len(values) - 1), rel=1e-3)
    assert suffix_sums(values, alike(1.0)).unique().tolist() == [1.0]


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, 2 * BLOCK, 2 * BLOCK + 1])
def test_nothing_comes_from_beyond_the_end(length, monkeypatch):
    monkeypatch.setattr(scan, "_FEW", 1)
    assert suffix_sums(torch.ones(length), alike(1.0)).tolist() == list(range(length, 0, -1))


@settings(max_examples=50, deadline=None)
@given(
    gamma=st.floats(0, 1), lam=st.floats(0, 1), gamma_turn=st.sampled_from([0.0, 0.5, 1.0]), seed=st.integers(0, 999)
)
def test_packed_advantages_equal_a_padded_loop(gamma, lam, gamma_turn, seed):
    batch = random_batch([6, 1, 40, 90], seed=seed, sampled_share=0.6)
    generator = torch.Generator().manual_seed(seed)
    rewards_T, values_T = (torch.randn(batch.num_tokens, generator=generator) for _ in range(2))
    messages_T = torch.randint(0, 2, (batch.num_tokens,), generator=generator).cumsum(0).int()
    batch = batch.replace(token_rewards_T=rewards_T, values_T=values_T, message_ids_T=messages_T)
    options = {"gamma": gamma, "gamma_turn": gamma_turn}
    advantages, returns = [], []
    for index in range(len(batch)):
        row = batch.select([index])
        advantage, total, next_value, next_message = 0.0, 0.0, 0.0, None
        columns: list[tuple[float, float]] = []
        for t in reversed(range(row.num_tokens)):
            if not row.loss_mask_T[t]:
                continue
            message = int(row.message_ids_T[t])
            decay = gamma * (gamma_turn if next_message not in (None, message) else 1.0)
            reward, value = float(row.token_rewards_T[t]), float(row.values_T[t])
            advantage = reward + decay * next_value - value + decay * lam * advantage
            total = reward + decay * total
            next_value, next_message = value, message
            columns.insert(0, (advantage, total))
        advantages += [column[0] for column in columns]
        returns += [column[1] for column in columns]
    assert unwhitened_gae(batch, lam=lam, **options) == pytest.approx(advantages, abs=1e-4)
    assert returns_of(batch, **options) == pytest.approx(returns, abs=1e-4)


def test_a_single_turn_gives_the_textbook_return():
    batch = batch_of([[1, 1, 1]], rewards=[[0, 0, 1]])
    assert returns_of(batch, gamma=0.5) == [0.25, 0.5, 1.0]


def test_with_lambda_1_and_without_discount_gae_is_the_return_minus_the_value():
    batch = batch_of([[1, 0, 1, 1]], rewards=[[0.5, 0, 0, 1]], values=[[0.3, 9, 0.2, 0.1]])
    assert unwhitened_gae(batch) == pytest.approx([1.5 - 0.3, 1 - 0.2, 1 - 0.1])


def test_gae_is_whitened_over_the_whole_batch_and_trains_values_towards_the_return():
    batch = batch_of([[1, 1], [0, 1]], rewards=[[0, 1], [0, 0]], values=[[0.5, 0.5], [9, 0.25]])
    result = compute_advantages(batch, AlgorithmConfig(adv_estimator="gae"))
    raw = torch.tensor([0.5, 0.5, -0.25])
    expected = (raw - raw.mean()) / raw.std()
    assert result.advantages_T[batch.loss_mask_T].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert result.returns_T.tolist() == [0, 1, 1, 0, 0, 0]


def test_a_discount_by_turn_counts_turns_and_not_tokens():
    batch = batch_of([[1, 1, 0, 1, 1, 0, 1]], rewards=[[0, 0, 0, 0, 0.5, 0, 1]], messages=[[2, 2, 3, 4, 4, 5, 6]])
    assert returns_of(batch, gamma_turn=0.9) == pytest.approx([1.26, 1.26, 1.4, 1.4, 1.0])
    # Per token and per turn together: 0.5 within a turn, 0.5 x 0.9 from one to the next.
    expected = [0.5 * 0.45 * 0.475, 0.45 * 0.475, 0.5 * 0.95, 0.5 + 0.45, 1.0]
    assert returns_of(batch, gamma=0.5, gamma_turn=0.9) == pytest.approx(expected)


def test_turns_without_an_observation_between_them_are_told_apart():
    batch = batch_of([[1, 1, 1]], rewards=[[0, 0, 1]], messages=[[2, 2, 4]])
    assert returns_of(batch, gamma_turn=0.5) == [0.5, 0.5, 1.0]


def test_remax_takes_the_greedy_score_from_every_return():
    batch = batch_of([[1, 0, 1], [1], [1]], rewards=[[0.25, 0, 0.5], [1], [1]], baselines=[0.5, 0.5, math.nan])
    result = compute_advantages(batch, AlgorithmConfig(adv_estimator="remax"), with_returns=True)
    assert result.advantages_T.tolist() == [0, 0.25, 0, 0, 0, 0.5, 0, 0]
    assert result.returns_T.tolist() == [0, 0.75, 0, 0.5, 0, 1, 0, 1]


def gigpo_by_hand(**options) -> list[float]:
    """Two episodes of one item: both begin at A; one goes on to B and wins, the other to C, back to A, and loses."""
    batch = batch_of(
        [[1, 0, 1, 1], [1, 0, 1, 0, 1]],
        rewards=[[0, 0, 0, 1], [0, 0, 0, 0, 0]],
        scores=[1, 0],
        groups=["a", "a"],
        messages=[[2, 3, 4, 4], [2, 3, 4, 5, 6]],
        anchors=[[65, 0, 66, 66], [65, 0, 67, 0, 65]],
    )
    config = AlgorithmConfig(adv_estimator="gigpo", gamma_turn=0.5, gigpo=GiGPOConfig(**options))
    return compute_advantages(batch, config).advantages_T[batch.loss_mask_T].tolist()


def test_gigpo_adds_to_the_episodes_advantage_that_of_turns_at_the_same_observation():
    # Returns at A: .5, 0, 0 (mean 1/6); B and C are alone. Episodes: +.5 and -.5.
    expected = [0.5 + 1 / 3, 0.5, 0.5, -0.5 - 1 / 6, -0.5, -0.5 - 1 / 6]
    assert gigpo_by_hand(mode="mean_norm") == pytest.approx(expected)


def test_gigpo_divides_by_the_standard_deviations_and_weighs_steps():
    episode, spread = math.sqrt(0.5), math.sqrt((1 / 9 + 2 / 36) / 2)
    step = [2 * (1 / 3) / spread, 2 * (-1 / 6) / spread]
    expected = [episode + step[0], episode, episode, -episode + step[1], -episode, -episode + step[1]]
    assert gigpo_by_hand(step_advantage_w=2.0) == pytest.approx(expected, abs=1e-4)


def test_gigpo_without_step_advantages_is_grpo():
    batch = mixed_batch()
    grpo = compute_advantages(batch, AlgorithmConfig(adv_estimator="grpo"))
    gigpo = compute_advantages(batch, AlgorithmConfig(adv_estimator="gigpo", gigpo=GiGPOConfig(step_advantage_w=0.0)))
    assert torch.allclose(gigpo.advantages_T, grpo.advantages_T)


def test_turns_of_different_items_are_never_compared():
    batch = batch_of(
        [[1], [1]], rewards=[[1], [0]], scores=[1, 0], groups=["a", "b"], messages=[[2], [2]], anchors=[[65], [65]]
    )
    result = compute_advantages(batch, AlgorithmConfig(adv_estimator="gigpo"))
    assert result.advantages_T.abs().max() == 0


@pytest.mark.parametrize(
    ("name", "missing"),
    [("gae", "values_T"), ("remax", "baselines_B"), ("gigpo", "anchor_ids_T"), ("gigpo", "message_ids_T")],
)
def test_what_an_estimator_lacks_is_named(name, missing):
    with pytest.raises(ValueError, match=missing):
        compute_advantages(mixed_batch().replace(**{missing: None}), AlgorithmConfig(adv_estimator=name))


@pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS))
def test_a_batch_in_which_nothing_was_sampled_has_no_advantages(name):
    batch = batch_of(
        [[0, 0], [0]],
        scores=[1, 0],
        groups=["a", "a"],
        values=[[1, 1], [1]],
        messages=[[1, 1], [1]],
        anchors=[[0, 0], [0]],
        baselines=[0, 0],
    )
    result = compute_advantages(batch, AlgorithmConfig(adv_estimator=name), with_returns=True)
    assert result.advantages_T.tolist() == result.returns_T.tolist() == [0.0] * 5


def test_whitening_leaves_mean_0_and_std_1_and_constants_at_0():
    values = whiten_(torch.tensor([1.0, 2.0, 3.0, 6.0]))
    assert values.mean() == pytest.approx(0, abs=1e-6) and values.std() == pytest.approx(1, abs=1e-6)
    assert whiten_(torch.full((7,), 0.35)).tolist() == [0.0] * 7
    assert whiten_(torch.tensor([5.0])).tolist() == [0.0]


def test_whitening_is_exact_over_millions_of_skewed_values():
    values = torch.rand(3_000_000, generator=torch.Generator().manual_seed(0)).pow(20) + 5
    expected = (values.double() - values.double().mean()) / values.double().std()
    assert (whiten_(values) - expected).abs().max() < 1e-4


def test_the_baseline_is_taken_from_every_return_when_gamma_is_1():
    batch = batch_of([[1, 1], [1, 1]], rewards=[[0.5, 0.5], [0, 0]], scores=[1, 0], groups=["a", "a"])
    result = compute_advantages(batch, AlgorithmConfig(adv_estimator="reinforce_plus_plus_baseline"))
    # Returns .5, 0, -.5, -.5: their mean is -1/8 and their sample variance 11/48.
    whitened = [value / math.sqrt(11 / 48) for value in (5 / 8, 1 / 8, -3 / 8, -3 / 8)]
    assert result.advantages_T[batch.loss_mask_T].tolist() == pytest.approx(whitened, abs=1e-6)


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
    return Advantages(batch.loss_mask_T * 0.5)


def one_per_sequence(batch: DataProto, config: AlgorithmConfig) -> Advantages:
    return Advantages(batch.scores_B)


@pytest.fixture
def own_estimators(tmp_path, monkeypatch):
    """A user's file ``own_estimators.py`` with this file's estimators, in a folder that Python imports from."""
    source = "\n".join(inspect.getsource(function) for function in (halves, one_per_sequence))
    imports = (
        "from verl.config import AlgorithmConfig\nfrom verl.protocol import DataProto\n"
        "from verl.trainer.core_algos import Advantages\n"
    )
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


@pytest.mark.parametrize("name", ["gpro", "own_estimators", ":halves", "own estimators:halves", ""])
def test_a_name_that_is_neither_known_nor_a_path_is_a_configuration_error(name):
    with pytest.raises(ConfigError, match=r"must be one of grpo, .*package\.module:function"):
        AlgorithmConfig(adv_estimator=name)


def test_the_names_that_the_config_allows_are_the_estimators_there_are():
    assert tuple(ADVANTAGE_ESTIMATORS) == ADV_ESTIMATORS
