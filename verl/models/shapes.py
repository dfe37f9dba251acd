"""How large a model is, from its ``config.json`` or its name, without loading it and without transformers.

Letters in formulas: ``V`` vocabulary, ``H`` hidden size, ``L`` layers, ``A`` heads x size of a head, ``K`` key-value
heads x size of a head, ``I`` width of the gated MLP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgym_rl.errors import ConfigError


@dataclass(frozen=True)
class ModelShape:
    """A decoder with gated MLPs and full attention in every layer, as Llama, Mistral, Qwen2 and Qwen3 have them."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    tied: bool
    """The output layer is the embedding matrix."""
    attention_bias: bool = False
    """Queries, keys and values have biases."""
    head_norm: bool = False
    """Queries and keys have norms of their own."""

    @property
    def attention_width(self) -> int:
        """``A``"""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """``K``"""
        return self.num_kv_heads * self.head_dim

    @property
    def layer_weights(self) -> int:
        """Of one layer: projections ``2HA + 2HK``, MLP ``3HI``, norms ``2H``, and what else it has."""
        hidden, attention, kv = self.hidden_size, self.attention_width, self.kv_width
        matrices = 2 * hidden * (attention + kv) + 3 * hidden * self.intermediate_size
        return matrices + 2 * hidden + self.attention_bias * (attention + 2 * kv) + self.head_norm * 2 * self.head_dim

    @property
    def head_weights(self) -> int:
        """Of embeddings and output layer: ``VH``, twice where they are two matrices."""
        return self.vocab_size * self.hidden_size * (1 if self.tied else 2)

    @property
    def num_weights(self) -> int:
        """Of the whole model."""
        return self.num_layers * self.layer_weights + self.head_weights + self.hidden_size

    @property
    def num_backbone_weights(self) -> int:
        """Of a critic: without output layer, with a vector for values and its bias."""
        return self.num_weights - (0 if self.tied else self.vocab_size * self.hidden_size) + self.hidden_size + 1

    def adapter_weights(self, rank: int) -> int:
        """Of low-rank adapters at all matrices of the layers: ``rank`` x (rows + columns) for each."""
        hidden, attention, kv = self.hidden_size, self.attention_width, self.kv_width
        sides = 2 * (hidden + attention) + 2 * (hidden + kv) + 3 * (hidden + self.intermediate_size)
        return rank * sides * self.num_layers


_KNOWN_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def shape_from_config(fields: Mapping[str, Any]) -> ModelShape | None:
    """The shape that a ``config.json`` describes; None for an architecture of another kind, and when a field lacks."""
    kind = fields.get("model_type")
    if kind not in _KNOWN_TYPES:
        return None
    try:
        num_heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
        return ModelShape(
            vocab_size=fields["vocab_size"],
            hidden_size=hidden,
            num_layers=fields["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=fields.get("num_key_value_heads") or num_heads,
            head_dim=fields.get("head_dim") or hidden // num_heads,
            intermediate_size=fields["intermediate_size"],
            tied=fields.get("tie_word_embeddings", False),
            attention_bias=kind == "qwen2" or bool(fields.get("attention_bias")),
            head_norm=kind == "qwen3",
        )
    except KeyError:
        return None


def read_config(path: str) -> dict[str, Any] | None:
    """The fields of the ``config.json`` in a model's folder; None where there is none.

    Raises `ConfigError` for one that is no JSON object.
    """
    file = Path(path) / "config.json"
    return read_json_object(file, f"{file}:") if file.is_file() else None


def read_json_object(file: Path, name: str) -> dict[str, Any]:
    """The fields of a file, which messages begin with ``name``; raises `ConfigError` for one that is no JSON object."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{name} must be a JSON object, is {type(fields).__name__}")
    return fields


def shape_of(path: str) -> ModelShape | None:
    """The shape of the model in a folder, else of the one that the last name of ``path`` is known for; None for others.

    Raises `ConfigError` as `read_config`.
    """
    fields = read_config(path)
    return KNOWN_SHAPES.get(Path(path).name) if fields is None else shape_from_config(fields)


def _qwen2_5(hidden: int, layers: int, heads: int, kv_heads: int, width: int, vocab: int = 151936) -> ModelShape:
    small = vocab == 151936
    return ModelShape(vocab, hidden, layers, heads, kv_heads, hidden // heads, width, small, attention_bias=True)


KNOWN_SHAPES: Mapping[str, ModelShape] = {
    "Qwen2.5-0.5B-Instruct": _qwen2_5(896, 24, 14, 2, 4864),
    "Qwen2.5-1.5B-Instruct": _qwen2_5(1536, 28, 12, 2, 8960),
    "Qwen2.5-3B-Instruct": _qwen2_5(2048, 36, 16, 2, 11008),
    "Qwen2.5-7B-Instruct": _qwen2_5(3584, 28, 28, 4, 18944, 152064),
    "Qwen2.5-14B-Instruct": _qwen2_5(5120, 48, 40, 8, 13824, 152064),
    "Qwen3-4B": ModelShape(151936, 2560, 36, 32, 8, 128, 9728, True, head_norm=True),
    "Qwen3-8B": ModelShape(151936, 4096, 36, 32, 8, 128, 12288, False, head_norm=True),
    "Llama-3.2-3B-Instruct": ModelShape(128256, 3072, 28, 24, 8, 128, 8192, True),
    "Llama-3.1-8B-Instruct": ModelShape(128256, 4096, 32, 32, 8, 128, 14336, False),
    "smollm2": ModelShape(49152, 576, 30, 9, 3, 64, 1536, True),
}
"""Of the models that presets name, by the last name of their path: for a plan before the model is there."""
