"""Runs that are killed or asked to end, at whatever moment: nothing that was saved is lost, and they go on as if never
stopped."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from support import stoppable
from support.batches import random_batch
from support.environments import Script
from support.parity import TASK, parity_spec
from support.servers import serve
from transformers import AutoModelForCausalLM

from agentgym_rl.envs.server import build_app
from verl.trainer.replay import finished_steps
from verl.utils import checkpoint
from verl.utils.tracking import read_metrics

pytestmark = pytest.mark.server

LIMIT_S = 120.0


@pytest.fixture
def processes() -> Iterator[list[BaseProcess]]:
    """Those that a test starts; none outlives it."""
    started: list[BaseProcess] = []
    yield started
    for process in started:
        process.kill()
        process.join()


def wait_for(what: Callable[[], object], process: BaseProcess, log: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert process.is_alive(), log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)


def test_ten_kills_at_random_moments_each_leave_a_complete_checkpoint(
    model: Path, tmp_path: Path, processes: list[BaseProcess]
) -> None:
    root, log, moments = tmp_path / "run", tmp_path / "log", random.Random(0)
    actor, num_torn, last_step = stoppable.make_actor(model), 0, 0
    for _ in range(10):
        process = stoppable.start(stoppable.save_for_ever, root, model, random_batch([5, 9]), log=log)
        processes.append(process)
        resumed_at = last_step
        wait_for(lambda at=resumed_at: max(checkpoint.complete_steps(root), default=0) > at, process, log)
        time.sleep(moments.uniform(0, 0.3))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        num_torn += any(root.glob("*.unfinished"))
        folder = checkpoint.latest(root)
        assert folder is not None
        last_step = stoppable.verify(folder, actor)
        assert last_step > resumed_at
        assert len(checkpoint.complete_steps(root)) <= 3, "two are kept, and one more until older ones are removed"
    assert num_torn > 0, "no kill came while a checkpoint was being written"


# --------------------------------------------------------------------------------------------------------- whole runs


def arguments(model: Path, url: str, folder: Path) -> list[str]:
    return [
        "data.train_file=unused",
        "data.train_batch_size=4",
        "data.max_response_length=200",
        "data.shuffle=False",
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.agentgym.task_name={TASK}",
        f"actor_rollout_ref.agentgym.env_addr={url}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        # There is something to learn in every step.
        "actor_rollout_ref.actor.entropy_coeff=0.1",
        "actor_rollout_ref.rollout.max_tokens=8",
        "algorithm.rounds_ctrl.rounds=2",
        "trainer.total_training_steps=4",
        "trainer.save_freq=1",
        "trainer.logger=[jsonl]",
        "trainer.device=cpu",
        "trainer.worker_group=local",
        f"trainer.default_local_dir={folder}",
    ]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return read_metrics(path) if path.exists() else []


def learnt(folder: Path) -> list[tuple[float, ...]]:
    keys = ("step", "actor/entropy", "actor/grad_norm", "rollout/sampled_tokens_mean", "training/epoch")
    return [tuple(row[key] for key in keys) for row in rows_of(folder)]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder / "global_step_4" / "actor" / "huggingface").state_dict()


def assert_as_never_stopped(folder: Path, whole: Path) -> None:
    assert learnt(folder) == learnt(whole)
    expected, found = weights_of(whole), weights_of(folder)
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve(build_app(parity_spec(Script(turns=2)))) as url:
        yield url


@pytest.fixture(scope="module")
def whole(model: Path, url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    process = stoppable.start(stoppable.train, arguments(model, url, folder / "run"), log=folder / "log")
    process.join(LIMIT_S)
    assert process.exitcode == 0, (folder / "log").read_text()
    return folder / "run"


def test_a_run_that_is_killed_again_and_again_equals_one_that_was_not(
    model: Path, url: str, whole: Path, tmp_path: Path, processes: list[BaseProcess]
) -> None:
    folder, log, moments = tmp_path / "run", tmp_path / "log", random.Random(1)
    for kill_after in (1, 2, 3, None):
        process = stoppable.start(stoppable.train, arguments(model, url, folder), log=log)
        processes.append(process)
        if kill_after is not None:
            wait_for(lambda step=kill_after: len(rows_of(folder)) >= step, process, log)
            time.sleep(moments.uniform(0, 0.3))
            process.kill()
        process.join(LIMIT_S)
    assert process.exitcode == 0, log.read_text()
    assert_as_never_stopped(folder, whole)


def test_sigterm_during_rollouts_gives_them_up_and_saves_the_last_finished_step(
    model: Path, url: str, whole: Path, tmp_path: Path, processes: list[BaseProcess]
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    script = Script(turns=2, hangs_at={5: 1})  # an item of step 2
    with serve(build_app(parity_spec(script))) as hanging_url:
        argv = [*arguments(model, hanging_url, folder), "trainer.save_freq=-1"]
        process = stoppable.start(stoppable.train, argv, log=log)
        processes.append(process)
        wait_for(script.hanging.is_set, process, log)
        process.terminate()
        time.sleep(1.0)
        script.release.set()
        process.join(LIMIT_S)
    assert process.exitcode == 128 + signal.SIGTERM
    assert f"terminated after step 1; the same command goes on from {folder / 'global_step_1'}" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert [path.name for path in folder.glob("global_step_*")] == ["global_step_1"]
    process = stoppable.start(stoppable.train, arguments(model, url, folder), log=log)
    processes.append(process)
    process.join(LIMIT_S)
    assert process.exitcode == 0, log.read_text()
    assert_as_never_stopped(folder, whole)


def test_steps_after_the_checkpoint_that_a_run_goes_on_from_are_not_finished_any_more(
    model: Path, url: str, tmp_path: Path, processes: list[BaseProcess]
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    endless = ["trainer.save_freq=2", "trainer.total_training_steps=1000"]
    process = stoppable.start(stoppable.train, [*arguments(model, url, folder), *endless], log=log)
    processes.append(process)
    wait_for(lambda: checkpoint.complete_steps(folder), process, log)
    process.kill()
    process.join()
    last_saved = max(checkpoint.complete_steps(folder))
    trajectories = folder / "trajectories"
    shutil.copytree(trajectories / "step1", trajectories / "step900")  # whatever the kill has left
    script = Script(turns=2, hangs_at=dict.fromkeys(range(8), 1))
    with serve(build_app(parity_spec(script))) as hanging_url:
        process = stoppable.start(stoppable.train, [*arguments(model, hanging_url, folder), *endless], log=log)
        processes.append(process)
        wait_for(script.hanging.is_set, process, log)
        assert finished_steps(trajectories) == list(range(1, last_saved + 1))
        process.kill()
        process.join()
        script.release.set()


def test_a_second_sigterm_ends_the_run_at_once(model: Path, tmp_path: Path, processes: list[BaseProcess]) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    script = Script(turns=2, hangs_at={1: 1})
    with serve(build_app(parity_spec(script))) as hanging_url:
        process = stoppable.start(stoppable.train, arguments(model, hanging_url, folder), log=log)
        processes.append(process)
        wait_for(script.hanging.is_set, process, log)
        for _ in range(2):
            process.terminate()
            time.sleep(0.2)
        script.release.set()
        process.join(LIMIT_S)
    assert process.exitcode == 128 + signal.SIGTERM
    assert "terminated" in log.read_text() and not list(folder.glob("global_step_*"))


def test_sigterm_before_the_first_step_is_finished_says_that_there_is_nothing_to_save(
    model: Path, tmp_path: Path, processes: list[BaseProcess]
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    script = Script(turns=2, hangs_at={1: 1})
    with serve(build_app(parity_spec(script))) as hanging_url:
        process = stoppable.start(stoppable.train, arguments(model, hanging_url, folder), log=log)
        processes.append(process)
        wait_for(script.hanging.is_set, process, log)
        process.terminate()
        time.sleep(1.0)
        script.release.set()
        process.join(LIMIT_S)
    assert process.exitcode == 128 + signal.SIGTERM
    assert "terminated before the first step was finished: nothing to save" in log.read_text()
