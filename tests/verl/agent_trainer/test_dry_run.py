"""``trainer.dry_run=true``: what is checked, what is printed, and that nothing is made; with every published script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models import save_tiny_model
from support.published import TASKS, published_lists, published_values

from agentgym_rl.errors import ConfigError
from verl.agent_trainer.dry_run import describe_evaluation, describe_ppo
from verl.agent_trainer.loading import known_keys, load_config, parse_command_line
from verl.agent_trainer.proposals import nearest_key
from verl.config import GenerationConfig, PPOConfig

ROOTS: dict[str, tuple[type, str, Any]] = {
    "main_ppo": (PPOConfig, "ppo_trainer", describe_ppo),
    "main_generation": (GenerationConfig, "generation", describe_evaluation),
}
SMALL = (
    "data.train_file=items.json",
    "data.train_batch_size=8",
    "data.max_prompt_length=256",
    "data.max_response_length=512",
    "actor_rollout_ref.agentgym.task_name=textcraft",
    "actor_rollout_ref.agentgym.env_addr=http://127.0.0.1:9",
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.device=cpu",
)


def plan(program: str, *overrides: str) -> str:
    """What a dry run prints."""
    root, name, describe = ROOTS[program]
    text: str = describe(load_config(root, parse_command_line(overrides, program=program, config_name=name)))
    return text


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with 20 items."""
    monkeypatch.chdir(tmp_path)
    write_items(tmp_path / "items.json", "textcraft", 20)
    return tmp_path


def write_items(path: Path, task: str, count: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([f"{task}_{index}" for index in range(count)]))


# ---------------------------------------------------------------------------------------------------- published scripts


@pytest.fixture
def published_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with item lists where the published scripts look for them, and no model."""
    monkeypatch.chdir(tmp_path)
    for task in TASKS:
        write_items(tmp_path / "AgentItemId" / f"{task}_train.json", task, 64)
        write_items(tmp_path / "AgentEval" / task / f"{task}_test.json", task, 12)
    return tmp_path


@pytest.mark.parametrize(("program", "overrides"), list(published_lists()))
def test_every_published_list_of_overrides_passes(program: str, overrides: list[str], published_folder: Path) -> None:
    printed = plan(program, *overrides, "trainer.dry_run=true", "trainer.device=cuda")
    assert printed.startswith("plan: ") and ("memory per GPU" in printed or "memory: not known" in printed)
    assert sorted(path.name for path in published_folder.iterdir()) == ["AgentEval", "AgentItemId"]


def test_a_published_plan_in_numbers(published_folder: Path) -> None:
    _, overrides = next(published_lists())
    printed = plan("main_ppo", *overrides)
    assert "32 items x n 4 = 128 trajectories, 16 updates of 16; 50 steps" in printed
    assert "64 items to train on, 2 steps an epoch" in printed
    assert "rounds: 30 in steps 1-50" in printed
    assert "estimated from what is known of Qwen2.5-7B-Instruct" in printed
    assert "not looked at: the server at http://127.0.0.1:36005; not here: model.path=models/Qwen2.5-7B" in printed


def misspelled(key: str) -> Iterator[str]:
    """The key with one letter of its last name missing, doubled, replaced, or exchanged with the next."""
    branch, _, name = key.rpartition(".")
    for place in range(len(name)):
        before, letter, after = name[:place], name[place], name[place + 1 :]
        changed = {before + after, before + 2 * letter + after, before + "j" + after}
        if after:
            changed.add(before + after[0] + letter + after[1:])
        yield from (f"{branch}.{text}" for text in sorted(changed - {name, ""}))


@pytest.mark.parametrize("program", ROOTS)
def test_every_published_key_is_proposed_for_each_of_its_misspellings(program: str) -> None:
    known = known_keys(ROOTS[program][0])
    wrong = {
        text: proposal
        for key in published_values()[program]
        for text in misspelled(key)
        if text not in known and (proposal := nearest_key(text, known)) != key
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("program", "key"), [(program, key) for program, keys in published_values().items() for key in keys]
)
def test_a_published_key_with_a_letter_exchanged_is_refused_with_the_right_one(program: str, key: str) -> None:
    text = next(text for text in misspelled(key) if text not in known_keys(ROOTS[program][0]))
    with pytest.raises(ConfigError) as caught:
        plan(program, f"{text}=1")
    assert str(caught.value) == f"{text}: unknown key; did you mean {key}?"


# ---------------------------------------------------------------------------------------------------- what is looked at


def test_sizes_are_those_of_the_models_own_config_where_it_is_there(folder: Path) -> None:
    save_tiny_model(folder / "model")
    printed = plan("main_ppo", *SMALL)
    assert "8 items x n 4 = 32 trajectories, 2 updates of 16; 2 steps" in printed
    assert "memory per process, one of 1, estimated from model/config.json:" in printed
    assert "hf engine: weights" in printed
    assert "not looked at: the server at http://127.0.0.1:9; the weights in model.path=model" in printed
    assert sorted(path.name for path in folder.iterdir()) == ["items.json", "model"]


def test_stages_and_the_checkpoint_to_go_on_from_are_told(folder: Path) -> None:
    (folder / "saves" / "global_step_3").mkdir(parents=True)
    (folder / "saves" / "global_step_3" / "trainer.json").write_text("{}")
    stages = ("algorithm.rounds_ctrl.type=scaling_inter_stepwise", "algorithm.rounds_ctrl.rounds=[2,4,8]")
    steps = ("algorithm.rounds_ctrl.steps_scaling_inter=2", "trainer.total_training_steps=5")
    printed = plan("main_ppo", *SMALL, *stages, *steps)
    assert "rounds: 2 in steps 1-2, 4 in steps 3-4, 8 in step 5" in printed


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train_file=absent.json", "data.train_file: item list absent.json: no such file or folder"),
        ("data.val_file=absent.json", "data.val_file: item list absent.json: no such file or folder"),
        ("data.train_batch_size=24", "data.train_batch_size=24: data.train_file has only 20 rows"),
        ("trainer.test_freq=5", "trainer.test_freq=5: validation needs data.val_file"),
        ("actor_rollout_ref.agentgym.task_name=textcarft", "did you mean textcraft?"),
        ("actor_rollout_ref.model.path=items.json", "has no config.json"),
        ("trainer.default_local_dir=items.json/run", "no files can be written there"),
        ("algorithm.adv_estimator=nowhere:estimator", "algorithm.adv_estimator='nowhere:estimator'"),
        ("trainer.resume_mode=resume_path", "needs trainer.resume_from_path"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "must divide trainer.n_gpus_per_node=1"),
    ],
)
def test_what_is_wrong_ends_a_dry_run_as_it_would_the_run(folder: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan("main_ppo", *SMALL, override)
    assert message in str(caught.value)


def test_a_model_of_which_nothing_is_known_is_said_to_be(folder: Path) -> None:
    assert "memory: not known" in plan("main_ppo", *SMALL)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    assert "its architecture is not one whose sizes are known" in plan("main_ppo", *SMALL)


def test_an_evaluation_says_what_it_would_sample(folder: Path) -> None:
    save_tiny_model(folder / "model")
    given = ("data.path=items.json", "data.n_samples=8", "model.path=model", "agentgym.task_name=textcraft")
    printed = plan(
        "main_generation",
        *given,
        "agentgym.env_addr=http://127.0.0.1:9",
        "rollout.rollout_log_dir=out",
        "trainer.device=cpu",
    )
    assert "20 items x 8 samples = 160 trajectories of at most 10 rounds" in printed
    assert "hf engine: cache" in printed and "at most: 160 trajectories" in printed
    assert not (folder / "out").exists()


# ------------------------------------------------------------------------------------------------------- as a user runs


def start(program: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"verl.agent_trainer.{program}", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )


def test_a_dry_run_ends_with_0_without_torch_where_the_device_is_named(folder: Path) -> None:
    save_tiny_model(folder / "model")
    ended = start("main_ppo", *SMALL, "trainer.dry_run=true", cwd=folder)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("plan: 8 items x n 4 = 32 trajectories")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor_rollout_ref.agentgym.max_retries=0", "error: no textcraft server at http://127.0.0.1:9: "),
        ("actor_rollout_ref.model.path=/no/such/model", "error: model.path='/no/such/model': no such folder"),
        ("actor_rollout_ref.model.path=no-such/model", "error: model.path='no-such/model': no such folder, and not"),
        ("data.train_file=absent.json", "error: data.train_file: item list absent.json: no such file or folder"),
        ("data.trian_file=items.json", "error: data.trian_file: unknown key; did you mean data.train_file?"),
    ],
)
def test_a_wrong_server_model_file_or_key_is_one_line_and_exit_code_2(
    folder: Path, override: str, message: str
) -> None:
    save_tiny_model(folder / "model")
    ended = start("main_ppo", *SMALL, override, cwd=folder)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.count("\n") == 1 and message in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["-m", "agentgym_rl.cli"], {"numpy", "requests", "uvicorn", "msgspec", "hydra", "torch", "ray"}),
        (["-m", "verl.agent_trainer.main_ppo"], {"torch", "ray", "transformers", "vllm", "pyarrow", "huggingface_hub"}),
        (["-m", "verl.agent_trainer.main_generation"], {"torch", "ray", "transformers", "vllm", "pyarrow"}),
    ],
)
def test_help_imports_nothing_that_takes_long(arguments: list[str], absent: set[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments, "--help"], capture_output=True, text=True, check=True
    )
    imported = {line.rsplit("|", 1)[-1].strip() for line in ended.stderr.splitlines()}
    assert "argparse" in imported and not imported & absent
