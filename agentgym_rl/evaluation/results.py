"""The folder of an evaluation's results: what it was made with, what was asked for, what came of it.

======================== ==============================================================================================
``settings.json``        what the results depend on, versions of model and servers included, and a line per run
``requested.json``       the items of the latest run and the number of samples of each
``trajectories/*.jsonl`` a row per trajectory, appended as each ends; a run that is killed goes on from there
``usage.jsonl``          of a hosted model: a row per answer, with its tokens
``report.json``          the figures, as `report_on` computes them from the files above and from nothing else
======================== ==============================================================================================
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentgym_rl.errors import ConfigError
from agentgym_rl.evaluation.report import Report, finished_samples, make_report, one_per_sample
from agentgym_rl.evaluation.usage import Prices, read_usage
from agentgym_rl.files import write_whole
from agentgym_rl.rollout.handler import RolloutRequest
from agentgym_rl.rollout.log import TRAJECTORY_FOLDER, read_trajectories
from agentgym_rl.types import Item, Trajectory

SETTINGS_FILE = "settings.json"
REQUESTED_FILE = "requested.json"
REPORT_FILE = "report.json"
USAGE_FILE = "usage.jsonl"

Sample = tuple[str, int]
"""Item id and sample index."""


@dataclass(frozen=True, slots=True)
class Requested:
    """What an evaluation was asked for."""

    items: tuple[Item, ...]
    n_samples: int

    @property
    def samples(self) -> set[Sample]:
        return {(item.item_id, sample) for item in self.items for sample in range(self.n_samples)}


def claim_folder(folder: Path, settings: dict[str, Any], run: dict[str, Any]) -> None:
    """Make the results folder, or find it made with the same settings; `ConfigError` when it was made with others.

    ``settings``: what results depend on, by key. ``run``: what may differ from run to run, such as versions of
    libraries; it is kept with the time of the run.
    """
    path = folder / SETTINGS_FILE
    folder.mkdir(parents=True, exist_ok=True)
    made_with = read_settings(folder) if path.exists() else settings
    earlier_runs = _read_json(path).get("runs", ()) if path.exists() else ()
    for key, value in settings.items():
        before = made_with.get(key)
        if before != value:
            raise ConfigError(
                f"{key}={value!r}: {str(folder)!r} holds results made with {before!r}; take another folder, or remove "
                "that one"
            )
    runs = [*earlier_runs, {"began": datetime.now(UTC).isoformat(timespec="seconds"), **run}]
    _write_json(path, {"settings": settings, "runs": runs})


def note_requested(folder: Path, requested: Requested) -> None:
    """Keep what this run was asked for: figures computed later are of the same samples."""
    items = [{"task": item.task, "item_id": item.item_id, "category": item.category} for item in requested.items]
    _write_json(folder / REQUESTED_FILE, {"n_samples": requested.n_samples, "items": items})


def missing_requests(requests: Sequence[RolloutRequest], folder: Path) -> list[RolloutRequest]:
    """Those without a result in the folder; samples that a fault took are among them."""
    finished = finished_samples(folder / TRAJECTORY_FOLDER)
    return [request for request in requests if (request.item.item_id, request.sample_index) not in finished]


def report_on(folder: Path) -> Report:
    """The report over the samples that the latest run was asked for, from the folder's files.

    Raises `ConfigError` for a folder that holds no evaluation.
    """
    requested, contents = read_requested(folder), read_trajectories(folder / TRAJECTORY_FOLDER)
    chosen = _chosen(contents.trajectories, requested)
    report = make_report(chosen, torn_files=contents.torn, num_missing=len(requested.samples) - len(chosen))
    if not (folder / USAGE_FILE).exists():
        return report
    usage, prices = read_usage(folder / USAGE_FILE), _read_json(folder / SETTINGS_FILE)["runs"][-1].get("prices")
    return dataclasses.replace(report, usage=usage, cost=usage.cost(Prices(**prices)) if prices else None)


def read_samples(folder: Path) -> list[Trajectory]:
    """The trajectory of each sample that the latest run was asked for and that is there."""
    return _chosen(read_trajectories(folder / TRAJECTORY_FOLDER).trajectories, read_requested(folder))


def write_report(folder: Path, report: Report) -> None:
    """Write the report's figures to the folder's ``report.json``."""
    _write_json(folder / REPORT_FILE, as_json(report))


def read_settings(folder: Path) -> dict[str, Any]:
    """What the folder's results depend on; raises `ConfigError` for a folder that holds no evaluation."""
    path = folder / SETTINGS_FILE
    content = _read_json(path)
    settings = content.get("settings") if isinstance(content, dict) else None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: holds no settings of an evaluation")
    return settings


def read_requested(folder: Path) -> Requested:
    """What the latest run was asked for; raises `ConfigError` for a folder that holds no evaluation."""
    path = folder / REQUESTED_FILE
    content = _read_json(path)
    try:
        items = [Item.parse(row["item_id"], row["task"], row["category"]) for row in content["items"]]
        return Requested(tuple(items), int(content["n_samples"]))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: does not say what an evaluation was asked for: {type(error).__name__}: {error}"
        ) from None


def as_json(value: Any) -> Any:
    """JSON values of a record: paths as text, and null for a mean over nothing."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): as_json(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(child) for child in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=1) + "\n")


def _chosen(trajectories: Sequence[Trajectory], requested: Requested) -> list[Trajectory]:
    """The trajectories that count, each with its item as it was asked for: a file that was written under another list
    has the categories of that one."""
    wanted, items = requested.samples, {item.item_id: item for item in requested.items}
    return [
        dataclasses.replace(trajectory, item=items[trajectory.item.item_id])
        for trajectory in one_per_sample(trajectories)
        if (trajectory.item.item_id, trajectory.sample_index) in wanted
    ]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path.parent}: no results of an evaluation are there (no {path.name})") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
