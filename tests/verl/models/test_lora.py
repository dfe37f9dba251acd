from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from support.batches import random_batch
from support.models import save_tiny_model, tiny_qwen2
from transformers import AutoModelForCausalLM

from agentgym_rl.errors import ConfigError
from verl.config import ActorConfig, ModelConfig, OptimConfig
from verl.models.loading import prepare_for_training
from verl.models.lora import merged_weights, without_adapter
from verl.trainer.core_algos import BatchTotals
from verl.workers.actor import Actor


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def make_actor(folder, **options) -> Actor:
    return Actor(
        ModelConfig(path=str(folder), **{"lora_rank": 4} | options),
        ActorConfig(optim=OptimConfig(lr=1e-2)),
        device="cpu",
        temperature=1.0,
        total_updates=10,
        loss_norm_constant=1.0,
    )


def trained_actor(folder, **options) -> Actor:
    actor, batch = make_actor(folder, **options), random_batch([12, 20, 7])
    actor.update([batch], [BatchTotals.of(batch)])
    return actor


def test_training_begins_at_the_model_itself_and_moves_the_adapter_alone(folder):
    actor, batch = make_actor(folder), random_batch([12, 20])
    before = {name: tensor.clone() for name, tensor in actor.model.named_parameters()}
    assert torch.equal(actor.log_probs(batch), actor.base_log_probs(batch))
    actor.update([batch], [BatchTotals.of(batch)])
    moved = {name for name, tensor in actor.model.named_parameters() if not torch.equal(tensor, before[name])}
    assert moved and all(".lora_" in name for name in moved)
    assert not torch.allclose(actor.log_probs(batch), actor.base_log_probs(batch), atol=1e-3)


def test_the_model_without_its_adapter_is_the_one_that_training_began_with(folder):
    actor, batch = trained_actor(folder), random_batch([12, 20])
    fresh = make_actor(folder).log_probs(batch)
    assert torch.equal(actor.base_log_probs(batch), fresh)
    with pytest.raises(RuntimeError, match="stop"), without_adapter(actor.module):
        raise RuntimeError("stop")
    assert not torch.equal(actor.log_probs(batch), fresh)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"], r".*layers\.1\.self_attn\.[qv]_proj"])
def test_merged_weights_give_the_adapted_log_probs_under_the_models_own_names(folder, targets):
    actor, batch = trained_actor(folder, target_modules=targets), random_batch([12, 20])
    merged = dict(actor.state_dict_items())
    assert list(merged) == [name for name, _ in tiny_qwen2().named_parameters()]
    plain = Actor(
        ModelConfig(path=str(folder)),
        ActorConfig(),
        device="cpu",
        temperature=1.0,
        total_updates=1,
        loss_norm_constant=1.0,
    )
    plain.model.load_state_dict(merged, strict=False)
    assert torch.allclose(plain.log_probs(batch), actor.log_probs(batch), atol=1e-5)


def test_an_export_is_the_merged_model_with_the_adapter_beside_it(folder, tmp_path):
    actor, ids = trained_actor(folder), torch.arange(2, 12)[None]
    actor.export_huggingface(tmp_path / "huggingface")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(tmp_path / "lora_adapter"))
    assert torch.allclose(merged(ids).logits, adapted(ids).logits, atol=1e-5)
    assert not torch.allclose(merged(ids).logits, tiny_qwen2()(ids).logits, atol=1e-3)


def test_an_adapter_resumes_to_the_last_bit(folder, tmp_path):
    batch = random_batch([12, 20], seed=3)
    actor = trained_actor(folder)
    actor.save(tmp_path / "actor")
    resumed = make_actor(folder)
    resumed.load(tmp_path / "actor")
    results = [each.update([batch], [BatchTotals.of(batch)]) for each in (actor, resumed)]
    assert results[0] == results[1]
    assert all(torch.equal(a, b) for a, b in zip(actor.model.parameters(), resumed.model.parameters(), strict=True))


@pytest.mark.parametrize("targets", [["no_such_layer"], ["embed_tokens"], ["lm_head"]])
def test_targets_that_cannot_have_an_adapter_are_refused_by_name(targets):
    config = ModelConfig(path="unused", lora_rank=2, target_modules=targets)
    with pytest.raises(ConfigError, match=rf"model\.target_modules=.*{targets[0]}"):
        prepare_for_training(tiny_qwen2(), config)


def test_a_model_without_adapter_is_itself_merged():
    model = tiny_qwen2()
    merged = dict(merged_weights(model, lambda tensor: tensor))
    assert merged.keys() == dict(model.named_parameters()).keys()
