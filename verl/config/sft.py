"""The root of supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agentgym_rl.errors import ConfigError
from verl.config.agentgym import ValidationAgentGymConfig
from verl.config.model import ModelConfig, OptimConfig
from verl.config.rollout import RolloutConfig
from verl.config.rules import above, at_least, one_of
from verl.config.run import RayInitConfig, TrainingRunConfig

TRUNCATIONS = ("error", "right")


@dataclass
class SFTDataConfig:
    train_file: str = "???"
    """Conversations: JSON or JSONL rows ``{item_id, conversations: [{from, loss, value}]}``; role/content works too.

    Of rows that hold token ids, as those of trajectory files do, the very ids are trained on that were sampled."""
    val_file: Any = None
    """Items for validation by rollouts during training, as in ``main_ppo``."""
    train_batch_size: int = 32
    """Rows per optimizer step, over all workers."""
    max_length: int = 4096
    """Tokens of a conversation."""
    truncation: str = "error"
    """What becomes of a longer row: ``error`` names it and stops, ``right`` cuts its end off; a row of which nothing to
    train on is left is dropped and counted."""
    max_prompt_length: int = 1024
    """In validation: as in ``main_ppo``."""
    max_response_length: int = 8192
    """In validation: as in ``main_ppo``."""
    shuffle: bool = True
    """Shuffle the rows anew each epoch, by ``seed``."""
    seed: int = 0
    """Seed of the order of conversations."""

    def __post_init__(self) -> None:
        at_least("data.train_batch_size", self.train_batch_size, 1)
        at_least("data.max_length", self.max_length, 2)
        one_of("data.truncation", self.truncation, TRUNCATIONS)
        at_least("data.max_prompt_length", self.max_prompt_length, 1)
        at_least("data.max_response_length", self.max_response_length, 1)


@dataclass
class SFTTrainerConfig(TrainingRunConfig):
    default_local_dir: str = "saves/sft"
    """Folder of checkpoints and metrics; the trained model is in ``<default_local_dir>/huggingface`` at the end."""
    experiment_name: str = "sft"
    max_time_s: float | None = None
    """Stop and save after this many seconds of training, if earlier."""
    max_token_len_per_gpu: int = 16384
    """Token budget of one packed micro-batch; no effect on the result."""
    grad_clip: float = 1.0
    """Largest gradient norm; 0 turns clipping off."""
    log_freq: int = 10
    """Print metrics every so many steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("trainer.log_freq", self.log_freq, 1)
        at_least("trainer.max_token_len_per_gpu", self.max_token_len_per_gpu, 1)
        at_least("trainer.grad_clip", self.grad_clip, 0)
        if self.max_time_s is not None:
            above("trainer.max_time_s", self.max_time_s, 0)


@dataclass
class SFTConfig:
    """Root of ``python -m verl.agent_trainer.main_sft``."""

    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    agentgym: ValidationAgentGymConfig = field(default_factory=ValidationAgentGymConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """How validation samples: ``rollout.val_kwargs``, with this engine and these limits."""
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)

    def __post_init__(self) -> None:
        if self.data.train_batch_size < self.trainer.world_size:
            raise ConfigError(
                f"data.train_batch_size={self.data.train_batch_size} on {self.trainer.world_size} workers: each needs "
                "at least one row; the nearest that work are "
                f"data.train_batch_size={self.trainer.world_size}, or {self.data.train_batch_size} workers"
            )
        self.trainer.check_engine_groups("rollout.tensor_model_parallel_size", self.rollout)
        for name, default in (("n", 1), ("temperature", 1.0), ("top_p", 1.0), ("top_k", -1)):
            if getattr(self.rollout, name) != default:
                raise ConfigError(
                    f"rollout.{name}={getattr(self.rollout, name)}: validation samples by rollout.val_kwargs.{name}"
                )
        if self.trainer.validates:
            self._check_validation()

    def _check_validation(self) -> None:
        needed = {
            "data.val_file": self.data.val_file,
            "agentgym.task_name": self.agentgym.task_name,
            "agentgym.env_addr": self.agentgym.env_addr,
        }
        missing = [key for key, value in needed.items() if not value]
        if missing:
            raise ConfigError(
                f"trainer.test_freq={self.trainer.test_freq}, trainer.val_before_train="
                f"{self.trainer.val_before_train}: validation needs {', '.join(missing)}"
            )
