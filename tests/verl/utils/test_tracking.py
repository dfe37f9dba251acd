"""Metrics reach every sink, and a resumed run's files tell one story."""

from __future__ import annotations

import importlib.util
import json
import resource
import sys
import time
import types
from collections import namedtuple
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentgym_rl.errors import ConfigError
from verl.config import TrainerConfig
from verl.utils.tracking import (
    ConsoleSink,
    JsonlSink,
    Metrics,
    Sink,
    Tracker,
    check_loggers,
    make_tracker,
    read_metrics,
)

COLUMNS = {"score": "rollout/score_mean", "rounds": "rounds/max_rounds"}


def open_tracker(folder: Path, *names: str, resumed_after: int = 0) -> Tracker:
    return make_tracker(
        TrainerConfig(project_name="p", experiment_name="e", logger=list(names)),
        folder,
        config={"data": {"seed": 3}, "lr": 1e-3},
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


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_service_whose_package_is_not_installed_is_a_clear_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    text = f"{name} needs the package {name}, which is not installed; pip install {name}"
    with pytest.raises(ConfigError, match=text):
        check_loggers(["console", name])
    with pytest.raises(ConfigError, match=text):
        open_tracker(tmp_path, "console", name)


# ------------------------------------------------------------------------------------------------------------- services


class FakeService:
    """Stands in for the client packages of wandb and mlflow; keeps what a service would."""

    def __init__(self) -> None:
        self.runs: dict[str, list[tuple[int, dict[str, float]]]] = {}
        self.options: dict[str, Any] = {}
        self.params: dict[str, str] = {}
        self.status = ""
        self.is_down = False

    def log(self, run_id: str, step: int, metrics: Mapping[str, float]) -> None:
        if self.is_down:
            raise ServiceError("no answer\nfrom the service")
        self.runs[run_id].append((step, dict(metrics)))

    def steps(self) -> list[list[int]]:
        return [[step for step, _ in rows] for rows in self.runs.values()]

    def as_wandb(self) -> types.ModuleType:
        def init(**options: Any) -> Any:
            if self.is_down:
                raise ServiceError("not logged in")
            self.options = options
            self.runs.setdefault(options["id"], [])
            return types.SimpleNamespace(
                id=options["id"],
                log=lambda metrics, step: self.log(options["id"], step, metrics),
                finish=lambda: setattr(self, "status", "FINISHED"),
            )

        module = types.ModuleType("wandb")
        module.init, module.errors = init, types.SimpleNamespace(Error=ServiceError)  # type: ignore[attr-defined]
        return module

    def as_mlflow(self) -> dict[str, types.ModuleType]:
        service = self

        class Client:
            def __init__(self, tracking_uri: str) -> None:
                if service.is_down:
                    raise ServiceError("not logged in")
                service.options["uri"] = tracking_uri

            def get_experiment_by_name(self, name: str) -> Any:
                return types.SimpleNamespace(experiment_id="1") if service.options.get("project") == name else None

            def create_experiment(self, name: str) -> str:
                service.options["project"] = name
                return "1"

            def create_run(self, experiment_id: str, run_name: str) -> Any:
                service.options["name"] = run_name
                run_id = f"run{len(service.runs)}"
                service.runs[run_id] = []
                return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

            def update_run(self, run_id: str, status: str) -> None:
                assert run_id in service.runs
                service.status = status

            def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
                service.params |= {param.key: param.value for param in params}
                if metrics:
                    service.log(run_id, metrics[0].step, {row.key: row.value for row in metrics})

            def set_terminated(self, run_id: str) -> None:
                service.status = "FINISHED"

        modules = {name: types.ModuleType(name) for name in ("mlflow", "mlflow.exceptions", "mlflow.entities")}
        modules["mlflow"].MlflowClient = Client  # type: ignore[attr-defined]
        modules["mlflow.exceptions"].MlflowException = ServiceError  # type: ignore[attr-defined]
        modules["mlflow.entities"].Metric = namedtuple("Metric", "key value timestamp step")  # type: ignore[attr-defined]
        modules["mlflow.entities"].Param = namedtuple("Param", "key value")  # type: ignore[attr-defined]
        return modules


class ServiceError(Exception):
    pass


@pytest.fixture(params=["wandb", "mlflow"])
def service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, FakeService]:
    fake = FakeService()
    modules = {"wandb": fake.as_wandb()} if request.param == "wandb" else fake.as_mlflow()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: True)
    return request.param, fake


def test_a_service_gets_metrics_and_config(service: tuple[str, FakeService], tmp_path: Path) -> None:
    name, fake = service
    with open_tracker(tmp_path, name) as tracker:
        tracker.log(1, {"rollout/score_mean": 0.5})
    assert list(fake.runs.values()) == [[(1, {"rollout/score_mean": 0.5})]]
    assert fake.options["project"] == "p" and fake.options["name"] == "e" and fake.status == "FINISHED"
    if name == "mlflow":
        assert fake.params == {"data.seed": "3", "lr": "0.001"}
        assert fake.options["uri"] == f"sqlite:///{tmp_path / 'mlflow.db'}"
    else:
        assert fake.options["config"] == {"data": {"seed": 3}, "lr": 1e-3}


def test_a_resumed_run_goes_on_with_its_run_of_the_service_and_gives_no_step_twice(
    service: tuple[str, FakeService], tmp_path: Path
) -> None:
    name, fake = service
    for resumed_after, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        with open_tracker(tmp_path, name, resumed_after=resumed_after) as tracker:
            for step in steps:
                tracker.log(step, {"a": 1.0})
    assert fake.steps() == [[1, 2, 3, 4]]


def test_a_fresh_run_in_the_same_folder_is_a_new_run_of_the_service(
    service: tuple[str, FakeService], tmp_path: Path
) -> None:
    name, fake = service
    for _ in range(2):
        with open_tracker(tmp_path, name) as tracker:
            tracker.log(1, {"a": 1.0})
    assert fake.steps() == [[1], [1]]


@pytest.mark.parametrize(("name", "path"), [("jsonl", "metrics.jsonl"), ("tensorboard", "tensorboard")])
def test_files_that_cannot_be_written_at_the_start_are_an_error_in_a_line(name: str, path: str, tmp_path: Path) -> None:
    (tmp_path / path).symlink_to("/dev/full/none")
    with pytest.raises(ConfigError, match=rf"trainer\.logger=.*{name} cannot start: \w+Error: .*{path}"):
        open_tracker(tmp_path, name)


def test_a_service_that_cannot_be_reached_at_the_start_is_an_error(
    service: tuple[str, FakeService], tmp_path: Path
) -> None:
    name, fake = service
    fake.is_down = True
    with pytest.raises(ConfigError, match=rf"trainer\.logger=.*{name} cannot start: ServiceError: not logged in"):
        open_tracker(tmp_path, name)


def test_a_service_that_fails_while_training_goes_on_is_counted_and_said_once(
    service: tuple[str, FakeService], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, fake = service
    with open_tracker(tmp_path, name, "jsonl") as tracker:
        for step, is_down in enumerate((False, True, True, False), start=1):
            fake.is_down = is_down
            tracker.log(step, {"a": 1.0})
    assert fake.steps() == [[1, 4]]
    failures = [row.get("tracking/failures") for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert failures == [None, 1, 2, 2]
    said = f"warning: {name} lost the metrics of step 2: ServiceError: no answer from the service\n"
    assert capsys.readouterr().err == said


# ------------------------------------------------------------------------------------------------------- failing sinks


class BrokenSink(Sink):
    name = "broken"

    def __init__(self, error: Exception) -> None:
        self.error, self.num_calls = error, 0

    def write(self, step: int, metrics: Metrics) -> None:
        self.num_calls += 1
        raise self.error

    def close(self) -> None:
        raise self.error


def test_a_sink_that_fails_again_and_again_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    sink = BrokenSink(OSError("gone"))
    with Tracker([sink]) as tracker:
        for step in range(1, 9):
            tracker.log(step, {})
    assert sink.num_calls == tracker.num_failures == 3
    assert [line.split(":")[1].strip() for line in capsys.readouterr().err.splitlines()] == [
        "broken lost the metrics of step 1",
        "broken failed 3 times in a row",
    ]


def test_a_bug_of_a_sink_is_not_taken_for_a_failure_of_its_surroundings() -> None:
    with pytest.raises(ZeroDivisionError):
        Tracker([BrokenSink(ZeroDivisionError())]).log(1, {})


def test_a_full_disk_leaves_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {"a": 1.0})
    # The limit on a file's size cuts a row in its middle, as a disk does that fills up.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, limits[1]))
    try:
        with pytest.raises(OSError):
            sink.write(2, {"a": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    sink.write(3, {"a": 1.0})
    sink.close()
    assert [row["step"] for row in read_metrics(path)] == [1, 3]
