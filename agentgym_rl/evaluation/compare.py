"""Results of two or more evaluations side by side, and the items on which they differ.

The first is what the others are compared with, over the items that both have. Avg@k: mean of the differences of the
items' mean scores, with a bootstrap interval over items and a sign-flip test. Pass@k: McNemar's exact test. The items
are the same ones, so these see much smaller differences than two separate intervals would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgym_rl.errors import ConfigError
from agentgym_rl.evaluation.intervals import Interval, bootstrap_mean, mcnemar_p, sign_flip_p
from agentgym_rl.evaluation.report import Report, Scores, aligned, by_item, has_success, mean_score
from agentgym_rl.evaluation.results import read_samples, read_settings, report_on

_TIE = 1e-9


@dataclass(frozen=True, slots=True)
class ItemResult:
    """What came of one item in one evaluation."""

    score: float
    """Mean over its samples."""
    passed: bool


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One results folder."""

    name: str
    settings: Mapping[str, Any]
    report: Report
    items: Mapping[str, ItemResult]
    """By item id; items with nothing but faults are left out."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One evaluation against the first, over the items that both have."""

    name: str
    num_items: int
    avg: float
    """Mean of (this - first) of the items' mean scores; nan without a common item."""
    avg_interval: Interval | None
    avg_p: float
    """See `sign_flip_p`."""
    only_first_passed: int
    only_this_passed: int
    pass_p: float
    """See `mcnemar_p`."""


@dataclass(frozen=True, slots=True)
class ItemRow:
    """An item on which the evaluations differ."""

    item_id: str
    results: tuple[ItemResult | None, ...]
    """In the order of the evaluations; None where it has no result."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two or more evaluations."""

    evaluations: tuple[Evaluation, ...]
    changed_settings: Mapping[str, tuple[Any, ...]]
    """Settings in which they differ, in the order of the evaluations."""
    differences: tuple[Difference, ...]
    """Each but the first against the first."""
    item_rows: tuple[ItemRow, ...]
    """By item id."""

    def table(self, *, max_items: int | None = None) -> str:
        """For a reader; ``max_items``: so many item rows at most."""
        lines = [f"[{number}] {evaluation.name}" for number, evaluation in enumerate(self.evaluations, 1)]
        for key, values in self.changed_settings.items():
            lines.append(f"{key}: " + ", ".join(f"[{number}] {value}" for number, value in enumerate(values, 1)))
        ks = [evaluation.report.k for evaluation in self.evaluations]
        if len(set(ks)) > 1:
            shown_ks = ", ".join(f"[{number}] {k}" for number, k in enumerate(ks, 1))
            lines.append(f"samples of an item: {shown_ks}; more samples alone raise Pass@k")
        lines += aligned(_score_rows(self.evaluations))
        lines += [_difference_line(number, each) for number, each in enumerate(self.differences, 2)]
        shown = self.item_rows[:max_items]
        lines.append(f"items that differ: {len(self.item_rows)}")
        if shown:
            header = ("", *(f"[{number}]" for number in range(1, len(self.evaluations) + 1)))
            lines += aligned([header, *((row.item_id, *map(_item_cell, row.results)) for row in shown)])
        if len(shown) < len(self.item_rows):
            lines.append(f"... and {len(self.item_rows) - len(shown)} more (--items shows more)")
        return "\n".join(lines)


def read_evaluation(folder: Path) -> Evaluation:
    """Read a results folder; raises `ConfigError` when it holds no evaluation."""
    sound = [trajectory for trajectory in read_samples(folder) if not trajectory.masked]
    items = {id: ItemResult(mean_score(group), has_success(group)) for id, group in sorted(by_item(sound).items())}
    return Evaluation(str(folder), read_settings(folder), report_on(folder), items)


def compare(evaluations: Sequence[Evaluation]) -> Comparison:
    """Compare each evaluation with the first; raises `ConfigError` for fewer than two."""
    if len(evaluations) < 2:
        raise ConfigError(f"{len(evaluations)} results folder: a comparison needs two or more")
    return Comparison(
        evaluations=tuple(evaluations),
        changed_settings=_changed_settings(evaluations),
        differences=tuple(_difference(evaluations[0], other) for other in evaluations[1:]),
        item_rows=tuple(_item_rows(evaluations)),
    )


def _changed_settings(evaluations: Sequence[Evaluation]) -> dict[str, tuple[Any, ...]]:
    keys = dict.fromkeys(key for evaluation in evaluations for key in evaluation.settings)
    values = {key: tuple(evaluation.settings.get(key) for evaluation in evaluations) for key in keys}
    return {key: each for key, each in values.items() if any(value != each[0] for value in each)}


def _difference(first: Evaluation, other: Evaluation) -> Difference:
    pairs = [(first.items[id], other.items[id]) for id in first.items if id in other.items]
    gains = [now.score - before.score for before, now in pairs]
    only_first = sum(before.passed and not now.passed for before, now in pairs)
    only_this = sum(now.passed and not before.passed for before, now in pairs)
    return Difference(
        name=other.name,
        num_items=len(pairs),
        avg=sum(gains) / len(gains) if gains else float("nan"),
        avg_interval=bootstrap_mean(gains),
        avg_p=sign_flip_p(gains),
        only_first_passed=only_first,
        only_this_passed=only_this,
        pass_p=mcnemar_p(only_first, only_this),
    )


def _item_rows(evaluations: Sequence[Evaluation]) -> list[ItemRow]:
    ids = sorted({id for evaluation in evaluations for id in evaluation.items})
    rows = [ItemRow(id, tuple(evaluation.items.get(id) for evaluation in evaluations)) for id in ids]
    return [row for row in rows if _differs(row.results)]


def _differs(results: Sequence[ItemResult | None]) -> bool:
    there = [result for result in results if result is not None]
    scores = [result.score for result in there]
    return len(there) < len(results) or max(scores) - min(scores) > _TIE or len({r.passed for r in there}) > 1


def _score_rows(evaluations: Sequence[Evaluation]) -> list[tuple[str, ...]]:
    """A row per category, task and overall; for each evaluation Avg, Pass, turns."""
    names = dict.fromkeys(name for evaluation in evaluations for name in _scores_by_name(evaluation.report))
    titles = [
        title
        for number, each in enumerate(evaluations, 1)
        for title in (f"[{number}] items", f"Avg@{each.report.k}", "95%", f"Pass@{each.report.k}", "95%", "turns")
    ]
    rows = [("", *titles)]
    for name in [*(name for name in names if name != "overall"), "overall"]:
        scores = [_scores_by_name(evaluation.report).get(name) for evaluation in evaluations]
        rows.append((name, *(cell for each in scores for cell in _score_cells(each))))
    return rows


def _scores_by_name(report: Report) -> dict[str, Scores]:
    return {scores.name: scores for scores in (*report.categories, *report.tasks, report.overall)}


def _score_cells(scores: Scores | None) -> tuple[str, ...]:
    if scores is None:
        return ("",) * 6
    avg = (f"{scores.avg:.3f}", str(scores.avg_interval or ""))
    passed = (f"{scores.pass_rate:.3f}", str(scores.pass_interval or ""))
    return (str(scores.num_items), *avg, *passed, f"{scores.turns_mean:.1f}")


def _difference_line(number: int, difference: Difference) -> str:
    if not difference.num_items:
        return f"[{number}] - [1]: no item has a result in both"
    interval = difference.avg_interval
    assert interval is not None
    return (
        f"[{number}] - [1] over {difference.num_items} items: Avg {difference.avg:+.3f} "
        f"({interval.low:+.3f}..{interval.high:+.3f}, p={difference.avg_p:.3g}); "
        f"passed by [1] alone {difference.only_first_passed}, by [{number}] alone {difference.only_this_passed} "
        f"(p={difference.pass_p:.3g})"
    )


def _item_cell(result: ItemResult | None) -> str:
    return "" if result is None else f"{result.score:.3f}{' pass' if result.passed else ''}"
