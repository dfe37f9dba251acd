"""From the folders of the experiments' runs to numbers, and the files that keep them: ``docs/results/<suite>.json``."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from suites import Kind, Run

from verl.utils.tracking import METRICS_FILE, read_metrics

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
CURVES = {
    "success": "rollout/success_mean",
    "turns": "rollout/turns_mean",
    "horizon": "rounds/max_rounds",
    "entropy": "actor/entropy",
    "sampled_tokens": "training/sampled_tokens",
    "tokens": "training/tokens",
}
"""What is kept of every training step."""
DIGITS = 4


@dataclass(frozen=True)
class Evaluation:
    """Success of sampled play on the held-out items."""

    samples: int
    avg: float
    low: float
    high: float
    """95% interval of ``avg`` over items."""
    solved: float
    """Share of the items that any sample solved (Pass@k)."""
    turns: float
    by_category: Mapping[str, float]


@dataclass(frozen=True)
class Result:
    """What came out of one run."""

    name: str
    seed: int
    evaluation: Evaluation
    cpu_s: Mapping[str, float]
    """Seconds of the CPU by kind of command."""
    wall_s: Mapping[str, float]
    curves: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """``step`` and what `CURVES` names, one number per training step; None where a step has none, such as the entropy
    of one without an update."""
    validation: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """``step``, ``success`` on the held-out items."""


class IncompleteEvaluationError(RuntimeError):
    """Trajectories of an evaluation were lost to faults, and its averages are those of the rest."""


def collect(run: Run) -> Result:
    """The numbers of a finished run. Raises `IncompleteEvaluationError`: what takes long is lost first, and takes long
    because it fails."""
    report = json.loads((run.evaluation / "report.json").read_text())
    if report["num_faults"] or report["num_missing"]:
        raise IncompleteEvaluationError(
            f"{run.evaluation}: {report['num_faults']} trajectories ended by faults, {report['num_missing']} are "
            f"missing; remove {run.folder}, or this folder, done.json and the last row of times.json, and run again"
        )
    times = json.loads((run.folder / "done.json").read_text())
    rows = read_metrics(run.training / METRICS_FILE) if run.training else []
    trained = [row for row in rows if "rollout/success_mean" in row]
    validated = [row for row in rows if "val/success_mean" in row]
    return Result(
        run.name,
        run.seed,
        _evaluation(report),
        _by_kind(times, "cpu_s"),
        _by_kind(times, "wall_s"),
        _curves(trained, CURVES),
        _curves(validated, {"success": "val/success_mean"}),
    )


def write_results(suite: str, results: Sequence[Result], folder: Path = RESULTS) -> Path:
    """Write ``<suite>.json``, one run per line, so that a change of one is a change of one line."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{suite}.json"
    lines = ",\n".join(json.dumps(dataclasses.asdict(result)) for result in results)
    target.write_text(f"[\n{lines}\n]\n")
    return target


def read_results(suite: str, folder: Path = RESULTS) -> list[Result]:
    """What `write_results` wrote."""
    rows = json.loads((folder / f"{suite}.json").read_text())
    return [Result(**row | {"evaluation": Evaluation(**row["evaluation"])}) for row in rows]


def _curves(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> dict[str, list[float | None]]:
    if not rows:
        return {}
    curves = {name: [_rounded(row.get(key)) for row in rows] for name, key in names.items()}
    return {"step": [row["step"] for row in rows]} | curves


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)


def _evaluation(report: Mapping[str, Any]) -> Evaluation:
    overall = report["overall"]
    return Evaluation(
        report["k"],
        round(overall["avg"], DIGITS),
        round(overall["avg_interval"]["low"], DIGITS),
        round(overall["avg_interval"]["high"], DIGITS),
        round(overall["pass_rate"], DIGITS),
        round(overall["turns_mean"], 2),
        {category["name"]: round(category["avg"], DIGITS) for category in report["categories"]},
    )


def _by_kind(times: Sequence[Mapping[str, Any]], key: str) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for row in times:
        seconds[Kind(row["kind"]).value] += row[key]
    return {kind: round(value) for kind, value in seconds.items()}
