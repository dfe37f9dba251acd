"""AgentEvol (Xi et al. 2024, https://arxiv.org/abs/2406.04151): a policy explores, the trajectories that did well are
merged with the base data, and a model is trained on both; then that model explores.

Under ``trainer.default_local_dir``::

    iteration_<N>/explore/          what the policy before made of the exploration items, as `main_generation` writes it
    iteration_<N>/explored.jsonl    of that, what is trained on
    iteration_<N>/train.jsonl       the same merged with the base data
    iteration_<N>/sft/              the training, and the model in sft/huggingface
    iteration_<N>/eval/             that model on the evaluation items
    iteration_<N>/summary.json      the iteration's row of the table; written last
    table.txt                       one row per iteration

Iteration 0 is the first policy: trained on the base data alone, or given. Each part goes on where it was stopped: it
finds its own files, and what is complete is not made again.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgym_rl.data.conversations import Conversation, read_conversations, write_conversations
from agentgym_rl.data.items import overlap
from agentgym_rl.errors import ConfigError
from agentgym_rl.evaluation.report import Report, one_per_sample
from agentgym_rl.evaluation.results import claim_folder
from agentgym_rl.files import write_whole
from agentgym_rl.rollout.log import TRAJECTORY_FOLDER, read_trajectories
from agentgym_rl.types import Item, Trajectory
from verl.config import (
    AgentEvolConfig,
    EvalSamplingConfig,
    GenerationConfig,
    GenerationDataConfig,
    SFTConfig,
    SFTDataConfig,
    SFTTrainerConfig,
    WorkersConfig,
)
from verl.trainer.generation import run_generation
from verl.trainer.sft import run_sft
from verl.utils.nested import flat_items
from verl.utils.seeding import derive_seed

SUMMARY_FILE, TABLE_FILE = "summary.json", "table.txt"
_FREE_KEYS = ("ray_init", "agentgym.env_addr", "algorithm.iterations")
"""What may change when a run goes on, beside how it is run (`_FREE_TRAINER_KEYS`)."""
_FREE_TRAINER_KEYS = (
    *("nnodes", "n_gpus_per_node", "device", "worker_group", "num_threads", "dry_run", "logger", "log_freq"),
    *("project_name", "experiment_name", "default_local_dir", "save_freq", "async_save"),
)


@dataclass(frozen=True)
class Summary:
    """What came of an iteration: a row of the table."""

    iteration: int
    model: str
    """Folder of the iteration's model."""
    explored: int
    """Trajectories of the exploration, faults left out."""
    passed: int
    """Of these, the ones that are good enough to train on."""
    items_passed: int
    """Items with at least one of them."""
    trained_on: int
    """Conversations that the iteration trained on."""
    from_exploration: int
    """Of these, the explored ones."""
    avg: float | None
    """Mean score of the evaluation."""
    pass_rate: float | None
    """Share of its items with a success."""

    @classmethod
    def read(cls, path: Path) -> Summary:
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True)
class Exploration:
    """What an iteration explored, and what of it is trained on."""

    num_sampled: int
    num_passed: int
    chosen: tuple[Conversation, ...]

    @property
    def num_items(self) -> int:
        return len({conversation.item_id for conversation in self.chosen})


def run_agentevol(config: AgentEvolConfig, *, train_items: Sequence[Item], val_items: Sequence[Item]) -> list[Summary]:
    """All iterations that are left; prints the table after each and returns its rows.

    Raises `ConfigError` when the folder holds a run with other settings.
    """
    root = Path(config.trainer.default_local_dir).resolve()
    claim_folder(root, _settings(config), {"iterations": config.algorithm.iterations})
    base = read_base(config)
    print(describe_run(config, train_items, val_items, base), flush=True)
    run = EvolutionRun(config, root, train_items, val_items, base)
    summaries = [run.first_policy()]
    for iteration in range(1, config.algorithm.iterations + 1):
        summaries.append(run.iterate(iteration, summaries[-1]))
        table = iteration_table(summaries)
        write_whole(root / TABLE_FILE, table + "\n")
        print(f"\n{table}\n", flush=True)
    return summaries


class EvolutionRun:
    """One run's iterations; each returns its summary, made now or read from its folder."""

    def __init__(
        self,
        config: AgentEvolConfig,
        root: Path,
        train_items: Sequence[Item],
        val_items: Sequence[Item],
        base: Sequence[Conversation],
    ) -> None:
        self._config, self._root = config, root
        self._train_items, self._val_items, self._base = tuple(train_items), tuple(val_items), tuple(base)

    def first_policy(self) -> Summary:
        """Iteration 0: the policy that explores first."""
        folder = self._folder(0)
        if (folder / SUMMARY_FILE).exists():
            return Summary.read(folder / SUMMARY_FILE)
        given = self._config.algorithm.first_policy
        if given is not None:
            model = str(Path(given).resolve()) if Path(given).exists() else given
        elif self._base:
            model = self._train(0, self._config.model.absolute().path, self._base)
        else:
            model = self._config.model.absolute().path
        is_trained = given is None and self._base
        return self._conclude(0, model, Exploration(0, 0, ()), num_trained=len(self._base) if is_trained else 0)

    def iterate(self, iteration: int, before: Summary) -> Summary:
        """Explore with the model of the iteration before, keep, merge, train, evaluate."""
        folder = self._folder(iteration)
        if (folder / SUMMARY_FILE).exists():
            return Summary.read(folder / SUMMARY_FILE)
        print(f"iteration {iteration} of {self._config.algorithm.iterations}", flush=True)
        exploration = self._explore(iteration, before.model)
        write_conversations(folder / "explored.jsonl", exploration.chosen)
        rows = [*self._base, *exploration.chosen]
        if not rows:
            raise ConfigError(
                f"iteration {iteration}: none of {exploration.num_sampled} explored trajectories is good enough to "
                "train on, and there is no base data: lower algorithm.reward_threshold, raise rollout.n, or give "
                "data.base_file or a better algorithm.first_policy"
            )
        start = before.model if self._config.algorithm.train_from == "last" else self._config.model.absolute().path
        model = self._train(iteration, start, rows)
        return self._conclude(iteration, model, exploration, num_trained=len(rows))

    def _explore(self, iteration: int, model: str) -> Exploration:
        folder = self._folder(iteration) / "explore"
        # Other random numbers each time: with the same ones a policy that changed little would find the same again.
        seed = derive_seed("explore", self._config.data.seed, iteration)
        rollout = self._config.rollout
        config = self._generation(model, folder, n=rollout.n, seed=seed, sampling=None)
        run_generation(config, self._train_items)
        trajectories = one_per_sample(read_trajectories(folder / TRAJECTORY_FOLDER).trajectories)
        algorithm = self._config.algorithm
        return choose(trajectories, self._config.thresholds, one_per_item=algorithm.explored == "one_per_item")

    def _train(self, iteration: int, start: str, rows: Sequence[Conversation]) -> str:
        """Train the model ``start`` on rows; the folder of what comes out."""
        folder = self._folder(iteration)
        file = folder / "train.jsonl"
        # Explored rows are the same whenever they are chosen, so writing them again changes nothing.
        write_conversations(file, rows)
        return str(run_sft(self._sft(iteration, start, file, len(rows))))

    def _conclude(self, iteration: int, model: str, exploration: Exploration, *, num_trained: int) -> Summary:
        """Evaluate the iteration's model, and write the summary that makes the iteration complete."""
        folder, sampling = self._folder(iteration), self._config.rollout.val_kwargs
        seed = self._config.data.seed
        config = self._generation(model, folder / "eval", n=sampling.n, seed=seed, sampling=sampling)
        report: Report = run_generation(config, self._val_items)
        summary = Summary(
            iteration=iteration,
            model=model,
            explored=exploration.num_sampled,
            passed=exploration.num_passed,
            items_passed=exploration.num_items,
            trained_on=num_trained,
            from_exploration=len(exploration.chosen),
            avg=_number(report.overall.avg),
            pass_rate=_number(report.overall.pass_rate),
        )
        write_whole(folder / SUMMARY_FILE, json.dumps(dataclasses.asdict(summary), indent=1))
        return summary

    def _folder(self, iteration: int) -> Path:
        folder = self._root / f"iteration_{iteration}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _generation(
        self, model: str, folder: Path, *, n: int, seed: int, sampling: EvalSamplingConfig | None
    ) -> GenerationConfig:
        """How the model plays; ``sampling`` None means as in exploration."""
        config, trainer = self._config, self._config.trainer
        how = sampling or config.rollout
        return GenerationConfig(
            data=GenerationDataConfig(
                path="the items of the run",
                max_prompt_length=config.data.max_prompt_length,
                max_response_length=config.data.max_response_length,
                n_samples=n,
                batch_size=config.data.gen_batch_size,
                seed=seed,
            ),
            agentgym=config.agentgym,
            model=dataclasses.replace(config.model, path=model, lora_rank=0, freeze=[]),
            rollout=dataclasses.replace(
                config.rollout,
                n=1,
                temperature=how.temperature,
                top_p=how.top_p,
                top_k=how.top_k,
                val_kwargs=EvalSamplingConfig(),
                rollout_log_dir=str(folder),
            ),
            trainer=WorkersConfig(
                nnodes=trainer.nnodes,
                n_gpus_per_node=trainer.n_gpus_per_node,
                device=trainer.device,
                worker_group=trainer.worker_group,
                num_threads=trainer.num_threads,
            ),
            ray_init=config.ray_init,
        )

    def _sft(self, iteration: int, start: str, file: Path, num_rows: int) -> SFTConfig:
        config = training_config(self._config, num_rows)
        name = f"{self._config.trainer.experiment_name}-{iteration}"
        return dataclasses.replace(
            config,
            data=dataclasses.replace(
                config.data, train_file=str(file), seed=derive_seed("train", self._config.data.seed, iteration)
            ),
            model=dataclasses.replace(config.model, path=start),
            trainer=dataclasses.replace(
                config.trainer, default_local_dir=str(file.parent / "sft"), experiment_name=name
            ),
        )


def training_config(config: AgentEvolConfig, num_rows: int) -> SFTConfig:
    """How an iteration trains on so many rows; its files and its model are put in by the run."""
    trainer = config.trainer
    fields = {field.name: getattr(trainer, field.name) for field in dataclasses.fields(SFTTrainerConfig)}
    return SFTConfig(
        data=SFTDataConfig(
            train_file="the rows of the run",
            # A small exploration without base data may have fewer rows than a batch takes.
            train_batch_size=max(min(config.data.train_batch_size, num_rows), trainer.world_size),
            # A trajectory has passed its own limits; the base data's is for the base data.
            max_length=max(config.data.max_length, config.rollout.limits(config.data).longest),
            truncation=config.data.truncation,
        ),
        model=config.model,
        optim=config.optim,
        trainer=SFTTrainerConfig(**fields),
        ray_init=config.ray_init,
    )


def read_base(config: AgentEvolConfig) -> list[Conversation]:
    """The base data; none where none is given."""
    return read_conversations(config.data.base_file) if config.data.base_file else []


# ------------------------------------------------------------------------------------------------------------ filtering


def choose(
    trajectories: Iterable[Trajectory], thresholds: Mapping[str, float | None], *, one_per_item: bool
) -> Exploration:
    """The trajectories with at least the threshold's score of their task; where that is None, the successes.

    ``one_per_item``: of each item the one with the highest score, of equals the shortest. The same trajectories give
    the same choice, in whatever order they come.
    """
    sound = [trajectory for trajectory in trajectories if not trajectory.masked]
    passed = sorted((t for t in sound if _passes(t, thresholds.get(t.item.task))), key=_rank)
    chosen = passed
    if one_per_item:
        best: dict[str, Trajectory] = {}
        for trajectory in passed:
            best.setdefault(trajectory.item.item_id, trajectory)
        chosen = list(best.values())
    return Exploration(len(sound), len(passed), tuple(Conversation.of(trajectory) for trajectory in chosen))


def _passes(trajectory: Trajectory, threshold: float | None) -> bool:
    return trajectory.success if threshold is None else trajectory.score >= threshold


def _rank(trajectory: Trajectory) -> tuple[Any, ...]:
    """Items in order of their ids, the best first within each."""
    item, length = trajectory.item, (len(trajectory.turns), trajectory.num_sampled_tokens)
    return item.task, item.index, item.game, -trajectory.score, *length, trajectory.sample_index


def iteration_table(summaries: Sequence[Summary]) -> str:
    """A row per iteration, for a reader."""
    header = ("iteration", "explored", "passed", "items", "trained on", "of it explored", "Avg", "Pass", "gain")
    rows: list[tuple[str, ...]] = [header]
    for summary in summaries:
        rows.append(
            (
                str(summary.iteration),
                *map(str, (summary.explored, summary.passed, summary.items_passed)),
                *map(str, (summary.trained_on, summary.from_exploration)),
                *("-" if value is None else f"{value:.3f}" for value in (summary.avg, summary.pass_rate)),
                _gain(summaries[0], summary),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _gain(first: Summary, summary: Summary) -> str:
    if summary.iteration == 0 or first.avg is None or summary.avg is None:
        return ""
    return f"{100 * (summary.avg - first.avg):+.1f}"


def _number(value: float) -> float | None:
    return value if value == value else None  # JSON has no NaN: the mean over nothing


# -------------------------------------------------------------------------------------------------------------- the run


def _settings(config: AgentEvolConfig) -> dict[str, Any]:
    """What the iterations depend on, by key."""
    free = {*_FREE_KEYS, *(f"trainer.{name}" for name in _FREE_TRAINER_KEYS)}
    values = flat_items(dataclasses.asdict(config))
    return {key: value for key, value in values if key not in free and not key.startswith("ray_init.")}


def describe_run(
    config: AgentEvolConfig, train_items: Sequence[Item], val_items: Sequence[Item], base: Sequence[Conversation]
) -> str:
    """What a run is going to do, in a few lines for the user."""
    algorithm, thresholds = config.algorithm, config.thresholds
    kept = {task: "successes" if score is None else f"score >= {score:g}" for task, score in thresholds.items()}
    what = kept.popitem()[1] if len(set(kept.values())) == 1 else ", ".join(f"{t}: {s}" for t, s in kept.items())
    lines = [
        f"plan: {algorithm.iterations} iterations of AgentEvol",
        f"explore {len(train_items)} items x n {config.rollout.n}; keep {what} ({algorithm.explored}); merge with "
        f"{len(base)} conversations; train from {algorithm.train_from}",
        f"evaluate on {len(val_items)} items x n {config.rollout.val_kwargs.n}",
        f"results in {config.trainer.default_local_dir}",
    ]
    shared = Counter(overlap(val_items, train_items))
    held_out = {item.item_id for item in val_items}
    trained = {row.item_id for row in base} & held_out
    for count, where in ((len(shared), "data.train_file"), (len(trained), "data.base_file")):
        if count:
            lines.append(f"warning: {count} items of data.val_file are also in {where}")
    return "\n      ".join(lines)
