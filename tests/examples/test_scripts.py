"""The scripts of examples/train and examples/eval, all of them, as SMOKE=1 runs them on a CPU."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.published import HORIZONS, TASKS
from support.servers import serve_process

from agentgym_rl.rollout.log import read_trajectories
from verl.agent_trainer.loading import load_config, parse_command_line
from verl.config import GenerationConfig, PPOConfig
from verl.utils.tracking import read_metrics

PROJECT = Path(__file__).resolve().parents[2]
SERVED_WITH = {"searchqa": ("--max-answers", "1"), "webarena": ("--started-ahead", "0")}
MARKS = {"sciworld": [pytest.mark.java], "webarena": [pytest.mark.browser]}
MARKED_TASKS = [pytest.param(task, marks=MARKS.get(task, [])) for task in TASKS]
METHODS = ("AgentGym-RL", "ScalingInter-RL")

pytestmark = [pytest.mark.server, pytest.mark.slow]


def start(script: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", f"examples/{script}", *arguments],
        cwd=PROJECT,
        env=os.environ | {"SMOKE": "1", "OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a process group of its own, as a terminal gives to each command
    )


def run(script: str, *arguments: str, **variables: str) -> str:
    """What the script printed; it must succeed."""
    process = start(script, *arguments, **variables)
    printed, _ = process.communicate(timeout=280)
    assert process.returncode == 0, printed[-3000:]
    return printed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model, made as the scripts make it."""
    folder = tmp_path_factory.mktemp("smoke") / "model"
    command = ["examples/custom_env/tiny_model.py", "--texts", "README.md", "--out", str(folder)]
    subprocess.run([sys.executable, *command], cwd=PROJECT, check=True, capture_output=True)
    return str(folder)


@pytest.mark.timeout(1200)  # four runs, beside whatever else the machine does
@pytest.mark.parametrize("task", MARKED_TASKS)
def test_every_script_of_a_task_runs(task: str, model: str, tmp_path: Path) -> None:
    with serve_process(task, *SERVED_WITH.get(task, ())) as server:
        given = {"MODEL": model, "ENV_ADDR": server.url, "SMOKE_DIR": str(tmp_path)}
        fixed, staged = (json.loads(rounds) for rounds in HORIZONS[task])
        for script, rounds in (
            (f"train/AgentGym-RL/{task}_train.sh", fixed),
            (f"train/ScalingInter-RL/{task}_train.sh", staged[0]),
            (f"train/{task}_train.sh", staged[0]),
        ):
            out = tmp_path / script
            run(script, "trainer.experiment_name=mine", OUT=str(out), **given)
            rows = read_metrics(out / "metrics.jsonl")
            assert [row["rounds/max_rounds"] for row in rows] == [rounds, rounds]
            assert all(row["actor/grad_norm"] > 0 for row in rows)
            assert (out / "global_step_2" / "actor" / "huggingface" / "config.json").is_file()
            trajectories = read_trajectories(out / "trajectories" / "step2").trajectories
            assert len(trajectories) == 4 and not any(trajectory.masked for trajectory in trajectories)
        evaluation = tmp_path / "evaluation"
        run(f"eval/{task}_eval.sh", OUT=str(evaluation), **(given | {"MODEL": str(out)}))
        report = json.loads((evaluation / "report.json").read_text())
        assert (report["overall"]["num_items"], report["num_faults"]) == (4, 0)


# -------------------------------------------------------------------------------------------------- what they stand for


@pytest.fixture
def told(tmp_path: Path) -> Callable[..., list[str]]:
    """Runs a script with a `python` that only writes down its arguments; these are returned."""
    fake = tmp_path / "project" / ".venv" / "bin"
    fake.mkdir(parents=True)
    (fake / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (fake / "python").chmod(0o755)
    (tmp_path / "project" / "examples").symlink_to(PROJECT / "examples")

    def arguments(script: str, *given: str) -> list[str]:
        copied = tmp_path / "project" / "examples" / script
        environment = {name: value for name, value in os.environ.items() if name not in ("SMOKE", "MODEL", "DATA")}
        printed = subprocess.run(
            ["bash", str(copied), *given], env=environment, capture_output=True, text=True, check=True
        ).stdout
        return printed.splitlines()[2:]

    return arguments


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("method", METHODS)
def test_training_has_the_published_horizon_and_settings(told: Any, task: str, method: str) -> None:
    overrides = told(f"train/{method}/{task}_train.sh", "trainer.save_freq=7")
    config = load_config(PPOConfig, parse_command_line(overrides, program="p", config_name="ppo_trainer"))
    rounds, branch = config.algorithm.rounds_ctrl, config.actor_rollout_ref
    fixed, staged = (json.loads(text) for text in HORIZONS[task])
    stage = 80 if task == "webarena" else 100
    if method == "AgentGym-RL":
        assert (rounds.type, rounds.rounds) == ("fixed", fixed)
    else:
        assert (rounds.type, rounds.rounds) == ("scaling_inter_stepwise", staged)
        assert rounds.steps_scaling_inter == stage
    assert config.trainer.total_training_steps == 3 * stage
    assert (config.algorithm.adv_estimator, branch.rollout.n, config.data.train_batch_size) == ("grpo", 4, 32)
    actor = branch.actor
    assert (actor.optim.lr, actor.ppo_mini_batch_size, actor.ppo_epochs) == (1e-6, 4, 2)
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (True, 0.001, "low_var_kl")
    assert (branch.rollout.max_tokens, branch.rollout.max_model_len) == (512, 32768)
    assert (branch.agentgym.timeout, branch.agentgym.max_retries) == (600, 10)
    assert branch.rollout.gpu_memory_utilization == 0.7
    assert (branch.model.path, config.data.train_file) == (
        "models/Qwen2.5-7B-Instruct",
        f"AgentItemId/{task}_train.json",
    )
    assert (config.trainer.world_size, config.trainer.save_freq) == (8, 7)  # the user's own comes last
    assert told(f"train/{task}_train.sh") == told(f"train/ScalingInter-RL/{task}_train.sh")


@pytest.mark.parametrize("task", TASKS)
def test_an_evaluation_has_the_published_settings(told: Any, task: str) -> None:
    overrides = told(f"eval/{task}_eval.sh")
    config = load_config(GenerationConfig, parse_command_line(overrides, program="p", config_name="generation"))
    fixed, staged = (json.loads(text) for text in HORIZONS[task])
    assert (config.agentgym.max_rounds, config.agentgym.timeout) == (max(fixed, staged[-1]), 500)
    assert (config.data.n_samples, config.data.batch_size, config.data.path) == (1, 32, f"AgentEval/{task}")
    assert (config.rollout.temperature, config.rollout.max_tokens, config.rollout.max_model_len) == (1, 512, 32768)
    assert config.rollout.gpu_memory_utilization == 0.95


def test_there_is_a_script_for_every_task_and_no_other() -> None:
    for folder, kind in (("train/AgentGym-RL", "train"), ("train/ScalingInter-RL", "train"), ("eval", "eval")):
        names = {path.name for path in (PROJECT / "examples" / folder).glob("*.sh")}
        assert {f"{task}_{kind}.sh" for task in TASKS} <= names
    readme = (PROJECT / "README.md").read_text()
    for path in (PROJECT / "examples").rglob("*.sh"):
        if path.name != "lib.sh":
            shown = str(path.relative_to(PROJECT)).replace(next((t for t in TASKS if t in path.name), "?"), "<task>")
            assert shown in readme, shown


# ---------------------------------------------------------------------------------------------------- all in one script


def lines_until(process: subprocess.Popen[str], text: str) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        yield line
        if text in line:
            return
    raise AssertionError(f"it ended with status {process.wait()} before it said {text!r}")


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def end_within(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    end = time.monotonic() + seconds
    while alive(processes) and time.monotonic() < end:
        time.sleep(0.1)
    return alive(processes)


def test_one_script_serves_trains_and_evaluates_and_leaves_nothing_running(tmp_path: Path) -> None:
    process = start("train_and_eval.sh", "textcraft", SMOKE_DIR=str(tmp_path), OUT=str(tmp_path / "run"))
    printed = "".join(lines_until(process, "step     2 |"))
    started = psutil.Process(process.pid).children(recursive=True)
    assert any("agentgym-rl" in " ".join(one.cmdline()) for one in started)
    rest, _ = process.communicate(timeout=200)
    assert process.returncode == 0, printed + rest
    assert "Avg@1" in rest and (tmp_path / "run" / "evaluation" / "report.json").is_file()
    assert alive(started) == []


def test_control_c_saves_the_last_step_and_ends_everything(tmp_path: Path, model: str) -> None:
    process = start(
        "train_and_eval.sh", "textcraft", "trainer.total_training_steps=1000", SMOKE_DIR=str(tmp_path),
        OUT=str(tmp_path / "run"), MODEL=model,
    )  # fmt: skip
    printed = "".join(lines_until(process, "step     1 |"))
    started = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM, printed + rest
    assert "terminated after step" in rest and "== evaluation" not in rest
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").is_file()
    assert len(started) >= 3 and alive(started) == []


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="this system has no setpriv")
def test_what_a_killed_script_started_ends_too(tmp_path: Path, model: str) -> None:
    process = start(
        "train_and_eval.sh", "textcraft", "trainer.total_training_steps=1000", SMOKE_DIR=str(tmp_path),
        OUT=str(tmp_path / "run"), MODEL=model,
    )  # fmt: skip
    list(lines_until(process, "plan:"))
    started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    assert process.stdout is not None
    process.stdout.read()  # until nobody holds it any more
    process.wait()
    assert end_within(started, 60) == []


def test_a_wrong_task_or_method_is_one_line() -> None:
    for arguments, variables in ((["textcarft"], {}), (["textcraft"], {"METHOD": "Scaling"})):
        process = start("train_and_eval.sh", *arguments, **variables)
        printed, _ = process.communicate(timeout=20)
        assert process.returncode == 2 and printed.count("\n") == 1 and "misspelled" in printed


def test_a_server_that_does_not_start_is_said(tmp_path: Path, model: str) -> None:
    process = start("train_and_eval.sh", "textcraft", SMOKE_DIR=str(tmp_path), MODEL=model, SERVE_OPTIONS="--no-such")
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"the server of textcraft did not start: see {tmp_path}/server.log" in printed
