"""Supervised training in this process: what is trained on, for how long, and what comes out."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.environments import Script
from support.parity import TASK, parity_spec
from support.rollouts import FRAMELESS
from support.servers import serve
from support.tokenizers import make_tokenizer
from transformers import AutoModelForCausalLM

from agentgym_rl.agent.chat import ChatTemplate, EncodedText
from agentgym_rl.data.conversations import Conversation, TokenRecord, read_conversations, write_conversations
from agentgym_rl.envs.registry import register
from agentgym_rl.envs.server import build_app
from agentgym_rl.errors import ConfigError
from agentgym_rl.rollout.log import read_trajectories
from agentgym_rl.types import Item, Message, Role
from verl.agent_trainer.loading import load_config, parse_command_line
from verl.config import SFTConfig
from verl.models.loading import load_tokenizer
from verl.single_controller.signals import Terminated
from verl.trainer.examples import RowEncoder
from verl.trainer.sft import SFTTrainer, encode, run_sft
from verl.utils.tracking import read_metrics


def conversation(answer: str, *, is_trained: bool = True, item: int = 1) -> Conversation:
    messages = (Message(Role.USER, "what do you do next?"), Message(Role.ASSISTANT, answer))
    return Conversation(f"textcraft_{item}", messages, (None, is_trained))


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


def test_an_answer_of_two_tokens_is_learned_to_its_last_token(model: Path, tmp_path: Path) -> None:
    data, chat = tmp_path / "data.jsonl", ChatTemplate(make_tokenizer())
    row = conversation("a")
    assert len(chat.encode_answer("a")) == 2  # the letter and the end of the turn
    write_conversations(data, [row] * 2)
    run_sft(sft_config(model, data, tmp_path / "out", "trainer.total_training_steps=30", "optim.lr=0.02"))
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "huggingface")
    encoded = chat.encode_conversation(row.messages, row.train_flags)
    assert sum(encoded.loss_mask) == 2
    ids = torch.tensor([encoded.ids])
    log_p = trained(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    assert (log_p[torch.tensor(encoded.loss_mask[1:]) == 1] > -0.1).all()


def test_rows_whose_labels_are_cut_away_are_dropped_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    chat = ChatTemplate(make_tokenizer(FRAMELESS, eos_token="</s>"))
    rows = [conversation("short"), cut_away("where " * 100)]
    examples = encode(rows, RowEncoder(chat, max_length=60, truncation="right"))
    assert len(examples) == 1 and 0 < examples[0].num_trained < len(examples[0].ids)
    said = capsys.readouterr().out
    assert "1 of 2 rows have no token to train on" in said
    assert "1 rows were cut to data.max_length=60 tokens" in said


def test_labels_that_are_all_cut_away_are_an_error() -> None:
    chat = ChatTemplate(make_tokenizer())
    with pytest.raises(ConfigError, match="none of its 2 rows has a token to train on"):
        encode([cut_away("where " * 100)] * 2, RowEncoder(chat, max_length=60, truncation="right"))


def cut_away(question: str) -> Conversation:
    messages = (Message(Role.USER, question), Message(Role.ASSISTANT, "there"))
    return Conversation("textcraft_2", messages, (None, True))


def many_rows(folder: Path) -> Path:
    data = folder / "data.jsonl"
    write_conversations(data, [conversation(f"Action: get {n} oak log", item=n) for n in range(7)])
    return data


def test_a_resumed_run_comes_to_the_same_numbers_to_the_last_digit(model: Path, tmp_path: Path) -> None:
    data = many_rows(tmp_path)
    options = ("optim.lr_schedule=cosine", "optim.lr_warmup_steps=2", "trainer.max_token_len_per_gpu=60")
    run_sft(sft_config(model, data, tmp_path / "whole", "trainer.total_training_steps=8", *options))
    halves = tmp_path / "halves"
    # The learning rate follows the plan's length, so the first half is a run that was stopped, not a shorter one.
    first = sft_config(model, data, halves, "trainer.total_training_steps=8", "trainer.max_time_s=1e-9", *options)
    run_sft(first)
    run_sft(sft_config(model, data, halves, "trainer.total_training_steps=8", *options))
    whole, resumed = (learned(read_metrics(folder / "metrics.jsonl")) for folder in (tmp_path / "whole", halves))
    assert [row["step"] for row in resumed] == list(range(1, 9))
    assert whole == resumed
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(halves)[name])


def test_a_run_that_trains_other_weights_is_not_resumed_and_starts_no_workers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, folder = many_rows(tmp_path), tmp_path / "out"
    run_sft(sft_config(model, data, folder, "trainer.total_training_steps=1", "model.lora_rank=4"))
    monkeypatch.setattr("verl.trainer.loop.start_workers", None)
    resumed = sft_config(model, data, folder, "trainer.total_training_steps=2", "model.lora_rank=2")
    with pytest.raises(ConfigError, match=r"model\.lora_rank=2: the run that wrote .*global_step_1 had 4"):
        run_sft(resumed)


def learned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the rows say of learning and not of time."""
    return [{key: value for key, value in row.items() if key.startswith(("step", "train/"))} for row in rows]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(run / "huggingface").state_dict()


def test_a_finished_run_has_nothing_left_to_do(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, folder = many_rows(tmp_path), tmp_path / "out"
    for _ in range(2):
        run_sft(sft_config(model, data, folder, "trainer.total_training_steps=2"))
    assert "nothing to do" in capsys.readouterr().out
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [1, 2]


def test_checkpoints_are_written_every_so_often_and_at_the_end(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    run_sft(sft_config(model, many_rows(tmp_path), folder, "trainer.total_training_steps=5", "trainer.save_freq=2"))
    assert sorted(path.name for path in folder.glob("global_step_*")) == [f"global_step_{n}" for n in (2, 4, 5)]
    last = folder / "global_step_5" / "actor" / "huggingface" / "model.safetensors"
    assert last.samefile(folder / "huggingface" / "model.safetensors")  # the model lies on the disk once


def test_sigterm_saves_the_last_finished_step(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, folder, update = many_rows(tmp_path), tmp_path / "out", SFTTrainer.train_step

    def asked_to_end(self: SFTTrainer, step: int) -> dict[str, float]:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, step)

    monkeypatch.setattr(SFTTrainer, "train_step", asked_to_end)
    config = sft_config(model, data, folder, "trainer.total_training_steps=6")
    with pytest.raises(Terminated, match=r"terminated after step 3; the same command goes on from .*global_step_3"):
        run_sft(config)
    monkeypatch.undo()
    run_sft(config)
    run_sft(sft_config(model, data, tmp_path / "whole", "trainer.total_training_steps=6"))
    assert learned(read_metrics(folder / "metrics.jsonl")) == learned(
        read_metrics(tmp_path / "whole" / "metrics.jsonl")
    )


def test_a_checkpoint_of_another_kind_of_training_is_refused(model: Path, tmp_path: Path) -> None:
    data, folder = many_rows(tmp_path), tmp_path / "out"
    run_sft(sft_config(model, data, folder, "trainer.total_training_steps=1"))
    state = folder / "global_step_1" / "trainer.json"
    state.write_text(state.read_text().replace('"kind": "sft"', '"kind": "dpo"'))
    with pytest.raises(ConfigError, match=r"global_step_1 is a checkpoint of dpo and not of sft"):
        run_sft(sft_config(model, data, folder, "trainer.total_training_steps=2"))


def test_an_adapter_is_exported_alone_and_merged(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    lora = ("model.lora_rank=4", "trainer.total_training_steps=4")
    run_sft(sft_config(model, many_rows(tmp_path), folder, *lora))
    assert (folder / "lora_adapter" / "adapter_config.json").exists()
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    changed = {name for name, tensor in weights(folder).items() if not torch.equal(tensor, before[name])}
    assert any("q_proj" in name for name in changed) and not any("norm" in name for name in changed)


@pytest.fixture
def server() -> Iterator[str]:
    spec = parity_spec(Script(turns=2))
    register(spec)
    with serve(build_app(spec)) as url:
        yield url


@pytest.mark.server
def test_the_model_is_validated_by_rollouts_with_its_current_weights(model: Path, tmp_path: Path, server: str) -> None:
    folder = tmp_path / "out"
    config = sft_config(
        model,
        many_rows(tmp_path),
        folder,
        f"agentgym.task_name={TASK}",
        f"agentgym.env_addr={server}",
        *("agentgym.max_rounds=3", "agentgym.agent=reflect", "agentgym.max_trials=2"),
        "data.val_file=given",
        "data.max_response_length=400",
        "rollout.max_tokens=8",
        "rollout.val_kwargs.n=2",
        "rollout.val_kwargs.temperature=0",
        "trainer.test_freq=4",
        "trainer.val_before_train=True",
        "trainer.total_training_steps=10",
    )
    run_sft(config, val_items=[Item(TASK, index) for index in range(3)])
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows if "val/score_mean" in row] == [0, 4, 8, 10]
    texts = {
        step: {t.turns[0].text for t in read_trajectories(folder / "trajectories" / f"val_step{step}").trajectories}
        for step in (0, 10)
    }
    # Of those that tried again the last trial counts alone.
    played = read_trajectories(folder / "trajectories" / "val_step10").trajectories
    results = [trajectory for trajectory in played if trajectory.is_last_trial]
    assert len(played) > len(results) == rows[-1]["val/trajectories"] == 6
    assert rows[-1]["val/score_mean"] == pytest.approx(sum(trajectory.score for trajectory in results) / 6)
    # Greedy play: what the model says has changed because its weights have.
    assert texts[0] != texts[10]


def test_validation_without_items_or_environment_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs data\.val_file, agentgym\.task_name, agentgym\.env_addr"):
        sft_config(model, tmp_path, tmp_path, "trainer.test_freq=5")


# ---------------------------------------------------------------------------------------------------------- sampled ids


def trajectory_row(chat: ChatTemplate, answer: list[int]) -> tuple[Conversation, EncodedText]:
    """A conversation whose answer was sampled as ``answer``, which is not how its text would be encoded."""
    prompt = chat.encode_prompt((Message(Role.USER, "Say it."),))
    ids = (*prompt.ids, *answer)
    record = TokenRecord(ids, (0,) * len(prompt.ids) + (1,) * len(answer), (0,) * len(prompt.ids) + (1,) * len(answer))
    messages = (Message(Role.USER, "Say it."), Message(Role.ASSISTANT, chat.decode(answer)))
    return Conversation("textcraft_1", messages, (None, True), record), prompt


def test_the_ids_that_were_sampled_are_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One letter at a time where the tokenizer would take the word at once: nothing is encoded a second time."""
    tokenizer = make_tokenizer()
    chat = ChatTemplate(tokenizer)
    letters = [id for letter in "hello" for id in tokenizer.encode(letter, add_special_tokens=False)]
    row, _ = trajectory_row(chat, [*letters, chat.end_of_turn_id])
    assert len(chat.encode_answer("hello")) != len(letters) + 1 or list(chat.encode_answer("hello"))[:-1] != letters
    write_conversations(tmp_path / "rows.jsonl", [row])
    [example] = encode(read_conversations(tmp_path / "rows.jsonl"), RowEncoder(chat, max_length=100))
    assert example.ids[example.loss_mask == 1].tolist() == [*letters, chat.end_of_turn_id]
    assert "1 rows are trained on with the very tokens that were sampled" in capsys.readouterr().out


def test_ids_of_another_tokenizer_are_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    chat = ChatTemplate(make_tokenizer())
    row, prompt = trajectory_row(chat, [7, chat.end_of_turn_id])
    assert row.record is not None
    foreign = TokenRecord(tuple(id + 1 for id in row.record.input_ids), row.record.loss_mask, row.record.sequence_ids)
    [example] = encode([replace(row, record=foreign)], RowEncoder(chat, max_length=100))
    assert example.ids[: len(prompt.ids)].tolist() == list(prompt.ids)
    assert "1 rows hold tokens of another tokenizer" in capsys.readouterr().out


def test_a_sampled_message_that_is_flagged_later_is_not_trained_on(capsys: pytest.CaptureFixture[str]) -> None:
    chat = ChatTemplate(make_tokenizer())
    row, _ = trajectory_row(chat, [7, chat.end_of_turn_id])
    with pytest.raises(ConfigError, match="none of its 1 rows has a token to train on"):
        encode([replace(row, train_flags=(None, False))], RowEncoder(chat, max_length=100))
