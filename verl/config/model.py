"""A model: its weights, how they are trained, and how they lie on the workers' devices."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentgym_rl.errors import ConfigError
from verl.config.rules import above, at_least, one_of


@dataclass
class ModelConfig:
    """The policy's weights and tokenizer."""

    path: str = "???"
    """Folder (or hub name) of a Hugging Face causal language model with a tokenizer that has a chat template."""
    trust_remote_code: bool = False
    """Run the Python code that the model's folder brings along. Only for code that you have read."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    share_prefixes: bool = True
    """What trajectories of one group have in common at their beginning, such as the prompt, is computed once for those
    that share a micro-batch; same numbers up to rounding. Not with ``ppo_micro_batch_size_per_gpu`` or
    ``ulysses_sequence_parallel_size``."""
    dtype: str = "auto"
    """Type that the model is read, computed, played and exported in: ``float32``, ``bfloat16``, or ``auto``: float32,
    with bfloat16 compute on CUDA. What is trained, be it the model or an adapter, is always kept in float32, with its
    gradients and Adam's moments; under ``bfloat16`` the rest takes half the memory."""
    external_lib: str | None = None
    """A Python module that is imported first and registers its own architectures with transformers."""
    freeze: list[str] = field(default_factory=list)
    """Weights that are not trained, by name; ``*`` stands for anything: ``[model.embed_tokens.*]``."""
    lora_rank: int = 0
    """Rank of a low-rank adapter that is trained instead of the model; 0 trains the model itself."""
    lora_alpha: float = 16.0
    """The adapter counts ``lora_alpha / lora_rank`` times."""
    target_modules: Any = "all-linear"
    """Layers that get an adapter: ``all-linear``, one regular expression, or a list of their last names."""

    def __post_init__(self) -> None:
        one_of("model.dtype", self.dtype, ("auto", "float32", "bfloat16"))
        at_least("model.lora_rank", self.lora_rank, 0)
        above("model.lora_alpha", self.lora_alpha, 0)
        targets = self.target_modules
        if not targets or not (isinstance(targets, str) or all(isinstance(name, str) for name in targets)):
            raise ConfigError(f"model.target_modules={targets!r}: must be a string or a list of strings")
        if self.lora_rank > 0 and self.freeze:
            raise ConfigError(
                f"model.freeze={list(self.freeze)!r} with model.lora_rank={self.lora_rank}: must be empty, since an "
                "adapter freezes all of the model; name fewer layers in model.target_modules"
            )

    def absolute(self) -> ModelConfig:
        """The same for processes that run in another folder; a hub name stays as it is."""
        return replace(self, path=str(Path(self.path).resolve())) if Path(self.path).exists() else self


@dataclass
class OptimConfig:
    """AdamW and its learning rate."""

    lr: float = 1e-6
    """Learning rate, the highest of the schedule."""
    lr_warmup_steps: int = 0
    """Optimizer steps (updates) of linear warm-up."""
    lr_schedule: str = "constant"
    """After the warm-up: ``constant`` or ``cosine`` (reaches ``min_lr_ratio`` after the last update of the plan)."""
    min_lr_ratio: float = 0.0
    """Share of ``lr`` that ``cosine`` ends at."""
    weight_decay: float = 0.01
    """Of matrices, as AdamW has it: this share of ``lr`` x weight per update; norms and biases have none."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay of AdamW's two moments."""
    max_skipped_updates: int = 5
    """An update whose loss or gradient is not finite is skipped; so many in a row end the run."""

    def __post_init__(self) -> None:
        at_least("optim.lr", self.lr, 0)
        at_least("optim.max_skipped_updates", self.max_skipped_updates, 1)
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError(f"optim.min_lr_ratio={self.min_lr_ratio!r}: must be in [0, 1]")
        at_least("optim.lr_warmup_steps", self.lr_warmup_steps, 0)
        at_least("optim.weight_decay", self.weight_decay, 0)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optim.betas={self.betas!r}: must be two numbers in [0, 1)")
        one_of("optim.lr_schedule", self.lr_schedule, ("constant", "cosine"))


@dataclass
class RefFSDPConfig:
    """How a model lies on the workers' devices; no effect on results beyond rounding."""

    param_offload: bool = False
    """Keep parameters in host memory between the calls that need them; no effect on a CPU."""
    fsdp_size: int = -1
    """Neighbouring workers that hold one copy of the model, each a shard of it; -1: all workers. Take the workers of a
    machine where the network between machines is slow: gradients alone cross it then, once per update, and each
    machine holds a copy."""

    def __post_init__(self) -> None:
        if self.fsdp_size < 1 and self.fsdp_size != -1:
            raise ConfigError(f"fsdp_config.fsdp_size={self.fsdp_size}: must be at least 1, or -1 for all workers")

    def num_shards(self, num_workers: int) -> int:
        """Of a copy of the model."""
        return num_workers if self.fsdp_size == -1 else self.fsdp_size


@dataclass
class FSDPConfig(RefFSDPConfig):
    optimizer_offload: bool = False
    """Keep the optimizer's state in host memory between updates; no effect on a CPU."""


@dataclass
class RefConfig:
    """The frozen reference model; loaded only when a KL term needs it, and with LoRA it is the actor's own base."""

    log_prob_max_token_len_per_gpu: int = 32768
    """Token budget of one packed forward pass."""
    fsdp_config: RefFSDPConfig = field(default_factory=RefFSDPConfig)

    def __post_init__(self) -> None:
        at_least("ref.log_prob_max_token_len_per_gpu", self.log_prob_max_token_len_per_gpu, 1)
