"""Reading a policy from, and writing it to, a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from agentgym_rl.errors import ConfigError
from verl.config import ModelConfig
from verl.models.attention import PACKED_ATTENTION


def load_policy(
    config: ModelConfig, device: torch.device | str = "cpu", *, attn_implementation: str = PACKED_ATTENTION
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in `parameter_dtype` on ``device`` in eval mode, and its tokenizer.

    Raises `ConfigError` when ``config.path`` holds no causal language model, not all weights of it, or one whose output
    layer is more than a matrix (`check_output_layer`).
    """
    tokenizer = load_tokenizer(config)
    model: PreTrainedModel
    loaded: dict[str, Any]
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]  # a pair, with the loading info
            config.path,
            dtype=parameter_dtype(config),
            attn_implementation=attn_implementation,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"model.path={config.path!r}: cannot load a causal language model: {error}") from error
    if missing := sorted(loaded["missing_keys"]):
        # transformers fills them with random numbers: other ones in each worker, and in actor and engine.
        raise ConfigError(f"model.path={config.path!r}: its files lack {len(missing)} weights, first {missing[0]!r}")
    check_output_layer(model)
    if config.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.to(torch.device(device))  # type: ignore[arg-type]  # its decorator hides the signature
    return model, tokenizer


_GENERIC_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer in ``config.path``; `ConfigError` when there is none."""
    try:
        declared = get_tokenizer_config(config.path).get("tokenizer_class")
        # AutoTokenizer takes the family's own class even where the folder asks for the generic one, and that class
        # rebuilds pre-tokenizer and merges by its own rules: a word-level tokenizer beside a Qwen2 then loses words.
        loader = PreTrainedTokenizerFast if declared in _GENERIC_TOKENIZERS else AutoTokenizer
        return loader.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={config.path!r}: cannot load a tokenizer: {error}") from error


def parameter_dtype(config: ModelConfig) -> torch.dtype:
    """Type in which parameters are kept; under ``auto`` the float32 masters, see `compute_dtype`."""
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def compute_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """Type of matrix products: bfloat16 under ``auto`` on CUDA, else the parameters' own."""
    if config.dtype == "auto" and device.type == "cuda":
        return torch.bfloat16
    return parameter_dtype(config)


# Names under which model families of transformers scale or cap their logits, and the value that changes nothing.
_LOGIT_TRANSFORMS = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}


def check_output_layer(model: PreTrainedModel) -> None:
    """Raise `ConfigError` unless logits are hidden states times a matrix, as chunked log-probs assume."""
    for name, neutral in _LOGIT_TRANSFORMS.items():
        value = getattr(model.config, name, neutral)
        if value not in (neutral, None):
            raise ConfigError(
                f"model {model.config.model_type!r} has {name}={value}: only plain output layers can be trained"
            )
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ConfigError(f"model {model.config.model_type!r} has a bias in its output layer: it cannot be trained")


def export_huggingface(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    weights: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Write weights, config, generation config and tokenizer to ``path``, for `from_pretrained` and vLLM.

    ``weights`` are full tensors by name, tied ones once.
    """
    model.save_pretrained(path, state_dict=dict(weights))
    tokenizer.save_pretrained(path)
