"""What the driver and its workers tell each other, without what the workers are made of.

The driver imports this and not the workers' own modules: transformers and FSDP alone take it seconds to import.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentgym_rl.rollout.collector import TokenLimits
from agentgym_rl.rollout.sessions import SessionUsage
from agentgym_rl.types import SamplingParams, Trajectory
from verl.config import ActorConfig, AgentGymConfig, CriticConfig, ModelConfig, RefConfig, RolloutConfig
from verl.workers.rollout.engine import EngineUsage


@dataclass(frozen=True)
class RolloutSetup:
    """What a rollout worker is made of."""

    model: ModelConfig
    agentgym: AgentGymConfig
    rollout: RolloutConfig
    limits: TokenLimits
    log_dir: str
    """Folder of the trajectory files."""
    seed: int


@dataclass(frozen=True)
class RolloutOrder:
    """What the trajectories of one call share."""

    step: int
    """Training step, 0 outside training."""
    max_rounds: int
    sampling: SamplingParams
    log_name: str
    """Folder of this call's trajectory files under `RolloutSetup.log_dir`, e.g. ``step7``."""
    append: bool = False
    """Add to what these files hold, rather than begin them anew."""
    max_in_flight: int | None = None
    """Trajectories at once over all workers; None: all, as far as ``agentgym.max_concurrency`` of each worker goes."""
    max_failed_fraction: float | None = None
    """A worker gives up once more than this share of its latest ``max_in_flight`` trajectories are faults."""
    only_faults: bool = False
    """Send back nothing but faults: the files hold the rest, which may be more than fits in memory."""


@dataclass(frozen=True)
class RolloutShare:
    """What one worker made of a call."""

    indices: tuple[int, ...]
    """Rising: the requests that fell to it; none where its device serves another worker's engine."""
    trajectories: tuple[Trajectory, ...]
    """One for each of them, or one for each trial; with `RolloutOrder.only_faults` the faults among them."""
    duration_s: float
    engine: EngineUsage
    """In this call alone."""
    sessions: SessionUsage


@dataclass(frozen=True)
class CriticSetup:
    """What a critic is made of."""

    model: ModelConfig
    critic: CriticConfig
    total_updates: int
    """As in `ActorSetup`."""


@dataclass(frozen=True)
class ActorSetup:
    """What a hybrid worker has beyond a rollout worker."""

    actor: ActorConfig
    ref: RefConfig | None
    """None: no KL term needs a reference model."""
    critic: CriticSetup | None
    """None: no values are needed."""
    total_updates: int
    """Optimizer steps of the whole run, which the learning rate follows."""
    loss_norm_constant: float
