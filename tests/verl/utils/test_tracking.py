"""Metrics reach every sink, and a resumed run's files tell one story."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path

import pytest

from agentgym_rl.errors import ConfigError
from verl.utils.tracking import ConsoleSink, JsonlSink, Tracker, make_tracker, read_metrics

COLUMNS = {"score": "rollout/score_mean", "rounds": "rounds/max_rounds"}


def open_tracker(folder: Path, *names: str, resumed_after: int = 0) -> Tracker:
    return make_tracker(
        names,
        folder,
        project="p",
        experiment="e",
        config={},
        console_columns=COLUMNS,
        resumed_after=resumed_after,
    )


def test_the_console_shows_one_line_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    ConsoleSink(COLUMNS).write(7, {"rounds/max_rounds": 10.0, "rollout/score_mean": 1 / 3, "timing_s/gen": 3.0})
    assert capsys.readouterr().out == "step     7 | score 0.333 | rounds 10\n"


def test_the_console_can_leave_steps_out(capsys: pytest.CaptureFixture[str]) -> None:
    sink = ConsoleSink(COLUMNS, every=5)
    for step in range(1, 11):
        sink.write(step, {"rounds/max_rounds": 1.0})
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["5", "10"]


def test_jsonl_rows_hold_every_metric_and_null_for_what_is_not_finite(tmp_path: Path) -> None:
    with open_tracker(tmp_path, "jsonl") as tracker:
        tracker.log(1, {"a": 0.5, "b": float("nan")})
        assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 0.5, "b": None}]


def test_a_resumed_run_continues_the_file_and_drops_what_it_will_do_again(tmp_path: Path) -> None:
    with open_tracker(tmp_path, "jsonl") as tracker:
        for step in (0, 1, 2, 3):
            tracker.log(step, {"run": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "ru')  # killed while writing
    with open_tracker(tmp_path, "jsonl", resumed_after=2) as tracker:
        tracker.log(3, {"run": 2.0})
    assert [(row["step"], row["run"]) for row in read_metrics(tmp_path / "metrics.jsonl")] == [
        (0, 1.0),
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
    ]


def test_a_fresh_run_begins_the_file_anew(tmp_path: Path) -> None:
    for run in (1.0, 2.0):
        with open_tracker(tmp_path, "jsonl") as tracker:
            tracker.log(0, {"run": run})
    assert [row["run"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [2.0]


def test_a_torn_last_row_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1}) + "\n" + '{"step": 2')
    assert read_metrics(path) == [{"step": 1}]
    JsonlSink(path, resumed_after=5).close()
    assert path.read_text() == '{"step": 1}\n'


def test_tensorboard_files_hold_the_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_tracker(tmp_path, "tensorboard") as tracker:
        tracker.log(1, {"rollout/score_mean": 0.25})
        tracker.log(2, {"rollout/score_mean": 0.5})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("rollout/score_mean")] == [(1, 0.25), (2, 0.5)]


def test_tensorboard_hides_what_a_later_run_did_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def shown() -> list[tuple[int, float]]:
        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        return [(event.step, event.value) for event in events.Scalars("run")]

    for run, resumed_after, steps in ((1.0, 0, (0, 1, 2)), (2.0, 0, (0, 1, 2, 3)), (3.0, 2, (3,))):
        with open_tracker(tmp_path, "tensorboard", resumed_after=resumed_after) as tracker:
            for step in steps:
                tracker.log(step, {"run": run})
        time.sleep(1.1)  # files are told apart by the second, and read in the order of their names
    assert shown() == [(0, 2.0), (1, 2.0), (2, 2.0), (3, 3.0)]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_wandb_that_is_not_installed_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="wandb needs the package wandb, which is not installed; pip install wandb"):
        open_tracker(tmp_path, "console", "wandb")
