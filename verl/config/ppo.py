"""The root of PPO, and rules between its branches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agentgym_rl.errors import ConfigError
from verl.config.actor_critic import ActorRolloutRefConfig, CriticConfig
from verl.config.algorithm import GROUP_ESTIMATORS, AlgorithmConfig, KLEstimator
from verl.config.rules import above, at_least, one_of
from verl.config.run import RayInitConfig, TrainingRunConfig


@dataclass
class DataConfig:
    train_file: Any = "???"
    """Training items: JSON, JSONL or parquet rows with ``item_id``. With several tasks, a list of a file for each task
    in turn, or one file whose ids name their tasks."""
    val_file: Any = None
    """Items for validation during training; a file, or a folder of category files. With several tasks as
    ``train_file``, and an entry may be null: that task is not validated."""
    task_weights: list[float] | None = None
    """Share of each task in every batch, in the order of ``agentgym.task_name``, in any unit; None mixes the tasks by
    their numbers of items. With weights, an epoch is as many items as all tasks have together."""
    train_batch_size: int = 32
    """Items per training step; each is rolled out ``actor_rollout_ref.rollout.n`` times."""
    max_prompt_length: int = 1024
    """Tokens of the task-description prompt of the first turn; a longer one is an error."""
    max_response_length: int = 8192
    """All tokens after that prompt, observations included."""
    shuffle: bool = True
    """Shuffle the items anew each epoch, by ``seed``."""
    seed: int = 0
    """Seed of the order of items."""

    def __post_init__(self) -> None:
        at_least("data.train_batch_size", self.train_batch_size, 1)
        at_least("data.max_prompt_length", self.max_prompt_length, 1)
        at_least("data.max_response_length", self.max_response_length, 1)
        for weight in self.task_weights or ():
            above("data.task_weights", weight, 0)


@dataclass
class TrainerConfig(TrainingRunConfig):
    """The run: length, devices, logs, checkpoints."""

    logger: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    peak_tflops_per_device: float | None = None
    """Dense 16-bit peak of one device, for the model FLOPs utilisation; None takes it by the GPU's name, if known."""
    critic_warmup: int = 0
    """So many steps at the start train the critic alone."""
    rollout_only: bool = False
    """Only make and write the trajectories of each step, by the model that training would start from: no optimizer, no
    update."""
    replay: str | None = None
    """Train on the trajectories that ``rollout_only`` or a training run wrote, without servers or engine: the folder of
    that run, or of its trajectories. Everything else is given as for that run."""
    token_values: str = "computed"
    """What is kept of each sampled token for the viewer, in ``default_local_dir/token_values``: ``none``; ``computed``:
    advantages, and what else the step computes (log-probs, values); ``all``: log-probs and entropies in any case, at
    the cost of two passes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("trainer.critic_warmup", self.critic_warmup, 0)
        one_of("trainer.token_values", self.token_values, ("none", "computed", "all"))
        self._check_halves()
        if self.peak_tflops_per_device is not None:
            above("trainer.peak_tflops_per_device", self.peak_tflops_per_device, 0)

    def _check_halves(self) -> None:
        """Rules of runs that leave out one half of each step."""
        if not (self.rollout_only or self.replay):
            return
        if self.rollout_only and self.replay:
            raise ConfigError(
                f"trainer.rollout_only=True with trainer.replay={self.replay!r}: one of the two, since one leaves out "
                "the updates and the other the rollouts"
            )
        half = "trainer.rollout_only=True" if self.rollout_only else f"trainer.replay={self.replay!r}"
        reason = "no policy changes" if self.rollout_only else "there is no engine to validate with"
        if self.validates:
            name = "test_freq" if self.test_freq > 0 else "val_before_train"
            raise ConfigError(f"trainer.{name}={getattr(self, name)!r} with {half}: must be off, since {reason}")
        if self.rollout_only and self.resume_mode == "resume_path":
            raise ConfigError(
                f"trainer.resume_mode=resume_path with {half}: give the checkpoint's actor/huggingface folder as "
                "actor_rollout_ref.model.path"
            )


def _check_enough_for_workers(key: str, batch: int, n_key: str, n: int, trainer: TrainerConfig) -> None:
    """Every worker needs a trajectory of each batch: a worker without any would only wait for the others."""
    if batch * n >= trainer.world_size:
        return
    raise ConfigError(
        f"{key}={batch} x {n_key}={n} = {batch * n} trajectories on trainer.nnodes={trainer.nnodes} x "
        f"trainer.n_gpus_per_node={trainer.n_gpus_per_node} = {trainer.world_size} workers: each needs at least one; "
        f"the nearest that work are {key}={-(-trainer.world_size // n)}, or {batch * n} workers"
    )


@dataclass
class PPOConfig:
    """Root of ``python -m verl.agent_trainer.main_ppo``."""

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)

    def __post_init__(self) -> None:
        rollout, actor = self.actor_rollout_ref.rollout, self.actor_rollout_ref.actor
        if self.algorithm.adv_estimator in GROUP_ESTIMATORS and rollout.n < 2:
            raise ConfigError(
                f"actor_rollout_ref.rollout.n={rollout.n} with algorithm.adv_estimator="
                f"{self.algorithm.adv_estimator}: a group needs n >= 2"
            )
        if rollout.temperature <= 0:
            raise ConfigError(
                f"actor_rollout_ref.rollout.temperature={rollout.temperature}: training needs a temperature above 0"
            )
        if rollout.top_p != 1.0 or rollout.top_k != -1:
            raise ConfigError(
                f"actor_rollout_ref.rollout.top_p={rollout.top_p}, top_k={rollout.top_k}: training samples from the "
                "full distribution (top_p=1, top_k=-1); a cut would make the trained log-probabilities wrong"
            )
        self.trainer.check_engine_groups("actor_rollout_ref.rollout.tensor_model_parallel_size", rollout)
        self.trainer.check_divides_workers(
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size", actor.ulysses_sequence_parallel_size
        )
        for key, fsdp in (
            ("actor_rollout_ref.actor", actor.fsdp_config),
            ("actor_rollout_ref.ref", self.actor_rollout_ref.ref.fsdp_config),
            ("critic", self.critic.fsdp_config),
        ):
            shards = fsdp.num_shards(self.trainer.world_size)
            self.trainer.check_divides_workers(f"{key}.fsdp_config.fsdp_size", shards)
        if self.data.train_batch_size % actor.ppo_mini_batch_size:
            raise ConfigError(
                f"actor_rollout_ref.actor.ppo_mini_batch_size={actor.ppo_mini_batch_size} must divide "
                f"data.train_batch_size={self.data.train_batch_size}"
            )
        self._check_algorithm()
        self._check_critic()
        self._check_task_weights()
        _check_enough_for_workers(
            "data.train_batch_size", self.data.train_batch_size, "actor_rollout_ref.rollout.n", rollout.n, self.trainer
        )
        _check_enough_for_workers(
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            actor.ppo_mini_batch_size,
            "actor_rollout_ref.rollout.n",
            rollout.n,
            self.trainer,
        )

    def _check_task_weights(self) -> None:
        weights, agentgym = self.data.task_weights, self.actor_rollout_ref.agentgym
        if weights is not None and agentgym.task_name != "???" and len(weights) != len(agentgym.tasks):
            raise ConfigError(
                f"data.task_weights={list(weights)}: must have a weight for each of the {len(agentgym.tasks)} tasks of "
                f"actor_rollout_ref.agentgym.task_name={agentgym.task_name!r}"
            )

    def _check_algorithm(self) -> None:
        rollout, actor, algorithm = self.actor_rollout_ref.rollout, self.actor_rollout_ref.actor, self.algorithm
        if algorithm.filter_groups.enable and rollout.n < 2:
            raise ConfigError(
                f"actor_rollout_ref.rollout.n={rollout.n} with algorithm.filter_groups.enable=True: a group needs "
                "n >= 2 to have a signal"
            )
        agentgym = self.actor_rollout_ref.agentgym
        if algorithm.adv_estimator == "remax" and agentgym.agent_choice.tries_again:
            raise ConfigError(
                f"algorithm.adv_estimator=remax with actor_rollout_ref.agentgym.agent={agentgym.agent}: an agent that "
                "tries again needs another estimator, since the greedy baseline is that of a first trial"
            )
        if algorithm.kl_ctrl.type == "adaptive" and actor.use_kl_loss:
            raise ConfigError(
                "algorithm.kl_ctrl.type='adaptive' with actor_rollout_ref.actor.use_kl_loss=True: must be fixed, since "
                "the KL is then in the loss, under actor_rollout_ref.actor.kl_loss_coef"
            )

    def _check_critic(self) -> None:
        if self.critic.enable is False and self.algorithm.adv_estimator == "gae":
            raise ConfigError("critic.enable=False with algorithm.adv_estimator=gae: must be True or null")
        if not self.needs_critic:
            if self.trainer.critic_warmup:
                raise ConfigError(
                    f"trainer.critic_warmup={self.trainer.critic_warmup} with algorithm.adv_estimator="
                    f"{self.algorithm.adv_estimator}: must be 0, since there is no critic; gae has one"
                )
            return
        size = self.critic.ppo_mini_batch_size
        if size is None:
            return
        if self.data.train_batch_size % size:
            raise ConfigError(
                f"critic.ppo_mini_batch_size={size} must divide data.train_batch_size={self.data.train_batch_size}"
            )
        n = self.actor_rollout_ref.rollout.n
        _check_enough_for_workers("critic.ppo_mini_batch_size", size, "actor_rollout_ref.rollout.n", n, self.trainer)

    @property
    def needs_critic(self) -> bool:
        """True when values are computed and learned."""
        return self.algorithm.adv_estimator == "gae" if self.critic.enable is None else self.critic.enable

    @property
    def reward_kl_coef(self) -> float:
        """What a nat of KL costs of the reward: nothing when the KL is in the loss, or it would count twice."""
        return 0.0 if self.actor_rollout_ref.actor.use_kl_loss else self.algorithm.kl_ctrl.kl_coef

    @property
    def needs_reference(self) -> bool:
        """True when a KL term is on."""
        return self.actor_rollout_ref.actor.use_kl_loss or self.reward_kl_coef > 0

    @property
    def shares_prefixes(self) -> bool:
        """True when the actor computes once what trajectories of a group begin with."""
        actor = self.actor_rollout_ref.actor
        splits = actor.ppo_micro_batch_size_per_gpu is not None or actor.ulysses_sequence_parallel_size > 1
        return self.actor_rollout_ref.model.share_prefixes and not splits

    @property
    def has_full_kl_reward(self) -> bool:
        return self.reward_kl_coef > 0 and self.algorithm.kl_penalty == KLEstimator.FULL

    @property
    def needs_ref_log_probs(self) -> bool:
        """True when the KL term is estimated from the sampled tokens."""
        return self.needs_reference and not (self.has_full_kl_reward or self.actor_rollout_ref.actor.has_full_kl_loss)
