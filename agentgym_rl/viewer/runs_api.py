"""Calls about runs: what there is, and the curves of a training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from agentgym_rl.viewer.answers import json_answer, not_found
from agentgym_rl.viewer.library import Library
from agentgym_rl.viewer.rows import Summary, mean

REFRESH_BUDGET_S = 0.2
"""How long a request may read files before it answers with what is known."""


def make_router(library: Library) -> APIRouter:
    router = APIRouter()

    @router.get("/runs")
    def runs() -> Response:
        """All runs, and how far their files have been read."""
        library.refresh(REFRESH_BUDGET_S)
        by_run: dict[str, list[Summary]] = {run: [] for run in library.runs()}
        for summary in library.summaries():
            by_run.setdefault(summary.run, []).append(summary)
        return json_answer({"root": str(library.root), **state(library), "runs": _runs(library, by_run)})

    @router.get("/metrics")
    def metrics(run: str, key: Annotated[list[str] | None, Query()] = None, after: int = 0) -> Response:
        """Chosen columns of a run's metrics, from row ``after`` on; without ``key`` only their names."""
        library.refresh(REFRESH_BUDGET_S)
        if library.folder_of(run) is None:
            raise not_found("run", run)
        found = library.metrics(run)
        rows, generation = (_rows_of(library, run), 0) if found is None else (found.rows, found.generation)
        return json_answer(
            {
                "generation": generation,
                "is_derived": found is None,
                "num_rows": len(rows),
                "keys": sorted({name for row in rows for name in row} - {"step"}),
                "steps": [row["step"] for row in rows[after:]],
                "series": {name: [_number(row.get(name)) for row in rows[after:]] for name in key or ()},
            }
        )

    return router


def state(library: Library) -> dict[str, Any]:
    """What every list tells of the library: its version, how much has been read, and what could not be."""
    progress = library.progress()
    return {
        "version": library.version,
        "done_bytes": progress.done_bytes,
        "total_bytes": progress.total_bytes,
        "is_complete": progress.is_complete,
        "problems": library.problems(),
    }


def _runs(library: Library, by_run: dict[str, list[Summary]]) -> list[dict[str, Any]]:
    modified_at = library.modified_at()
    return [_run(library, run, summaries, modified_at.get(run, 0.0)) for run, summaries in by_run.items()]


def _run(library: Library, run: str, summaries: Sequence[Summary], modified_at: float) -> dict[str, Any]:
    metrics = library.metrics(run)
    rows = [] if metrics is None else metrics.rows
    own = [s for s in summaries if s.phase == "train"] or summaries
    return {
        "name": run,
        "title": library.root.name if run == "." else run,
        "has_metrics": metrics is not None,
        "last_step": max([row["step"] for row in rows] + [s.step for s in summaries], default=None),
        "num_trajectories": len(summaries),
        "tasks": sorted({s.task for s in summaries} - {""}),
        "phases": dict(Counter(s.phase for s in summaries)),
        "stop_reasons": dict(Counter(s.stop_reason for s in summaries)),
        "score_mean": mean(s.score for s in own if not s.is_fault),
        "success_mean": mean(s.success for s in own if not s.is_fault),
        "last_score_mean": _last(rows, "rollout/score_mean"),
        "last_success_mean": _last(rows, "rollout/success_mean"),
        "modified_at": modified_at,
    }


def _last(rows: Sequence[dict[str, Any]], key: str) -> float | None:
    """The last value in the metrics; None for none."""
    return next((row[key] for row in reversed(rows) if isinstance(row.get(key), int | float)), None)


def _rows_of(library: Library, run: str) -> list[dict[str, Any]]:
    """Metrics made from a run's trajectories, where it has no file of them."""
    by_step: dict[int, list[Summary]] = {}
    for summary in library.summaries():
        if summary.run == run:
            by_step.setdefault(summary.step, []).append(summary)
    return [{"step": step, **_step_metrics(by_step[step])} for step in sorted(by_step)]


def _step_metrics(summaries: Sequence[Summary]) -> dict[str, Any]:
    """Means leave faults out, shares do not."""
    stops = Counter(summary.stop_reason for summary in summaries)
    sound = [summary for summary in summaries if summary.score is not None]
    return {
        "rollout/trajectories": len(summaries),
        "rollout/score_mean": mean(s.score for s in sound),
        "rollout/success_mean": mean(s.success for s in sound),
        "rollout/turns_mean": mean(s.turns for s in sound),
        "rounds/max_rounds": max(s.max_rounds for s in summaries),
        **{f"rollout/stop/{reason}": count / len(summaries) for reason, count in stops.items() if reason},
    }


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None
