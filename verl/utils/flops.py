"""Floating-point operations that a model needs, and how many a device can do: what utilisation is measured by.

Counted is what the mathematics needs, as in PaLM (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B):
2 operations per token and weight of a matrix, and the products of attention. What an implementation does beyond that
(recomputing activations, padding) is not counted, and the output layer only at sampled tokens, where it is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class ModelSize:
    """What the cost of a pass depends on."""

    num_body_weights: float
    """In matrices that every token passes: embeddings and output layer left out, experts by the share in use."""
    num_head_weights: int
    """In the output layer."""
    num_layers: int
    attention_width: int
    """Heads x dimension of a head."""
    trained_share: float
    """Of the body's weights; below 1 for adapters and frozen layers."""

    def forward_flops(self, lengths: Iterable[int], num_sampled: int) -> float:
        """Of one forward pass over sequences of ``lengths`` tokens, ``num_sampled`` of them sampled, all together.

        The token at place t looks at t others: ``4 x width x t`` for both products in each layer, which over a sequence
        of l tokens are ``2 x width x l^2``. Windows that some families put on attention are not taken off.
        """
        num_tokens = pairs = 0
        for length in lengths:
            num_tokens, pairs = num_tokens + length, pairs + length**2
        body = 2.0 * self.num_body_weights * num_tokens
        attention = 2.0 * self.num_layers * self.attention_width * pairs
        return body + attention + 2.0 * self.num_head_weights * num_sampled

    def training_flops(self, lengths: Iterable[int], num_sampled: int) -> float:
        """The same of a forward and a backward pass: gradients of activations cost a forward pass once more, and those
        of weights again, for the weights that are trained."""
        return (2.0 + self.trained_share) * self.forward_flops(lengths, num_sampled)


def model_size(model: PreTrainedModel) -> ModelSize:
    """Of a loaded model, whole or sharded; only its shapes are looked at."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings().weight
    apart = {id(head), id(model.get_input_embeddings().weight)}
    weights = trained = 0.0
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or id(parameter) in apart:
            continue
        count = parameter.numel() * (_used_share(config) if ".experts." in name else 1.0)
        weights += count
        trained += count if parameter.requires_grad else 0.0
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return ModelSize(
        num_body_weights=weights,
        num_head_weights=head.numel(),
        num_layers=config.num_hidden_layers,
        attention_width=num_heads * head_dim,
        trained_share=trained / weights if weights else 0.0,
    )


def _used_share(config: PretrainedConfig) -> float:
    """Of the experts, those that one token passes."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((value for name in names if (value := getattr(config, name, None))), None)
    return config.num_experts_per_tok / num_experts if num_experts else 1.0


# Data sheets, dense bfloat16 (float16 on V100) with float32 accumulation; the longest of several fitting names counts.
_PEAK_TFLOPS = {
    "B200": 2250.0,
    "GB200": 2500.0,
    "H200": 989.4,
    "GH200": 989.4,
    "H100": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H800": 989.4,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10": 125.0,
    "A6000": 154.8,
    "L40S": 362.0,
    "L40": 181.0,
    "L20": 119.5,
    "L4": 121.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "V100": 125.0,
    "MI300X": 1307.4,
    "MI250X": 383.0,
}


def peak_flops(device_name: str) -> float | None:
    """Dense 16-bit operations per second of one device with the driver's name for it; None when it is not known."""
    words = device_name.replace("-", " ").split()
    fitting = [name for name in _PEAK_TFLOPS if _contains(words, name.split())]
    return _PEAK_TFLOPS[max(fitting, key=len)] * 1e12 if fitting else None


def _contains(words: list[str], part: list[str]) -> bool:
    """True for ``H100 PCIe`` in ``NVIDIA H100 PCIe``; ``H20`` is not in ``NVIDIA H200``."""
    return all(word in words for word in part)
