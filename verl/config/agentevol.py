"""The root of AgentEvol."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agentgym_rl.errors import ConfigError
from verl.config.agentgym import GenerationAgentGymConfig
from verl.config.model import ModelConfig, OptimConfig
from verl.config.rollout import RolloutConfig
from verl.config.rules import at_least, one_of
from verl.config.run import RayInitConfig
from verl.config.sft import TRUNCATIONS, SFTTrainerConfig


@dataclass
class AgentEvolDataConfig:
    base_file: str | None = None
    """Conversations that every iteration trains on beside what it explored; None: on that alone."""
    train_file: Any = "???"
    """Items that are explored, as in ``main_ppo``."""
    val_file: Any = "???"
    """Items that each iteration's model is evaluated on, as ``data.path`` in ``main_generation``."""
    train_batch_size: int = 32
    """Conversations per optimizer step, over all workers."""
    gen_batch_size: int = 32
    """Items in flight at once in exploration and evaluation, over all workers; no effect on the result."""
    max_length: int = 4096
    """Tokens of a conversation of the base data; see ``truncation``."""
    truncation: str = "error"
    """As in ``main_sft``."""
    max_prompt_length: int = 1024
    """As in ``main_generation``."""
    max_response_length: int = 8192
    """As in ``main_generation``."""
    seed: int = 0
    """Seed of the order of items."""

    def __post_init__(self) -> None:
        for name in ("train_batch_size", "gen_batch_size", "max_prompt_length", "max_response_length"):
            at_least(f"data.{name}", getattr(self, name), 1)
        at_least("data.max_length", self.max_length, 2)
        one_of("data.truncation", self.truncation, TRUNCATIONS)


@dataclass
class AgentEvolAlgorithmConfig:
    """AgentEvol, Xi et al. 2024, https://arxiv.org/abs/2406.04151."""

    iterations: int = 2
    """Times to explore and train. A finished run goes on when this is raised."""
    first_policy: str | None = None
    """The model that explores first; None: what training ``model.path`` on ``data.base_file`` gives (iteration 0), or
    ``model.path`` itself where there is no base data."""
    reward_threshold: Any = None
    """Explored trajectories with at least this score are trained on; None: those that the task counts as successes. Of
    several tasks, a list with an entry for each in the order of ``agentgym.task_name``."""
    explored: str = "one_per_item"
    """``one_per_item``: of each item the best trajectory that passes, the shortest of equals; ``all`` that pass."""
    train_from: str = "base"
    """Each iteration trains ``base``, the model ``model.path``, or ``last``, the model of the iteration before."""

    def __post_init__(self) -> None:
        at_least("algorithm.iterations", self.iterations, 1)
        thresholds = self.reward_threshold if isinstance(self.reward_threshold, list) else [self.reward_threshold]
        if not all(value is None or type(value) in (int, float) for value in thresholds):
            raise ConfigError(
                f"algorithm.reward_threshold={self.reward_threshold!r}: must be a number or null, or a list of them"
            )
        one_of("algorithm.explored", self.explored, ("one_per_item", "all"))
        one_of("algorithm.train_from", self.train_from, ("base", "last"))


@dataclass
class AgentEvolTrainerConfig(SFTTrainerConfig):
    """Of each iteration's training: ``total_epochs`` and so on are those of one iteration."""

    default_local_dir: str = "saves/agentevol"
    """Holds ``iteration_<N>/`` with all that iteration N made, and ``table.txt``."""
    experiment_name: str = "agentevol"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume_mode != "auto":
            raise ConfigError(
                f"trainer.resume_mode={self.resume_mode}: must be auto; to begin anew take another "
                "trainer.default_local_dir"
            )
        if self.validates:
            raise ConfigError(
                f"trainer.test_freq={self.test_freq}, trainer.val_before_train={self.val_before_train}: must be -1 and "
                "False, since every iteration ends with an evaluation"
            )


@dataclass
class AgentEvolConfig:
    """Root of ``python -m verl.agent_trainer.main_agentevol``."""

    data: AgentEvolDataConfig = field(default_factory=AgentEvolDataConfig)
    agentgym: GenerationAgentGymConfig = field(default_factory=GenerationAgentGymConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    algorithm: AgentEvolAlgorithmConfig = field(default_factory=AgentEvolAlgorithmConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Exploration takes ``rollout.n`` trajectories per item; evaluation samples as ``rollout.val_kwargs`` says."""
    trainer: AgentEvolTrainerConfig = field(default_factory=AgentEvolTrainerConfig)
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)

    def __post_init__(self) -> None:
        self.trainer.check_engine_groups("rollout.tensor_model_parallel_size", self.rollout)
        if self.data.train_batch_size < self.trainer.world_size:
            raise ConfigError(
                f"data.train_batch_size={self.data.train_batch_size} on {self.trainer.world_size} workers: must be at "
                f"least {self.trainer.world_size}, so that each has a conversation"
            )
        thresholds = self.algorithm.reward_threshold
        if isinstance(thresholds, list) and len(thresholds) != len(self.agentgym.tasks):
            raise ConfigError(
                f"algorithm.reward_threshold={thresholds!r}: must have an entry for each of the "
                f"{len(self.agentgym.tasks)} tasks of agentgym.task_name, or be one value for all"
            )
        if self.rollout.rollout_log_dir is not None:
            raise ConfigError(
                f"rollout.rollout_log_dir={self.rollout.rollout_log_dir!r}: must be null, since each iteration has its "
                "folder in trainer.default_local_dir"
            )

    @property
    def thresholds(self) -> dict[str, float | None]:
        """The least score to train on by task; None: a success."""
        thresholds = self.algorithm.reward_threshold
        each = thresholds if isinstance(thresholds, list) else [thresholds] * len(self.agentgym.tasks)
        return dict(zip(self.agentgym.tasks, each, strict=True))
