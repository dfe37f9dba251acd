"""Every configuration key: name, default, meaning and unit.

The tree is plain dataclasses under AgentGym-RL's and Verl's names. The YAML files in ``verl/agent_trainer/config`` pick
values; `verl.agent_trainer.loading` reads them with Hydra once and hands each part its own branch.
Rules within a branch are in ``__post_init__``; rules between branches in the root's.
Errors are `ConfigError` and name key, value and what is allowed.
"""

from verl.config.actor_critic import ActorConfig, ActorRolloutRefConfig, CriticConfig, CriticModelConfig
from verl.config.agentevol import AgentEvolAlgorithmConfig, AgentEvolConfig, AgentEvolDataConfig, AgentEvolTrainerConfig
from verl.config.agentgym import AgentGymConfig, GenerationAgentGymConfig, ValidationAgentGymConfig
from verl.config.algorithm import (
    ADV_ESTIMATORS,
    FILTER_METRICS,
    GROUP_ESTIMATORS,
    UNDISCOUNTED_ESTIMATORS,
    AlgorithmConfig,
    FilterGroupsConfig,
    GiGPOConfig,
    KLControlConfig,
    KLEstimator,
    LossAggMode,
    RoundsControlConfig,
)
from verl.config.dpo import (
    DPOAlgorithmConfig,
    DPOConfig,
    DPODataConfig,
    DPORefConfig,
    DPOTrainerConfig,
    PreferenceLossType,
)
from verl.config.generation import GenerationConfig, GenerationDataConfig
from verl.config.model import FSDPConfig, ModelConfig, OptimConfig, RefConfig, RefFSDPConfig
from verl.config.ppo import DataConfig, PPOConfig, TrainerConfig
from verl.config.rollout import EvalSamplingConfig, RolloutConfig, TrajectoryLengths
from verl.config.run import LOGGERS, RayInitConfig, TrainingRunConfig, WorkersConfig
from verl.config.sft import TRUNCATIONS, SFTConfig, SFTDataConfig, SFTTrainerConfig

__all__ = [
    "ADV_ESTIMATORS",
    "FILTER_METRICS",
    "GROUP_ESTIMATORS",
    "LOGGERS",
    "TRUNCATIONS",
    "UNDISCOUNTED_ESTIMATORS",
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AgentEvolAlgorithmConfig",
    "AgentEvolConfig",
    "AgentEvolDataConfig",
    "AgentEvolTrainerConfig",
    "AgentGymConfig",
    "AlgorithmConfig",
    "CriticConfig",
    "CriticModelConfig",
    "DPOAlgorithmConfig",
    "DPOConfig",
    "DPODataConfig",
    "DPORefConfig",
    "DPOTrainerConfig",
    "DataConfig",
    "EvalSamplingConfig",
    "FSDPConfig",
    "FilterGroupsConfig",
    "GenerationAgentGymConfig",
    "GenerationConfig",
    "GenerationDataConfig",
    "GiGPOConfig",
    "KLControlConfig",
    "KLEstimator",
    "LossAggMode",
    "ModelConfig",
    "OptimConfig",
    "PPOConfig",
    "PreferenceLossType",
    "RayInitConfig",
    "RefConfig",
    "RefFSDPConfig",
    "RolloutConfig",
    "RoundsControlConfig",
    "SFTConfig",
    "SFTDataConfig",
    "SFTTrainerConfig",
    "TrainerConfig",
    "TrainingRunConfig",
    "TrajectoryLengths",
    "ValidationAgentGymConfig",
    "WorkersConfig",
]
