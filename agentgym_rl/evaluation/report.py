"""Avg@k and Pass@k over items and categories, from trajectories or from trajectory files.

Samples of one item are told by its item id alone. Every item weighs the same, however many of its samples are faults;
faults are in no average, an item with nothing but faults is left out, and both are counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentgym_rl.rollout.collector import count_errors
from agentgym_rl.rollout.log import read_trajectories
from agentgym_rl.rollout.statistics import stop_reason_shares
from agentgym_rl.types import StopReason, Trajectory

DEFINITIONS = (
    "Avg@k: mean score over an item's samples, averaged over items.",
    "Pass@k: share of items with at least one success among their samples.",
    "Faults (environment, engine, deadline) are in no average; items with nothing but faults are not counted.",
)


@dataclass(frozen=True, slots=True)
class Scores:
    """Numbers of one set of items."""

    name: str
    """The category, or ``overall``."""
    num_items: int
    avg: float
    """Avg@k; nan when no item is counted, as are the other means."""
    pass_rate: float
    """Pass@k."""
    turns_mean: float
    """Turns per trajectory, faults left out."""


@dataclass(frozen=True, slots=True)
class Report:
    """Result of an evaluation."""

    k: int
    """Samples per item (the most that any item has)."""
    overall: Scores
    categories: tuple[Scores, ...]
    """By name; empty when no item names a category."""
    stop_reasons: dict[StopReason, float]
    """Share of each among all trajectories, faults included."""
    num_trajectories: int
    num_faults: int
    faults_by_type: dict[str, int]
    torn_files: tuple[Path, ...] = ()
    """Trajectory files whose last row was torn and left out."""

    def table(self) -> str:
        """The report for a reader: a row per category, stop reasons, faults, and what the columns mean."""
        header = ("", "items", f"Avg@{self.k}", f"Pass@{self.k}", "turns")
        rows = [header, *(_cells(scores) for scores in (*self.categories, self.overall))]
        lines = _aligned(rows)
        shares = ", ".join(f"{reason} {share:.1%}" for reason, share in self.stop_reasons.items() if share)
        lines.append(f"stop reasons of {self.num_trajectories} trajectories: {shares or 'none'}")
        if self.num_faults:
            counts = ", ".join(f"{kind} {count}" for kind, count in self.faults_by_type.items())
            lines.append(f"faults: {self.num_faults} ({counts})")
        lines += [f"{path}: its last row is torn and was left out" for path in self.torn_files]
        return "\n".join([*lines, *DEFINITIONS])


def make_report(trajectories: Sequence[Trajectory], *, torn_files: tuple[Path, ...] = ()) -> Report:
    """Evaluate trajectories, in any order and from any number of workers."""
    sound = [trajectory for trajectory in trajectories if not trajectory.masked]
    names = sorted({trajectory.item.category for trajectory in trajectories} - {""})
    return Report(
        k=max((len(samples) for samples in _by_item(trajectories).values()), default=0),
        overall=_scores("overall", sound),
        categories=tuple(_scores(name, [t for t in sound if t.item.category == name]) for name in names),
        stop_reasons=stop_reason_shares(trajectories),
        num_trajectories=len(trajectories),
        num_faults=len(trajectories) - len(sound),
        faults_by_type=count_errors(trajectories),
        torn_files=torn_files,
    )


def report_files(path: str | Path) -> Report:
    """Evaluate a trajectory file or a folder of them."""
    contents = read_trajectories(path)
    return make_report(one_per_sample(contents.trajectories), torn_files=contents.torn)


def finished_samples(path: str | Path) -> set[tuple[str, int]]:
    """``(item_id, sample_index)`` of every result written below ``path``: what need not be done again, as faults do."""
    return {(t.item.item_id, t.sample_index) for t in read_trajectories(path).trajectories if not t.masked}


def one_per_sample(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """The result of each sample, or its last fault where it has none: what counts of a sample that was done again."""
    chosen: dict[tuple[str, int], Trajectory] = {}
    for trajectory in sorted(trajectories, key=lambda t: not t.masked):
        chosen[trajectory.item.item_id, trajectory.sample_index] = trajectory
    return list(chosen.values())


def _by_item(trajectories: Iterable[Trajectory]) -> dict[str, list[Trajectory]]:
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.item.item_id].append(trajectory)
    return groups


def _scores(name: str, trajectories: Sequence[Trajectory]) -> Scores:
    items = [items for _, items in sorted(_by_item(trajectories).items())]
    return Scores(
        name=name,
        num_items=len(items),
        avg=_mean([_mean(sorted(t.score for t in samples)) for samples in items]),
        pass_rate=_mean([any(t.success for t in samples) for samples in items]),
        turns_mean=_mean([len(t.turns) for t in trajectories]),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _cells(scores: Scores) -> tuple[str, ...]:
    averages = (f"{scores.avg:.3f}", f"{scores.pass_rate:.3f}", f"{scores.turns_mean:.1f}")
    return (scores.name, str(scores.num_items), *averages)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
