"""Where metrics go: a readable line per step, ``metrics.jsonl``, TensorBoard, Weights & Biases."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from agentgym_rl.errors import ConfigError

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

Metrics = Mapping[str, float]


class Sink(ABC):
    """One place that metrics go to."""

    @abstractmethod
    def write(self, step: int, metrics: Metrics) -> None:
        """Take the metrics of one step."""

    def close(self) -> None:  # noqa: B027 - most sinks hold nothing open
        """Write out what is buffered; nothing follows."""


class Tracker:
    """Writes each step's metrics to all sinks. A context manager."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def log(self, step: int, metrics: Metrics) -> None:
        for sink in self._sinks:
            sink.write(step, metrics)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def check_loggers(names: Sequence[str]) -> None:
    """Raise `ConfigError` for a logger whose package is not installed."""
    packages = {"tensorboard": "tensorboard", "wandb": "wandb"}
    for name in names:
        package = packages.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"trainer.logger={list(names)}: {name} needs the package {package}, which is not installed; "
                f"pip install {package}, or leave {name} out"
            )


def make_tracker(
    names: Sequence[str],
    folder: Path,
    *,
    project: str,
    experiment: str,
    config: Mapping[str, Any],
    console_columns: Mapping[str, str],
    console_every: int = 1,
    resumed_after: int = 0,
) -> Tracker:
    """A tracker for ``trainer.logger``; files go to ``folder``, the console gets every ``console_every``-th step.

    A run that goes on after step ``resumed_after`` continues the files; what they hold of later steps, logged by a run
    that died before its next checkpoint, is dropped.
    """
    check_loggers(names)
    folder.mkdir(parents=True, exist_ok=True)
    sinks: list[Sink] = []
    if "console" in names:
        sinks.append(ConsoleSink(console_columns, every=console_every))
    if "jsonl" in names:
        sinks.append(JsonlSink(folder / METRICS_FILE, resumed_after=resumed_after))
    if "tensorboard" in names:
        sinks.append(TensorBoardSink(folder / TENSORBOARD_FOLDER, resumed_after=resumed_after))
    if "wandb" in names:
        sinks.append(WandbSink(folder, project=project, experiment=experiment, config=config))
    return Tracker(sinks)


class ConsoleSink(Sink):
    """One line per step with the metrics that tell how the run goes."""

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

    def __init__(self, path: Path, *, resumed_after: int = 0) -> None:
        _drop_later_steps(path, resumed_after)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Metrics) -> None:
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardSink(Sink):
    """Event files for TensorBoard."""

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


class WandbSink(Sink):
    """Weights & Biases, through its own client."""

    def __init__(self, folder: Path, *, project: str, experiment: str, config: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(project=project, name=experiment, dir=str(folder), config=dict(config))

    def write(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``metrics.jsonl``; a torn last line is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            rows.append(json.loads(line))
    return rows


def _drop_later_steps(path: Path, last_step: int) -> None:
    """Keep the rows up to ``last_step``: rewritten aside, then renamed."""
    if not path.exists():
        return
    kept = [row for row in read_metrics(path) if last_step > 0 and row["step"] <= last_step]
    aside = path.with_suffix(".unfinished")
    aside.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    os.replace(aside, path)


def _short(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e6 else f"{value:.3g}"
