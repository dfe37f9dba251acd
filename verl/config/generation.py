"""The root of evaluations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agentgym_rl.errors import ConfigError
from verl.config.agentgym import GenerationAgentGymConfig
from verl.config.model import ModelConfig
from verl.config.rollout import EvalSamplingConfig, RolloutConfig
from verl.config.rules import at_least
from verl.config.run import RayInitConfig, WorkersConfig


@dataclass
class GenerationDataConfig:
    path: Any = "???"
    """Items: a file, or a folder with ``<task>_test.json`` and one file per category. With several tasks, a list of one
    of these for each task in turn, or one file whose ids name their tasks."""
    max_prompt_length: int = 1024
    """Tokens of the task-description prompt of the first turn; a longer one is an error."""
    max_response_length: int = 8192
    """All tokens after that prompt, observations included."""
    n_samples: int = 1
    """Trajectories per item: the k of Avg@k and Pass@k."""
    batch_size: int = 32
    """Items in flight at once, over all workers; no effect on the result."""
    seed: int = 0
    """Seed of sampling."""

    def __post_init__(self) -> None:
        for name in ("max_prompt_length", "max_response_length", "n_samples", "batch_size"):
            at_least(f"data.{name}", getattr(self, name), 1)


@dataclass
class GenerationConfig:
    """Root of ``python -m verl.agent_trainer.main_generation``."""

    data: GenerationDataConfig = field(default_factory=GenerationDataConfig)
    agentgym: GenerationAgentGymConfig = field(default_factory=GenerationAgentGymConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: WorkersConfig = field(default_factory=WorkersConfig)
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)

    def __post_init__(self) -> None:
        if self.rollout.n != 1:
            raise ConfigError(f"rollout.n={self.rollout.n}: an evaluation takes data.n_samples trajectories per item")
        if self.rollout.val_kwargs != EvalSamplingConfig():
            raise ConfigError("rollout.val_kwargs: an evaluation samples by rollout.temperature, top_p and top_k")
        self.trainer.check_engine_groups("rollout.tensor_model_parallel_size", self.rollout)
