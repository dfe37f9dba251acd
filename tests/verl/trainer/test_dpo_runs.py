"""Preference training in this process: what it learns, what it keeps of the reference, and how it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import tiny_qwen2
from support.pairs import pair
from support.tokenizers import make_tokenizer
from transformers import AutoModelForCausalLM

from agentgym_rl.data.pairs import write_pairs
from agentgym_rl.errors import ConfigError
from verl.agent_trainer.loading import load_config, parse_command_line
from verl.config import DPOConfig
from verl.trainer.dpo import REFERENCE_FILE, run_dpo
from verl.utils.tracking import read_metrics
from verl.workers.dpo_worker import DPOWorker


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    pairs = [pair(["look", f"get {n}"], ["look", f"drop {n}", "wait"], item_id=f"textcraft_{n}") for n in range(6)]
    write_pairs(path, pairs)
    return path


def dpo_config(model: Path, data: Path, folder: Path, *overrides: str) -> DPOConfig:
    argv = [
        f"data.train_file={data}",
        "data.train_batch_size=3",
        f"model.path={model}",
        "optim.lr=1e-3",
        "trainer.total_training_steps=6",
        "trainer.device=cpu",
        "trainer.worker_group=local",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={folder}",
        *overrides,
    ]
    return load_config(DPOConfig, parse_command_line(argv, program="test", config_name="dpo_trainer"))


def metrics(folder: Path) -> list[dict[str, Any]]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [{key: row[key] for key in row if not key.startswith(("timing", "perf", "checkpoint"))} for row in rows]


def test_the_chosen_side_becomes_likelier_than_the_rejected_one(model: Path, data: Path, tmp_path: Path) -> None:
    run_dpo(dpo_config(model, data, tmp_path, "trainer.total_training_steps=20"))
    first, *_, last = metrics(tmp_path)
    # At the first step the policy is the reference: no reward, and the loss of a coin's throw.
    assert first["train/loss"] == pytest.approx(0.6931472, abs=1e-5)
    assert (first["rewards/chosen"], first["rewards/rejected"]) == pytest.approx((0, 0), abs=1e-5)
    assert last["rewards/accuracies"] == 1.0
    assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"])
    assert last["rewards/margins"] > 0.1 and last["train/loss"] < 0.65
    assert (tmp_path / "huggingface" / "config.json").exists()


def test_a_resumed_run_comes_to_the_same_numbers_to_the_last_digit(model: Path, data: Path, tmp_path: Path) -> None:
    run_dpo(dpo_config(model, data, tmp_path / "whole"))
    halves = tmp_path / "halves"
    run_dpo(dpo_config(model, data, halves, "trainer.max_time_s=1e-9"))
    run_dpo(dpo_config(model, data, halves))
    assert metrics(halves) == metrics(tmp_path / "whole")
    first, second = (
        AutoModelForCausalLM.from_pretrained(folder / "huggingface").state_dict()
        for folder in (tmp_path / "whole", halves)
    )
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_the_reference_is_asked_once_and_then_read_from_its_file(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dpo(dpo_config(model, data, tmp_path, "trainer.max_time_s=1e-9"))
    assert (tmp_path / REFERENCE_FILE).exists()
    monkeypatch.setattr(DPOWorker, "ref_log_probs", None)
    run_dpo(dpo_config(model, data, tmp_path))
    assert len(metrics(tmp_path)) == 6


def test_a_resumed_run_that_lost_the_file_asks_the_first_model_and_not_the_trained_one(
    model: Path, data: Path, tmp_path: Path
) -> None:
    run_dpo(dpo_config(model, data, tmp_path / "whole"))
    halves = tmp_path / "halves"
    run_dpo(dpo_config(model, data, halves, "trainer.max_time_s=1e-9"))
    (halves / REFERENCE_FILE).unlink()
    run_dpo(dpo_config(model, data, halves))
    assert metrics(halves)[-1] == pytest.approx(metrics(tmp_path / "whole")[-1], rel=1e-5)


def test_other_pairs_or_another_reference_make_the_file_worthless(model: Path, data: Path, tmp_path: Path) -> None:
    run_dpo(dpo_config(model, data, tmp_path / "out", "trainer.max_time_s=1e-9"))
    kept = (tmp_path / "out" / REFERENCE_FILE).read_bytes()
    other = other_model(tmp_path / "other")
    run_dpo(dpo_config(model, data, tmp_path / "out", f"ref.path={other}", "trainer.resume_mode=disable"))
    first = metrics(tmp_path / "out")[0]
    assert (tmp_path / "out" / REFERENCE_FILE).read_bytes() != kept
    assert abs(first["rewards/chosen"]) > 0.01  # the policy does not begin as this reference


def other_model(folder: Path) -> Path:
    tokenizer = make_tokenizer()
    tiny_qwen2(seed=7, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_without_a_reference_rewards_are_log_probs(model: Path, data: Path, tmp_path: Path) -> None:
    run_dpo(dpo_config(model, data, tmp_path, "algorithm.reference_free=True", "algorithm.beta=0.5"))
    first = metrics(tmp_path)[0]
    assert first["rewards/chosen"] == pytest.approx(0.5 * first["log_probs/chosen"])
    assert first["log_probs/chosen"] < -1
    assert not (tmp_path / REFERENCE_FILE).exists()


@pytest.mark.parametrize("loss", ["ipo", "hinge", "kto_pair"])
def test_every_loss_widens_the_margin(model: Path, data: Path, tmp_path: Path, loss: str) -> None:
    run_dpo(dpo_config(model, data, tmp_path, f"algorithm.loss_type={loss}"))
    first, *_, last = metrics(tmp_path)
    assert last["rewards/margins"] > first["rewards/margins"] + 0.01
    assert ("kl/chosen" in first) == (loss == "kto_pair")


def test_an_adapter_is_trained_against_the_model_without_it(model: Path, data: Path, tmp_path: Path) -> None:
    run_dpo(dpo_config(model, data, tmp_path, "model.lora_rank=4", "optim.lr=1e-2"))
    first, *_, last = metrics(tmp_path)
    assert first["train/loss"] == pytest.approx(0.6931472, abs=1e-5)
    assert last["rewards/margins"] > 0.01
    assert (tmp_path / "lora_adapter").is_dir()


def test_a_reference_beside_reference_free_is_refused(model: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"with algorithm\.reference_free=True: must be null"):
        dpo_config(model, data, tmp_path, "algorithm.reference_free=True", f"ref.path={model}")
