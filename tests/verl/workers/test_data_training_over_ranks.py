"""Supervised and preference training: same data, same result, on one and two ranks, packed or one by one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.data_training_program import (
    LOSSES,
    OPTIM,
    PACKINGS,
    UPDATES,
    all_trainings,
    conversations,
    pairs,
)
from support.models import save_tiny_model, tiny_qwen2
from support.ranks import run_ranks

from verl.config import DPOAlgorithmConfig, ModelConfig
from verl.protocol import DataProto
from verl.workers.dpo import PreferenceTrainer, pair_ratios

KINDS = ("sft", *LOSSES, "sft_lora", "dpo_lora")
Results = Mapping[str, dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def on_one(model: Path) -> Results:
    torch.manual_seed(0)
    return all_trainings(str(model), 0, 1)


@pytest.fixture(scope="module")
def on_two(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    out = tmp_path_factory.mktemp("two")
    run_ranks("support.data_training_program", 2, model, out)
    return torch.load(out / "results.pt", weights_only=False)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for mine, theirs in zip(one["metrics"], other["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    for name, tensor in one["weights"].items():
        torch.testing.assert_close(tensor, other["weights"][name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "lora" not in kind])
def test_packing_changes_neither_loss_nor_weights(on_one: Results, kind: str) -> None:
    assert_same(on_one[f"{kind}/packed"], on_one[f"{kind}/one_by_one"])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "lora" not in kind])
def test_two_ranks_come_to_what_one_does(on_one: Results, on_two: Results, kind: str) -> None:
    for packing in PACKINGS:
        assert_same(on_two[f"{kind}/{packing}"], on_one[f"{kind}/one_by_one"])


@pytest.mark.parametrize("kind", ["sft_lora", "dpo_lora"])
def test_an_adapter_begins_as_the_model_and_learns(on_one: Results, on_two: Results, kind: str) -> None:
    plain = {"sft_lora": "sft", "dpo_lora": "sigmoid"}[kind]
    for results in (on_one, on_two):
        losses = [row["train/loss"] for row in results[f"{kind}/packed"]["metrics"]]
        assert losses[0] == pytest.approx(results[f"{plain}/packed"]["metrics"][0]["train/loss"], rel=1e-5)
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", KINDS)
def test_every_training_moves_the_weights(model: Path, on_one: Results, kind: str) -> None:
    first = tiny_qwen2().state_dict()["model.layers.0.self_attn.q_proj.weight"]
    moved = on_one[f"{kind}/packed"]["weights"]["model.layers.0.self_attn.q_proj.weight"]
    assert (moved - first).abs().max() > 1e-4


def test_supervised_updates_are_those_of_a_plain_loop_on_padded_rows(on_one: Results) -> None:
    batch, model = conversations(), tiny_qwen2()
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": OPTIM.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=OPTIM.lr)
    for update in range(UPDATES):
        columns = (column.split(batch.lengths_B.tolist()) for column in (batch.input_ids_T, batch.loss_mask_T))
        rows = list(zip(*columns, strict=True))
        ids_BT = torch.nn.utils.rnn.pad_sequence([ids for ids, _ in rows], batch_first=True)
        labels_BT = torch.nn.utils.rnn.pad_sequence(
            [torch.where(mask, ids, -100) for ids, mask in rows], batch_first=True, padding_value=-100
        )
        attention_BT = torch.arange(ids_BT.shape[1]) < batch.lengths_B[:, None]
        # transformers' own loss: mean over all labels that are not -100, each predicted from the position before.
        loss = model(input_ids=ids_BT, attention_mask=attention_BT.long(), labels=labels_BT).loss
        assert on_one["sft/packed"]["metrics"][update]["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for name, tensor in model.named_parameters():
        if name in on_one["sft/packed"]["weights"]:
            torch.testing.assert_close(on_one["sft/packed"]["weights"][name], tensor.detach(), rtol=0, atol=1e-5)


def test_a_micro_batch_never_separates_a_pair(model: Path) -> None:
    learner = preference_learner(model, max_token_len=30)
    for part in learner.packed.micro_batches(pairs()):
        assert part == [row for first in part[::2] for row in (first, first + 1)]


def test_a_batch_with_half_a_pair_is_refused(model: Path) -> None:
    batch: DataProto = pairs().select([0, 1, 2])
    with pytest.raises(ValueError, match="holds both sides of each"):
        pair_ratios(batch, torch.zeros(batch.num_sampled_tokens))


def preference_learner(model: Path, *, max_token_len: int) -> PreferenceTrainer:
    return PreferenceTrainer(
        ModelConfig(path=str(model)),
        OPTIM,
        DPOAlgorithmConfig(),
        device="cpu",
        total_updates=1,
        grad_clip=1.0,
        max_token_len=max_token_len,
    )
