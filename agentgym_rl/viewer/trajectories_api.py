"""Calls about trajectories: the list, what it can be filtered by, and all of one."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, HTTPException
from fastapi import Query as QueryString
from starlette.responses import Response

from agentgym_rl.viewer.answers import json_answer, not_found
from agentgym_rl.viewer.items import ItemQuery, item_rows, with_goals
from agentgym_rl.viewer.library import Library
from agentgym_rl.viewer.query import Query, Searches, filtered, group_of, page_of, select_within
from agentgym_rl.viewer.records import record_of
from agentgym_rl.viewer.rows import Summary
from agentgym_rl.viewer.runs_api import REFRESH_BUDGET_S, state

PANELS_BUDGET_S = 0.3
"""How long a request may make panels before it answers with those that are known."""


def make_router(library: Library) -> APIRouter:
    router = APIRouter()
    searches = Searches()

    @router.get("/trajectories")
    def trajectories(query: Annotated[Query, QueryString()]) -> Response:
        """A page of the list, see `Query`."""
        library.refresh(REFRESH_BUDGET_S)
        rows, unchecked = select_within(library, query, searches, PANELS_BUDGET_S)
        return json_answer({**state(library), "unchecked": unchecked, **msgspec.structs.asdict(page_of(rows, query))})

    @router.get("/items")
    def items(query: Annotated[ItemQuery, QueryString()]) -> Response:
        """A page of the items that the trajectories of the same filters are about, see `ItemQuery`."""
        library.refresh(REFRESH_BUDGET_S)
        summaries, unchecked = filtered(library, query, searches, PANELS_BUDGET_S)
        rows = item_rows(summaries, query)
        shown, unlabelled = with_goals(library, rows[query.offset : query.offset + query.limit], searches.goals)
        return json_answer(
            {
                **state(library),
                "unchecked": unchecked + unlabelled,
                "total": len(rows),
                "offset": query.offset,
                "rows": shown,
            }
        )

    @router.get("/facets")
    def facets(run: str = "") -> Response:
        """What the trajectories, of one run or of all, can be filtered by."""
        library.refresh(REFRESH_BUDGET_S)
        return json_answer(_facets(library, run))

    @router.get("/trajectories/{id}")
    def trajectory(id: str) -> Response:
        """All of one trajectory, made ready for its page, with the members of its group."""
        library.refresh(REFRESH_BUDGET_S)
        summary, row = library.find(id), library.read_row(id)
        if summary is None or row is None:
            raise not_found("trajectory", id)
        group = [each for each in library.summaries() if group_of(each) == group_of(summary)]
        group.sort(key=lambda each: (each.sample_index, each.trial, each.id))
        record = _record(library, summary, row)
        about = {"summary": summary, "place": library.place_of(id), "group": group}
        return json_answer(about | {"goal": searches.goals.of(library, summary)} | record)

    @router.get("/trajectories/{id}/neighbours")
    def neighbours(id: str, query: Annotated[Query, QueryString()]) -> Response:
        """Where a trajectory stands in a list: its position, counted from 1, and the ids before and after it."""
        rows, _ = select_within(library, query, searches, PANELS_BUDGET_S)
        return json_answer(_neighbours([row.id for row in rows], id))

    @router.get("/trajectories/{id}/raw")
    def raw(id: str) -> Response:
        """The trajectory's row as it stands in its file."""
        row = library.read_row(id)
        if row is None:
            raise not_found("trajectory", id)
        return Response(row, media_type="application/json")

    return router


def _record(library: Library, summary: Summary, row: bytes) -> dict[str, Any]:
    """The row for its page; HTTP 422 where it has the outlines of a trajectory and no more."""
    step = summary.step if summary.phase == "train" else None
    try:
        return record_of(row, run_folder=library.folder_of(summary.run), root=library.root, step=step)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise HTTPException(422, f"this row is no whole trajectory: {type(error).__name__}: {error}") from error


def _neighbours(ids: list[str], id: str) -> dict[str, Any]:
    if id not in ids:
        return {"position": None, "total": 0, "previous": None, "next": None}
    place = ids.index(id)
    return {
        "position": place + 1,
        "total": len(ids),
        "previous": ids[place - 1] if place else None,
        "next": ids[place + 1] if place + 1 < len(ids) else None,
    }


def _facets(library: Library, run: str) -> dict[str, Any]:
    chosen = [summary for summary in library.summaries() if not run or summary.run == run]
    return {
        "root": library.root.name,
        "runs": library.runs(),
        "tasks": sorted({summary.task for summary in chosen} - {""}),
        "phases": sorted({summary.phase for summary in chosen}),
        "stop_reasons": sorted({summary.stop_reason for summary in chosen}),
        "steps": sorted({summary.step for summary in chosen}),
    }
