"""``agentgym-rl train``: the short form prints the full command and becomes it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from agentgym_rl.training_command import trainer_arguments
from verl.agent_trainer.loading import load_config, parse_command_line
from verl.config import PPOConfig


def train(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agentgym_rl.cli", "train", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )


def test_the_full_command_is_printed_and_run_with_what_follows(tmp_path: Path) -> None:
    (tmp_path / "my items.json").write_text(json.dumps([f"babyai_{index}" for index in range(64)]))
    short = ["--algorithm", "scaling_inter_rl", "--model", "models/Qwen2.5-7B-Instruct", "--task", "babyai"]
    ended = train(
        *short, "--data-path", "my items.json", "--hardware", "node_8", "trainer.dry_run=true", "trainer.device=cuda",
        cwd=tmp_path,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    command, plan = ended.stdout.split("\n", 1)
    assert shlex.split(command) == [
        "python",
        "-m",
        "verl.agent_trainer.main_ppo",
        "task=babyai",
        "algorithm=scaling_inter_rl",
        "hardware=node_8",
        "actor_rollout_ref.model.path=models/Qwen2.5-7B-Instruct",
        "data.train_file=my items.json",
        "trainer.dry_run=true",
        "trainer.device=cuda",
    ]
    assert plan.startswith("plan: 32 items x n 4 = 128 trajectories") and "rounds: 6 in steps 1-2" in plan
    assert "memory per GPU, one of 8" in plan


@pytest.mark.parametrize(
    "name", ["step=3", "a, b", "it's", '"x"', "{y} [z]", " ends in blanks ", "50%", "$HOME", "a\\b", "été"]
)
def test_folders_of_any_name_reach_the_trainer_as_they_are(name: str) -> None:
    path = f"runs/{name}"
    options = argparse.Namespace(
        environment="babyai", algorithm="grpo", hardware=None, model=path, data_path=path, env_addr=None, out=path,
        overrides=[],
    )  # fmt: skip
    argv = trainer_arguments(options)
    config = load_config(PPOConfig, parse_command_line(argv, program="test", config_name="ppo_trainer"))
    assert config.actor_rollout_ref.model.path == config.data.train_file == config.trainer.default_local_dir == path


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--model", "m", "--task", "textcarft"], "did you mean task=textcraft?"),
        (["--model", "m", "--task", "textcraft", "trainer.totl_epochs=2"], "did you mean trainer.total_epochs?"),
    ],
)
def test_the_trainers_own_answers_reach_the_user(tmp_path: Path, arguments: list[str], problem: str) -> None:
    ended = train(*arguments, cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ") and problem in ended.stderr
