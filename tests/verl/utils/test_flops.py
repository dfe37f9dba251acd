"""Operations counted by hand, and peaks found by what drivers call their devices."""

from __future__ import annotations

import dataclasses

import pytest
from support.models import tiny_qwen2

from verl.utils.flops import ModelSize, model_size, peak_flops

SIZE = ModelSize(num_body_weights=100, num_head_weights=10, num_layers=2, attention_width=3, trained_share=1.0)


def test_a_forward_pass_of_two_sequences_by_hand() -> None:
    # Matrices 2 x 100 x (5 + 2) = 1400; attention 2 x 2 layers x 3 wide x (25 + 4) = 348; output 2 x 10 x 3 = 60.
    assert SIZE.forward_flops([5, 2], num_sampled=3) == 1400 + 348 + 60


def test_training_costs_three_forward_passes_and_adapters_two() -> None:
    forward = SIZE.forward_flops([5, 2], num_sampled=3)
    assert SIZE.training_flops([5, 2], num_sampled=3) == 3 * forward
    adapters = dataclasses.replace(SIZE, trained_share=0.01)
    assert adapters.training_flops([5, 2], num_sampled=3) == pytest.approx(2.01 * forward)


def test_the_size_of_a_model_by_hand() -> None:
    # 32 wide, 64 inside, 4 heads of 8 with 2 for keys and values, 2 layers, 64 words with tied embeddings.
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64
    assert model_size(tiny_qwen2()) == ModelSize(2 * layer, 64 * 32, 2, 32, 1.0)


def test_frozen_layers_are_counted_as_such() -> None:
    model = tiny_qwen2()
    model.base_model.layers[0].requires_grad_(False)
    assert model_size(model).trained_share == 0.5


def test_of_experts_only_those_in_use_are_counted() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
    )
    router, experts, attention = 8 * 32, 2 * 3 * 32 * 16, 2 * 32 * 64 + 2 * 32 * 32
    size = model_size(Qwen3MoeForCausalLM(config))
    assert size.num_body_weights == router + experts + attention and size.attention_width == 64


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_peaks_by_device(name: str, tflops: float) -> None:
    assert peak_flops(name) == tflops * 1e12


def test_a_device_that_is_not_known_has_no_peak() -> None:
    assert peak_flops("cpu") is None
