"""Calls that read whole episodes: panels, comparisons, and what can be taken away as a file."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, HTTPException
from fastapi import Query as QueryString
from pydantic import Field
from starlette.responses import Response

from agentgym_rl.data.pairs import PairRules
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Trajectory
from agentgym_rl.viewer.answers import json_answer, not_found
from agentgym_rl.viewer.comparison import compare, comparison_json
from agentgym_rl.viewer.episodes import decoded, read_episode
from agentgym_rl.viewer.export import Side, as_jsonl, comparison_page, conversations_of, pairs_of, trajectory_page
from agentgym_rl.viewer.library import Library
from agentgym_rl.viewer.panel import panel_beside
from agentgym_rl.viewer.query import Query, Searches, select
from agentgym_rl.viewer.rows import Summary
from agentgym_rl.viewer.runs_api import REFRESH_BUDGET_S

_JSONL = "application/jsonl"


class Chosen(Query):
    """Trajectories to be taken away: those of a list, or those named."""

    id: list[str] = Field(default_factory=list)


class ChosenPairs(Chosen):
    """Which of them make pairs, see `PairRules`."""

    min_gap: float = Field(0.0, ge=0, allow_inf_nan=False)
    threshold: Annotated[float | None, Field(allow_inf_nan=False)] = None
    per_item: int = Field(1, ge=1)


def make_router(library: Library) -> APIRouter:
    router = APIRouter()
    searches = Searches()

    @router.get("/trajectories/{id}/panel")
    def panel(id: str) -> Response:
        """What the environment shows beside the turns; null for nothing."""
        return json_answer(panel_beside(_side(library, id).trajectory))

    @router.get("/compare")
    def comparison(left: str, right: str) -> Response:
        """Two trajectories turn by turn, with the words that differ."""
        one, other = _side(library, left), _side(library, right)
        return json_answer(
            {
                "comparison": comparison_json(compare(one.trajectory, other.trajectory)),
                "summaries": [one.summary, other.summary],
                "panels": [panel_beside(one.trajectory), panel_beside(other.trajectory)],
            }
        )

    @router.get("/export/html")
    def html(id: str, other: str = "") -> Response:
        """A file that shows a trajectory, or two side by side, without the viewer."""
        side = _side(library, id)
        page = comparison_page(side, _side(library, other)) if other else trajectory_page(side)
        return _file(page, f"{side.summary.item_id}.html", "text/html; charset=utf-8")

    @router.get("/export/conversations")
    def conversations(chosen: Annotated[Chosen, QueryString()]) -> Response:
        """Conversations for supervised training; faults are left out."""
        rows = conversations_of(_trajectories(library, chosen, searches))
        return _file(as_jsonl(rows), "conversations.jsonl", _JSONL, len(rows))

    @router.get("/export/pairs")
    def pairs(chosen: Annotated[ChosenPairs, QueryString()]) -> Response:
        """Preference pairs; faults are left out."""
        rules = PairRules(min_gap=chosen.min_gap, threshold=chosen.threshold, per_item=chosen.per_item)
        rows = pairs_of(_trajectories(library, chosen, searches), rules)
        return _file(as_jsonl(rows), "pairs.jsonl", _JSONL, len(rows))

    return router


def _side(library: Library, id: str) -> Side:
    library.refresh(REFRESH_BUDGET_S)
    summary, row = library.find(id), library.read_row(id)
    if summary is None or row is None:
        raise not_found("trajectory", id)
    return Side(summary, _trajectory(summary, row), row)


def _trajectory(summary: Summary, row: bytes) -> Trajectory:
    try:
        return read_episode(decoded(row, summary.item_id), summary.item_id)
    except ConfigError as error:
        raise HTTPException(422, str(error)) from error


def _trajectories(library: Library, chosen: Chosen, searches: Searches) -> list[Trajectory]:
    library.refresh()
    ids = set(chosen.id) or {summary.id for summary in select(library, chosen, searches)}
    return [_trajectory(summary, row) for summary, row in library.read_rows(ids)]


def _file(content: str, name: str, media_type: str, count: int | None = None) -> Response:
    """An answer that the browser saves; the name keeps what file systems take, half a surrogate is replaced."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    headers = {"content-disposition": f'attachment; filename="{safe}"'}
    if count is not None:
        headers["x-count"] = str(count)
    return Response(content.encode(errors="replace"), media_type=media_type, headers=headers)
