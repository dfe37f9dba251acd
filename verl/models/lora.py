"""Low-rank adapters by `peft`: training them, leaving them out, merging them, writing them.

`peft` takes a second to import, so a run without an adapter does without.
Hu et al. 2021, https://arxiv.org/abs/2106.09685: a matrix ``W`` becomes ``W + scale * B A``, of which ``A`` and ``B``
are trained. ``B`` begins at 0, so that training begins at the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from agentgym_rl.errors import ConfigError
from verl.config import ModelConfig
from verl.models.loading import own_dtype

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER = "default"
_BASE = ".base_layer."
_ADAPTER_KEYS = (f".lora_A.{ADAPTER}.", f".lora_B.{ADAPTER}.")


def add_adapter(model: PreTrainedModel, config: ModelConfig) -> None:
    """Freeze ``model``, in place, and put an adapter of ``config.lora_rank`` beside its matrices.

    Raises `ConfigError` when ``config.target_modules`` names nothing in it, or something other than linear layers, or
    the output layer, which chunked log-probs take as a plain matrix.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import Linear, LoraLayer

    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same beginning however many ranks there are, and after a resume
            inject_adapter_in_model(adapter_config(config), model, adapter_name=ADAPTER)
    except ValueError as error:
        raise ConfigError(f"model.target_modules={config.target_modules!r}: {error}") from error
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer) and not isinstance(layer, Linear):
            raise ConfigError(f"model.target_modules={config.target_modules!r}: {name!r} is no linear layer")
    if isinstance(model.get_output_embeddings(), LoraLayer):
        raise ConfigError(f"model.target_modules={config.target_modules!r}: the output layer can have no adapter")


def adapter_config(config: ModelConfig) -> LoraConfig:
    """What `peft` calls this adapter."""
    from peft import LoraConfig

    targets = config.target_modules
    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # it only ever divides it
        target_modules=targets if isinstance(targets, str) else list(targets),
        base_model_name_or_path=config.path,
        task_type="CAUSAL_LM",
    )


@contextmanager
def without_adapter(module: nn.Module) -> Iterator[None]:
    """``module`` computes as if it had no adapter."""
    layers: list[Any] = [layer for layer in module.modules() if _is_adapted(layer)]
    # Not by `enable_adapters`: it also turns requires_grad off, which FSDP reads when it first gathers a parameter.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged_weights(
    model: PreTrainedModel, whole: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of ``model`` under the names they had without the adapter, which is added to them; in its `own_dtype`.

    ``whole`` makes a full tensor of a shard; all ranks must run the iterator to its end.
    """
    layers = {f"{name}.base_layer.weight": layer for name, layer in model.named_modules() if _is_adapted(layer)}
    for name, parameter in model.named_parameters():
        if any(key in name for key in _ADAPTER_KEYS):
            continue
        weight = whole(parameter)
        if name in layers:
            weight = weight.float() + _delta(layers[name], whole)  # rounded once, with the sum
        yield name.replace(_BASE, "."), weight.to(own_dtype(model))


def adapter_weights(
    model: PreTrainedModel, whole: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The adapter's own weights under the names of `peft`'s files; collective as `merged_weights`."""
    for name, parameter in model.named_parameters():
        if any(key in name for key in _ADAPTER_KEYS):
            yield f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}", whole(parameter)


def save_adapter(folder: Path, config: ModelConfig, weights: dict[str, torch.Tensor]) -> None:
    """Write the folder that ``peft.PeftModel.from_pretrained`` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    adapter_config(config).save_pretrained(str(folder))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "adapter_model.safetensors")


def _is_adapted(layer: nn.Module) -> bool:
    return ADAPTER in getattr(layer, "lora_A", ())


def _delta(layer: Any, whole: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    a, b = whole(layer.lora_A[ADAPTER].weight), whole(layer.lora_B[ADAPTER].weight)
    return layer.scaling[ADAPTER] * (b.float() @ a.float())
