"""Items of a run: how often each was tried, how often it succeeded, and whether its groups gave a signal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec

from agentgym_rl.viewer.goals import Goals
from agentgym_rl.viewer.library import Library, natural
from agentgym_rl.viewer.query import Filters, group_of
from agentgym_rl.viewer.rows import Summary, mean

_LABEL_BUDGET_S = 0.5
"""Goals stand in whole rows: of a page that has more items than this lets it read, later calls tell the others."""


class ItemQuery(Filters):
    """What the list of items is asked for."""

    sort: Literal["item_id", "tries", "success_mean", "score_mean", "groups", "groups_alike"] = "item_id"


class ItemRow(msgspec.Struct, frozen=True):
    """One item over all trajectories that pass the filters."""

    task: str
    item_id: str
    category: str
    tries: int
    """Trajectories, faults included."""
    faults: int
    """Those that count in no mean."""
    success_mean: float | None
    """Share of successes; None where no try tells."""
    score_mean: float | None
    groups: int
    """Those of at least two sound members."""
    groups_alike: int
    """Groups whose members all scored the same: nothing is learned from them."""
    sample: str
    """Id of one of the trajectories."""
    goal: str = ""


def item_rows(summaries: Iterable[Summary], query: ItemQuery) -> list[ItemRow]:
    """A row for each item, in order; what has no value comes last in either direction."""
    by_item: dict[tuple[str, str], list[Summary]] = {}
    for summary in summaries:
        by_item.setdefault((summary.task, summary.item_id), []).append(summary)
    rows = sorted((_row(members) for members in by_item.values()), key=lambda row: natural(row.item_id))
    known = [row for row in rows if getattr(row, query.sort) is not None]
    unknown = [row for row in rows if getattr(row, query.sort) is None]
    return sorted(known, key=_sort_key(query.sort), reverse=query.descending) + unknown


def with_goals(library: Library, rows: Sequence[ItemRow], goals: Goals) -> tuple[list[ItemRow], int]:
    """The rows with what was to be reached, as the panel of one of the trajectories tells it; and of how many rows
    that is not known yet."""
    samples = [found for row in rows if (found := library.find(row.sample)) is not None]
    known = goals.find(library, samples, _LABEL_BUDGET_S)
    labels = {id: goal.label for id, goal in known.items()}
    told = [msgspec.structs.replace(row, goal=labels.get(row.sample, "")) for row in rows]
    return told, len(samples) - len(known)


def _sort_key(name: str) -> Callable[[ItemRow], Any]:
    return (lambda row: natural(row.item_id)) if name == "item_id" else (lambda row: getattr(row, name))


def _row(members: Sequence[Summary]) -> ItemRow:
    sound = [summary for summary in members if summary.score is not None and not summary.is_fault]
    groups: dict[object, list[float | None]] = {}
    for summary in sound:
        groups.setdefault(group_of(summary), []).append(summary.score)
    compared = [scores for scores in groups.values() if len(scores) > 1]
    first = members[0]
    return ItemRow(
        task=first.task,
        item_id=first.item_id,
        category=first.category,
        tries=len(members),
        faults=sum(summary.is_fault for summary in members),
        success_mean=mean(summary.success for summary in members if not summary.is_fault),
        score_mean=mean(summary.score for summary in sound),
        groups=len(compared),
        groups_alike=sum(len(set(scores)) == 1 for scores in compared),
        sample=first.id,
    )
