"""What a run will hold in the memory of one device, by part, each with its formula: an estimate before it starts.

Left out are fragments, buffers of communication and what CUDA itself takes, some GiB in all.
Letters: ``P`` weights of a model, ``D`` devices, ``T`` tokens of a micro-batch, ``V H L A K I`` as in
`verl.models.shapes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from verl.config import (
    ActorConfig,
    AgentGymConfig,
    CriticConfig,
    DPOConfig,
    FSDPConfig,
    ModelConfig,
    PPOConfig,
    RefFSDPConfig,
    RolloutConfig,
    SFTConfig,
    TrajectoryLengths,
)
from verl.models.shapes import ModelShape

WEIGHTS = "weights"
ADAPTER = "adapter"
ENGINE_PHASE = "= while the engine works"
_LEGEND = (
    "(P weights, P' those of the adapter, D devices of a copy, T tokens at once, V vocabulary, H hidden, L layers; "
    "widths of A heads, K keys, I MLP)"
)
_GIB = 2**30
_FLOAT32 = 4
_KEPT_LOGITS_BYTES = 512 * 2**20
"""As `verl.models.log_probs.KEEP_BYTES`, which would import torch."""
_GATHERED_LAYERS = 2
"""FSDP gathers a layer while the one before it computes."""


@dataclass(frozen=True)
class Part:
    """Something that lies in a device's memory."""

    name: str
    num_bytes: float
    formula: str
    rests: bool = False
    """It stays there while others use the device."""

    @property
    def is_weights(self) -> bool:
        return self.name in (WEIGHTS, ADAPTER)


@dataclass(frozen=True)
class Machine:
    """The devices that a run's memory is spread over."""

    device: str
    """``cpu`` or ``cuda``."""
    num_devices: int

    @property
    def is_sharded(self) -> bool:
        """One CPU process is alone; all else shares out the model."""
        return self.device == "cuda" or self.num_devices > 1


@dataclass(frozen=True)
class Demand:
    """What one engine is asked for."""

    at_once: int
    """Trajectories that it decodes at the same time."""
    longest: int
    """Tokens of the longest trajectory that the budgets allow."""

    @classmethod
    def of(
        cls,
        rollout: RolloutConfig,
        agentgym: AgentGymConfig,
        data: TrajectoryLengths,
        *,
        num_trajectories: int,
        num_workers: int,
    ) -> Demand:
        """For a run that has so many trajectories in flight."""
        num_engines = num_workers // rollout.tensor_model_parallel_size
        share = -(-num_trajectories // num_engines)
        return cls(min(share, rollout.max_num_seqs, agentgym.max_concurrency), rollout.limits(data).longest)


@dataclass(frozen=True)
class MemoryPlan:
    """The parts of a run, by who uses the device."""

    users: dict[str, tuple[Part, ...]]
    """``actor``, ``reference``, ``critic``: what each holds while it works; what the engine plays with comes first."""
    engine: tuple[Part, ...]
    engine_name: str
    engine_share: float | None
    """Of a GPU's memory, which the engine fills up with its cache; None when it grows with use."""

    def describe(self, machine: Machine, source: str) -> str:
        """A table for the user; ``source`` says where the model's size is from."""
        where = f"per {'GPU' if machine.device == 'cuda' else 'process'}, one of {machine.num_devices}"
        lines = [f"memory {where}, estimated from {source}:"]
        for user, parts in self.users.items():
            lines += [_line(f"{user}: {part.name}", part.num_bytes, part.formula) for part in parts]
        lines += [
            _line(f"{self.engine_name} engine: {part.name}", part.num_bytes, part.formula) for part in self.engine
        ]
        lines += [_line(name, num_bytes, self._note(name)) for name, num_bytes in self.phases()]
        return "\n".join([*lines, f"  {_LEGEND}"])

    def _note(self, phase: str) -> str:
        if phase != ENGINE_PHASE or self.engine_share is None:
            return ""
        return f"its cache is what fits {self.engine_share:g} of the GPU's memory, weights included"

    def phases(self) -> Iterator[tuple[str, float]]:
        """What is in memory at once while each user works, in bytes."""
        if self.engine:
            yield ENGINE_PHASE, _sum(self.engine) + self._resting_beside("engine")
        for user, parts in self.users.items():
            yield f"= while the {user} works", _sum(parts) + self._resting_beside(user)
        if self.engine and self.users:
            trained = next(iter(self.users))
            stored = [part for part in (*self.users[trained], *self.engine) if part.is_weights]
            yield "= while the engine gets weights", _sum(stored) + self._resting_beside(trained, "engine")

    def _resting_beside(self, *busy: str) -> float:
        everybody = {**self.users, "engine": self.engine}
        return _sum([part for user, parts in everybody.items() if user not in busy for part in parts if part.rests])


def plan_memory(
    config: PPOConfig, shape: ModelShape, critic_shape: ModelShape, machine: Machine, *, engine: str
) -> MemoryPlan:
    """Of a PPO run whose policy, and critic if it has one, are so large; ``engine`` is ``hf`` or ``vllm``."""
    branch, demand = config.actor_rollout_ref, ppo_demand(config)
    engine_holds = engine_parts(shape, branch.model, branch.rollout, machine, demand, engine=engine)
    return MemoryPlan(
        users={} if config.trainer.rollout_only else _users(config, shape, critic_shape, machine, demand.longest),
        engine=() if config.trainer.replay else tuple(engine_holds),
        engine_name=engine,
        engine_share=engine_share(branch.rollout, machine, engine),
    )


def plan_data_memory(
    config: SFTConfig, shape: ModelShape, machine: Machine, *, engine: str | None, num_trajectories: int = 0
) -> MemoryPlan:
    """Of a training on data; ``engine`` plays so many trajectories in validation, None where nothing is validated."""
    model, trainer = config.model, config.trainer
    row = config.data.max_length * (2 if isinstance(config, DPOConfig) else 1)  # both sides of a pair go together
    share = config.data.train_batch_size * row // machine.num_devices
    tokens = max(min(trainer.max_token_len_per_gpu, share), row)
    users: dict[str, tuple[Part, ...]] = {
        "model": (
            *_trained(shape.num_weights, shape, model, FSDPConfig(), machine),
            *_gathered(shape, model, machine),
            _activations(shape, model, machine, tokens),
            _logits(shape, tokens),
        )
    }
    if isinstance(config, DPOConfig) and config.ref.path is not None:
        offloaded = RefFSDPConfig(param_offload=True)
        users["reference, before training"] = (_weights(shape.num_weights, parameter_bytes(model), offloaded, machine),)
    if engine is None:
        return MemoryPlan(users, (), "", None)
    demand = Demand.of(
        config.rollout,
        config.agentgym,
        config.data,
        num_trajectories=num_trajectories,
        num_workers=machine.num_devices,
    )
    parts = tuple(engine_parts(shape, model, config.rollout, machine, demand, engine=engine))
    return MemoryPlan(users, parts, engine, engine_share(config.rollout, machine, engine))


def _users(
    config: PPOConfig, shape: ModelShape, critic_shape: ModelShape, machine: Machine, longest: int
) -> dict[str, tuple[Part, ...]]:
    branch = config.actor_rollout_ref
    users: dict[str, tuple[Part, ...]] = {"actor": tuple(_actor(config, shape, machine, longest))}
    if config.needs_reference and branch.model.lora_rank == 0:
        size = parameter_bytes(branch.model)
        users["reference"] = (_weights(shape.num_weights, size, branch.ref.fsdp_config, machine),)
    if config.needs_critic:
        users["critic"] = tuple(_critic(config, critic_shape, machine, longest))
    return users


def ppo_demand(config: PPOConfig) -> Demand:
    """What a training step asks of one engine."""
    branch = config.actor_rollout_ref
    num_trajectories = config.data.train_batch_size * branch.rollout.n
    return Demand.of(
        branch.rollout,
        branch.agentgym,
        config.data,
        num_trajectories=num_trajectories,
        num_workers=config.trainer.world_size,
    )


def micro_batch_tokens(config: PPOConfig, trained: ActorConfig | CriticConfig, longest: int) -> int:
    """``T``: most tokens that a device works on at once, since a trajectory longer than the budget goes alone."""
    actor = config.actor_rollout_ref.actor
    sharing = actor.ulysses_sequence_parallel_size
    if trained.ppo_micro_batch_size_per_gpu is not None:
        return -(-trained.ppo_micro_batch_size_per_gpu * longest // sharing)
    groups = trained.ppo_mini_batch_size or actor.ppo_mini_batch_size
    share = groups * config.actor_rollout_ref.rollout.n * longest // config.trainer.world_size
    return max(min(trained.ppo_max_token_len_per_gpu, share), -(-longest // sharing))


# ------------------------------------------------------------------------------------------------------------ the parts


def parameter_bytes(model: ModelConfig) -> int:
    """Of one weight that is not trained: float32, unless ``model.dtype`` says otherwise."""
    return 2 if model.dtype == "bfloat16" else _FLOAT32


def compute_bytes(model: ModelConfig, machine: Machine) -> int:
    """Of one number in matrix products."""
    return 2 if model.dtype == "auto" and machine.device == "cuda" else parameter_bytes(model)


def _weights(num_weights: int, size: int, fsdp: RefFSDPConfig, machine: Machine) -> Part:
    shards = fsdp.num_shards(machine.num_devices)
    formula = f"P x {size} B / D = {num_weights:.3g} x {size} B / {shards}"
    return Part(WEIGHTS, num_weights * size / shards, formula, not fsdp.param_offload)


def _trained(
    num_weights: int, shape: ModelShape, model: ModelConfig, fsdp: FSDPConfig, machine: Machine
) -> Iterator[Part]:
    """Weights, gradients and the optimizer's state; with an adapter the last two are the adapter's alone.

    What is trained is float32 whatever ``model.dtype`` says, as `verl.models.loading.TRAINED_DTYPE`.
    """
    adapter = shape.adapter_weights(model.lora_rank)
    trained = adapter or num_weights
    size, share = _FLOAT32, 1 / fsdp.num_shards(machine.num_devices)
    yield _weights(num_weights, parameter_bytes(model) if adapter else size, fsdp, machine)
    if adapter:
        formula = f"P' x {size} B / D, P' = {adapter:.3g} of rank {model.lora_rank}"
        yield Part(ADAPTER, adapter * size * share, formula, not fsdp.param_offload)
    letter = "P'" if adapter else "P"
    yield Part("gradients", trained * size * share, f"{letter} x {size} B / D")
    yield Part("Adam", 2 * trained * size * share, f"2 x {letter} x {size} B / D", not fsdp.optimizer_offload)


def _actor(config: PPOConfig, shape: ModelShape, machine: Machine, longest: int) -> Iterator[Part]:
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    tokens = micro_batch_tokens(config, actor, longest)
    yield from _trained(shape.num_weights, shape, model, actor.fsdp_config, machine)
    yield from _gathered(shape, model, machine)
    yield _activations(shape, model, machine, tokens)
    yield _logits(shape, tokens)


def _critic(config: PPOConfig, shape: ModelShape, machine: Machine, longest: int) -> Iterator[Part]:
    model = config.critic.model.resolved(config.actor_rollout_ref.model)
    yield from _trained(shape.num_backbone_weights, shape, model, config.critic.fsdp_config, machine)
    yield from _gathered(shape, model, machine)
    yield _activations(shape, model, machine, micro_batch_tokens(config, config.critic, longest))


def _logits(shape: ModelShape, tokens: int) -> Part:
    num_bytes = tokens * shape.vocab_size * _FLOAT32
    if num_bytes <= _KEPT_LOGITS_BYTES:
        return Part("logits", num_bytes, "T V x 4 B")
    return Part("logits", _KEPT_LOGITS_BYTES, "kept up to here; beyond, they are computed anew in parts")


def _gathered(shape: ModelShape, model: ModelConfig, machine: Machine) -> Iterator[Part]:
    """What FSDP puts together of the shards: embeddings and output layer throughout a pass, and the layers at work."""
    size = compute_bytes(model, machine)
    if not machine.is_sharded and size == _FLOAT32:
        return  # the plain module, which computes in the type of what is trained
    num_weights = shape.head_weights + _GATHERED_LAYERS * shape.layer_weights
    yield Part("gathered layers", num_weights * size, f"(embeddings, output, {_GATHERED_LAYERS} layers) x {size} B")


def _activations(shape: ModelShape, model: ModelConfig, machine: Machine, tokens: int) -> Part:
    """What the backward pass needs of a layer is about ``8H + 2A + 2K + 4I`` numbers a token; with checkpointing it is
    kept of one layer, and of the others only what went in."""
    size, hidden, layers = compute_bytes(model, machine), shape.hidden_size, shape.num_layers
    width = 8 * hidden + 2 * shape.attention_width + 2 * shape.kv_width + 4 * shape.intermediate_size
    if model.enable_gradient_checkpointing:
        formula = f"T (L H + 8H + 2A + 2K + 4I) x {size} B, T = {tokens}"
        return Part("activations", tokens * (layers * hidden + width) * size, formula)
    return Part("activations", tokens * layers * width * size, f"T L (8H + 2A + 2K + 4I) x {size} B, T = {tokens}")


def engine_parts(
    shape: ModelShape, model: ModelConfig, rollout: RolloutConfig, machine: Machine, demand: Demand, *, engine: str
) -> Iterator[Part]:
    """Weights of its own, and the cache of as many trajectories as it may have at once, each at its longest.

    The ``vllm`` engine gives up both between rollouts on a GPU, if it is to; the ``hf`` engine the cache alone.
    """
    size, parallel = compute_bytes(model, machine), rollout.tensor_model_parallel_size
    stays = engine == "vllm" and not (rollout.free_cache_engine and machine.device == "cuda")
    formula = f"P x {size} B / {parallel}" if parallel > 1 else f"P x {size} B"
    yield Part(WEIGHTS, shape.num_weights * size / parallel, formula, rests=stays or engine == "hf")
    cache = 2 * shape.num_layers * shape.kv_width * size / parallel
    token = f"2 L K x {size} B = {cache / 1024:.4g} KiB a token"
    formula = f"at most: {demand.at_once} trajectories x {demand.longest} tokens, {token}"
    yield Part("cache", demand.at_once * demand.longest * cache, formula, rests=stays)


def engine_share(rollout: RolloutConfig, machine: Machine, engine: str) -> float | None:
    """Of a GPU's memory, which the engine fills up; None for one that grows with use."""
    return rollout.gpu_memory_utilization if engine == "vllm" and machine.device == "cuda" else None


def _sum(parts: Iterable[Part]) -> float:
    return sum(part.num_bytes for part in parts)


def _line(name: str, num_bytes: float, note: str) -> str:
    return f"  {name:<36}{num_bytes / _GIB:8.2f} GiB   {note}".rstrip()
