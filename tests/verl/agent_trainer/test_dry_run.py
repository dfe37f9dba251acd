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
from support.models import save_tiny_model, tiny_tokenizer
from support.published import TASKS, published_lists, published_values

from agentgym_rl.errors import ConfigError
from verl.agent_trainer.dry_run import describe_agentevol, describe_evaluation, describe_ppo, describe_sft
from verl.agent_trainer.loading import known_keys, load_config, parse_command_line
from verl.agent_trainer.proposals import nearest_key
from verl.config import AgentEvolConfig, DPOConfig, GenerationConfig, PPOConfig, SFTConfig
from verl.utils import checkpoint

ROOTS: dict[str, tuple[type, str, Any]] = {
    "main_ppo": (PPOConfig, "ppo_trainer", describe_ppo),
    "main_generation": (GenerationConfig, "generation", describe_evaluation),
    "main_sft": (SFTConfig, "sft_trainer", describe_sft),
    "main_dpo": (DPOConfig, "dpo_trainer", describe_sft),
    "main_agentevol": (AgentEvolConfig, "agentevol", describe_agentevol),
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


@pytest.mark.parametrize("program", published_values())
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


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("trainer.total_steps", "trainer.total_training_steps"),
        ("trainer.training_steps", "trainer.total_training_steps"),
        ("trainer.epochs", "trainer.total_epochs"),
        ("data.batch_size", "data.train_batch_size"),
        ("total_steps", "trainer.total_training_steps"),
    ],
)
def test_a_key_that_lacks_a_word_is_answered_with_the_one_that_has_all_its_words(asked: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{asked}: unknown key; did you mean {meant}\?$"):
        plan("main_ppo", f"{asked}=3")


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


def test_a_checkpoint_that_the_run_could_not_go_on_from_ends_a_dry_run(folder: Path) -> None:
    begun = checkpoint.begin(folder / "saves", 3)
    checkpoint.save_trainer_state(begun, {"step": 3, "kind": "sft", "config": {}})
    checkpoint.commit(folder / "saves", 3)
    with pytest.raises(ConfigError, match=r"global_step_3 is a checkpoint of sft and not of ppo"):
        plan("main_ppo", *SMALL, "trainer.default_local_dir=saves")


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
    tiny_tokenizer().save_pretrained(folder / "model")
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


DATA_RUNS = {
    "main_sft": ("data.train_file=rows.jsonl",),
    "main_dpo": ("data.train_file=pairs.jsonl",),
    "main_agentevol": (
        *("data.base_file=rows.jsonl", "data.train_file=items.json", "data.val_file=items.json"),
        *("agentgym.task_name=textcraft", "agentgym.env_addr=http://127.0.0.1:9"),
    ),
}
VALIDATED = (
    *("trainer.test_freq=1", "data.val_file=items.json", "rollout.val_kwargs.n=2"),
    *("agentgym.task_name=textcraft", "agentgym.env_addr=http://127.0.0.1:9"),
)


def write_rows(folder: Path, count: int = 6) -> None:
    talk = [{"from": "human", "value": "Go north."}, {"from": "gpt", "value": "Action: go north"}]
    other = [talk[0], {"from": "gpt", "value": "Action: stay"}]
    rows = [{"item_id": f"textcraft_{number}", "conversations": talk} for number in range(count)]
    pairs = [{"item_id": f"textcraft_{number}", "chosen": talk, "rejected": other} for number in range(count)]
    for name, content in (("rows.jsonl", rows), ("pairs.jsonl", pairs)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in content))


@pytest.mark.parametrize("program", DATA_RUNS)
def test_a_training_on_data_says_what_it_would_do_and_makes_nothing(program: str, folder: Path) -> None:
    save_tiny_model(folder / "model")
    write_rows(folder)
    validated = VALIDATED if program != "main_agentevol" else ()
    printed = plan(
        program,
        *DATA_RUNS[program],
        *("model.path=model", "data.train_batch_size=4", "trainer.device=cpu", "data.max_length=64"),
        *validated,
    )
    assert "model: Adam" in printed and "hf engine: cache" in printed
    assert "not looked at: the server at http://127.0.0.1:9; the weights in model.path=model" in printed
    if program == "main_agentevol":
        assert "merge with 6 conversations" in printed and "20 items x n" in printed
    else:
        assert "data: 6 " in printed and "tokens, " in printed and "with loss" in printed
        assert "1 steps of 4, 1 an epoch" in printed and "validation on 20 items x n 2 every 1 steps" in printed
    assert sorted(path.name for path in folder.iterdir()) == ["items.json", "model", "pairs.jsonl", "rows.jsonl"]


@pytest.mark.parametrize("program", DATA_RUNS)
def test_a_training_on_data_is_planned_without_its_model(program: str, folder: Path) -> None:
    write_rows(folder)
    printed = plan(program, *DATA_RUNS[program], "model.path=model", "data.train_batch_size=4", "trainer.device=cpu")
    assert "memory: not known" in printed and "not here: model.path=model" in printed
    assert program == "main_agentevol" or "how many tokens they have is not known yet" in printed


@pytest.mark.parametrize(
    ("program", "override", "message"),
    [
        ("main_sft", "data.train_file=absent.jsonl", "data.train_file='absent.jsonl': no such file"),
        ("main_sft", "data.train_batch_size=7", "data.train_batch_size=7: data.train_file has only 6 rows"),
        ("main_sft", "data.max_length=4", "more than data.max_length=4"),
        ("main_sft", "trainer.default_local_dir=rows.jsonl/run", "no files can be written there"),
        ("main_dpo", "ref.path=rows.jsonl", "ref.path='rows.jsonl': has no config.json"),
        ("main_dpo", "data.train_file=rows.jsonl", "chosen"),
        ("main_agentevol", "data.base_file=absent.jsonl", "data.base_file='absent.jsonl': no such file"),
        ("main_agentevol", "algorithm.first_policy=items.json", "algorithm.first_policy='items.json': has no config"),
    ],
)
def test_what_is_wrong_with_a_training_on_data_ends_its_dry_run(
    program: str, override: str, message: str, folder: Path
) -> None:
    save_tiny_model(folder / "model")
    write_rows(folder)
    given = ("model.path=model", "data.train_batch_size=4", "trainer.device=cpu")
    with pytest.raises(ConfigError) as caught:
        plan(program, *DATA_RUNS[program], *given, override)
    assert message in str(caught.value)


def test_a_models_config_that_cannot_be_read_is_named(folder: Path) -> None:
    (folder / "model").mkdir()
    for content, message in (("{", "is not JSON"), ("[]", "must be a JSON object")):
        (folder / "model" / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=f"model/config.json: {message}"):
            plan("main_ppo", *SMALL)


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
