"""Avg@k and Pass@k over items and categories, from trajectories or from trajectory files.

Samples of one item are told by its item id alone. Every item weighs the same, however many of its samples are faults;
faults are in no average, an item with nothing but faults is left out, and both are counted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentgym_rl.evaluation.intervals import Interval, bootstrap_mean, wilson
from agentgym_rl.evaluation.usage import Usage
from agentgym_rl.rollout.collector import count_errors
from agentgym_rl.rollout.log import read_trajectories
from agentgym_rl.types import Item, StopReason, Trajectory

DEFINITIONS = (
    "Avg@k: mean score over an item's samples, averaged over items.",
    "Pass@k: share of items with at least one success among their samples.",
    "95% intervals: of Avg@k by the bootstrap over items, of Pass@k by Wilson's score.",
    "Faults (environment, engine, deadline) are in no average; items with nothing but faults are not counted.",
)


@dataclass(frozen=True, slots=True)
class Scores:
    """Numbers of one set of items."""

    name: str
    """The category, the task, or ``overall``."""
    num_items: int
    avg: float
    """Avg@k; nan when no item is counted, as are the other means."""
    avg_interval: Interval | None
    """See `bootstrap_mean`; None when no item is counted."""
    pass_rate: float
    """Pass@k."""
    pass_interval: Interval | None
    """See `wilson`; None when no item is counted."""
    turns_mean: float
    """Turns per trajectory, faults left out."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Trajectories that ended for one reason."""

    reason: StopReason
    count: int
    share: float
    """Among all trajectories, faults included."""
    avg: float
    """Mean score; nan for faults, which have none."""
    success_share: float
    """Nan for faults."""
    turns_mean: float


@dataclass(frozen=True, slots=True)
class Report:
    """Result of an evaluation."""

    k: int
    """Samples per item (the most that any item has)."""
    overall: Scores
    tasks: tuple[Scores, ...]
    """By name; empty when all items are of one task."""
    categories: tuple[Scores, ...]
    """By name, with the task before it where there are several; empty when no item names a category."""
    endings: tuple[Ending, ...]
    """By stop reason; those that did not occur are left out."""
    num_trajectories: int
    num_faults: int
    faults_by_type: dict[str, int]
    num_missing: int = 0
    """Samples that were asked for and are not there, not even as a fault: the evaluation has not come to its end."""
    torn_files: tuple[Path, ...] = ()
    """Trajectory files whose last row was torn and left out."""
    usage: Usage | None = None
    """Of a hosted model: what all answers took, those of trajectories that came to nothing included."""
    cost: float | None = None
    """Of a hosted model whose prices were given, in their currency."""

    def table(self) -> str:
        """The report for a reader: a row per category and task, one per stop reason, faults, and what columns mean."""
        header = ("", "items", f"Avg@{self.k}", "95%", f"Pass@{self.k}", "95%", "turns")
        rows = [header, *(_cells(scores) for scores in (*self.categories, *self.tasks, self.overall))]
        lines = aligned(rows)
        shares = ", ".join(f"{ending.reason} {ending.share:.1%}" for ending in self.endings)
        lines.append(f"stop reasons of {self.num_trajectories} trajectories: {shares or 'none'}")
        if self.endings:
            titles = ("", "trajectories", "score", "success", "turns")
            lines += aligned([titles, *(_ending_cells(ending) for ending in self.endings)])
        if self.num_faults:
            counts = ", ".join(f"{kind} {count}" for kind, count in self.faults_by_type.items())
            lines.append(f"faults: {self.num_faults} ({counts})")
        if self.num_missing:
            lines.append(f"not yet done: {self.num_missing} samples; these figures are of the others")
        lines += [f"{path}: its last row is torn and was left out" for path in self.torn_files]
        if self.usage is not None:
            lines.append(f"{self.usage}{'' if self.cost is None else f'; cost {self.cost:.4f}'}")
        return "\n".join([*lines, *DEFINITIONS])


def make_report(
    trajectories: Sequence[Trajectory], *, torn_files: tuple[Path, ...] = (), num_missing: int = 0
) -> Report:
    """Evaluate trajectories, in any order and from any number of workers."""
    sound = [trajectory for trajectory in trajectories if not trajectory.masked]
    tasks = sorted({trajectory.item.task for trajectory in trajectories})
    names = sorted({name for t in trajectories if (name := _category_of(t.item, tasks))})
    return Report(
        k=max((len(samples) for samples in by_item(trajectories).values()), default=0),
        overall=_scores("overall", sound),
        tasks=tuple(_scores(task, [t for t in sound if t.item.task == task]) for task in tasks if len(tasks) > 1),
        categories=tuple(_scores(name, [t for t in sound if _category_of(t.item, tasks) == name]) for name in names),
        endings=tuple(_endings(trajectories)),
        num_trajectories=len(trajectories),
        num_faults=len(trajectories) - len(sound),
        faults_by_type=count_errors(trajectories),
        num_missing=num_missing,
        torn_files=torn_files,
    )


def finished_samples(path: str | Path) -> set[tuple[str, int]]:
    """``(item_id, sample_index)`` of every result written below ``path``: what need not be done again, as faults do."""
    trajectories = read_trajectories(path).trajectories
    return {(t.item.item_id, t.sample_index) for t in trajectories if t.is_last_trial and not t.masked}


def one_per_sample(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """The result of each sample, or its last fault where it has none: what counts of a sample that was done again.

    Of a sample that tried its item several times (``reflect``), the last trial is the result.
    """
    chosen: dict[tuple[str, int], Trajectory] = {}
    for trajectory in sorted(trajectories, key=lambda t: not t.masked):
        if trajectory.is_last_trial:
            chosen[trajectory.item.item_id, trajectory.sample_index] = trajectory
    return list(chosen.values())


def by_item(trajectories: Iterable[Trajectory]) -> dict[str, list[Trajectory]]:
    """Trajectories by item id."""
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.item.item_id].append(trajectory)
    return groups


def mean_score(samples: Sequence[Trajectory]) -> float:
    """Mean score of an item's samples, in an order of its own, so that theirs does not change a digit."""
    return _mean(sorted(trajectory.score for trajectory in samples))


def has_success(samples: Iterable[Trajectory]) -> bool:
    return any(trajectory.success for trajectory in samples)


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows of a table as lines: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in rows
    ]


def _category_of(item: Item, tasks: Sequence[str]) -> str:
    """The category's name among those of all tasks; empty where the item has none."""
    return f"{item.task}/{item.category}" if item.category and len(tasks) > 1 else item.category


def _scores(name: str, trajectories: Sequence[Trajectory]) -> Scores:
    items = [samples for _, samples in sorted(by_item(trajectories).items())]
    scores, passes = [mean_score(samples) for samples in items], [has_success(samples) for samples in items]
    return Scores(
        name=name,
        num_items=len(items),
        avg=_mean(scores),
        avg_interval=bootstrap_mean(scores),
        pass_rate=_mean(passes),
        pass_interval=wilson(sum(passes), len(passes)),
        turns_mean=_mean([len(t.turns) for t in trajectories]),
    )


def _endings(trajectories: Sequence[Trajectory]) -> Iterator[Ending]:
    for reason in StopReason:
        ended = [trajectory for trajectory in trajectories if trajectory.stop_reason == reason]
        if not ended:
            continue
        sound = [] if reason.is_fault else ended
        yield Ending(
            reason=reason,
            count=len(ended),
            share=len(ended) / len(trajectories),
            avg=mean_score(sound),
            success_share=_mean([t.success for t in sound]),
            turns_mean=_mean([len(t.turns) for t in ended]),
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _cells(scores: Scores) -> tuple[str, ...]:
    return (
        scores.name,
        str(scores.num_items),
        f"{scores.avg:.3f}",
        str(scores.avg_interval or ""),
        f"{scores.pass_rate:.3f}",
        str(scores.pass_interval or ""),
        f"{scores.turns_mean:.1f}",
    )


def _ending_cells(ending: Ending) -> tuple[str, ...]:
    return (
        str(ending.reason),
        str(ending.count),
        _number(ending.avg, ".3f"),
        _number(ending.success_share, ".3f"),
        f"{ending.turns_mean:.1f}",
    )


def _number(value: float, form: str) -> str:
    return "" if math.isnan(value) else format(value, form)
