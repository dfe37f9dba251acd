"""Which trajectories a list shows, in which order: filters, text search, sorting, groups, pages."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentgym_rl.viewer.goals import NO_GOAL, GoalFilter, Goals, passes
from agentgym_rl.viewer.library import Library, natural
from agentgym_rl.viewer.rows import Summary, decode

_MAX_PAGE = 1000
_NUM_SEARCHES = 16
_UNLIMITED = float("inf")

SortKey = Literal[
    "step",
    "item_id",
    "score",
    "success",
    "stop_reason",
    "turns",
    "tokens",
    "sampled_tokens",
    "duration_s",
    "uid",
    "run",
]
Limit = Annotated[float | None, Field(allow_inf_nan=False)]


class Filters(BaseModel):
    """Which trajectories are asked for, and which stretch of a list; a filter that is None or empty lets all pass."""

    model_config = ConfigDict(extra="forbid")

    run: list[str] = []
    phase: Literal["", "train", "val", "eval"] = ""
    task: str = ""
    item: str = Field("", max_length=200)
    """Part of an item id; in quotes the whole of it."""
    uid: str = ""
    step_min: int | None = None
    step_max: int | None = None
    score_min: Limit = None
    score_max: Limit = None
    success: bool | None = None
    stop: list[str] = []
    """Stop reasons, any of which will do."""
    turns_min: int | None = None
    turns_max: int | None = None
    tokens_min: int | None = None
    tokens_max: int | None = None
    text: str = Field("", max_length=500)
    """Somewhere in what was said or seen, upper and lower case alike."""
    goal: GoalFilter | Literal[""] = ""
    """What the panel says of the goal."""
    descending: bool = False
    offset: int = Field(0, ge=0)
    limit: int = Field(100, ge=1, le=_MAX_PAGE)

    @model_validator(mode="before")
    @classmethod
    def _names_are_known(cls, values: Any) -> Any:
        """Raises ValueError that says what there is in the place of a name that there is not."""
        known = cls.model_fields
        for name in values if isinstance(values, dict) else ():
            if name not in known:
                ends = [end for end in (f"{name}_min", f"{name}_max") if end in known]
                raise ValueError(f"{name}: no such parameter; there {_listed(ends or sorted(known))}")
        return values


class Query(Filters):
    """What the list is asked for."""

    sort: SortKey = "step"
    grouped: bool = False
    """Members of a group together: groups in the order of the one of theirs that comes first."""


def _listed(names: list[str]) -> str:
    return f"are {', '.join(names[:-1])} and {names[-1]}"


class Page(msgspec.Struct):
    """A stretch of the list."""

    total: int
    offset: int
    rows: list[Summary]


class Filtered(NamedTuple):
    """Trajectories that pass the filters."""

    rows: list[Summary]
    unchecked: int
    """So many more might pass: their panels have not been made yet."""


def select(library: Library, query: Query, searches: Searches) -> list[Summary]:
    """All trajectories that pass the filters, in order."""
    return select_within(library, query, searches, _UNLIMITED).rows


def select_within(library: Library, query: Query, searches: Searches, budget_s: float) -> Filtered:
    """Those that pass, in order; a filter that needs panels makes them for at most about ``budget_s`` seconds."""
    rows, unchecked = filtered(library, query, searches, budget_s)
    return Filtered(_ordered(rows, query), unchecked)


def filtered(library: Library, filters: Filters, searches: Searches, budget_s: float) -> Filtered:
    """Those that pass, in the library's order. The filters that cost most see what the others have let pass."""
    chosen = [summary for summary in library.summaries() if _passes(summary, filters)]
    if filters.text:
        found = searches.find(library, filters.text, chosen)
        chosen = [summary for summary in chosen if summary.id in found]
    if not filters.goal:
        return Filtered(chosen, 0)
    goals = searches.goals.find(library, chosen, budget_s)
    passed = [summary for summary in chosen if passes(summary, goals.get(summary.id, NO_GOAL), filters.goal)]
    return Filtered(passed, len(chosen) - len(goals))


def page_of(rows: list[Summary], query: Query) -> Page:
    return Page(len(rows), query.offset, rows[query.offset : query.offset + query.limit])


def _passes(summary: Summary, query: Filters) -> bool:
    return (
        (not query.run or summary.run in query.run)
        and (not query.phase or summary.phase == query.phase)
        and (not query.task or summary.task == query.task)
        and (not query.item or _names(summary.item_id, query.item))
        and (not query.uid or summary.uid == query.uid)
        and _within(summary.step, query.step_min, query.step_max)
        and _within(summary.score, query.score_min, query.score_max)
        and (query.success is None or summary.success is query.success)
        and (not query.stop or summary.stop_reason in query.stop)
        and _within(summary.turns, query.turns_min, query.turns_max)
        and _within(summary.tokens, query.tokens_min, query.tokens_max)
    )


def _names(item_id: str, wanted: str) -> bool:
    quoted = re.fullmatch(r'"(.*)"', wanted)
    return item_id == quoted[1] if quoted else wanted.casefold() in item_id.casefold()


def _within(value: float | None, low: float | None, high: float | None) -> bool:
    if low is None and high is None:
        return True
    return value is not None and (low is None or value >= low) and (high is None or value <= high)


def _ordered(rows: list[Summary], query: Query) -> list[Summary]:
    """Sorted; what has no value comes last in either direction."""
    key = _sort_key(query.sort)
    known = [row for row in rows if getattr(row, query.sort) is not None]
    unknown = [row for row in rows if getattr(row, query.sort) is None]
    ordered = sorted(known, key=key, reverse=query.descending) + unknown
    return _together(ordered) if query.grouped else ordered


def _sort_key(name: str) -> Callable[[Summary], Any]:
    if name in ("item_id", "uid", "run"):
        return lambda row: natural(getattr(row, name))
    return lambda row: getattr(row, name)


def group_of(summary: Summary) -> tuple[str, str, int, str]:
    """What members of a group share."""
    return summary.run, summary.phase, summary.step, summary.uid


def _together(rows: Iterable[Summary]) -> list[Summary]:
    groups: dict[tuple[str, str, int, str], list[Summary]] = {}
    for row in rows:
        groups.setdefault(group_of(row), []).append(row)
    return [
        row for group in groups.values() for row in sorted(group, key=lambda row: (row.sample_index, row.trial, row.id))
    ]


class _Said(msgspec.Struct):
    value: str = ""
    content: str = ""


class _Seen(msgspec.Struct):
    observation: str | None = None


class _Texts(msgspec.Struct):
    conversations: list[_Said]
    turns: list[_Seen] | None = None
    """The last observation of an episode stands in no message."""


_texts_decoder = msgspec.json.Decoder(_Texts)


class Searches:
    """Text searches in the files, which are remembered, so that paging and a growing run read only what is new."""

    def __init__(self) -> None:
        self.goals = Goals()
        self._results: OrderedDict[str, dict[str, tuple[Summary, bool]]] = OrderedDict()
        """By text and id; another summary under the same id is that of a file written anew."""
        self._lock = threading.Lock()

    def find(self, library: Library, text: str, summaries: Iterable[Summary]) -> set[str]:
        """Ids of the trajectories in whose messages ``text`` stands, whatever its case."""
        wanted = text.casefold()
        with self._lock:
            known = self._results.setdefault(wanted, {})
            self._results.move_to_end(wanted)
            while len(self._results) > _NUM_SEARCHES:
                self._results.popitem(last=False)
            asked = {summary.id: summary for summary in summaries}
            unknown = {id for id, summary in asked.items() if known.get(id, (None,))[0] is not summary}
            for summary, row in library.read_rows(unknown):
                known[summary.id] = (summary, _contains(row, wanted))
            return {id for id in asked if id in known and known[id][1]}


def _contains(row: bytes, wanted: str) -> bool:
    try:
        texts = decode(row, _texts_decoder)
    except ValueError:
        return False  # the file was replaced since; the next refresh will see to it
    said = [each.value or each.content for each in texts.conversations]
    seen = [turn.observation or "" for turn in (texts.turns or [])[-1:]]
    return any(wanted in text.casefold() for text in (*said, *seen))
