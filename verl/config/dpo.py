"""The root of preference optimization."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from agentgym_rl.errors import ConfigError
from verl.config.model import RefConfig
from verl.config.rules import above, one_of
from verl.config.sft import SFTConfig, SFTDataConfig, SFTTrainerConfig


class PreferenceLossType(StrEnum):
    """Losses over pairs: see `verl.trainer.core_algos.preferences`."""

    SIGMOID = "sigmoid"
    """DPO."""
    IPO = "ipo"
    HINGE = "hinge"
    KTO_PAIR = "kto_pair"


@dataclass
class DPODataConfig(SFTDataConfig):
    train_file: str = "???"
    """Pairs, as ``agentgym-rl make-pairs`` writes them: JSON or JSONL rows ``{item_id, chosen, rejected}``, each a
    conversation; an optional ``prompt`` holds messages that both begin with and that are not trained on."""


@dataclass
class DPOAlgorithmConfig:
    """Direct preference optimization, Rafailov et al. 2023, https://arxiv.org/abs/2305.18290."""

    loss_type: str = "sigmoid"
    """``sigmoid`` (DPO), ``ipo``, ``hinge`` or ``kto_pair``: see `verl.trainer.core_algos.preferences`."""
    beta: float = 0.1
    """Rewards are this times the log-ratio to the reference: the smaller, the further the policy may move."""
    label_smoothing: float = 0.0
    """Share of pairs that are taken to be the wrong way round (``sigmoid`` only)."""
    reference_free: bool = False
    """Take a uniform distribution for the reference."""

    def __post_init__(self) -> None:
        one_of("algorithm.loss_type", self.loss_type, PreferenceLossType)
        above("algorithm.beta", self.beta, 0)
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(f"algorithm.label_smoothing={self.label_smoothing!r}: must be in [0, 0.5)")
        if self.label_smoothing and self.loss_type != "sigmoid":
            raise ConfigError(
                f"algorithm.label_smoothing={self.label_smoothing} with algorithm.loss_type={self.loss_type}: must be "
                "0, since only sigmoid reads labels as probabilities"
            )


@dataclass
class DPORefConfig(RefConfig):
    """The frozen reference. Its log-probs of all pairs are computed once, before training, and kept in the run's
    folder; it is not in memory while training goes on."""

    path: str | None = None
    """Folder (or hub name) of the reference; None means the model that training begins with."""


@dataclass
class DPOTrainerConfig(SFTTrainerConfig):
    default_local_dir: str = "saves/dpo"
    """Folder of checkpoints and metrics; the trained model is in ``<default_local_dir>/huggingface`` at the end."""
    experiment_name: str = "dpo"


@dataclass
class DPOConfig(SFTConfig):
    """Root of ``python -m verl.agent_trainer.main_dpo``; a row is a pair."""

    data: DPODataConfig = field(default_factory=DPODataConfig)
    algorithm: DPOAlgorithmConfig = field(default_factory=DPOAlgorithmConfig)
    ref: DPORefConfig = field(default_factory=DPORefConfig)
    trainer: DPOTrainerConfig = field(default_factory=DPOTrainerConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.algorithm.reference_free and self.ref.path is not None:
            raise ConfigError(
                f"ref.path={self.ref.path!r} with algorithm.reference_free=True: must be null, since no model is the "
                "reference"
            )
