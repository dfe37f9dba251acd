"""``rollout``: how trajectories are sampled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from agentgym_rl.errors import ConfigError
from agentgym_rl.rollout.handler import TokenLimits
from agentgym_rl.types import SamplingParams
from verl.config.rules import at_least, check_sampling, one_of


@dataclass
class EvalSamplingConfig:
    """How validation during training samples."""

    n: int = 1
    """Trajectories per item."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    """As ``rollout.top_p``, which an evaluation may lower."""
    top_k: int = -1
    """As ``rollout.top_k``, which an evaluation may set."""

    def __post_init__(self) -> None:
        at_least("rollout.val_kwargs.n", self.n, 1)
        check_sampling("rollout.val_kwargs", self.temperature, self.top_p, self.top_k)


class TrajectoryLengths(Protocol):
    """What the ``data`` branches of all programs that play have in common."""

    max_prompt_length: int
    max_response_length: int


@dataclass
class RolloutConfig:
    """How trajectories are sampled."""

    name: str = "auto"
    """Engine: ``hf`` (transformers in the worker's process), ``vllm`` (an engine process beside each worker), or
    ``auto``: ``vllm`` on CUDA where it is installed, else ``hf``."""
    n: int = 1
    """Trajectories per item in a training step (the group)."""
    temperature: float = 1.0
    """Divisor of the logits, above 0 in training; 0 means greedy in an evaluation."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that make up this share of probability; 1 in training."""
    top_k: int = -1
    """Sample from so many likeliest tokens; -1 for no cut, as in training."""
    max_tokens: int = 512
    """Tokens of one assistant turn."""
    max_model_len: int = 32768
    """Tokens of a whole sequence."""
    gpu_memory_utilization: float = 0.5
    """Share of a GPU's memory, weights included, that the ``vllm`` engine may hold; on a CPU the share of the free
    memory that the KV caches of all workers may take. The ``hf`` engine grows its cache with use and ignores it."""
    tensor_model_parallel_size: int = 1
    """Workers whose devices one ``vllm`` engine spans (tensor parallelism), for models too large for one device. It
    must divide ``trainer.n_gpus_per_node``; with the ``hf`` engine it is 1."""
    max_num_seqs: int = 256
    """Sequences that the engine decodes at once."""
    max_num_batched_tokens: int = 8192
    """Tokens that the ``vllm`` engine computes in one pass, prompts included."""
    enable_prefix_caching: bool = True
    """The ``vllm`` engine keeps the KV cache of earlier turns and shared prompts; the ``hf`` engine always does."""
    enforce_eager: bool = False
    """Run the ``vllm`` engine without CUDA graphs and compilation: slower, starts sooner. Always so on a CPU."""
    free_cache_engine: bool = True
    """On CUDA, the ``vllm`` engine gives its GPU memory back while the actor trains (weights wait in main memory)."""
    rollout_log_dir: str | None = None
    """Folder of trajectory files ``step<N>/<rank>.jsonl``; None means ``<trainer.default_local_dir>/trajectories``."""
    max_failed_fraction: float = 0.5
    """When more than this share of a step's trajectories are faults, the run stops with the first cause."""
    val_kwargs: EvalSamplingConfig = field(default_factory=EvalSamplingConfig)

    def __post_init__(self) -> None:
        one_of("rollout.name", self.name, ("auto", "hf", "vllm"))
        at_least("rollout.n", self.n, 1)
        at_least("rollout.max_tokens", self.max_tokens, 1)
        at_least("rollout.max_model_len", self.max_model_len, 2)
        at_least("rollout.max_num_seqs", self.max_num_seqs, 1)
        at_least("rollout.max_num_batched_tokens", self.max_num_batched_tokens, self.max_num_seqs)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"rollout.gpu_memory_utilization={self.gpu_memory_utilization!r}: must be in (0, 1]")
        check_sampling("rollout", self.temperature, self.top_p, self.top_k)
        if not 0 <= self.max_failed_fraction < 1:
            raise ConfigError(f"rollout.max_failed_fraction={self.max_failed_fraction!r}: must be in [0, 1)")
        at_least("rollout.tensor_model_parallel_size", self.tensor_model_parallel_size, 1)

    @property
    def sampling(self) -> SamplingParams:
        """How turns are sampled, those of validation apart."""
        return SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k
        )

    @property
    def val_sampling(self) -> SamplingParams:
        """How the turns of validation are sampled."""
        how = self.val_kwargs
        return SamplingParams(max_tokens=self.max_tokens, temperature=how.temperature, top_p=how.top_p, top_k=how.top_k)

    def limits(self, data: TrajectoryLengths) -> TokenLimits:
        """The token budgets of a trajectory."""
        return TokenLimits(data.max_prompt_length, data.max_response_length, self.max_tokens, self.max_model_len)
