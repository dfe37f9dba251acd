"""Which checkpoint a run goes on from, and which it refuses, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from agentgym_rl.errors import ConfigError
from verl.agent_trainer.loading import load_config, parse_command_line
from verl.config import PPOConfig, SFTConfig
from verl.trainer.resuming import data_checkpoint, ppo_checkpoint
from verl.utils import checkpoint

SHAPE = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 300, "head_dim": None}


class Kind:
    """A kind of training: its configuration, and how it finds its checkpoint."""

    def __init__(
        self, name: str, root: type, config_name: str, model_key: str, find: Callable[[Any], Path | None]
    ) -> None:
        self.name, self.model_key, self.find = name, model_key, find
        self._root, self._config_name = root, config_name

    def config(self, folder: Path, *model: str, others: tuple[str, ...] = ()) -> Any:
        """``model``: overrides below the model's key."""
        given = [
            "data.train_file=items.json",
            f"{self.model_key}.path={folder / 'model'}",
            f"trainer.default_local_dir={folder / 'run'}",
            *(f"{self.model_key}.{each}" for each in model),
            *others,
        ]
        if self.name == "ppo":
            given += [
                "actor_rollout_ref.agentgym.task_name=textcraft",
                "actor_rollout_ref.agentgym.env_addr=http://127.0.0.1:9",
            ]
        return load_config(self._root, parse_command_line(given, program="test", config_name=self._config_name))

    def saves(self, folder: Path, *model: str, shape: dict[str, Any] = SHAPE, kind: str = "") -> Path:
        """A checkpoint as a run of this kind leaves it, without weights."""
        begun = checkpoint.begin(folder / "run", 1)
        exported = begun / "actor" / "huggingface"
        exported.mkdir(parents=True)
        (exported / "config.json").write_text(json.dumps(shape))
        state = {"step": 1, "kind": kind or self.name, "config": asdict(self.config(folder, *model))}
        checkpoint.save_trainer_state(begun, state)
        return checkpoint.commit(folder / "run", 1)


KINDS = [
    Kind("ppo", PPOConfig, "ppo_trainer", "actor_rollout_ref.model", ppo_checkpoint),
    Kind("sft", SFTConfig, "sft_trainer", "model", lambda config: data_checkpoint(config, kind="sft")),
]
both_kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def has_model(folder: Path, **fields: Any) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(SHAPE | fields))


@both_kinds
def test_a_run_without_a_checkpoint_starts_afresh(kind: Kind, tmp_path: Path) -> None:
    assert kind.find(kind.config(tmp_path)) is None


@both_kinds
def test_the_newest_checkpoint_is_taken_unless_that_is_switched_off(kind: Kind, tmp_path: Path) -> None:
    saved = kind.saves(tmp_path)
    assert kind.find(kind.config(tmp_path)) == saved
    assert kind.find(kind.config(tmp_path, others=("trainer.resume_mode=disable",))) is None


@both_kinds
def test_a_checkpoint_of_another_kind_of_training_is_refused(kind: Kind, tmp_path: Path) -> None:
    kind.saves(tmp_path, kind="dpo")
    with pytest.raises(ConfigError, match=rf"global_step_1 is a checkpoint of dpo and not of {kind.name}: take"):
        kind.find(kind.config(tmp_path))


def test_a_run_with_a_critic_needs_a_checkpoint_with_one(tmp_path: Path) -> None:
    kind = KINDS[0]
    saved = kind.saves(tmp_path)
    with pytest.raises(ConfigError, match=r"global_step_1 has no critic/"):
        kind.find(kind.config(tmp_path, others=("algorithm.adv_estimator=gae",)))
    (saved / "critic").mkdir()
    assert kind.find(kind.config(tmp_path, others=("algorithm.adv_estimator=gae",))) == saved


@both_kinds
@pytest.mark.parametrize(
    ("saved", "now", "seen"),
    [
        ([], ["lora_rank=8"], r"model\.lora_rank=8: .* had 0,"),
        (["lora_rank=8"], [], r"model\.lora_rank=0: .* had 8,"),
        (["lora_rank=8"], ["lora_rank=4"], r"model\.lora_rank=4: .* had 8,"),
        (["freeze=['a.*']"], [], r"model\.freeze=\S+: .* had .'a\.\*',?.,"),
        (["lora_rank=8"], ["lora_rank=8", "lora_alpha=32.0"], r"model\.lora_alpha=32\.0: .* had 16\.0,"),
        (
            ["lora_rank=8"],
            ["lora_rank=8", "target_modules=[q_proj]"],
            r"model\.target_modules=.'q_proj',?.: .* had 'all-linear',",
        ),
    ],
)
def test_a_checkpoint_of_a_run_that_trained_other_weights_names_the_key_and_both_values(
    kind: Kind, tmp_path: Path, saved: list[str], now: list[str], seen: str
) -> None:
    kind.saves(tmp_path, *saved)
    with pytest.raises(ConfigError, match=seen):
        kind.find(kind.config(tmp_path, *now))


@both_kinds
@pytest.mark.parametrize(
    ("saved", "now"),
    [
        ([], []),
        ([], ["lora_alpha=8.0", "target_modules=[q_proj]"]),  # there is no adapter
        (["freeze=[a,b]"], ["freeze=[b,a]"]),
        (["lora_rank=2", "target_modules=[q_proj,v_proj]"], ["lora_rank=2", "target_modules=[v_proj,q_proj]"]),
    ],
)
def test_a_checkpoint_of_a_run_that_trained_the_same_weights_is_taken(
    kind: Kind, tmp_path: Path, saved: list[str], now: list[str]
) -> None:
    folder = kind.saves(tmp_path, *saved)
    assert kind.find(kind.config(tmp_path, *now)) == folder


@both_kinds
def test_a_checkpoint_of_a_time_without_adapters_is_taken(kind: Kind, tmp_path: Path) -> None:
    folder = kind.saves(tmp_path)
    checkpoint.save_trainer_state(folder, {"step": 1, "kind": kind.name, "config": {"model": {"path": "a"}}})
    assert kind.find(kind.config(tmp_path)) == folder


@both_kinds
@pytest.mark.parametrize(("field", "value"), [("hidden_size", 128), ("vocab_size", 512), ("model_type", "qwen2")])
def test_a_checkpoint_whose_weights_do_not_fit_into_the_model_is_refused(
    kind: Kind, tmp_path: Path, field: str, value: Any
) -> None:
    kind.saves(tmp_path)
    has_model(tmp_path, **{field: value})
    key = rf"{kind.model_key}\.path"
    seen = rf"{key}='.*model': has {field} {value!r}, and the model in .*global_step_1 {SHAPE[field]!r}:"
    with pytest.raises(ConfigError, match=seen):
        kind.find(kind.config(tmp_path))


@both_kinds
def test_what_is_no_size_may_differ(kind: Kind, tmp_path: Path) -> None:
    folder = kind.saves(tmp_path)
    has_model(tmp_path, head_dim=16, max_position_embeddings=4096, dtype="bfloat16")
    assert kind.find(kind.config(tmp_path)) == folder
