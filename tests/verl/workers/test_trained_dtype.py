"""A model of 16 bit: what is trained of it is kept in float32, so that small updates are not rounded away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.batches import random_batch
from support.models import save_tiny_model
from torch.distributed.tensor import DTensor

from verl.config import ActorConfig, CriticConfig, CriticModelConfig, ModelConfig, OptimConfig, RefConfig
from verl.protocol import DataProto
from verl.trainer.core_algos import BatchTotals
from verl.utils.distributed import destroy_process_group
from verl.workers.actor import Actor
from verl.workers.critic import Critic
from verl.workers.language_model import LanguageModelTrainer
from verl.workers.packed_model import MicroBatchLimits
from verl.workers.reference import Reference
from verl.workers.sft import SupervisedTrainer

KINDS = {"whole": {}, "adapter": {"lora_rank": 4}, "frozen": {"freeze": ["model.embed_tokens.*", "*.bias"]}}
"""How a model is trained, and what its config says then."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    destroy_process_group()


def supervised(folder: Path, dtype: str = "bfloat16", *, lr: float = 1e-6, **options) -> SupervisedTrainer:
    return SupervisedTrainer(
        ModelConfig(path=str(folder), dtype=dtype, **options),
        OptimConfig(lr=lr, weight_decay=0.0),
        MicroBatchLimits(),
        device="cpu",
        total_updates=100,
    )


def critic_of_16_bit(folder: Path) -> Critic:
    policy = ModelConfig(path=str(folder), dtype="bfloat16", lora_rank=4)
    config = CriticConfig(optim=OptimConfig(lr=1e-6, weight_decay=0.0), cliprange_value=None)
    model = CriticModelConfig().resolved(policy)
    return Critic(model, config, device="cpu", total_updates=10, loss_norm_constant=1.0)


def all_ids() -> DataProto:
    """A batch with every id of the vocabulary in it."""
    batch = random_batch([40, 40, 40], sampled_share=0.7)
    batch.input_ids_T[:64] = torch.arange(64)
    return batch


def trained(trainer: LanguageModelTrainer) -> dict[str, torch.Tensor]:
    return {
        name: (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().clone()
        for name, parameter in trainer.module.named_parameters()
        if parameter.requires_grad
    }


def least_changed(trainer: LanguageModelTrainer, before: dict[str, torch.Tensor]) -> float:
    """The smallest share of changed numbers in a trained weight."""
    return min(float((after != before[name]).float().mean()) for name, after in trained(trainer).items())


@pytest.mark.parametrize("kind", KINDS)
def test_small_updates_move_every_trained_weight(folder, kind):
    trainer, batch = supervised(folder, **KINDS[kind]), all_ids()
    before = trained(trainer)
    for _ in range(3):
        trainer.update(batch, BatchTotals.of(batch))
    assert least_changed(trainer, before) > 0.95
    state = [tensor for each in trainer._optimizer.state.values() for tensor in each.values()]
    assert {tensor.dtype for tensor in (*trained(trainer).values(), *state)} == {torch.float32}
    frozen = {p.dtype for p in trainer.module.parameters() if not p.requires_grad}
    assert frozen == ({torch.bfloat16} if kind != "whole" else set())


def test_small_updates_move_every_weight_of_a_critic(folder):
    critic, batch = critic_of_16_bit(folder), all_ids()
    generator = torch.Generator().manual_seed(0)
    returns_T = torch.rand(batch.num_tokens, generator=generator) * batch.loss_mask_T
    batch = batch.replace(returns_T=returns_T, values_T=torch.zeros(batch.num_tokens))
    before = trained(critic)
    for _ in range(3):
        critic.update([batch], [BatchTotals.of(batch)])
    assert least_changed(critic, before) > 0.9
    assert {tensor.dtype for tensor in trained(critic).values()} == {torch.float32}


@pytest.mark.parametrize(("kind", "lr"), [("whole", 1e-5), ("adapter", 1e-4)])
def test_the_loss_falls_as_in_float32(folder, kind, lr):
    batch = all_ids()
    losses = {}
    for dtype in ("float32", "bfloat16"):
        trainer = supervised(folder, dtype, lr=lr, **KINDS[kind])
        losses[dtype] = [trainer.update(batch, BatchTotals.of(batch))["train/loss"] for _ in range(50)]
    exact, rounded = losses["float32"], losses["bfloat16"]
    assert exact[0] - exact[-1] > 0.05
    assert rounded[0] - rounded[-1] == pytest.approx(exact[0] - exact[-1], rel=0.2)


@pytest.mark.parametrize("recomputes", [False, True])
def test_training_computes_in_16_bit_and_begins_at_the_reference_to_the_last_bit(folder, recomputes):
    config = ModelConfig(path=str(folder), dtype="bfloat16", enable_gradient_checkpointing=recomputes)
    actor = Actor(config, ActorConfig(), device="cpu", temperature=0.7, total_updates=1, loss_norm_constant=1.0)
    batch = random_batch([12, 20, 7])
    reference = Reference(config, RefConfig(), device="cpu", temperature=0.7)
    assert torch.equal(actor.log_probs(batch), reference.log_probs(batch))
    assert actor.update([batch], [BatchTotals.of(batch)])["actor/grad_norm"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_of_16_bit_and_a_checkpoint_keeps_all_bits(folder, kind, tmp_path):
    trainer, batch = supervised(folder, **KINDS[kind]), all_ids()
    for _ in range(2):
        trainer.update(batch, BatchTotals.of(batch))
    trainer.save(tmp_path / "model")
    trainer.export_huggingface(tmp_path / "huggingface")
    assert {t.dtype for t in load_file(tmp_path / "huggingface" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "huggingface" / "config.json").read_text())["dtype"] == "bfloat16"
    if kind == "adapter":
        adapter = load_file(tmp_path / "lora_adapter" / "adapter_model.safetensors")
        assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}
    resumed = supervised(folder, **KINDS[kind])
    resumed.load(tmp_path / "model")
    before = trained(trainer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trained(resumed).items())
    assert trainer.update(batch, BatchTotals.of(batch)) == resumed.update(batch, BatchTotals.of(batch))
