"""Same data, same result: on one and two ranks, for any micro-batch, packed or padded, rows whole or shared."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import save_tiny_model, tiny_qwen2
from support.ranks import run_ranks
from support.training_program import BROKEN, TEMPERATURE, TRAININGS, UPDATES, fixed_batch, train

from agentgym_rl.errors import ConfigError
from verl.models.sequence_parallel import check_heads
from verl.protocol import DataProto
from verl.trainer.core_algos import kl_estimate, ppo_clip_loss
from verl.utils import distributed
from verl.utils.balancing import balanced_partition

FULL_KL = [name for name in TRAININGS if name.startswith("full_kl")]
FULL = [
    name
    for name, training in TRAININGS.items()
    if name not in FULL_KL and (not training.model or "enable_gradient" in str(training.model))
]
LORA = [name for name in TRAININGS if name.startswith("lora")]
FROZEN = [name for name in TRAININGS if name.startswith("frozen")]
BFLOAT16 = {"bfloat16": "packed", "bfloat16_lora": "lora", "bfloat16_frozen": "frozen"}
"""Trainings with frozen weights and matrix products of 16 bit, and the same in float32."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def two_ranks(model, tmp_path_factory) -> Path:
    """The results of both ranks, ``<training>_<rank>.pt``."""
    out = tmp_path_factory.mktemp("two")
    run_ranks("support.training_program", 2, model, out)
    return out


def on_one_rank(name: str, model: Path) -> dict[str, Any]:
    training = TRAININGS[name]
    options = {key: value for key, value in training.actor.items() if key != "ulysses_sequence_parallel_size"}
    return train(type(training)(options, training.model), str(model), fixed_batch(), 0, 1)


@pytest.fixture(scope="module")
def one_rank(model) -> dict[str, dict[str, Any]]:
    names = ("packed", "lora", "frozen", "micro_1", "micro_2", "micro_4", "full_kl", "full_kl_lora", *BFLOAT16)
    try:
        return {name: on_one_rank(name, model) for name in names}
    finally:
        distributed.destroy_process_group()  # One rank too has a group in mixed precision.


def results(folder: Path, name: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{name}_{rank}.pt") for rank in (0, 1)]


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for metrics, other_metrics in zip(one["metrics"], other["metrics"], strict=True):
        assert metrics == pytest.approx(other_metrics, rel=1e-4, abs=1e-5)
    assert one["weights"].keys() == other["weights"].keys()
    for name, tensor in one["weights"].items():
        assert torch.allclose(tensor, other["weights"][name], atol=1e-5), name


@pytest.mark.parametrize("name", FULL)
def test_two_ranks_train_as_one_whatever_the_micro_batches(two_ranks, one_rank, name):
    for result in results(two_ranks, name):
        assert_same(result, one_rank["packed"])


@pytest.mark.parametrize("name", ["micro_1", "micro_2", "micro_4"])
def test_one_rank_trains_the_same_in_micro_batches(one_rank, name):
    assert_same(one_rank[name], one_rank["packed"])


@pytest.mark.parametrize("name", LORA)
def test_an_adapter_trains_the_same_on_two_ranks_and_the_reference_stays_where_it_was(two_ranks, one_rank, name):
    for result in (*results(two_ranks, name), one_rank["lora"]):
        assert_same(result, one_rank["lora"])
        assert result["reference_moved"] == 0
    assert furthest(one_rank["lora"]["weights"]) > 1e-3


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_weights_train_the_same_on_two_ranks(two_ranks, one_rank, name):
    for result in results(two_ranks, name):
        assert_same(result, one_rank["frozen"])
    change = changes(one_rank["frozen"]["weights"])
    frozen = {name for name in change if "embed_tokens" in name or name.endswith(".bias")}
    assert all((change[name] == 0) == (name in frozen) for name in change) and frozen


@pytest.mark.parametrize(("name", "exact"), BFLOAT16.items())
def test_a_model_of_16_bit_trains_the_same_on_two_ranks_and_nearly_as_in_float32(two_ranks, one_rank, name, exact):
    one = one_rank[name]
    assert_near(one["metrics"], one_rank[exact]["metrics"], grad_norm=0.1, pg_loss=0.02)
    for result in results(two_ranks, name):
        assert_near(result["metrics"], one["metrics"], grad_norm=0.05, pg_loss=0.005)
        assert result["reference_moved"] == one["reference_moved"] == 0
        for weight, tensor in result["weights"].items():
            assert tensor.dtype == torch.bfloat16
            # Where a gradient is about 0, its rounding decides which way the weight goes.
            assert (tensor - one["weights"][weight]).abs().mean() < 1e-3, weight


def assert_near(
    one: list[dict[str, float]], other: list[dict[str, float]], *, grad_norm: float, pg_loss: float
) -> None:
    """Gradient norms are as near as this share of themselves in all updates, losses as near as this."""
    for metrics, other_metrics in zip(one, other, strict=True):
        assert metrics["actor/grad_norm"] == pytest.approx(other_metrics["actor/grad_norm"], rel=grad_norm)
        assert metrics["actor/pg_loss"] == pytest.approx(other_metrics["actor/pg_loss"], abs=pg_loss)


@pytest.mark.parametrize("name", FULL_KL)
def test_the_kl_over_the_whole_vocabulary_trains_the_same_on_two_ranks(two_ranks, one_rank, name):
    one = one_rank["full_kl_lora" if "lora" in name else "full_kl"]
    rows = balanced_partition(fixed_batch().lengths_B.tolist(), 2)
    for result, share in zip(results(two_ranks, name), rows, strict=True):
        assert_same(result, one)
        whole = one["full_kl"].split(fixed_batch().lengths_B.tolist())
        assert torch.allclose(result["full_kl"], torch.cat([whole[row] for row in share]), atol=1e-5)
    assert one["full_kl"].max() > 1e-3
    assert one["reference_moved"] == 0


@pytest.mark.parametrize(("name", "kl_type"), [("packed", "low_var_kl"), ("full_kl", "full")])
def test_padded_rows_and_full_logits_train_to_the_same_weights(one_rank, name, kl_type):
    expected = padded_training(fixed_batch(), kl_type)
    for weight, tensor in one_rank[name]["weights"].items():
        assert torch.allclose(tensor, expected[weight], atol=1e-5), weight


def test_log_probs_come_back_to_the_rank_whose_share_they_are(two_ranks, one_rank):
    lengths = fixed_batch().lengths_B.tolist()
    whole = one_rank["packed"]["log_probs"].split(lengths)
    for name in FULL:
        for result, rows in zip(results(two_ranks, name), balanced_partition(lengths, 2), strict=True):
            expected = torch.cat([whole[row] for row in rows])
            assert torch.allclose(result["log_probs"], expected, atol=1e-4), name


@pytest.mark.parametrize("factor", BROKEN)
def test_an_update_that_is_not_finite_on_one_rank_is_skipped_on_all_and_the_next_one_is_made(two_ranks, factor):
    one, other = results(two_ranks, f"broken_{factor:g}")
    assert one["skipped"] == other["skipped"] == [1, 0]
    for weights, other_weights in zip(one["weights"], other["weights"], strict=True):
        assert all(torch.equal(tensor, other_weights[name]) for name, tensor in weights.items())
    broken, sound = one["weights"]
    assert furthest(broken) == 0 and furthest(sound) > 1e-4


def test_heads_that_the_ranks_cannot_share_are_refused():
    config = tiny_qwen2().config  # 4 heads, 2 key/value heads
    check_heads(config, 2)
    check_heads(config, 4)
    with pytest.raises(ConfigError, match=r"ulysses_sequence_parallel_size=3: .* 4 heads and 2 key/value heads"):
        check_heads(config, 3)


# ------------------------------------------------------------------------------------------------------ by textbook


def changes(weights: dict[str, torch.Tensor]) -> dict[str, float]:
    """How far each weight is from where training began."""
    begun = dict(tiny_qwen2().named_parameters())
    return {name: float((tensor - begun[name].detach()).abs().max()) for name, tensor in weights.items()}


def furthest(weights: dict[str, torch.Tensor]) -> float:
    return max(changes(weights).values())


def padded_training(batch: DataProto, kl_type: str) -> dict[str, torch.Tensor]:
    """The same three updates on one padded batch, with full logits and an attention mask, by torch alone."""
    model = tiny_qwen2()
    with torch.no_grad():
        reference_S, _, reference_SV = padded_log_probs(model, batch)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}])
    sampled = batch.loss_mask_T
    lengths_S = batch.sampled_lengths_B[batch.sequence_index_T[sampled]]
    weights_S = 1 / lengths_S / (batch.sampled_lengths_B > 0).sum()
    for update in range(UPDATES):
        log_probs_S, entropy_S, log_p_SV = padded_log_probs(model, batch)
        policy = ppo_clip_loss(
            log_probs_S, batch.old_log_probs_T[sampled], batch.advantages_T[sampled], clip_low=0.2, clip_high=0.2
        )
        if kl_type == "full":
            kl_S = (log_p_SV.exp() * (log_p_SV - reference_SV)).sum(-1)
        else:
            kl_S = kl_estimate(log_probs_S, reference_S, kl_type)
        loss = (weights_S * (policy.loss_S + 0.1 * kl_S - 0.01 * entropy_S)).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # One update of warm-up to 1e-3, then half a cosine over the two that are left.
        rate = 1e-3 if update == 0 else 1e-3 * 0.5 * (1 + math.cos(math.pi * (update - 1) / (UPDATES - 1)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def padded_log_probs(model, batch: DataProto) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs ``S``, entropies ``S`` and log-probs of all tokens from one batch of rows padded on the right."""
    rows = batch.input_ids_T.split(batch.lengths_B.tolist())
    ids_BT = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    mask_BT = torch.arange(ids_BT.shape[1]) < batch.lengths_B[:, None]
    log_p = (model(input_ids=ids_BT, attention_mask=mask_BT.long()).logits / TEMPERATURE).log_softmax(-1)
    token_log_probs_BT = torch.zeros(ids_BT.shape)
    entropy_BT = torch.zeros(ids_BT.shape)
    token_log_probs_BT[:, 1:] = log_p[:, :-1].gather(-1, ids_BT[:, 1:, None])[..., 0]
    entropy_BT[:, 1:] = -(log_p.exp() * log_p).sum(-1)[:, :-1]
    sampled = batch.loss_mask_T
    before_BTV = log_p.roll(1, dims=1)
    return token_log_probs_BT[mask_BT][sampled], entropy_BT[mask_BT][sampled], before_BTV[mask_BT][sampled]
