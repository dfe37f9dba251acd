"""A model's folder that is not a whole model is refused by a look at its files, in a dry run as at the start."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.models import save_tiny_model
from tokenizers import Tokenizer
from tokenizers.models import BPE

from agentgym_rl.errors import ConfigError
from verl.agent_trainer.checks import check_model_path
from verl.agent_trainer.dry_run import describe_evaluation, describe_ppo
from verl.agent_trainer.loading import load_config, parse_command_line
from verl.config import GenerationConfig, ModelConfig, PPOConfig
from verl.models.loading import load_tokenizer
from verl.utils.model_files import check_weight_files

Spoil = Callable[[Path], None]


def without_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


def with_empty_tokenizer(folder: Path) -> None:
    Tokenizer(BPE()).save(str(folder / "tokenizer.json"))


def with_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"')


def with_few_rows(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 60}))


def with_cut_tensors(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def with_cut_header(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])


def with_a_pointer_for_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n")


def without_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = {"weight_map": {"lm_head.weight": "a.safetensors", "model.norm.weight": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


FAULTS: dict[str, tuple[Spoil, str]] = {
    "no tokenizer": (without_tokenizer, "holds no tokenizer: tokenizer.json is missing, and tokenizer.model, "),
    "a tokenizer of nothing": (with_empty_tokenizer, "its tokenizer encodes 'Thought: the door is closed, so"),
    "a tokenizer that is cut off": (with_broken_tokenizer, "tokenizer.json cannot be read: "),
    "too few embeddings": (with_few_rows, "config.json has vocab_size=60, and the tokenizer has ids up to 63: "),
    "weights cut off": (with_cut_tensors, "model.safetensors is cut off: it has "),
    "weights cut off in the header": (with_cut_header, "model.safetensors is cut off, or is no safetensors file: it "),
    "a pointer for weights": (with_a_pointer_for_weights, "model.safetensors is cut off, or is no safetensors file"),
    "a shard missing": (without_a_shard, "b.safetensors is missing, which model.safetensors.index.json names"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_is_no_whole_model_is_refused_at_the_start_and_in_a_dry_run(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spoil, message = FAULTS[fault]
    save_tiny_model(tmp_path / "model")
    check_model_path(ModelConfig(path="model"))
    spoil(tmp_path / "model")
    (tmp_path / "items.json").write_text('["textcraft_0", "textcraft_1"]')
    branch, played = "actor_rollout_ref", "agentgym.task_name=textcraft"
    trained = ("data.train_file=items.json", "data.train_batch_size=2", f"{branch}.actor.ppo_mini_batch_size=2")
    for root, name, describe, argv in (
        (PPOConfig, "ppo_trainer", describe_ppo, (*trained, f"{branch}.{played}", f"{branch}.model.path=model")),
        (
            *(GenerationConfig, "generation", describe_evaluation),
            ("data.path=items.json", played, "model.path=model", "rollout.rollout_log_dir=out"),
        ),
    ):
        address = f"{branch}.agentgym.env_addr" if root is PPOConfig else "agentgym.env_addr"
        argv = (*argv, f"{address}=http://127.0.0.1:9", "trainer.device=cpu")
        config = load_config(root, parse_command_line(argv, program="test", config_name=name))
        with pytest.raises(ConfigError) as caught:
            describe(config)
        assert str(caught.value).startswith(f"model.path='model': {message}")
    with pytest.raises(ConfigError, match=r"^model.path='model': "):
        check_model_path(ModelConfig(path="model"))


def test_a_critic_and_a_reference_need_no_tokenizer_but_whole_weights(tmp_path: Path) -> None:
    model = ModelConfig(path=str(save_tiny_model(tmp_path)))
    without_tokenizer(tmp_path)
    check_model_path(model, "ref.path")
    check_model_path(model, "critic.model.path")
    with_cut_tensors(tmp_path)
    with pytest.raises(ConfigError, match=r"^ref.path='.*': model.safetensors is cut off"):
        check_model_path(model, "ref.path")


def test_code_that_a_folder_brings_along_may_be_its_tokenizer(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    without_tokenizer(tmp_path)
    check_model_path(ModelConfig(path=str(tmp_path), trust_remote_code=True))


def test_a_tokenizer_of_nothing_is_refused_where_it_is_loaded_too(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    with_empty_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"encodes 'Thought: .* to no tokens"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


def test_a_header_that_is_no_header_is_named(tmp_path: Path) -> None:
    for header in (b"[]", b"{x", b'{"a": {}}', b'{"a": 3}'):
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(ConfigError, match=r"model.safetensors is no safetensors file: its header cannot be read"):
            check_weight_files(ModelConfig(path=str(tmp_path)))
