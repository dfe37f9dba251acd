"""What a training step would take on 8 and 64 GPUs, by simulation: nothing of it was measured on a GPU.

    python scripts/experiments/cluster_sim.py --task textcraft --model Qwen2.5-7B-Instruct --out saves/scaling

`cluster_rollout` plays a rollout as discrete events, `cluster_step` adds the phases that follow, `cluster_model` holds
published figures, assumptions and formulas, `cluster_workload` what trajectories are like: a task's statistics or, with
``--run``, those of a real run. `cluster_validate` holds the same code to real runs on a CPU.
Writes ``estimate.json``, the tables as ``estimate.md``, or with ``--docs PAGE`` between the marks of that page, and,
where matplotlib is installed, ``phases.svg`` and ``sensitivity.svg``.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from cluster_model import DEVICES, NETWORKS, Assumptions, Cluster, Design, NoRoom
from cluster_rollout import EnvServers, TrajectoryScript
from cluster_step import Recipe, Scenario, StepEstimate, simulate
from cluster_workload import PROFILES, TaskProfile, read_run, resample

from verl.models.shapes import KNOWN_SHAPES

PROJECT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- estimate: written by scripts/experiments/cluster_sim.py -->", "<!-- end of the estimate -->"
PHASE_GROUPS: Mapping[str, tuple[str, ...]] = {
    "rollout": ("gen",),
    "passes": ("old_log_prob", "ref", "values"),
    "update": ("update", "update_critic"),
    "sync": ("sync",),
    "driver": ("driver",),
    "save": ("save",),
}
"""Columns of the table, and the phases of a step in each."""
_SLOTS = 256

Draw = Callable[[int, int], Sequence[TrajectoryScript]]
"""Trajectories of so many items, by a seed."""


@dataclass(frozen=True)
class Case:
    """A row of the table: a scenario and what its trajectories are drawn from."""

    name: str
    horizon: int
    scenario: Scenario
    draw: Draw


@dataclass(frozen=True)
class Result:
    """A case, simulated with several seeds."""

    name: str
    horizon: int
    gpus: int
    trajectories: int
    estimates: tuple[StepEstimate, ...]

    def mean(self, read: Callable[[StepEstimate], float]) -> float:
        return statistics.fmean(read(estimate) for estimate in self.estimates)

    @property
    def step_s(self) -> float:
        return self.mean(lambda estimate: estimate.step_s)

    def group_s(self, group: str) -> float:
        names = PHASE_GROUPS[group]
        return self.mean(lambda e: sum(e.phases[name].seconds for name in names if name in e.phases))

    def numbers(self) -> dict[str, float]:
        """What goes into the table and the file."""
        return {
            "step_s": self.step_s,
            **{f"{group}_s": self.group_s(group) for group in PHASE_GROUPS},
            "tokens_per_s": self.mean(lambda e: e.tokens_per_s),
            "mfu": self.mean(lambda e: e.mfu),
            "idle_share": self.mean(lambda e: e.idle_share),
            "gpu_hours_per_1000_steps": self.mean(lambda e: e.gpu_hours_per_1000),
            "floor_s": self.mean(lambda e: e.floor_s),
            "spread_s": max(e.step_s for e in self.estimates) - min(e.step_s for e in self.estimates),
        }


@dataclass(frozen=True)
class Study:
    """What is simulated: model and machines, recipe at the smallest of them, trajectories."""

    model: str
    device: str
    network: str
    recipe: Recipe
    horizons: Sequence[int]
    gpus: tuple[int, int]
    """The small cluster and the large one."""
    seeds: Sequence[int]
    profile: TaskProfile | None
    """None: ``scripts`` of a real run."""
    scripts: Sequence[TrajectoryScript] = ()
    tensor_parallel: int = 1
    fsdp_size: int = -1
    design: Design = field(default_factory=Design)
    assumed: Assumptions = field(default_factory=Assumptions)

    def case(self, name: str, *, gpus: int, horizon: int, larger: int = 1) -> Case:
        """``larger`` times the items, in mini-batches that are larger by as much."""
        recipe = self.recipe
        recipe = replace(recipe, items=recipe.items * larger, mini_batch_items=recipe.mini_batch_items * larger)
        cluster = Cluster(
            DEVICES[self.device],
            gpus,
            node_bandwidth=NETWORKS[self.network],
            tensor_parallel=self.tensor_parallel,
            fsdp_size=self.fsdp_size,
        )
        scenario = Scenario(
            KNOWN_SHAPES[self.model],
            cluster,
            recipe,
            self.design,
            self.assumed,
            EnvServers(cluster.num_nodes, _SLOTS),
        )
        return Case(name, horizon, scenario, self._draw(self.profile, horizon))

    def _draw(self, profile: TaskProfile | None, horizon: int) -> Draw:
        samples, scripts = self.recipe.samples, self.scripts
        if profile is None:
            return lambda items, seed: resample(scripts, items=items, samples=samples, seed=seed)
        return lambda items, seed: profile.scripts(items=items, samples=samples, horizon=horizon, seed=seed)

    def with_profile(self, case: Case, profile: TaskProfile) -> Case:
        """The same with other statistics."""
        return replace(case, draw=self._draw(profile, case.horizon))

    def run(self, case: Case) -> Result:
        items = case.scenario.recipe.items
        estimates = tuple(simulate(case.draw(items, seed), case.scenario) for seed in self.seeds)
        return Result(
            case.name, case.horizon, case.scenario.cluster.num_devices, estimates[0].num_trajectories, estimates
        )

    @property
    def growth(self) -> int:
        small, large = self.gpus
        return large // small

    def scaling_cases(self) -> Iterator[Case]:
        """Each horizon on the small cluster, on the large one with the same batch, and with one grown as much."""
        small, large = self.gpus
        for horizon in self.horizons:
            yield self.case(f"{small} GPUs", gpus=small, horizon=horizon)
            yield self.case(f"{large} GPUs, same batch", gpus=large, horizon=horizon)
            yield self.case(f"{large} GPUs, batch x {self.growth}", gpus=large, horizon=horizon, larger=self.growth)

    def of_task(self, profile: TaskProfile) -> Study:
        """The same on another task, at its own stages."""
        return replace(self, profile=profile, horizons=stages(profile.name))

    def bases(self) -> tuple[Case, Case]:
        """What means and assumptions are varied on: both clusters fully loaded, at the longest horizon."""
        small, large = self.gpus
        longest = max(self.horizons)
        return (
            self.case(f"{small} GPUs", gpus=small, horizon=longest),
            self.case(f"{large} GPUs, batch x {self.growth}", gpus=large, horizon=longest, larger=self.growth),
        )


# --------------------------------------------------------------------------------------------------------- variations


def variants(case: Case) -> Iterator[tuple[str, Case]]:
    """The case without each of the framework's means, and with other settings."""

    def changed(**changes: Any) -> Case:
        return replace(case, scenario=replace(case.scenario, **changes))

    recipe, cluster, design = case.scenario.recipe, case.scenario.cluster, case.scenario.design
    yield "as it is", case
    yield "without prefix reuse in the engine", changed(design=replace(design, prefix_reuse=False))
    yield "without packing: rows padded to the longest", changed(design=replace(design, packing=False))
    yield "without sharing prefixes in training", changed(design=replace(design, prefix_sharing=False))
    yield "engine awake throughout (`free_cache_engine=false`)", changed(design=replace(design, sleep=False))
    yield "static split of the trajectories", changed(design=replace(design, one_by_one=False))
    few = replace(recipe, max_concurrency=4)
    yield "4 sessions a worker, one-by-one hand-out", changed(recipe=few)
    yield "4 sessions a worker, static split", changed(recipe=few, design=replace(design, one_by_one=False))
    once = replace(recipe, mini_batch_items=recipe.items, epochs=1)
    yield "one update of the whole batch, no old log-probs", changed(recipe=once)
    slow = replace(cluster, node_bandwidth=NETWORKS["1x100G"])
    yield "a network of 100 Gb/s per machine", changed(cluster=slow)
    yield "100 Gb/s, one update of the whole batch", changed(cluster=slow, recipe=once)
    if cluster.num_devices % cluster.devices_per_node == 0:
        size = cluster.devices_per_node
        yield "a copy of the model in each machine (`fsdp_size`)", changed(cluster=replace(cluster, fsdp_size=size))
        copies = replace(slow, fsdp_size=size)
        yield "a copy in each machine, 100 Gb/s per machine", changed(cluster=copies)
        yield "a copy in each machine, 100 Gb/s, one update of the whole batch", changed(cluster=copies, recipe=once)
    if cluster.num_devices % 2 == 0:
        yield "engines of two GPUs (tensor parallel)", changed(cluster=replace(cluster, tensor_parallel=2))


def seconds_of(study: Study, case: Case) -> float | None:
    """Of the case's step; None where memory does not suffice."""
    try:
        return study.run(case).step_s
    except NoRoom:
        return None


@dataclass(frozen=True)
class Sensitivity:
    """What halving and doubling one number does to the step's time."""

    name: str
    value: float
    halved: float
    """Step time over that of the base."""
    doubled: float

    @property
    def weight(self) -> float:
        return max(abs(math.log(self.halved)), abs(math.log(self.doubled)))


def sensitivities(study: Study, base: Case) -> list[Sensitivity]:
    """Of every assumption and published figure, the weightiest first; a share is doubled to at most 1."""
    base_s = study.run(base).step_s

    def of(name: str, value: float, change: Callable[[float], Case]) -> Sensitivity:
        halved, doubled = (study.run(change(factor)).step_s / base_s for factor in (0.5, 2.0))
        return Sensitivity(name, value, halved, doubled)

    found = [of(name, value, change) for name, value, change in _knobs(study, base)]
    return sorted(found, key=lambda each: -each.weight)


def _knobs(study: Study, base: Case) -> Iterator[tuple[str, float, Callable[[float], Case]]]:
    """Name, value, and the base with that value times a factor."""
    assumed, cluster = base.scenario.assumed, base.scenario.cluster
    for name in (each.name for each in dataclasses.fields(Assumptions)):
        if getattr(assumed, name):
            yield name, getattr(assumed, name), partial(_with_assumption, base, name)
    for name in ("peak_flops", "memory_bandwidth", "link_bandwidth", "host_bandwidth"):
        yield f"device {name}", getattr(cluster.device, name), partial(_with_device, base, name)
    if cluster.num_nodes > 1:
        yield "network node_bandwidth", cluster.node_bandwidth, partial(_with_network, base)
    if study.profile is not None:
        for name in ("prompt", "sampled", "observed", "natural_turns", "env_s", "env_sigma"):
            yield f"task {name}", getattr(study.profile, name), partial(_with_statistic, study, base, name)


def _with_assumption(base: Case, name: str, factor: float) -> Case:
    return replace(base, scenario=replace(base.scenario, assumed=base.scenario.assumed.scaled(name, factor)))


def _with_device(base: Case, name: str, factor: float) -> Case:
    cluster = base.scenario.cluster
    device = replace(cluster.device, **{name: getattr(cluster.device, name) * factor})
    return replace(base, scenario=replace(base.scenario, cluster=replace(cluster, device=device)))


def _with_network(base: Case, factor: float) -> Case:
    cluster = base.scenario.cluster
    cluster = replace(cluster, node_bandwidth=cluster.node_bandwidth * factor)
    return replace(base, scenario=replace(base.scenario, cluster=cluster))


def _with_statistic(study: Study, base: Case, name: str, factor: float) -> Case:
    assert study.profile is not None
    return study.with_profile(base, replace(study.profile, **{name: getattr(study.profile, name) * factor}))


# ------------------------------------------------------------------------------------------------------------- report


@dataclass(frozen=True)
class Report:
    """All results of a study."""

    study: Study
    scaling: Sequence[Result]
    variants: Mapping[str, Mapping[str, float | None]]
    """By base: the step's seconds, None where memory does not suffice."""
    sensitivity: Mapping[str, Sequence[Sensitivity]]
    tasks: Mapping[str, Sequence[Result]]
    """Every task at its longest stage, by base; none for a real run."""

    @classmethod
    def of(cls, study: Study) -> Report:
        """Variants and sensitivities, which are ratios within one draw of trajectories, and other tasks are taken on
        the first draw."""
        bases, first = study.bases(), replace(study, seeds=study.seeds[:1])
        return cls(
            study,
            [study.run(case) for case in study.scaling_cases()],
            {base.name: {name: seconds_of(first, case) for name, case in variants(base)} for base in bases},
            {base.name: sensitivities(first, base) for base in bases},
            {} if study.profile is None else {name: _task(first, name) for name in PROFILES},
        )

    def efficiencies(self) -> list[tuple[int, float, float]]:
        """By horizon: tokens per second and GPU on the large cluster over those on the small one, with the same batch
        and with one grown as much as the cluster."""
        rows = []
        for start in range(0, len(self.scaling), 3):
            small, same, grown = self.scaling[start : start + 3]
            per_gpu = [result.numbers()["tokens_per_s"] / result.gpus for result in (small, same, grown)]
            rows.append((small.horizon, per_gpu[1] / per_gpu[0], per_gpu[2] / per_gpu[0]))
        return rows

    def as_json(self) -> dict[str, Any]:
        study = self.study
        return {
            "model": study.model,
            "device": dataclasses.asdict(DEVICES[study.device]),
            "network_bytes_per_s": NETWORKS[study.network],
            "recipe": dataclasses.asdict(study.recipe),
            "task": None if study.profile is None else dataclasses.asdict(study.profile),
            "assumed": dataclasses.asdict(study.assumed),
            "seeds": list(study.seeds),
            "steps": [
                {"name": r.name, "horizon": r.horizon, "gpus": r.gpus, "trajectories": r.trajectories} | r.numbers()
                for r in self.scaling
            ],
            "efficiency": [
                {"horizon": horizon, "same_batch": same, "grown_batch": grown}
                for horizon, same, grown in self.efficiencies()
            ],
            "variants": self.variants,
            "sensitivity": {base: [dataclasses.asdict(row) for row in rows] for base, rows in self.sensitivity.items()},
            "tasks": {
                name: [{"name": r.name, "horizon": r.horizon, "gpus": r.gpus} | r.numbers() for r in results]
                for name, results in self.tasks.items()
            },
        }

    def as_markdown(self) -> str:
        tables = [*self._scaling_tables(), *self._task_table(), *self._variant_tables(), *self._sensitivity()]
        return "\n\n".join([self._heading(), *tables])

    def _heading(self) -> str:
        study, recipe = self.study, self.study.recipe
        task = "a real run's trajectories" if study.profile is None else study.profile.name
        passes = ", ".join(
            name for name, has in (("KL to a reference", recipe.has_reference), ("a critic", recipe.has_critic)) if has
        )
        return (
            f"Estimate: {study.model} on {task}, {study.device} ({study.network} between machines), "
            f"{recipe.items} items x {recipe.samples} trajectories on {study.gpus[0]} GPUs in {recipe.updates} updates"
            f"{', ' + passes if passes else ''}; mean of {len(study.seeds)} draws of the trajectories."
        )

    def _scaling_tables(self) -> Iterator[str]:
        columns = ["horizon", "cluster", "trajectories", *(f"{group} s" for group in PHASE_GROUPS)]
        columns += ["step s", "floor s", "tokens/s", "MFU", "GPUs idle", "GPU hours, 1,000 steps"]
        yield _table(columns, [scaling_cells(result) for result in self.scaling])
        small, large = self.study.gpus
        yield _table(
            ["horizon", f"tokens/s per GPU, {large} over {small}: same batch", f"batch x {self.study.growth}"],
            [[str(horizon), _percent(same), _percent(grown)] for horizon, same, grown in self.efficiencies()],
        )

    def _task_table(self) -> Iterator[str]:
        if not self.tasks:
            return
        columns = ["task", "horizon"]
        for result in next(iter(self.tasks.values())):
            columns += [f"{result.name}: step s", "rollout", "GPUs idle", "GPU hours, 1,000 steps"]
        rows = []
        for name, results in self.tasks.items():
            cells = [name, str(results[0].horizon)]
            for result in results:
                numbers = result.numbers()
                cells += [_seconds(numbers["step_s"]), _percent(numbers["rollout_s"] / numbers["step_s"])]
                cells += [_percent(numbers["idle_share"]), f"{numbers['gpu_hours_per_1000_steps']:,.0f}"]
            rows.append(cells)
        yield _table(columns, rows)

    def _variant_tables(self) -> Iterator[str]:
        columns = [f"horizon {max(self.study.horizons)}: step time"]
        for base in self.variants:
            columns += [base, "over the first"]
        names = list(next(iter(self.variants.values())))
        yield _table(columns, [[name, *self._variant_cells(name)] for name in names])

    def _variant_cells(self, name: str) -> Iterator[str]:
        for steps in self.variants.values():
            seconds, plain = steps.get(name), next(iter(steps.values()))
            if seconds is None or plain is None:
                yield from ("does not fit", "")
            else:
                yield from (f"{_seconds(seconds)} s", f"{seconds / plain:.2f}")

    def _sensitivity(self) -> Iterator[str]:
        for base, found in self.sensitivity.items():
            yield _table(
                [f"{base}, horizon {max(self.study.horizons)}", "value", "step time: halved", "doubled"],
                [
                    [f"`{each.name}`", f"{each.value:.4g}", f"{each.halved:.2f}", f"{each.doubled:.2f}"]
                    for each in found
                    if each.weight >= math.log(1.01)
                ],
            )


def _task(study: Study, name: str) -> list[Result]:
    study = study.of_task(PROFILES[name])
    return [study.run(case) for case in study.bases()]


def scaling_cells(result: Result) -> list[str]:
    """A row of the first table."""
    numbers = result.numbers()
    return [
        *(str(result.horizon), result.name, str(result.trajectories)),
        *(_seconds(numbers[f"{group}_s"]) for group in PHASE_GROUPS),
        *(_seconds(numbers["step_s"]), _seconds(numbers["floor_s"]), f"{numbers['tokens_per_s']:,.0f}"),
        *(_percent(numbers["mfu"]), _percent(numbers["idle_share"])),
        f"{numbers['gpu_hours_per_1000_steps']:,.0f}",
    ]


def line(cells: Sequence[str]) -> str:
    """Of a table."""
    return "| " + " | ".join(cells) + " |"


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(line(cells) for cells in (columns, ["---"] * len(columns), *rows))


def write_docs(page: Path, tables: str) -> None:
    """Put the tables between the page's marks. Raises `ValueError` where they are not there once each, in order."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: no {BEGIN if not begin else END!r}")
    page.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}")


def draw(report: Report, folder: Path) -> None:
    """``phases.svg`` and ``sensitivity.svg``."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "cluster_sim"  # the same figure from the same numbers
    from matplotlib import pyplot

    metadata = {"Date": None}
    figure, axes = pyplot.subplots(figsize=(8, 0.45 * len(report.scaling) + 1.2))
    names = [f"{result.horizon} turns, {result.name}" for result in report.scaling]
    lefts = [0.0] * len(names)
    for group in PHASE_GROUPS:
        widths = [result.group_s(group) for result in report.scaling]
        axes.barh(names, widths, left=lefts, label=group)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step (simulated)")
    axes.legend(fontsize=8)
    figure.savefig(folder / "phases.svg", bbox_inches="tight", metadata=metadata)
    figure, panels = pyplot.subplots(1, len(report.sensitivity), figsize=(10, 4.5), squeeze=False)
    for axes, (base, found) in zip(panels[0], report.sensitivity.items(), strict=True):
        weightiest = found[:12]
        labels = [each.name for each in weightiest]
        axes.barh(labels, [each.halved - 1 for each in weightiest], left=1, height=0.7, label="halved")
        axes.barh(labels, [each.doubled - 1 for each in weightiest], left=1, height=0.35, label="doubled")
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.set_title(base, fontsize=10)
        axes.set_xlabel("step time over that of the base")
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "sensitivity.svg", bbox_inches="tight", metadata=metadata)


def write(report: Report, folder: Path, page: Path | None = None) -> None:
    """All files of a report; its tables into ``page`` where there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "estimate.json").write_text(json.dumps(report.as_json(), indent=1) + "\n")
    if page is None:
        (folder / "estimate.md").write_text(report.as_markdown() + "\n")
    else:
        write_docs(page, report.as_markdown())
    if importlib.util.find_spec("matplotlib"):
        draw(report, folder)
    else:
        print("no figures: pip install -e '.[experiments]' brings matplotlib")


# -------------------------------------------------------------------------------------------------------- command line


def stages(task: str) -> list[int]:
    """Horizons of ScalingInter-RL in the task's preset."""
    preset = yaml.safe_load((PROJECT / "configs" / "ppo_trainer" / "task" / f"{task}.yaml").read_text())
    return list(preset["_horizon"]["staged"])


def study_of(args: argparse.Namespace) -> Study:
    """What the command line asks for. Raises `ValueError` for a run without the steps."""
    first, _, last = args.steps.partition(":")
    measured = read_run(args.run, first=int(first), last=int(last) if last else None) if args.run else []
    scripts = [replace(script, uid=f"{step.step}/{script.uid}") for step in measured for script in step.scripts]
    recipe = Recipe(
        items=args.items,
        samples=args.samples,
        mini_batch_items=args.mini_batch_items,
        epochs=args.epochs,
        has_reference=not args.no_reference,
        has_critic=args.critic,
        max_concurrency=args.max_concurrency,
    )
    horizons = sorted({step.horizon for step in measured})[-1:] if measured else args.horizons or stages(args.task)
    return Study(
        model=args.model,
        device=args.device,
        network=args.network,
        recipe=recipe,
        horizons=horizons,
        gpus=(args.gpus[0], args.gpus[1]),
        seeds=range(args.seeds),
        profile=None if measured else PROFILES[args.task],
        scripts=scripts,
        tensor_parallel=args.tensor_parallel,
        fsdp_size=args.fsdp_size,
    )


def parser() -> argparse.ArgumentParser:
    recipe = Recipe()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=sorted(PROFILES), default="textcraft", help="whose statistics to draw from")
    parser.add_argument("--run", type=Path, help="folder of a real run, whose trajectories to take instead")
    parser.add_argument("--steps", default="1:", help="of that run, FIRST:LAST")
    parser.add_argument("--model", choices=sorted(KNOWN_SHAPES), default="Qwen2.5-7B-Instruct")
    parser.add_argument("--device", choices=sorted(DEVICES), default="H100")
    parser.add_argument("--network", choices=sorted(NETWORKS), default="8x400G")
    parser.add_argument("--gpus", type=int, nargs=2, default=(8, 64), metavar=("SMALL", "LARGE"))
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--fsdp-size", type=int, default=-1, help="GPUs that hold one copy of the model; -1: all")
    parser.add_argument("--horizons", type=int, nargs="+", help="turns; by default the task's stages")
    parser.add_argument("--items", type=int, default=recipe.items, help="of a step on the small cluster")
    parser.add_argument("--samples", type=int, default=recipe.samples, help="trajectories of each")
    parser.add_argument("--mini-batch-items", type=int, default=recipe.mini_batch_items)
    parser.add_argument("--epochs", type=int, default=recipe.epochs)
    parser.add_argument("--no-reference", action="store_true", help="no KL, and so no pass through a reference")
    parser.add_argument("--critic", action="store_true")
    parser.add_argument("--max-concurrency", type=int, default=recipe.max_concurrency, help="sessions of a worker")
    parser.add_argument("--seeds", type=int, default=3, help="draws of the trajectories that are averaged")
    parser.add_argument("--out", type=Path, default=PROJECT / "saves" / "scaling")
    parser.add_argument("--docs", type=Path, help="page whose marked part becomes the tables")
    return parser


def main() -> None:
    args = parser().parse_args()
    report = Report.of(study_of(args))
    write(report, args.out, args.docs)
    print(report.as_markdown())


if __name__ == "__main__":
    main()
