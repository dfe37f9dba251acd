"""``algorithm`` of PPO: advantages, KL, horizons, and which groups are trained on."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from agentgym_rl.errors import ConfigError
from agentgym_rl.rounds import Patience, RoundScheduler, make_scheduler
from verl.config.rules import above, at_least, one_of


class LossAggMode(StrEnum):
    """How token losses become one number."""

    TOKEN_MEAN = "token-mean"
    """The mean over all sampled tokens of the mini-batch."""
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    """The sum within a trajectory, then the mean over trajectories."""
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
    """The mean within a trajectory, then the mean over trajectories."""
    SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"
    """The sum within a trajectory over a constant, then the mean over trajectories."""


class KLEstimator(StrEnum):
    """How a KL is known at each token: see `verl.trainer.core_algos.kl`."""

    KL = "kl"
    """The log-ratio (k1)."""
    ABS = "abs"
    """Its absolute value."""
    MSE = "mse"
    """Half its square (k2)."""
    LOW_VAR_KL = "low_var_kl"
    """The estimate of low variance (k3)."""
    FULL = "full"
    """No estimate: over the whole vocabulary, computed wherever actor and reference are at hand together."""


@dataclass
class KLControlConfig:
    """KL penalty taken from the reward; it has no effect when ``actor.use_kl_loss`` puts the KL in the loss."""

    type: str = "fixed"
    """``fixed``, or ``adaptive``: ``kl_coef`` is where it begins, and it then follows ``target_kl``."""
    kl_coef: float = 0.0
    """Nats of KL per sampled token cost this much reward; 0 turns it off."""
    target_kl: float = 0.1
    """Nats of KL per sampled token that ``adaptive`` aims at."""
    horizon: float = 10000.0
    """Trajectories within which ``adaptive`` can change the coefficient by about a fifth."""

    def __post_init__(self) -> None:
        one_of("algorithm.kl_ctrl.type", self.type, ("fixed", "adaptive"))
        at_least("algorithm.kl_ctrl.kl_coef", self.kl_coef, 0)
        above("algorithm.kl_ctrl.target_kl", self.target_kl, 0)
        above("algorithm.kl_ctrl.horizon", self.horizon, 0)
        if self.type == "adaptive" and not self.kl_coef:
            raise ConfigError(
                "algorithm.kl_ctrl.kl_coef=0.0 with algorithm.kl_ctrl.type=adaptive: must be above 0, "
                "since a coefficient that begins at 0 stays there"
            )


@dataclass
class RoundsControlConfig:
    """ScalingInter-RL: turns allowed in each training step."""

    type: str = "fixed"
    """``fixed``, ``scaling_inter_stepwise`` (the next stage after so many steps), ``scaling_inter_linear`` (from stage
    to stage in equal parts) or ``scaling_inter_adaptive`` (the next stage when the success rate stops rising, or when
    too many trajectories are cut)."""
    rounds: Any = 10
    """An int for ``fixed``, a rising list of stages for the others."""
    steps_scaling_inter: int = 100
    """Training steps that a stage lasts, for ``scaling_inter_stepwise``, or that it takes from one stage to the next,
    for ``scaling_inter_linear``."""
    window: int = 10
    """Training steps that ``scaling_inter_adaptive`` averages."""
    min_rise: float = 0.01
    """``scaling_inter_adaptive``: the success rate has stopped rising when that of the last ``window`` steps is not
    higher by this than that of the ``window`` before."""
    max_cut_share: float = 0.5
    """``scaling_inter_adaptive``: the next stage begins, too, when more than this share of the trajectories of the last
    ``window`` steps ended by ``max_rounds``."""
    val_rounds: int | None = None
    """Turns allowed in validation; null: the longest horizon of ``rounds``. Runs with different horizons are compared
    under the same one."""

    def __post_init__(self) -> None:
        if self.val_rounds is not None:
            at_least("algorithm.rounds_ctrl.val_rounds", self.val_rounds, 1)
        self.scheduler()

    def scheduler(self) -> RoundScheduler:
        """The schedule; raises `ConfigError` for an impossible one."""
        patience = Patience(self.window, self.min_rise, self.max_cut_share)
        return make_scheduler(self.type, self.rounds, self.steps_scaling_inter, patience)


GROUP_ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus_baseline", "gigpo")
ADV_ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae", "remax", "gigpo")
UNDISCOUNTED_ESTIMATORS = ("grpo", "rloo")
"""They look at the whole score of a trajectory alone."""
FILTER_METRICS = ("score", "seq_reward", "success", "acc")
_IMPORT_PATH = re.compile(r"\w+(\.\w+)*:\w+")


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling (DAPO, Yu et al. 2025, https://arxiv.org/abs/2503.14476): groups whose members all have the same
    result teach nothing, so they are left out and others are sampled in their place."""

    enable: bool = False
    """Sample others in place of such groups."""
    metric: str = "score"
    """What must differ within a group: ``score`` (or ``seq_reward``), or ``success`` (or ``acc``)."""
    max_num_gen_batches: int = 10
    """Rounds of sampling in one training step, the first included; a step that then still lacks groups is trained on
    those there are."""

    def __post_init__(self) -> None:
        one_of("algorithm.filter_groups.metric", self.metric, FILTER_METRICS)
        at_least("algorithm.filter_groups.max_num_gen_batches", self.max_num_gen_batches, 1)


@dataclass
class GiGPOConfig:
    """``adv_estimator=gigpo``: Feng et al. 2025, https://arxiv.org/abs/2505.10978."""

    step_advantage_w: float = 1.0
    """Weight of a turn's advantage among turns that answer the same observation, beside that of the whole episode."""
    mode: str = "mean_std_norm"
    """``mean_std_norm`` divides both advantages by their groups' standard deviation, ``mean_norm`` does not."""

    def __post_init__(self) -> None:
        at_least("algorithm.gigpo.step_advantage_w", self.step_advantage_w, 0)
        one_of("algorithm.gigpo.mode", self.mode, ("mean_std_norm", "mean_norm"))


@dataclass
class AlgorithmConfig:
    adv_estimator: str = "grpo"
    """One of `ADV_ESTIMATORS`, or a function of your own as ``package.module:function``: see
    `verl.trainer.core_algos.AdvantageEstimator`."""
    gamma: float = 1.0
    """Discount per sampled token."""
    gamma_turn: float = 1.0
    """Discount per turn, beside ``gamma``: what an action brings counts less the more turns later it comes.

    Turns as steps of time: Zhou et al. 2024, https://arxiv.org/abs/2402.19446."""
    lam: float = 1.0
    """Lambda of ``gae``, per sampled token."""
    norm_adv_by_std_in_grpo: bool = True
    """``grpo`` divides by the standard deviation of the group's scores; False leaves that out, as Dr. GRPO does."""
    gigpo: GiGPOConfig = field(default_factory=GiGPOConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_is: bool = False
    """Weight the policy loss by truncated importance ratios between trainer and engine; see
    `verl.trainer.core_algos.correction`."""
    rollout_is_threshold: float = 2.0
    """Ratios are cut to at most this."""
    rollout_is_level: str = "token"
    """``token``: each token by its own ratio; ``sequence``: all by the product over the trajectory."""
    kl_penalty: str = "kl"
    """Estimator of the KL taken from the reward, as in ``actor.kl_loss_type``."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    rounds_ctrl: RoundsControlConfig = field(default_factory=RoundsControlConfig)

    def __post_init__(self) -> None:
        if not _IMPORT_PATH.fullmatch(self.adv_estimator):
            one_of("algorithm.adv_estimator", self.adv_estimator, (*ADV_ESTIMATORS, "package.module:function"))
        one_of("algorithm.kl_penalty", self.kl_penalty, KLEstimator)
        for name in ("gamma", "gamma_turn", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"algorithm.{name}={getattr(self, name)!r}: must be in [0, 1]")
        if self.gamma_turn != 1.0 and self.adv_estimator in UNDISCOUNTED_ESTIMATORS:
            raise ConfigError(
                f"algorithm.gamma_turn={self.gamma_turn} with algorithm.adv_estimator={self.adv_estimator}: must be 1, "
                "since it gives every turn the whole trajectory's score"
            )
        if self.gamma != 1.0 and self.adv_estimator == "gigpo":
            raise ConfigError(
                f"algorithm.gamma={self.gamma} with algorithm.adv_estimator=gigpo: must be 1; its steps are turns, so "
                "set algorithm.gamma_turn"
            )
        one_of("algorithm.rollout_is_level", self.rollout_is_level, ("token", "sequence"))
        above("algorithm.rollout_is_threshold", self.rollout_is_threshold, 0)
