"""``trainer`` and ``ray_init``, as all programs have them: workers, the length of a run, and what is kept of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentgym_rl.errors import ConfigError
from verl.config.rollout import RolloutConfig
from verl.config.rules import at_least, one_of

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
        one_of("trainer.device", self.device, ("auto", "cpu", "cuda"))
        one_of("trainer.worker_group", self.worker_group, ("ray", "local"))
        at_least("trainer.nnodes", self.nnodes, 1)
        at_least("trainer.n_gpus_per_node", self.n_gpus_per_node, 1)
        if self.worker_group == "local" and self.world_size != 1:
            raise ConfigError(
                f"trainer.worker_group=local with trainer.nnodes={self.nnodes} x trainer.n_gpus_per_node="
                f"{self.n_gpus_per_node}: local runs one worker in the driver's process; take ray, or 1 x 1"
            )
        if self.num_threads is not None:
            at_least("trainer.num_threads", self.num_threads, 1)

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
        at_least("trainer.total_epochs", self.total_epochs, 1)
        if self.total_training_steps is not None:
            at_least("trainer.total_training_steps", self.total_training_steps, 1)
        for name in self.logger:
            one_of("trainer.logger", name, LOGGERS)
        self._check_checkpoints()

    def _check_checkpoints(self) -> None:
        one_of("trainer.resume_mode", self.resume_mode, ("auto", "disable", "resume_path"))
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
            at_least("trainer.max_actor_ckpt_to_keep", self.max_actor_ckpt_to_keep, 1)

    @property
    def validates(self) -> bool:
        """True when the model is evaluated by rollouts during training."""
        return self.test_freq > 0 or self.val_before_train


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
            at_least("ray_init.num_cpus", self.num_cpus, 1)
            if self.address is not None:
                raise ConfigError(
                    f"ray_init.num_cpus={self.num_cpus} with ray_init.address={self.address!r}: a running cluster "
                    "knows its CPUs; leave num_cpus out"
                )
