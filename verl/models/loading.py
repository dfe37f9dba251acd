"""Reading a policy from, and writing it to, a Hugging Face folder."""

from __future__ import annotations

import copy
import fnmatch
import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
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
from verl.utils.model_files import PROBE, check_encodes


def load_policy(
    config: ModelConfig, device: torch.device | str = "cpu", *, attn_implementation: str = PACKED_ATTENTION
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in `parameter_dtype` on ``device`` in eval mode, and its tokenizer.

    Raises `ConfigError` when ``config.path`` holds no causal language model, not all weights of it, or one whose output
    layer is more than a matrix (`check_output_layer`).
    """
    tokenizer = load_tokenizer(config)
    model = read_model(config, attn_implementation=attn_implementation)
    model.to(torch.device(device))  # type: ignore[arg-type]  # its decorator hides the signature
    return model, tokenizer


def read_model(config: ModelConfig, *, attn_implementation: str = PACKED_ATTENTION) -> PreTrainedModel:
    """The model on the CPU; see `load_policy`."""
    import_external(config)
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
    return model


def model_skeleton(config: ModelConfig) -> PreTrainedModel:
    """The same model with all tensors on the meta device: structure without memory."""
    import_external(config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code),
            dtype=parameter_dtype(config),
            attn_implementation=PACKED_ATTENTION,
            trust_remote_code=config.trust_remote_code,
        )


def import_external(config: ModelConfig) -> None:
    """Import ``config.external_lib``, which makes its architectures known to transformers."""
    if config.external_lib is None:
        return
    try:
        importlib.import_module(config.external_lib)
    except ImportError as error:
        raise ConfigError(f"model.external_lib={config.external_lib!r}: cannot be imported: {error}") from error


def prepare_for_training(model: PreTrainedModel, config: ModelConfig) -> None:
    """Adapter, frozen weights and gradient checkpointing as ``config`` says; changes ``model`` in place.

    What is trained is float32 then, see `TRAINED_DTYPE`.
    """
    if config.lora_rank > 0:
        from verl.models.lora import add_adapter

        add_adapter(model, config)
    freeze(model, config.freeze)
    _keep_trained_in_float32(model)
    if config.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def freeze(model: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Stop training the weights whose names match one of the patterns (``*`` stands for anything), in place.

    Tied weights are one weight with the first of their names. Raises `ConfigError` for a pattern that matches none, and
    when nothing is left to train.
    """
    names = dict(model.named_parameters())
    for pattern in patterns:
        matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            some = ", ".join(list(names)[:3])
            raise ConfigError(f"model.freeze: {pattern!r} matches no weight; names are such as {some}")
        for name in matched:
            names[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in names.values()):
        raise ConfigError(f"model.freeze={list(patterns)!r}: nothing is left to train")


def _keep_trained_in_float32(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(TRAINED_DTYPE)  # in place: tied weights stay one


_GENERIC_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer in ``config.path``; `ConfigError` when there is none."""
    import_external(config)
    try:
        declared = get_tokenizer_config(config.path).get("tokenizer_class")
        # AutoTokenizer takes the family's own class even where the folder asks for the generic one, and that class
        # rebuilds pre-tokenizer and merges by its own rules: a word-level tokenizer beside a Qwen2 then loses words.
        loader = PreTrainedTokenizerFast if declared in _GENERIC_TOKENIZERS else AutoTokenizer
        tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(
            config.path, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={config.path!r}: cannot load a tokenizer: {error}") from error
    check_encodes(tokenizer.encode(PROBE, add_special_tokens=False), f"model.path={config.path!r}")
    return tokenizer


TRAINED_DTYPE = torch.float32
"""Of trained weights, so also of their gradients and of Adam's moments, whatever they compute in.

An update moves a weight by about ``lr``. bfloat16 has 8 bits: at ``lr`` 1e-6 a weight beyond 0.0005 would be rounded
back to where it was, and a second moment that decays by 0.999 could not move at all.
"""


def parameter_dtype(config: ModelConfig) -> torch.dtype:
    """Type in which a model is read, and in which weights that are not trained are kept; see `TRAINED_DTYPE`."""
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def compute_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """Type of matrix products: bfloat16 under ``auto`` on CUDA, else `parameter_dtype`."""
    if config.dtype == "auto" and device.type == "cuda":
        return torch.bfloat16
    return parameter_dtype(config)


def own_dtype(model: PreTrainedModel) -> torch.dtype:
    """Type in which ``model`` was read, and in which engines and exports get its weights."""
    dtype = model.config.dtype
    return dtype if isinstance(dtype, torch.dtype) else model.dtype


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

    ``weights`` are full tensors by name, tied ones once, in the model's `own_dtype`.
    """
    # Of the trained weights' type `save_pretrained` would speak in the config, which training may read meanwhile.
    exported = copy.copy(model)
    exported.config = copy.deepcopy(model.config)
    exported.save_pretrained(path, state_dict=dict(weights))
    exported.config.dtype = own_dtype(model)
    exported.config.save_pretrained(path)
    tokenizer.save_pretrained(path)
