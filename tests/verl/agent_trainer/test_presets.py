"""Presets, chosen on the command line: what they set, what overrides them, and what a wrong name is answered with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentgym_rl.errors import ConfigError
from verl.agent_trainer.loading import load_config, parse_command_line
from verl.agent_trainer.presets import GROUPS, packaged
from verl.config import AgentEvolConfig, DPOConfig, GenerationConfig, PPOConfig, SFTConfig

CONFIGS = Path(__file__).parents[3] / "configs"
ROOTS: dict[str, type] = {
    "ppo_trainer": PPOConfig,
    "generation": GenerationConfig,
    "sft_trainer": SFTConfig,
    "dpo_trainer": DPOConfig,
    "agentevol": AgentEvolConfig,
}
HORIZONS = {
    "textcraft": (30, [10, 20, 30], 100),
    "babyai": (20, [6, 13, 20], 100),
    "sciworld": (20, [10, 20, 30], 100),
    "searchqa": (5, [5, 8, 10], 100),
    "webarena": (15, [8, 12, 15], 80),
}
"""As published: turns of a fixed horizon, turns of each stage of a growing one, steps of a stage."""


def load(folder: str, *arguments: str) -> Any:
    return load_config(ROOTS[folder], parse_command_line(arguments, program="p", config_name=folder))


def complete(folder: str) -> list[str]:
    """A choice for each group and key that a root cannot do without."""
    choices = {"task": "textcraft", "model": "qwen2_5_7b", "algorithm": "grpo", "hardware": "node_8"}
    keys = ["data.train_file=rows.jsonl"] if folder in ("sft_trainer", "dpo_trainer") else []
    return [f"{group}={name}" for group, name in choices.items() if packaged(folder, group)] + keys


@pytest.mark.parametrize(
    ("folder", "group", "name"),
    [
        (folder, group, name)
        for folder in ROOTS
        for group in GROUPS
        for name in packaged(folder, group)
        if group != "model" or folder == "ppo_trainer"  # all share these
    ],
)
def test_every_preset_that_comes_with_the_package_makes_a_run(folder: str, group: str, name: str) -> None:
    load(folder, *complete(folder), f"{group}={name}")


@pytest.mark.parametrize("task", HORIZONS)
def test_a_task_brings_the_published_horizons_to_every_algorithm(task: str) -> None:
    fixed, staged, stage_steps = HORIZONS[task]
    plain = load("ppo_trainer", f"task={task}", "model=qwen2_5_7b").algorithm.rounds_ctrl
    assert (plain.type, plain.rounds) == ("fixed", fixed)
    growing = load("ppo_trainer", "algorithm=scaling_inter_rl", f"task={task}", "model=smollm2").algorithm.rounds_ctrl
    assert (growing.type, growing.rounds) == ("scaling_inter_stepwise", staged)
    assert growing.steps_scaling_inter == stage_steps
    evolution = load("agentevol", f"task={task}", "model=qwen2_5_7b")
    assert evolution.agentgym.max_rounds == max(fixed, staged[-1])
    evaluation = load("generation", f"task={task}", "model=qwen2_5_7b")
    assert evaluation.agentgym.max_rounds == max(fixed, staged[-1])
    assert evaluation.agentgym.task_name == task


def test_a_key_overrides_a_preset_wherever_it_stands_and_a_preset_the_file() -> None:
    config = load("ppo_trainer", "actor_rollout_ref.rollout.n=16", *complete("ppo_trainer"), "hardware=nodes")
    assert config.actor_rollout_ref.rollout.n == 16
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node, config.ray_init.address) == (2, 8, "auto")
    assert config.actor_rollout_ref.model.path == "models/Qwen2.5-7B-Instruct"
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 4  # 8 in ppo_trainer.yaml


def test_a_task_without_a_preset_gets_its_name_and_the_usual_address_of_its_server() -> None:
    given = ("model=smollm2", "data.train_file=x")
    with pytest.raises(ConfigError, match=r"must be given: actor_rollout_ref\.agentgym\.env_addr"):
        load("ppo_trainer", "task=wordle", *given)  # AgentGym's, whose port we do not know
    config = load("ppo_trainer", "task=wordle", *given, "actor_rollout_ref.agentgym.env_addr=http://127.0.0.1:1/wordle")
    assert config.actor_rollout_ref.agentgym.task_name == "wordle"


@pytest.mark.parametrize(
    ("folder", "choice", "message"),
    [
        ("ppo_trainer", "task=textcarft", "task='textcarft': no such preset; there are babyai, sciworld"),
        ("ppo_trainer", "task=textcarft", "did you mean task=textcraft?"),
        ("ppo_trainer", "algorithm=scaling_inter", "there are dapo, gigpo, grpo, ppo"),
        ("generation", "hardware=node_9", "did you mean hardware=node_8?"),
        ("generation", "algorithm=grpo", "this program has no presets of that kind"),
        ("sft_trainer", "model=7b", "there are llama3_1_8b"),
    ],
)
def test_a_wrong_name_is_answered_with_those_that_there_are(folder: str, choice: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(folder, choice)
    assert message in str(caught.value)


def test_presets_of_the_users_own_stand_beside_those_of_the_package(tmp_path: Path) -> None:
    (tmp_path / "ppo_trainer" / "hardware").mkdir(parents=True)
    (tmp_path / "ppo_trainer" / "hardware" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - node_8\n  - _self_\ntrainer:\n  nnodes: 4\n"
    )
    (tmp_path / "mine.yaml").write_text("defaults:\n  - ppo_trainer\n  - _self_\ntrainer:\n  save_freq: 25\n")
    own = ["--config-dir", str(tmp_path), "--config-name", "mine", "task=babyai", "model=qwen3_8b"]
    config = load("ppo_trainer", *own, "hardware=mine")
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node, config.trainer.save_freq) == (4, 8, 25)
    assert load("ppo_trainer", *own, "hardware=cpu").trainer.device == "cpu"


def test_configs_in_the_projects_root_are_the_presets_of_the_package() -> None:
    assert sorted(file.name for file in (CONFIGS / "ppo_trainer" / "task").iterdir()) == [
        f"{task}.yaml" for task in sorted(HORIZONS)
    ]
