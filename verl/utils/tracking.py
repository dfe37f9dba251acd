"""Where metrics go: a readable line per step, ``metrics.jsonl``, TensorBoard, Weights & Biases, MLflow.

A sink that fails in the middle of a run does not end it: the failure is counted and said, the other sinks go on.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

from agentgym_rl.errors import ConfigError
from agentgym_rl.files import write_whole
from verl.utils.nested import flat_items

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
"""What a logger needs beyond the project itself."""

_MAX_FAILURES_IN_A_ROW = 3

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

Metrics = Mapping[str, float]


class Sink(ABC):
    """One place that metrics go to."""

    name: ClassVar[str]
    failures: tuple[type[Exception], ...] = (OSError,)
    """What its surroundings can do to it: disk, network, the service's client."""

    @abstractmethod
    def write(self, step: int, metrics: Metrics) -> None:
        """Take the metrics of one step."""

    def close(self) -> None:  # noqa: B027 - most sinks hold nothing open
        """Write out what is buffered; nothing follows."""


class Tracker:
    """Writes each step's metrics to all sinks. A context manager.

    A failing sink loses the step, says so the first time, and is left out for good after three failures in a row, since
    each may cost its client's whole time-out. ``tracking/failures`` counts them once there are any.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self._in_a_row = dict.fromkeys((sink.name for sink in sinks), 0)
        self.num_failures = 0

    def log(self, step: int, metrics: Metrics) -> None:
        for sink in tuple(self._sinks):
            counted = {"tracking/failures": float(self.num_failures)} if self.num_failures else {}
            try:
                sink.write(step, {**metrics, **counted})
            except sink.failures as error:
                self._count(sink, step, error)
            else:
                self._in_a_row[sink.name] = 0

    def _count(self, sink: Sink, step: int, error: Exception) -> None:
        self.num_failures += 1
        self._in_a_row[sink.name] += 1
        if self._in_a_row[sink.name] == 1:
            print(f"warning: {sink.name} lost the metrics of step {step}: {_in_a_line(error)}", file=sys.stderr)
        if self._in_a_row[sink.name] == _MAX_FAILURES_IN_A_ROW:
            print(f"warning: {sink.name} failed {_MAX_FAILURES_IN_A_ROW} times in a row: left out", file=sys.stderr)
            self._sinks.remove(sink)

    def close(self) -> None:
        for sink in self._sinks:
            try:
                sink.close()
            except sink.failures as error:
                print(f"warning: {sink.name} may lack its last metrics: {_in_a_line(error)}", file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def check_loggers(names: Sequence[str]) -> None:
    """Raise `ConfigError` for a logger whose package is not installed."""
    for name in names:
        package = _PACKAGES.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"trainer.logger={list(names)}: {name} needs the package {package}, which is not installed; "
                f"pip install {package}, or leave {name} out"
            )


class TrackedRun(Protocol):
    """The keys of a ``trainer`` branch that tracking reads."""

    logger: list[str]
    project_name: str
    experiment_name: str


def make_tracker(
    run: TrackedRun,
    folder: Path,
    *,
    config: Mapping[str, Any],
    console_columns: Mapping[str, str],
    console_every: int = 1,
    resumed_after: int = 0,
) -> Tracker:
    """A tracker for ``trainer.logger``; files go to ``folder``, the console gets every ``console_every``-th step.

    A run that goes on after step ``resumed_after`` continues files and the services' runs; what files hold of later
    steps, logged by a run that died before its next checkpoint, is dropped. Services keep such steps, given once.
    Raises `ConfigError` when a logger's package is not installed, its service cannot be reached, or its files cannot be
    written.
    """
    check_loggers(run.logger)
    folder.mkdir(parents=True, exist_ok=True)

    def make(name: str) -> Sink:
        match name:
            case "console":
                return ConsoleSink(console_columns, every=console_every)
            case "jsonl":
                return JsonlSink(folder / METRICS_FILE, resumed_after=resumed_after)
            case "tensorboard":
                return TensorBoardSink(folder / TENSORBOARD_FOLDER, resumed_after=resumed_after)
            case "wandb":
                return WandbSink(folder, run, config=config, resumed_after=resumed_after)
            case "mlflow":
                return MlflowSink(folder, run, config=config, resumed_after=resumed_after)
            case _:
                raise ConfigError(f"trainer.logger={run.logger}: {name!r} is not known")

    sinks: list[Sink] = []
    for name in dict.fromkeys(run.logger):
        try:
            sinks.append(make(name))
        except OSError as error:  # of the disk, as when it is full
            raise _cannot_start(run, name, error) from error
    return Tracker(sinks)


class ConsoleSink(Sink):
    """One line per step with the metrics that tell how the run goes."""

    name = "console"

    def __init__(self, columns: Mapping[str, str], *, every: int = 1) -> None:
        """``columns`` gives label and metric of what is shown, where a step has it; only every so many steps are."""
        self._columns, self._every = dict(columns), every

    def write(self, step: int, metrics: Metrics) -> None:
        if step % self._every:
            return
        shown = [f"{label} {_short(metrics[key])}" for label, key in self._columns.items() if key in metrics]
        print(f"step {step:>5} | " + " | ".join(shown), file=sys.stdout, flush=True)


class JsonlSink(Sink):
    """One JSON object per line: ``step`` and every metric; numbers that are not finite become null."""

    name = "jsonl"

    def __init__(self, path: Path, *, resumed_after: int = 0) -> None:
        _drop_later_steps(path, resumed_after)
        self._file = path.open("ab", buffering=0)

    def write(self, step: int, metrics: Metrics) -> None:
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        line = (json.dumps({"step": step, **finite}) + "\n").encode()
        end = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            # Half a row would make the next one unreadable; giving room back works on a full disk.
            self._file.truncate(end)
            raise

    def close(self) -> None:
        self._file.close()


class TensorBoardSink(Sink):
    """Event files for TensorBoard."""

    name = "tensorboard"

    def __init__(self, folder: Path, *, resumed_after: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what an earlier run wrote at this step and later; a fresh start hides all, step 0 included.
        self._writer = SummaryWriter(str(folder), purge_step=resumed_after + 1 if resumed_after else 0)

    def write(self, step: int, metrics: Metrics) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _ServiceRun:
    """Which run of a service this one is, in a file: a resumed run goes on with it and logs no step a second time."""

    def __init__(self, path: Path, *, resumed_after: int) -> None:
        known = json.loads(path.read_text()) if resumed_after and path.exists() else {}
        self._path = path
        self.id: str | None = known.get("run_id")
        self._last_step: int = known.get("last_step", -1)

    def is_new(self, step: int) -> bool:
        return step > self._last_step

    def record(self, run_id: str, *, last_step: int | None = None) -> None:
        self.id = run_id
        self._last_step = self._last_step if last_step is None else last_step
        write_whole(self._path, json.dumps({"run_id": self.id, "last_step": self._last_step}))


class WandbSink(Sink):
    """Weights & Biases, through its own client."""

    name = "wandb"

    def __init__(self, folder: Path, run: TrackedRun, *, config: Mapping[str, Any], resumed_after: int = 0) -> None:
        import wandb

        self.failures = (OSError, wandb.errors.Error)
        self._known = _ServiceRun(folder / "wandb_run.json", resumed_after=resumed_after)
        run_id = self._known.id or uuid.uuid4().hex
        try:
            self._run = wandb.init(
                project=run.project_name,
                name=run.experiment_name,
                dir=str(folder),
                config=dict(config),
                id=run_id,
                resume="allow",
            )
        except self.failures as error:
            raise _cannot_start(run, self.name, error) from error
        self._known.record(run_id)

    def write(self, step: int, metrics: Metrics) -> None:
        if self._known.is_new(step):
            self._run.log(dict(metrics), step=step)
            self._known.record(self._run.id, last_step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowSink(Sink):
    """MLflow: the server of ``MLFLOW_TRACKING_URI``, or a database ``mlflow.db`` in the run's folder."""

    name = "mlflow"

    def __init__(self, folder: Path, run: TrackedRun, *, config: Mapping[str, Any], resumed_after: int = 0) -> None:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        self.failures = (OSError, MlflowException)
        self._known = _ServiceRun(folder / "mlflow_run.json", resumed_after=resumed_after)
        try:
            self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}")
            self._run_id = self._resume(self._known.id) if self._known.id else self._create(run, config)
        except self.failures as error:
            raise _cannot_start(run, self.name, error) from error
        self._known.record(self._run_id)

    def _resume(self, run_id: str) -> str:
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _create(self, run: TrackedRun, config: Mapping[str, Any]) -> str:
        from mlflow.entities import Param

        known = self._client.get_experiment_by_name(run.project_name)
        experiment_id = known.experiment_id if known else self._client.create_experiment(run.project_name)
        run_id: str = self._client.create_run(experiment_id, run_name=run.experiment_name).info.run_id
        params = [Param(key, str(value)) for key, value in flat_items(config)]
        for start in range(0, len(params), _MLFLOW_BATCH):
            self._client.log_batch(run_id, params=params[start : start + _MLFLOW_BATCH])
        return run_id

    def write(self, step: int, metrics: Metrics) -> None:
        from mlflow.entities import Metric

        if self._known.is_new(step):
            now_ms = int(time.time() * 1000)
            rows = [Metric(key, value, now_ms, step) for key, value in metrics.items()]
            self._client.log_batch(self._run_id, metrics=rows)
            self._known.record(self._run_id, last_step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


# The most parameters that MLflow takes in one call.
_MLFLOW_BATCH = 100


def _cannot_start(run: TrackedRun, name: str, error: Exception) -> ConfigError:
    return ConfigError(f"trainer.logger={run.logger}: {name} cannot start: {_in_a_line(error)}")


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``metrics.jsonl``; a torn last line is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            rows.append(json.loads(line))
    return rows


def _drop_later_steps(path: Path, last_step: int) -> None:
    """Keep the rows up to ``last_step``."""
    if not path.exists():
        return
    kept = [row for row in read_metrics(path) if last_step > 0 and row["step"] <= last_step]
    write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))


def _short(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e6 else f"{value:.3g}"
