from __future__ import annotations

import pytest
import torch
import transformers
from support.batches import random_batch
from support.models import tiny_qwen2

from verl.models.attention import PACKED_ATTENTION, Packing, packed_attention
from verl.models.policy import PolicyModule


def policy(num_kv_heads: int = 2, *, sliding_window: int | None = None) -> PolicyModule:
    model = tiny_qwen2(num_kv_heads=num_kv_heads)
    if sliding_window is not None:
        for layer in model.model.layers:
            layer.self_attn.sliding_window = sliding_window
    model.set_attn_implementation(PACKED_ATTENTION)
    return PolicyModule(model)


def test_a_packed_row_equals_its_sequences_run_alone_by_eager_attention():
    batch = random_batch([5, 17, 17, 3, 3, 3, 40, 17], sampled_share=1.0)
    packed = policy()(batch)[0]
    model = tiny_qwen2()
    model.set_attn_implementation("eager")
    alone = []
    for index in range(len(batch)):
        ids = batch.select([index]).input_ids_T[None]
        log_p = model(input_ids=ids).logits[0].log_softmax(-1)
        alone.append(log_p[:-1].gather(-1, ids[0, 1:, None])[:, 0])
    assert torch.allclose(packed, torch.cat(alone), atol=1e-5)


FAMILIES = [
    (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    (transformers.MistralConfig, transformers.MistralForCausalLM),
    (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
]


@pytest.mark.parametrize(("config_class", "model_class"), FAMILIES, ids=lambda value: value.__name__)
def test_other_model_families_take_packed_rows(config_class, model_class):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "vocab_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = model_class(config_class(**sizes, **heads, pad_token_id=0, initializer_range=0.2)).eval()
    batch = random_batch([5, 17, 40], sampled_share=1.0)
    model.set_attn_implementation("eager")
    ids = batch.select([2]).input_ids_T[None]
    log_p = model(input_ids=ids).logits[0].log_softmax(-1)
    model.set_attn_implementation(PACKED_ATTENTION)
    packed = PolicyModule(model)(batch)[0]
    assert torch.allclose(packed[-39:], log_p[:-1].gather(-1, ids[0, 1:, None])[:, 0], atol=1e-5)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_gradients_of_a_packed_row_are_the_sum_of_those_alone(num_kv_heads):
    batch = random_batch([5, 5, 17, 3, 3])
    module = policy(num_kv_heads)
    module(batch)[0].sum().backward()
    packed = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    for index in range(len(batch)):
        module(batch.select([index]))[0].sum().backward()
    for one, other in zip(packed, module.parameters(), strict=True):
        assert torch.allclose(one, other.grad, atol=1e-4, rtol=1e-4)


def test_no_mask_is_ever_built(monkeypatch):
    shapes = []
    original = torch.nn.functional.scaled_dot_product_attention

    def watch(query, *args, attn_mask=None, **kwargs):
        shapes.append((query.shape[0], query.shape[2]))
        assert attn_mask is None
        return original(query, *args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr("verl.models.attention.scaled_dot_product_attention", watch)
    policy()(random_batch([30, 30, 20]))
    assert shapes == [(2, 30), (1, 20)] * 2


def test_a_sliding_window_hides_what_lies_further_back():
    batch = random_batch([12], sampled_share=1.0)
    module = policy(sliding_window=3)
    changed = batch.replace(input_ids_T=batch.input_ids_T.clone())
    changed.input_ids_T[0] += 1
    before, after = module(batch)[0], module(changed)[0]
    # Two layers of window 3 reach 4 tokens back: the change at 0 is seen by positions 0..4, which predict tokens 1..5.
    assert not torch.allclose(before[4], after[4], atol=1e-6)
    assert torch.equal(before[5:], after[5:])


def test_a_mask_from_elsewhere_is_refused():
    q = torch.zeros(1, 1, 2, 4)
    packing = Packing.of(torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="packing replaces attention_mask"):
        packed_attention(torch.nn.Identity(), q, q, q, torch.zeros(1, 1, 2, 2), packing=packing)


def test_what_the_model_wants_and_packing_lacks_is_refused():
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="verl_packed has no 'softcap', which Identity asks for"):
        packed_attention(torch.nn.Identity(), q, q, q, None, packing=Packing.of(torch.tensor([0, 2])), softcap=50.0)
