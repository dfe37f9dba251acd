"""Training and evaluation against the real server of every environment, with a tiny random model on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.models import tiny_qwen2
from support.servers import serve_process
from support.tokenizers import make_tokenizer

from agentgym_rl.rollout.log import read_trajectories
from verl.utils.tracking import read_metrics

pytestmark = [pytest.mark.server]


@dataclass(frozen=True)
class Task:
    """How one environment is served and trained on."""

    name: str
    served_with: tuple[str, ...] = ()
    """Options of ``agentgym-rl serve``."""
    items: tuple[int, ...] = (0, 1, 2, 3)
    max_prompt_length: int = 2048
    """Instruction and first observation, in tokens of the test's tokenizer."""
    max_response_length: int = 4096


TASKS: dict[str, Any] = {
    "textcraft": Task("textcraft"),
    "babyai": Task("babyai"),
    "searchqa": Task("searchqa", ("--max-answers", "1")),
    "sciworld": pytest.param(Task("sciworld", items=(4236, 4237, 4238, 4239)), marks=pytest.mark.java),
    "webarena": pytest.param(Task("webarena", ("--started-ahead", "0")), marks=pytest.mark.browser),
}
"""Task -> how to run it small; `pytest.param(Task(...), marks=pytest.mark.java)` marks what needs more."""


@dataclass(frozen=True)
class World:
    """A running server, with a model and an item list in a folder."""

    task: Task
    url: str
    folder: Path

    def run(self, program: str, *overrides: str) -> str:
        """What the program printed; it must succeed."""
        command = [sys.executable, "-m", f"verl.agent_trainer.{program}", "trainer.device=cpu", "trainer.num_threads=1"]
        run = subprocess.run(
            [*command, "trainer.worker_group=local", *overrides],
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert run.returncode == 0, run.stderr[-3000:]
        return run.stdout


@pytest.fixture(params=TASKS.values(), ids=TASKS.keys())
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    task: Task = request.param
    tokenizer = make_tokenizer()
    model = tiny_qwen2(vocab_size=len(tokenizer))
    model.config.max_position_embeddings = task.max_prompt_length + task.max_response_length
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "items.json").write_text(json.dumps([f"{task.name}_{item}" for item in task.items]))
    with serve_process(task.name, *task.served_with) as server:
        yield World(task, server.url, tmp_path)


def test_a_tiny_model_is_trained_for_two_steps_and_evaluated(world: World) -> None:
    task, folder = world.task, world.folder
    world.run(
        "main_ppo",
        f"data.train_file={folder / 'items.json'}",
        "data.train_batch_size=2",
        f"data.max_prompt_length={task.max_prompt_length}",
        f"data.max_response_length={task.max_response_length}",
        f"actor_rollout_ref.agentgym.task_name={task.name}",
        f"actor_rollout_ref.agentgym.env_addr={world.url}",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.entropy_coeff=0.1",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.max_tokens=12",
        "algorithm.rounds_ctrl.rounds=2",
        "trainer.total_training_steps=2",
        f"trainer.default_local_dir={folder / 'run'}",
    )
    rows = read_metrics(folder / "run" / "metrics.jsonl")
    assert len(rows) == 2 and all(row["actor/grad_norm"] > 0 for row in rows)
    trajectories = read_trajectories(folder / "run" / "trajectories" / "step2").trajectories
    assert len(trajectories) == 4 and not any(trajectory.masked for trajectory in trajectories)

    printed = world.run(
        "main_generation",
        f"data.path={folder / 'items.json'}",
        f"data.max_prompt_length={task.max_prompt_length}",
        f"data.max_response_length={task.max_response_length}",
        f"agentgym.task_name={task.name}",
        f"agentgym.env_addr={world.url}",
        "agentgym.max_rounds=2",
        f"model.path={folder / 'run' / 'global_step_2' / 'actor' / 'huggingface'}",
        "rollout.max_tokens=12",
        f"rollout.rollout_log_dir={folder / 'eval'}",
    )
    assert "Avg@1" in printed
    evaluated = read_trajectories(folder / "eval").trajectories
    assert {trajectory.item.item_id for trajectory in evaluated} == {f"{task.name}_{item}" for item in task.items}
    assert not any(trajectory.masked for trajectory in evaluated)
