"""Supervised training in this process: what is trained on, for how long, and what comes out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tokenizers import make_tokenizer
from transformers import AutoModelForCausalLM

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.data.conversations import Conversation, write_conversations
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Message, Role
from verl.agent_trainer.loading import load_config, parse_command_line
from verl.config import SFTConfig
from verl.models.loading import load_tokenizer
from verl.trainer.examples import RowEncoder
from verl.trainer.sft import encode, run_sft
from verl.utils.tracking import read_metrics


def conversation(answer: str, *, is_trained: bool = True) -> Conversation:
    messages = (Message(Role.USER, "what do you do next?"), Message(Role.ASSISTANT, answer))
    return Conversation("textcraft_1", messages, (None, is_trained))


def sft_config(model: Path, data: Path, folder: Path, *overrides: str) -> SFTConfig:
    argv = [
        f"data.train_file={data}",
        "data.train_batch_size=2",
        f"model.path={model}",
        "optim.lr=0.01",
        "trainer.device=cpu",
        "trainer.worker_group=local",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={folder}",
        *overrides,
    ]
    return load_config(SFTConfig, parse_command_line(argv, program="test", config_name="sft_trainer"))


def test_training_fits_the_answers_and_exports_the_model(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    write_conversations(data, [conversation(f"Action: get {n} oak log") for n in range(4)])
    run_sft(sft_config(model, data, tmp_path / "out", "trainer.total_epochs=40"))
    losses = [row["train/loss"] for row in read_metrics(tmp_path / "out" / "metrics.jsonl")]
    assert len(losses) == 80 and losses[-1] < 0.3 * losses[0]

    exported = tmp_path / "out" / "huggingface"
    trained = AutoModelForCausalLM.from_pretrained(exported)
    chat = ChatTemplate(load_tokenizer(sft_config(exported, data, tmp_path).model))
    prompt = chat.encode_prompt(conversation("").messages[:1]).ids
    ids = trained.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False, pad_token_id=0)[0, len(prompt) :]
    assert chat.decode(ids.tolist()).startswith("Action")
    assert not (tmp_path / "out" / "huggingface.unfinished").exists()


def test_training_stops_when_its_time_is_over(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    write_conversations(data, [conversation("Action: wait")] * 2)
    run_sft(sft_config(model, data, tmp_path / "out", "trainer.total_training_steps=9", "trainer.max_time_s=1e-6"))
    assert "trained 1 of 9 steps" in capsys.readouterr().out
    assert (tmp_path / "out" / "huggingface" / "config.json").exists()


def test_rows_without_a_token_to_train_on_are_left_out_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    chat = ChatTemplate(make_tokenizer())
    rows = [conversation("a"), conversation("b", is_trained=False), conversation("c")]
    examples = encode(rows, RowEncoder(chat, max_length=100))
    assert len(examples) == 2 and all(0 < e.num_trained < len(e.ids) for e in examples)
    assert "1 of 3 rows have no token to train on" in capsys.readouterr().out


def test_data_in_which_nothing_can_be_trained_on_is_an_error() -> None:
    with pytest.raises(ConfigError, match="none of its 2 rows has a token to train on"):
        encode([conversation("a", is_trained=False)] * 2, RowEncoder(ChatTemplate(make_tokenizer()), max_length=100))


def test_a_row_that_is_too_long_is_named() -> None:
    rows = [conversation("a"), conversation("long " * 200)]
    with pytest.raises(ConfigError, match=r"row 2 \(textcraft_1\): \d+ tokens, more than data\.max_length=100"):
        encode(rows, RowEncoder(ChatTemplate(make_tokenizer()), max_length=100))


def test_two_workers_need_two_conversations_a_step(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.train_batch_size=2 on 3 workers"):
        sft_config(model, tmp_path, tmp_path, "trainer.worker_group=ray", "trainer.n_gpus_per_node=3")
