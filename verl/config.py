"""Every configuration key: name, default, meaning and unit.

The tree is plain dataclasses under AgentGym-RL's and Verl's names. The YAML files in ``verl/agent_trainer/config`` pick
values; `verl.agent_trainer.loading` reads them with Hydra once and hands each part its own branch.
Rules within a branch are in ``__post_init__``; rules between branches in the root's.
Errors are `ConfigError` and name key, value and what is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from agentgym_rl.agent.strategies import AgentChoice
from agentgym_rl.client.addresses import addresses_by_task
from agentgym_rl.errors import ConfigError
from agentgym_rl.rollout.handler import TokenLimits
from agentgym_rl.rounds import Patience, RoundScheduler, make_scheduler
from agentgym_rl.types import SamplingParams


def _one_of(key: str, value: Any, allowed: Iterable[Any]) -> None:
    allowed = tuple(allowed)
    if value not in allowed:
        raise ConfigError(f"{key}={value!r}: must be one of {', '.join(map(str, allowed))}")


def _at_least(key: str, value: float, minimum: float) -> None:
    if not value >= minimum:  # as NaN is not
        raise ConfigError(f"{key}={value!r}: must be at least {minimum}")


def _above(key: str, value: float, minimum: float) -> None:
    if not value > minimum:
        raise ConfigError(f"{key}={value!r}: must be above {minimum}")


def _names(key: str, value: Any) -> tuple[str, ...]:
    """One name, or a list of different ones."""
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{key}={value!r}: must be a name, or a list of names")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{key}={list(names)!r}: {twice} stands twice")
    return names


def _check_sampling(branch: str, temperature: float, top_p: float, top_k: int) -> None:
    _at_least(f"{branch}.temperature", temperature, 0)
    if not 0 < top_p <= 1:
        raise ConfigError(f"{branch}.top_p={top_p!r}: must be in (0, 1]")
    if top_k < 1 and top_k != -1:
        raise ConfigError(f"{branch}.top_k={top_k!r}: must be at least 1, or -1 for no cut")


# --------------------------------------------------------------------------------------------------------------- shared


@dataclass
class AgentGymConfig:
    """Which environment is stepped, and where."""

    task_name: Any = "???"
    """A registered environment: ``textcraft`` or the user's own; of several, a list: ``[textcraft,babyai]``."""
    env_addr: Any = "???"
    """Base URL of the environment server; of several, a list, or with commas between: sessions are spread over them.

    With a list of tasks, a list with an entry for each task in turn, which may itself be a list."""
    timeout: float = 600.0
    """Seconds one trajectory may take (stop reason ``deadline``)."""
    request_timeout: float = 60.0
    """Seconds to wait for the answer to one HTTP request."""
    connect_timeout: float = 5.0
    """Seconds that one try to connect to a server may take."""
    max_retries: int = 10
    """Tries to reach the server at the start of a run, and for requests that cannot have run twice."""
    agent: str = "react"
    """The agent's way of thinking: ``react`` (thought, then action), ``act`` (action only), ``plan`` (a plan first,
    kept in view), ``reflect`` (after a failure, what to do differently, and another trial), or a class of your own
    as ``package.module:Class``."""
    action_format: str = "react"
    """How an action is written: ``react`` (a line ``Action: ...``), ``function_calling`` (in the model's own format
    where its chat template has one) or ``code_as_action`` (one call, as in Python; it is read, never run)."""
    max_trials: int = 3
    """Trials of an item by one sample, for agents that try again, such as ``reflect``."""
    max_concurrency: int = 256
    """Trajectories in flight per rollout worker, and so its threads and connections to the server."""

    def __post_init__(self) -> None:
        _above("agentgym.timeout", self.timeout, 0)
        _above("agentgym.request_timeout", self.request_timeout, 0)
        _above("agentgym.connect_timeout", self.connect_timeout, 0)
        _at_least("agentgym.max_retries", self.max_retries, 0)
        _at_least("agentgym.max_concurrency", self.max_concurrency, 1)
        _ = self.agent_choice
        if self.task_name != "???" and self.env_addr not in ("???", ""):
            _ = self.servers

    @property
    def agent_choice(self) -> AgentChoice:
        """Way of thinking and form of actions; raises `ConfigError` when there is none of that name."""
        return AgentChoice(self.agent, self.action_format, self.max_trials)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of all tasks."""
        return _names("agentgym.task_name", self.task_name)

    @property
    def servers(self) -> dict[str, tuple[str, ...]]:
        """Addresses of each task's servers; none in a run that needs none."""
        if self.env_addr == "":
            return {}
        return addresses_by_task(self.tasks, self.env_addr, is_list=not isinstance(self.task_name, str))


@dataclass
class ModelConfig:
    """The policy's weights and tokenizer."""

    path: str = "???"
    """Folder (or hub name) of a Hugging Face causal language model with a tokenizer that has a chat template."""
    trust_remote_code: bool = False
    """Run the Python code that the model's folder brings along. Only for code that you have read."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    share_prefixes: bool = True
    """What trajectories of one group have in common at their beginning, such as the prompt, is computed once for those
    that share a micro-batch; same numbers up to rounding. Not with ``ppo_micro_batch_size_per_gpu`` or
    ``ulysses_sequence_parallel_size``."""
    dtype: str = "auto"
    """Type that the model is read, computed, played and exported in: ``float32``, ``bfloat16``, or ``auto``: float32,
    with bfloat16 compute on CUDA. What is trained, be it the model or an adapter, is always kept in float32, with its
    gradients and Adam's moments; under ``bfloat16`` the rest takes half the memory."""
    external_lib: str | None = None
    """A Python module that is imported first and registers its own architectures with transformers."""
    freeze: list[str] = field(default_factory=list)
    """Weights that are not trained, by name; ``*`` stands for anything: ``[model.embed_tokens.*]``."""
    lora_rank: int = 0
    """Rank of a low-rank adapter that is trained instead of the model; 0 trains the model itself."""
    lora_alpha: float = 16.0
    """The adapter counts ``lora_alpha / lora_rank`` times."""
    target_modules: Any = "all-linear"
    """Layers that get an adapter: ``all-linear``, one regular expression, or a list of their last names."""

    def __post_init__(self) -> None:
        _one_of("model.dtype", self.dtype, ("auto", "float32", "bfloat16"))
        _at_least("model.lora_rank", self.lora_rank, 0)
        _above("model.lora_alpha", self.lora_alpha, 0)
        targets = self.target_modules
        if not targets or not (isinstance(targets, str) or all(isinstance(name, str) for name in targets)):
            raise ConfigError(f"model.target_modules={targets!r}: must be a string or a list of strings")
        if self.lora_rank > 0 and self.freeze:
            raise ConfigError(
                f"model.freeze={list(self.freeze)!r} with model.lora_rank={self.lora_rank}: must be empty, since an "
                "adapter freezes all of the model; name fewer layers in model.target_modules"
            )

    def absolute(self) -> ModelConfig:
        """The same for processes that run in another folder; a hub name stays as it is."""
        return replace(self, path=str(Path(self.path).resolve())) if Path(self.path).exists() else self


@dataclass
class OptimConfig:
    """AdamW and its learning rate."""

    lr: float = 1e-6
    """Learning rate, the highest of the schedule."""
    lr_warmup_steps: int = 0
    """Optimizer steps (updates) of linear warm-up."""
    lr_schedule: str = "constant"
    """After the warm-up: ``constant`` or ``cosine`` (reaches ``min_lr_ratio`` after the last update of the plan)."""
    min_lr_ratio: float = 0.0
    """Share of ``lr`` that ``cosine`` ends at."""
    weight_decay: float = 0.01
    """Of matrices, as AdamW has it: this share of ``lr`` x weight per update; norms and biases have none."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay of AdamW's two moments."""
    max_skipped_updates: int = 5
    """An update whose loss or gradient is not finite is skipped; so many in a row end the run."""

    def __post_init__(self) -> None:
        _at_least("optim.lr", self.lr, 0)
        _at_least("optim.max_skipped_updates", self.max_skipped_updates, 1)
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError(f"optim.min_lr_ratio={self.min_lr_ratio!r}: must be in [0, 1]")
        _at_least("optim.lr_warmup_steps", self.lr_warmup_steps, 0)
        _at_least("optim.weight_decay", self.weight_decay, 0)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optim.betas={self.betas!r}: must be two numbers in [0, 1)")
        _one_of("optim.lr_schedule", self.lr_schedule, ("constant", "cosine"))


@dataclass
class RefFSDPConfig:
    """How a model lies on the workers' devices; no effect on results beyond rounding."""

    param_offload: bool = False
    """Keep parameters in host memory between the calls that need them; no effect on a CPU."""
    fsdp_size: int = -1
    """Neighbouring workers that hold one copy of the model, each a shard of it; -1: all workers. Take the workers of a
    machine where the network between machines is slow: gradients alone cross it then, once per update, and each
    machine holds a copy."""

    def __post_init__(self) -> None:
        if self.fsdp_size < 1 and self.fsdp_size != -1:
            raise ConfigError(f"fsdp_config.fsdp_size={self.fsdp_size}: must be at least 1, or -1 for all workers")

    def num_shards(self, num_workers: int) -> int:
        """Of a copy of the model."""
        return num_workers if self.fsdp_size == -1 else self.fsdp_size


@dataclass
class FSDPConfig(RefFSDPConfig):
    optimizer_offload: bool = False
    """Keep the optimizer's state in host memory between updates; no effect on a CPU."""


LOGGERS = ("console", "jsonl", "tensorboard", "wandb", "mlflow")


@dataclass
class WorkersConfig:
    """The processes that do a run's work."""

    nnodes: int = 1
    """Machines that take part."""
    n_gpus_per_node: int = 1
    """Workers per node: one per GPU, or one per process on a CPU."""
    device: str = "auto"
    """``cuda``, ``cpu``, or ``auto`` (cuda where there is one)."""
    worker_group: str = "ray"
    """``ray``, or ``local``: everything in the driver's process, for debugging on one device."""
    num_threads: int | None = None
    """Threads of torch per worker; None shares the machine's cores out among its workers."""
    dry_run: bool = False
    """Check what can be checked without the model's weights and a server, print the plan, and end."""

    def __post_init__(self) -> None:
        _one_of("trainer.device", self.device, ("auto", "cpu", "cuda"))
        _one_of("trainer.worker_group", self.worker_group, ("ray", "local"))
        _at_least("trainer.nnodes", self.nnodes, 1)
        _at_least("trainer.n_gpus_per_node", self.n_gpus_per_node, 1)
        if self.worker_group == "local" and self.world_size != 1:
            raise ConfigError(
                f"trainer.worker_group=local with trainer.nnodes={self.nnodes} x trainer.n_gpus_per_node="
                f"{self.n_gpus_per_node}: local runs one worker in the driver's process; take ray, or 1 x 1"
            )
        if self.num_threads is not None:
            _at_least("trainer.num_threads", self.num_threads, 1)

    @property
    def world_size(self) -> int:
        return self.nnodes * self.n_gpus_per_node

    def check_engine_groups(self, key: str, rollout: RolloutConfig) -> None:
        """Raise `ConfigError`, in which ``key`` names the number of devices, when an engine would span machines."""
        if self.n_gpus_per_node % rollout.tensor_model_parallel_size:
            raise ConfigError(
                f"{key}={rollout.tensor_model_parallel_size} must divide trainer.n_gpus_per_node={self.n_gpus_per_node}"
            )

    def check_divides_workers(self, key: str, size: int) -> None:
        """Raise `ConfigError` when ``size``, which is that of ``key``, does not part the workers into equal groups."""
        if self.world_size % size:
            raise ConfigError(
                f"{key}={size} must divide the number of workers, trainer.nnodes={self.nnodes} x "
                f"trainer.n_gpus_per_node={self.n_gpus_per_node} = {self.world_size}"
            )


@dataclass
class TrainingRunConfig(WorkersConfig):
    """A training run: its length, and what is kept of it."""

    total_epochs: int = 1
    """Passes over the training data, unless ``total_training_steps`` is given."""
    total_training_steps: int | None = None
    """Training steps; None means ``total_epochs`` x batches of an epoch."""
    default_local_dir: str = "saves/default"
    """Folder of checkpoints, metrics and trajectories."""
    save_freq: int = -1
    """Save every so many steps; -1 saves only at the end."""
    test_freq: int = -1
    """Validate by rollouts every so many steps, and at the end; -1 never."""
    val_before_train: bool = False
    """Validate once before the first step."""
    resume_mode: str = "auto"
    """``auto`` (from the latest checkpoint in ``default_local_dir``, if any), ``disable``, or ``resume_path``."""
    resume_from_path: str | None = None
    """A folder ``global_step_<N>``, for ``resume_mode=resume_path``."""
    max_actor_ckpt_to_keep: int | None = None
    """Older checkpoints are removed once a new one is complete; None keeps all."""
    async_save: bool = True
    """Write checkpoints while training goes on, from a copy in host memory as large as they are; False waits."""
    project_name: str = "agentgym-rl"
    """The project under which trackers list the run."""
    experiment_name: str = "default"
    """The run's name there."""
    logger: list[str] = field(default_factory=lambda: ["console", "jsonl"])
    """Where metrics go: any of ``console``, ``jsonl``, ``tensorboard``, ``wandb``, ``mlflow``."""
    seed: int = 0
    """Seed of random numbers; the order of the data has its own, ``data.seed``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least("trainer.total_epochs", self.total_epochs, 1)
        if self.total_training_steps is not None:
            _at_least("trainer.total_training_steps", self.total_training_steps, 1)
        for name in self.logger:
            _one_of("trainer.logger", name, LOGGERS)
        self._check_checkpoints()

    def _check_checkpoints(self) -> None:
        _one_of("trainer.resume_mode", self.resume_mode, ("auto", "disable", "resume_path"))
        for name in ("save_freq", "test_freq"):
            value = getattr(self, name)
            if value < 1 and value != -1:
                raise ConfigError(f"trainer.{name}={value!r}: must be at least 1, or -1")
        if self.resume_mode == "resume_path" and not self.resume_from_path:
            raise ConfigError(
                "trainer.resume_mode=resume_path needs trainer.resume_from_path, a folder global_step_<N>"
            )
        if self.resume_mode != "resume_path" and self.resume_from_path:
            raise ConfigError(
                f"trainer.resume_from_path={self.resume_from_path!r} with trainer.resume_mode={self.resume_mode}: "
                "a path is used only with resume_mode=resume_path"
            )
        if self.max_actor_ckpt_to_keep is not None:
            _at_least("trainer.max_actor_ckpt_to_keep", self.max_actor_ckpt_to_keep, 1)

    @property
    def validates(self) -> bool:
        """True when the model is evaluated by rollouts during training."""
        return self.test_freq > 0 or self.val_before_train


# ------------------------------------------------------------------------------------------------------------------ PPO


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
        _at_least("data.train_batch_size", self.train_batch_size, 1)
        _at_least("data.max_prompt_length", self.max_prompt_length, 1)
        _at_least("data.max_response_length", self.max_response_length, 1)
        for weight in self.task_weights or ():
            _above("data.task_weights", weight, 0)


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
        _at_least("actor.ulysses_sequence_parallel_size", self.ulysses_sequence_parallel_size, 1)
        _at_least("actor.ppo_mini_batch_size", self.ppo_mini_batch_size, 1)
        _at_least("actor.ppo_epochs", self.ppo_epochs, 1)
        _at_least("actor.ppo_max_token_len_per_gpu", self.ppo_max_token_len_per_gpu, 1)
        _one_of("actor.loss_agg_mode", self.loss_agg_mode, LossAggMode)
        _one_of("actor.kl_loss_type", self.kl_loss_type, KLEstimator)
        if self.ppo_micro_batch_size_per_gpu is not None:
            _at_least("actor.ppo_micro_batch_size_per_gpu", self.ppo_micro_batch_size_per_gpu, 1)
        for name in ("grad_clip", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "kl_loss_coef"):
            if getattr(self, name) is not None:
                _at_least(f"actor.{name}", getattr(self, name), 0)
        if self.loss_norm_constant is not None:
            _above("actor.loss_norm_constant", self.loss_norm_constant, 0)
        if self.clip_ratio_c is not None:
            _above("actor.clip_ratio_c", self.clip_ratio_c, 1.0)

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
class RefConfig:
    """The frozen reference model; loaded only when a KL term needs it, and with LoRA it is the actor's own base."""

    log_prob_max_token_len_per_gpu: int = 32768
    """Token budget of one packed forward pass."""
    fsdp_config: RefFSDPConfig = field(default_factory=RefFSDPConfig)

    def __post_init__(self) -> None:
        _at_least("ref.log_prob_max_token_len_per_gpu", self.log_prob_max_token_len_per_gpu, 1)


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
        _at_least("rollout.val_kwargs.n", self.n, 1)
        _check_sampling("rollout.val_kwargs", self.temperature, self.top_p, self.top_k)


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
        _one_of("rollout.name", self.name, ("auto", "hf", "vllm"))
        _at_least("rollout.n", self.n, 1)
        _at_least("rollout.max_tokens", self.max_tokens, 1)
        _at_least("rollout.max_model_len", self.max_model_len, 2)
        _at_least("rollout.max_num_seqs", self.max_num_seqs, 1)
        _at_least("rollout.max_num_batched_tokens", self.max_num_batched_tokens, self.max_num_seqs)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"rollout.gpu_memory_utilization={self.gpu_memory_utilization!r}: must be in (0, 1]")
        _check_sampling("rollout", self.temperature, self.top_p, self.top_k)
        if not 0 <= self.max_failed_fraction < 1:
            raise ConfigError(f"rollout.max_failed_fraction={self.max_failed_fraction!r}: must be in [0, 1)")
        _at_least("rollout.tensor_model_parallel_size", self.tensor_model_parallel_size, 1)

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
                _at_least(f"critic.{name}", getattr(self, name), 1)
        _at_least("critic.grad_clip", self.grad_clip, 0)
        if self.cliprange_value is not None:
            _above("critic.cliprange_value", self.cliprange_value, 0)
        _one_of("critic.loss_agg_mode", self.loss_agg_mode, LossAggMode)


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
        _one_of("algorithm.kl_ctrl.type", self.type, ("fixed", "adaptive"))
        _at_least("algorithm.kl_ctrl.kl_coef", self.kl_coef, 0)
        _above("algorithm.kl_ctrl.target_kl", self.target_kl, 0)
        _above("algorithm.kl_ctrl.horizon", self.horizon, 0)
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
            _at_least("algorithm.rounds_ctrl.val_rounds", self.val_rounds, 1)
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
        _one_of("algorithm.filter_groups.metric", self.metric, FILTER_METRICS)
        _at_least("algorithm.filter_groups.max_num_gen_batches", self.max_num_gen_batches, 1)


@dataclass
class GiGPOConfig:
    """``adv_estimator=gigpo``: Feng et al. 2025, https://arxiv.org/abs/2505.10978."""

    step_advantage_w: float = 1.0
    """Weight of a turn's advantage among turns that answer the same observation, beside that of the whole episode."""
    mode: str = "mean_std_norm"
    """``mean_std_norm`` divides both advantages by their groups' standard deviation, ``mean_norm`` does not."""

    def __post_init__(self) -> None:
        _at_least("algorithm.gigpo.step_advantage_w", self.step_advantage_w, 0)
        _one_of("algorithm.gigpo.mode", self.mode, ("mean_std_norm", "mean_norm"))


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
            _one_of("algorithm.adv_estimator", self.adv_estimator, (*ADV_ESTIMATORS, "package.module:function"))
        _one_of("algorithm.kl_penalty", self.kl_penalty, KLEstimator)
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
        _one_of("algorithm.rollout_is_level", self.rollout_is_level, ("token", "sequence"))
        _above("algorithm.rollout_is_threshold", self.rollout_is_threshold, 0)


@dataclass
class RayInitConfig:
    """The Ray that runs the workers, for ``trainer.worker_group=ray``."""

    address: str | None = None
    """``host:port`` of a running cluster's head, or ``auto`` for the cluster that this machine is part of.

    None: the one that ``RAY_ADDRESS`` names, else a Ray of the run's own on this machine, which ends with it."""
    num_cpus: int | None = None
    """CPUs that a Ray of the run's own reckons with; None: one per worker."""
    env_vars: list[str] = field(default_factory=list)
    """Further environment variables that workers get from the driver: names, or patterns such as ``MY_LIB_*``."""

    def __post_init__(self) -> None:
        if self.num_cpus is not None:
            _at_least("ray_init.num_cpus", self.num_cpus, 1)
            if self.address is not None:
                raise ConfigError(
                    f"ray_init.num_cpus={self.num_cpus} with ray_init.address={self.address!r}: a running cluster "
                    "knows its CPUs; leave num_cpus out"
                )


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
        _at_least("trainer.critic_warmup", self.critic_warmup, 0)
        _one_of("trainer.token_values", self.token_values, ("none", "computed", "all"))
        self._check_halves()
        if self.peak_tflops_per_device is not None:
            _above("trainer.peak_tflops_per_device", self.peak_tflops_per_device, 0)

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


# ----------------------------------------------------------------------------------------------------------- generation


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
            _at_least(f"data.{name}", getattr(self, name), 1)


@dataclass
class GenerationAgentGymConfig(AgentGymConfig):
    max_rounds: int = 10
    """Assistant turns per trajectory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least("agentgym.max_rounds", self.max_rounds, 1)


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


# ------------------------------------------------------------------------------------------------------------------ SFT


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
        _at_least("data.train_batch_size", self.train_batch_size, 1)
        _at_least("data.max_length", self.max_length, 2)
        _one_of("data.truncation", self.truncation, TRUNCATIONS)
        _at_least("data.max_prompt_length", self.max_prompt_length, 1)
        _at_least("data.max_response_length", self.max_response_length, 1)


@dataclass
class ValidationAgentGymConfig(GenerationAgentGymConfig):
    """The environment that the model is validated in during training; nothing else needs one."""

    task_name: Any = ""
    """A registered environment, or a list of several; empty where nothing is validated."""
    env_addr: Any = ""
    """As in ``main_ppo``; empty where nothing is validated."""


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
        _at_least("trainer.log_freq", self.log_freq, 1)
        _at_least("trainer.max_token_len_per_gpu", self.max_token_len_per_gpu, 1)
        _at_least("trainer.grad_clip", self.grad_clip, 0)
        if self.max_time_s is not None:
            _above("trainer.max_time_s", self.max_time_s, 0)


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


# ------------------------------------------------------------------------------------------------------------------ DPO


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
        _one_of("algorithm.loss_type", self.loss_type, PreferenceLossType)
        _above("algorithm.beta", self.beta, 0)
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


# ------------------------------------------------------------------------------------------------------------ AgentEvol


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
            _at_least(f"data.{name}", getattr(self, name), 1)
        _at_least("data.max_length", self.max_length, 2)
        _one_of("data.truncation", self.truncation, TRUNCATIONS)


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
        _at_least("algorithm.iterations", self.iterations, 1)
        thresholds = self.reward_threshold if isinstance(self.reward_threshold, list) else [self.reward_threshold]
        if not all(value is None or type(value) in (int, float) for value in thresholds):
            raise ConfigError(
                f"algorithm.reward_threshold={self.reward_threshold!r}: must be a number or null, or a list of them"
            )
        _one_of("algorithm.explored", self.explored, ("one_per_item", "all"))
        _one_of("algorithm.train_from", self.train_from, ("base", "last"))


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
