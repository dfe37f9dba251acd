"""One training step on a cluster: rollout, passes over the batch, update, and what lies between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from cluster_model import (
    BF16,
    FLOAT32,
    NO_WORK,
    Assumptions,
    Cluster,
    Design,
    EngineCost,
    TrainingCost,
    Work,
    cache_tokens,
    model_size,
    save_s,
    sleep_s,
    sync_s,
    training_bytes,
)
from cluster_rollout import EngineRules, EnvServers, Rollout, RolloutResult, TrajectoryScript

from verl.models.shapes import ModelShape
from verl.utils.balancing import balanced_partition, pack
from verl.utils.families import Family
from verl.utils.flops import ModelSize

_LEAST_SHARED = 16
"""As `verl.utils.families`: fewer tokens in common are not worth sharing."""


@dataclass(frozen=True)
class Recipe:
    """How a step trains; defaults are those of the preset ``algorithm=grpo`` on ``hardware=node_8``."""

    items: int = 32
    samples: int = 4
    mini_batch_items: int = 4
    epochs: int = 2
    has_reference: bool = True
    """KL to a reference in the loss."""
    has_critic: bool = False
    """Its size is the policy's."""
    max_tokens: int = 32768
    """Of a micro-batch."""
    recomputes: bool = True
    memory_share: float = 0.7
    """As ``rollout.gpu_memory_utilization``."""
    max_concurrency: int = 256
    save_every: int = 25
    """Steps; 0 never."""
    async_save: bool = True

    @property
    def updates(self) -> int:
        return self.items // self.mini_batch_items * self.epochs

    @property
    def needs_old_log_probs(self) -> bool:
        """A single update takes its own."""
        return self.updates > 1


@dataclass(frozen=True)
class Scenario:
    """All that a step's time follows from, trajectories apart."""

    shape: ModelShape
    cluster: Cluster
    recipe: Recipe = field(default_factory=Recipe)
    design: Design = field(default_factory=Design)
    assumed: Assumptions = field(default_factory=Assumptions)
    servers: EnvServers = field(default_factory=EnvServers)
    rules: EngineRules = field(default_factory=EngineRules)

    def engine_cost(self) -> EngineCost:
        """Raises `NoRoom` where the model leaves no memory for a cache."""
        tokens = cache_tokens(
            self.shape,
            self.cluster,
            self.design,
            memory_share=self.recipe.memory_share,
            training_bytes=training_bytes(self.shape, self.cluster.num_shards),
        )
        return EngineCost.of(self.shape, self.cluster, self.assumed, cache_tokens=tokens)

    def training_cost(self) -> TrainingCost:
        return TrainingCost.of(self.shape, self.cluster, self.assumed, recomputes=self.recipe.recomputes)


@dataclass(frozen=True)
class Phase:
    """A part of a step."""

    seconds: float
    busy_s: float = 0.0
    """Of a device on average, in which it computed for engine or training."""


@dataclass(frozen=True)
class StepEstimate:
    """A simulated step."""

    phases: Mapping[str, Phase]
    rollout: RolloutResult
    num_devices: int
    num_trajectories: int
    num_tokens: int
    num_sampled: int
    flops: float
    """That the step needs, as `verl.trainer.performance` counts them."""
    peak_flops: float
    floor_s: float
    """What published peaks allow at best: `floor_s`."""

    @property
    def step_s(self) -> float:
        return sum(phase.seconds for phase in self.phases.values())

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.step_s

    @property
    def mfu(self) -> float:
        return self.flops / self.step_s / self.num_devices / self.peak_flops

    @property
    def idle_share(self) -> float:
        """Of the devices' time in which they compute neither for an engine nor in a training pass."""
        return 1.0 - sum(phase.busy_s for phase in self.phases.values()) / self.step_s

    @property
    def gpu_hours_per_1000(self) -> float:
        return self.step_s * self.num_devices * 1000 / 3600


def simulate(scripts: Sequence[TrajectoryScript], scenario: Scenario) -> StepEstimate:
    """A step on these trajectories, which stand group by group. Raises `NoRoom` where memory does not suffice."""
    rollout = simulate_rollout(scripts, scenario)
    phases = {"gen": _gen_phase(rollout, scenario)} | _training_phases(scripts, scenario)
    phases["sync"] = Phase(sync_s(scenario.shape, scenario.cluster, scenario.assumed, scenario.design))
    phases["driver"] = Phase(_driver_s(scripts, scenario))
    phases["save"] = Phase(_save_s(scenario, sum(phase.seconds for phase in phases.values())))
    return StepEstimate(
        phases=phases,
        rollout=rollout,
        num_devices=scenario.cluster.num_devices,
        num_trajectories=len(scripts),
        num_tokens=sum(script.num_tokens for script in scripts),
        num_sampled=sum(script.num_sampled for script in scripts),
        flops=needed_flops(scripts, scenario),
        peak_flops=scenario.cluster.device.peak_flops,
        floor_s=floor_s(scripts, scenario),
    )


def simulate_rollout(scripts: Sequence[TrajectoryScript], scenario: Scenario) -> RolloutResult:
    """The step's trajectories alone."""
    # Of the design, what bears on the rollout beside the engine's cost: the others share one result.
    design = Design(one_by_one=scenario.design.one_by_one, prefix_reuse=scenario.design.prefix_reuse)
    return _played(
        tuple(scripts),
        scenario.engine_cost(),
        scenario.cluster.num_engines,
        design,
        scenario.servers,
        scenario.rules,
        scenario.recipe.max_concurrency,
        scenario.assumed.collector_turn_s,
    )


@lru_cache(maxsize=32)
def _played(scripts: tuple[TrajectoryScript, ...], *settings: Any) -> RolloutResult:
    """Most of a study's scenarios differ in what follows the rollout, which is by far the most work to simulate."""
    return Rollout(scripts, *settings).run()


def _gen_phase(rollout: RolloutResult, scenario: Scenario) -> Phase:
    around = sleep_s(scenario.shape, scenario.cluster, scenario.assumed, scenario.design)
    return Phase(rollout.duration_s + around, sum(rollout.busy_s) / len(rollout.busy_s))


def _driver_s(scripts: Sequence[TrajectoryScript], scenario: Scenario) -> float:
    num_tokens = sum(script.num_tokens for script in scripts)
    return scenario.assumed.driver_s + scenario.assumed.driver_token_s * num_tokens


def _save_s(scenario: Scenario, step_s: float) -> float:
    return save_s(
        scenario.shape,
        scenario.cluster,
        scenario.assumed,
        steps_between=scenario.recipe.save_every,
        step_s=step_s,
        is_async=scenario.recipe.async_save,
    )


def _training_phases(scripts: Sequence[TrajectoryScript], scenario: Scenario) -> dict[str, Phase]:
    """Forward passes over the whole batch, then updates by mini-batches."""
    recipe = scenario.recipe
    passes = Passes(scenario.training_cost(), scenario.cluster.num_devices, scenario.design, recipe.max_tokens)
    phases: dict[str, Phase] = {}
    forward = passes.run(scripts, trains=False)
    names = {
        "old_log_prob": recipe.needs_old_log_probs,
        "ref": recipe.has_reference,
        "values": recipe.has_critic,
    }
    phases |= {name: forward for name, is_due in names.items() if is_due}
    update = _update(scripts, passes, recipe)
    return phases | ({"update_critic": update} if recipe.has_critic else {}) | {"update": update}


def _update(scripts: Sequence[TrajectoryScript], passes: Passes, recipe: Recipe) -> Phase:
    size = recipe.mini_batch_items * recipe.samples
    parts = [passes.run(scripts[start : start + size], trains=True) for start in range(0, len(scripts), size)]
    optimizer = passes.cost.optimizer_s() * len(parts)
    return Phase(
        recipe.epochs * (sum(part.seconds for part in parts) + optimizer),
        recipe.epochs * sum(part.busy_s for part in parts),
    )


@dataclass(frozen=True)
class Passes:
    """Passes over a batch that is shared out over devices, as the framework's workers make them."""

    cost: TrainingCost
    num_devices: int
    design: Design
    max_tokens: int

    def run(self, scripts: Sequence[TrajectoryScript], *, trains: bool) -> Phase:
        """All devices go through their micro-batches side by side; those without one wait for the others."""
        ranks = self.micro_batches(scripts)
        seconds = busy = 0.0
        for number in range(max(map(len, ranks))):
            works = (rank[number] for rank in ranks if number < len(rank))
            times = [self.cost.compute_s(work, trains=trains) for work in works]
            seconds += self.cost.micro_batch_s(max(times), trains=trains)
            busy += sum(times) / self.num_devices
        return Phase(seconds, busy)

    def micro_batches(self, scripts: Sequence[TrajectoryScript]) -> list[list[Work]]:
        """Of each device."""
        return [self._micro_batches([scripts[index] for index in share]) for share in self._shares(scripts)]

    def _shares(self, scripts: Sequence[TrajectoryScript]) -> list[list[int]]:
        """As `verl.utils.families.balanced_shares`: groups together where the busiest device has less to do then."""
        lengths = [script.num_tokens for script in scripts]
        alone = balanced_partition(lengths, self.num_devices)
        families = find_families(scripts, lengths, None) if self.design.prefix_sharing else []
        if not families:
            return alone
        costs = [family.cost(lengths) for family in families]
        together = balanced_partition(costs, self.num_devices)
        if _most(costs, together) >= _most(lengths, alone):
            return alone
        return [sorted(index for place in part for index in families[place].members) for part in together]

    def _micro_batches(self, scripts: Sequence[TrajectoryScript]) -> list[Work]:
        lengths = [script.num_tokens for script in scripts]
        if not self.design.packing:
            return self._padded(scripts, lengths)
        shared = self.design.prefix_sharing
        families = find_families(scripts, lengths, self.max_tokens) if shared else singles(len(lengths))
        packs = pack([family.cost(lengths) for family in families], max_tokens=self.max_tokens)
        return [self._packed(scripts, lengths, [families[place] for place in part]) for part in packs]

    def _packed(self, scripts: Sequence[TrajectoryScript], lengths: Sequence[int], families: Iterable[Family]) -> Work:
        return sum((family_work(self.cost.size, scripts, lengths, family) for family in families), NO_WORK)

    def _padded(self, scripts: Sequence[TrajectoryScript], lengths: Sequence[int]) -> list[Work]:
        """Rows in their order, as many as the token budget holds, each as long as the longest of the share."""
        longest = max(lengths, default=0)
        rows = max(self.max_tokens // max(longest, 1), 1)
        parts = [scripts[start : start + rows] for start in range(0, len(scripts), rows)]
        return [
            Work.of(self.cost.size, [longest] * len(part), 0, sum(script.num_sampled for script in part))
            for part in parts
        ]


def family_work(size: ModelSize, scripts: Sequence[TrajectoryScript], lengths: Sequence[int], family: Family) -> Work:
    """Of a family's forward pass."""
    sampled = sum(scripts[member].num_sampled for member in family.members)
    return Work.of(size, [lengths[member] for member in family.members], family.prefix, sampled)


def find_families(scripts: Sequence[TrajectoryScript], lengths: Sequence[int], max_tokens: int | None) -> list[Family]:
    """As the function of that name in `verl.utils.families`, from the lengths of what is shared."""
    families: list[Family] = []
    for index, script in enumerate(scripts):
        grown = None
        if families and scripts[families[-1].members[0]].uid == script.uid and script.shared >= _LEAST_SHARED:
            grown = Family([*families[-1].members, index], script.shared)
        if grown is None or (max_tokens is not None and grown.cost(lengths) > max_tokens):
            families.append(Family([index], 0))
        else:
            families[-1] = grown
    return families


def singles(count: int) -> list[Family]:
    return [Family([index], 0) for index in range(count)]


def _most(costs: Sequence[int], parts: Iterable[Sequence[int]]) -> int:
    return max(sum(costs[index] for index in part) for part in parts)


# ------------------------------------------------------------------------------------------------------------- bounds


def needed_flops(scripts: Sequence[TrajectoryScript], scenario: Scenario) -> float:
    """Of a step: each token once through the engine, the passes and the updates; nothing shared, nothing recomputed."""
    size, recipe = model_size(scenario.shape), scenario.recipe
    lengths, sampled = [script.num_tokens for script in scripts], sum(script.num_sampled for script in scripts)
    forward = 1 + recipe.needs_old_log_probs + recipe.has_reference + recipe.has_critic
    trained = recipe.epochs * (1 + recipe.has_critic)
    return forward * size.forward_flops(lengths, sampled) + trained * size.training_flops(lengths, sampled)


def floor_s(scripts: Sequence[TrajectoryScript], scenario: Scenario) -> float:
    """What the step takes at least by published peaks: operations of what is left once everything is shared; for the
    rollout also the longest chain of one trajectory, in which each token reads all weights and each step waits for
    the environment; and gathering the weights for the engines."""
    cluster, recipe, design = scenario.cluster, scenario.recipe, scenario.design
    size, device = model_size(scenario.shape), cluster.device
    peak = device.peak_flops * cluster.num_devices
    shared = _least_flops(scripts, scenario)
    read_s = BF16 * (size.num_body_weights + size.num_head_weights)
    read_s /= device.memory_bandwidth * cluster.tensor_parallel
    chain_s = max(script.env_s + script.num_sampled * read_s for script in scripts)
    forward = recipe.needs_old_log_probs + recipe.has_reference + recipe.has_critic
    trained = recipe.epochs * (1 + recipe.has_critic) * (4 if recipe.recomputes else 3)
    gathered = FLOAT32 * scenario.shape.num_weights * (cluster.num_shards - 1) / cluster.num_shards
    copied = BF16 * scenario.shape.num_weights / cluster.tensor_parallel / device.host_bandwidth
    return (
        max(shared / peak, chain_s)
        + (forward + trained) * shared / peak
        + gathered / cluster.ring_bandwidth(cluster.num_shards)
        + (2 * copied if design.sleep else 0.0)
    )


def _least_flops(scripts: Sequence[TrajectoryScript], scenario: Scenario) -> float:
    """Of a forward pass with everything that groups have in common computed once."""
    size = model_size(scenario.shape)
    lengths = [script.num_tokens for script in scripts]
    shared = scenario.design.prefix_sharing or scenario.design.prefix_reuse
    families = find_families(scripts, lengths, None) if shared else singles(len(lengths))
    return sum(family_work(size, scripts, lengths, family).all_flops for family in families)
