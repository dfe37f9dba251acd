"""Sizes of models from their configuration alone are those of the models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from verl.models.shapes import KNOWN_SHAPES, shape_from_config, shape_of

TINY = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
}
BILLIONS = {"Qwen2.5-0.5B-Instruct": 0.494, "Qwen2.5-7B-Instruct": 7.616, "Qwen3-8B": 8.191}
BILLIONS |= {"Llama-3.1-8B-Instruct": 8.030, "Llama-3.2-3B-Instruct": 3.213, "smollm2": 0.1345}


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**TINY, tie_word_embeddings=True),
        Qwen2Config(**TINY, tie_word_embeddings=False),
        Qwen3Config(**TINY, head_dim=8, tie_word_embeddings=False),
        LlamaConfig(**TINY, tie_word_embeddings=True),
        MistralConfig(**TINY, tie_word_embeddings=False, head_dim=16),
    ],
    ids=lambda config: f"{config.model_type}-{config.tie_word_embeddings}",
)
def test_weights_are_counted_as_transformers_makes_them(config: PretrainedConfig, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    shape = shape_of(str(tmp_path))
    assert shape is not None and shape.num_weights == model.num_parameters()


@pytest.mark.parametrize(("name", "billions"), BILLIONS.items())
def test_models_of_presets_are_as_large_as_their_makers_say(name: str, billions: float) -> None:
    assert shape_of(f"somewhere/{name}") is KNOWN_SHAPES[name]
    assert KNOWN_SHAPES[name].num_weights / 1e9 == pytest.approx(billions, rel=2e-3)


def test_an_adapter_has_rank_times_rows_and_columns_of_each_matrix() -> None:
    shape = shape_from_config({"model_type": "llama", **TINY})
    # Per layer: q and o 24 + 24, k and v 24 + 12, three matrices of the MLP 24 + 40.
    assert shape is not None and shape.adapter_weights(2) == 3 * 2 * (2 * 48 + 2 * 36 + 3 * 64)


def test_of_other_architectures_nothing_is_claimed(tmp_path: Path) -> None:
    assert shape_from_config({"model_type": "qwen2_moe", **TINY}) is None
    assert shape_from_config({"model_type": "llama"}) is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert shape_of(str(tmp_path)) is None
    assert shape_of("models/of-my-own") is None
