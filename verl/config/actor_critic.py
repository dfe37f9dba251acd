"""``actor_rollout_ref`` and ``critic``: how policy and values are updated."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from verl.config.agentgym import AgentGymConfig
from verl.config.algorithm import KLEstimator, LossAggMode
from verl.config.model import FSDPConfig, ModelConfig, OptimConfig, RefConfig
from verl.config.rollout import RolloutConfig
from verl.config.rules import above, at_least, one_of


@dataclass
class ActorConfig:
    """How the policy is updated."""

    ppo_mini_batch_size: int = 8
    """Items (groups) per optimizer step; times ``rollout.n`` gives trajectories."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Trajectories per forward/backward pass on one device; None packs by ``ppo_max_token_len_per_gpu``.

    No effect on the result."""
    ppo_max_token_len_per_gpu: int = 16384
    """Token budget of one packed micro-batch; a single longer trajectory goes alone."""
    ppo_epochs: int = 1
    """Passes over each step's trajectories."""
    shuffle: bool = False
    """Shuffle trajectories into mini-batches."""
    grad_clip: float = 1.0
    """Largest gradient norm; 0 turns clipping off."""
    clip_ratio: float = 0.2
    """How far the ratio of new to old probability counts: from 1 - this to 1 + this."""
    clip_ratio_low: float | None = None
    """Lower bound is 1 - this; None means ``clip_ratio``."""
    clip_ratio_high: float | None = None
    """Upper bound is 1 + this; None means ``clip_ratio``."""
    clip_ratio_c: float | None = None
    """Dual clip: bound on ratio x advantage for negative advantages (> 1); None turns it off."""
    entropy_coeff: float = 0.0
    """Weight of the entropy (nats, averaged as ``loss_agg_mode`` says) that is taken from the loss; 0 turns it off."""
    use_kl_loss: bool = False
    """Add the KL to the reference to the loss, instead of taking it from the reward."""
    kl_loss_coef: float = 0.001
    """Weight of a nat of that KL."""
    kl_loss_type: str = "low_var_kl"
    """Estimator of the KL: ``kl``, ``abs``, ``mse`` or ``low_var_kl``; or ``full``: over the whole vocabulary, at the
    cost of a pass through the reference for each update.

    The gradient of ``kl`` is 0 in expectation, so in the loss it holds nothing back."""
    loss_agg_mode: str = "token-mean"
    """How token losses become one number: ``token-mean`` over all sampled tokens of the mini-batch;
    ``seq-mean-token-sum`` and ``seq-mean-token-mean``: sum or mean within a trajectory, then mean over trajectories;
    ``seq-mean-token-sum-norm``: sum within a trajectory over ``loss_norm_constant``, then mean."""
    loss_norm_constant: float | None = None
    """Divisor of a trajectory's token sum in ``seq-mean-token-sum-norm``; None means ``data.max_response_length``."""
    ulysses_sequence_parallel_size: int = 1
    """Workers that share each packed micro-batch, in actor and reference: its token budget and the memory for one long
    trajectory grow so many times. No effect on the result."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        at_least("actor.ulysses_sequence_parallel_size", self.ulysses_sequence_parallel_size, 1)
        at_least("actor.ppo_mini_batch_size", self.ppo_mini_batch_size, 1)
        at_least("actor.ppo_epochs", self.ppo_epochs, 1)
        at_least("actor.ppo_max_token_len_per_gpu", self.ppo_max_token_len_per_gpu, 1)
        one_of("actor.loss_agg_mode", self.loss_agg_mode, LossAggMode)
        one_of("actor.kl_loss_type", self.kl_loss_type, KLEstimator)
        if self.ppo_micro_batch_size_per_gpu is not None:
            at_least("actor.ppo_micro_batch_size_per_gpu", self.ppo_micro_batch_size_per_gpu, 1)
        for name in ("grad_clip", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "kl_loss_coef"):
            if getattr(self, name) is not None:
                at_least(f"actor.{name}", getattr(self, name), 0)
        if self.loss_norm_constant is not None:
            above("actor.loss_norm_constant", self.loss_norm_constant, 0)
        if self.clip_ratio_c is not None:
            above("actor.clip_ratio_c", self.clip_ratio_c, 1.0)

    @property
    def has_full_kl_loss(self) -> bool:
        return self.use_kl_loss and self.kl_loss_type == KLEstimator.FULL

    @property
    def clip_low(self) -> float:
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


@dataclass
class ActorRolloutRefConfig:
    agentgym: AgentGymConfig = field(default_factory=AgentGymConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass
class CriticModelConfig:
    """The critic's backbone; whatever is not named here is as in ``actor_rollout_ref.model``."""

    path: str | None = None
    """Folder (or hub name) of a Hugging Face causal language model; None means ``actor_rollout_ref.model.path``."""
    enable_gradient_checkpointing: bool | None = None
    """None means as the policy."""

    def resolved(self, policy: ModelConfig) -> ModelConfig:
        """The whole model config of the critic of this policy. A critic is trained whole, without adapters."""
        return replace(
            policy,
            path=policy.path if self.path is None else self.path,
            enable_gradient_checkpointing=(
                policy.enable_gradient_checkpointing
                if self.enable_gradient_checkpointing is None
                else self.enable_gradient_checkpointing
            ),
            lora_rank=0,
            freeze=[],
        )


@dataclass
class CriticConfig:
    """The model of values that ``algorithm.adv_estimator=gae`` needs, and how it is trained."""

    enable: bool | None = None
    """Train a critic; None means where ``gae`` needs it. An estimator of your own may want ``values_T`` too."""
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    ppo_mini_batch_size: int | None = None
    """Items (groups) per optimizer step; None means as ``actor_rollout_ref.actor.ppo_mini_batch_size``."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Trajectories per forward/backward pass on one device; None packs by ``ppo_max_token_len_per_gpu``."""
    ppo_max_token_len_per_gpu: int = 32768
    """Token budget of one packed micro-batch; a single longer trajectory goes alone."""
    ppo_epochs: int | None = None
    """Passes over each step's trajectories; None means as ``actor_rollout_ref.actor.ppo_epochs``."""
    shuffle: bool | None = None
    """Shuffle trajectories into mini-batches; None means as ``actor_rollout_ref.actor.shuffle``."""
    grad_clip: float = 1.0
    """Largest gradient norm; 0 turns clipping off."""
    cliprange_value: float | None = 0.5
    """How far a step may move a value from where it was, as far as the loss sees; None does not clip."""
    loss_agg_mode: str = "token-mean"
    """As ``actor_rollout_ref.actor.loss_agg_mode``."""

    def __post_init__(self) -> None:
        for name in ("ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu", "ppo_epochs"):
            if getattr(self, name) is not None:
                at_least(f"critic.{name}", getattr(self, name), 1)
        at_least("critic.grad_clip", self.grad_clip, 0)
        if self.cliprange_value is not None:
            above("critic.cliprange_value", self.cliprange_value, 0)
        one_of("critic.loss_agg_mode", self.loss_agg_mode, LossAggMode)
