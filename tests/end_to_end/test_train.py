"""The programs as a user runs them: a tiny random model against a real TextCraft server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from support.models import tiny_qwen2
from support.servers import serve_process
from support.tokenizers import make_tokenizer
from transformers import AutoModelForCausalLM

from agentgym_rl.agent.strategies import conversation_start
from agentgym_rl.data.conversations import Conversation, write_conversations
from agentgym_rl.envs.registry import get_spec
from agentgym_rl.rollout.log import read_trajectories
from agentgym_rl.types import Message, Role, Trajectory
from verl.utils.tracking import read_metrics

pytestmark = [pytest.mark.server, pytest.mark.ray]

PPO = (
    "data.train_batch_size=4",
    "data.max_response_length=400",
    "actor_rollout_ref.agentgym.task_name=textcraft",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    # A random model crafts nothing, so entropy is what it is trained on.
    "actor_rollout_ref.actor.entropy_coeff=0.1",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.max_tokens=12",
    "algorithm.rounds_ctrl.type=scaling_inter_stepwise",
    "algorithm.rounds_ctrl.rounds=[1,2]",
    "algorithm.rounds_ctrl.steps_scaling_inter=1",
    "trainer.device=cpu",
    "trainer.num_threads=1",
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a model and item lists, and the URL of a running server in ``url``."""
    folder, tokenizer = tmp_path_factory.mktemp("world"), make_tokenizer()
    tiny_qwen2(vocab_size=len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for name, indices in (("train", range(8)), ("val", range(20, 27))):
        (folder / f"{name}.json").write_text(json.dumps([{"item_id": f"textcraft_{index}"} for index in indices]))
    with serve_process("textcraft") as server:
        (folder / "url").write_text(server.url)
        yield folder


def start(program: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"verl.agent_trainer.{program}", *overrides],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def succeed(program: str, *overrides: str) -> str:
    run = start(program, *overrides)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def train(world: Path, name: str, *overrides: str) -> Path:
    """Run main_ppo into the folder ``name`` of the world."""
    url = (world / "url").read_text()
    succeed(
        "main_ppo",
        *PPO,
        f"data.train_file={world / 'train.json'}",
        f"actor_rollout_ref.agentgym.env_addr={url}",
        f"actor_rollout_ref.model.path={world / 'model'}",
        f"trainer.default_local_dir={world / name}",
        *overrides,
    )
    return world / name


@pytest.fixture(scope="module")
def alone(world: Path) -> Path:
    """Four steps on one worker, in the driver's process."""
    return train(world, "alone", "trainer.worker_group=local", "trainer.total_training_steps=4", "trainer.save_freq=3")


@pytest.fixture(scope="module")
def pair(world: Path) -> Path:
    """Two steps on two Ray workers."""
    return train(world, "pair", "trainer.n_gpus_per_node=2", "trainer.total_training_steps=2")


def by_sample(folder: Path) -> dict[tuple[str, int], Trajectory]:
    return {(t.item.item_id, t.sample_index): t for t in read_trajectories(folder).trajectories}


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / "metrics.jsonl")


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(checkpoint / "actor" / "huggingface").state_dict()


def test_a_run_leaves_checkpoints_metrics_and_trajectories_where_they_belong(alone: Path) -> None:
    assert sorted(path.name for path in alone.glob("global_step_*")) == ["global_step_3", "global_step_4"]
    assert [row["rounds/max_rounds"] for row in metrics_of(alone)] == [1, 2, 2, 2]
    assert list((alone / "tensorboard").glob("events.out.tfevents.*"))
    for step in range(1, 5):
        rows = [json.loads(line) for line in (alone / f"trajectories/step{step}/0.jsonl").read_text().splitlines()]
        assert len(rows) == 8
        assert {row["item_id"] for row in rows} <= {f"textcraft_{index}" for index in range(8)}
        assert all({"item_id", "conversations", "reward"} <= row.keys() for row in rows)
        assert all(row["conversations"][2]["value"].startswith("Crafting commands:") for row in rows)


def test_two_ray_workers_do_what_one_does(alone: Path, pair: Path) -> None:
    files = sorted(path.name for path in (pair / "trajectories" / "step1").iterdir())
    assert files == ["0.jsonl", "1.jsonl", "step.json"]
    together, single = by_sample(pair / "trajectories" / "step1"), by_sample(alone / "trajectories" / "step1")
    assert together.keys() == single.keys() and len(together) == 8
    assert all(t.input_ids.tolist() == single[key].input_ids.tolist() for key, t in together.items())
    for row, expected in zip(metrics_of(pair), metrics_of(alone), strict=False):
        for key in ("actor/entropy", "actor/grad_norm", "training/tokens"):
            assert row[key] == pytest.approx(expected[key], rel=1e-3)


def test_two_workers_that_share_each_sequence_do_what_one_does(world: Path, alone: Path) -> None:
    overrides = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2")
    shared = train(world, "shared", *overrides, "trainer.total_training_steps=2")
    for row, expected in zip(metrics_of(shared), metrics_of(alone), strict=False):
        for key in ("actor/entropy", "actor/grad_norm", "training/tokens"):
            assert row[key] == pytest.approx(expected[key], rel=1e-3)


def test_an_adapter_is_trained_merged_into_the_engine_and_exported_by_itself(world: Path) -> None:
    overrides = ("trainer.worker_group=local", "actor_rollout_ref.actor.use_kl_loss=True")
    lora = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=1e-2")
    folder = train(world, "lora", *overrides, *lora, "trainer.total_training_steps=2")
    rows = metrics_of(folder)
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    # The second step samples with what the first one learned, and its reference is where the first began.
    assert rows[1]["training/rollout_probs_diff_max"] < 1e-4 and rows[1]["actor/kl_loss"] > 0
    actor = folder / "global_step_2" / "actor"
    merged, base = AutoModelForCausalLM.from_pretrained(actor / "huggingface"), world / "model"
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(actor / "lora_adapter"))
    ids = torch.tensor([[5, 6, 7, 8]])
    plain = AutoModelForCausalLM.from_pretrained(base)(ids).logits
    assert torch.allclose(merged(ids).logits, adapted(ids).logits, atol=1e-5)
    assert not torch.allclose(merged(ids).logits, plain, atol=1e-3)


def test_two_steps_and_two_after_a_resume_equal_four_to_the_last_digit(world: Path, alone: Path) -> None:
    train(world, "parts", "trainer.worker_group=local", "trainer.total_training_steps=2")
    parts = train(world, "parts", "trainer.worker_group=local", "trainer.total_training_steps=4")
    for key in ("actor/entropy", "actor/grad_norm", "rollout/sampled_tokens_mean", "rounds/max_rounds"):
        assert [row[key] for row in metrics_of(parts)] == [row[key] for row in metrics_of(alone)]
    expected, found = weights_of(alone / "global_step_4"), weights_of(parts / "global_step_4")
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_an_evaluation_is_the_same_on_one_worker_and_on_two(world: Path, alone: Path) -> None:
    def evaluate(name: str, *overrides: str) -> dict[str, Any]:
        printed = succeed(
            "main_generation",
            f"data.path={world / 'val.json'}",
            "data.batch_size=5",
            "agentgym.task_name=textcraft",
            f"agentgym.env_addr={(world / 'url').read_text()}",
            "agentgym.max_rounds=2",
            f"model.path={alone / 'global_step_4' / 'actor' / 'huggingface'}",
            "rollout.temperature=0",
            "rollout.max_tokens=12",
            f"rollout.rollout_log_dir={world / name}",
            "trainer.device=cpu",
            "trainer.num_threads=1",
            *overrides,
        )
        assert "Avg@1" in printed and "Pass@1" in printed
        assert len(read_trajectories(world / name).trajectories) == 7
        return json.loads((world / name / "report.json").read_text())

    one = evaluate("eval1", "trainer.worker_group=local")
    two = evaluate("eval2", "trainer.n_gpus_per_node=2")
    assert one == two and one["overall"]["num_items"] == 7


def test_two_workers_train_on_conversations(world: Path) -> None:
    opening = conversation_start(get_spec("textcraft").client.task_description, "react")
    rows = [
        Conversation(
            f"textcraft_{number}",
            (*opening, Message(Role.USER, "Goal: craft oak planks."), Message(Role.ASSISTANT, f"Action: get {number}")),
            (None, False, None, True),
        )
        for number in range(8)
    ]
    write_conversations(world / "sft.jsonl", rows)
    succeed(
        "main_sft",
        f"data.train_file={world / 'sft.jsonl'}",
        "data.train_batch_size=4",
        f"model.path={world / 'model'}",
        "optim.lr=1e-2",
        "trainer.total_training_steps=10",
        f"trainer.default_local_dir={world / 'sft'}",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=2",
        "trainer.num_threads=1",
    )
    losses = [row["train/loss"] for row in metrics_of(world / "sft")]
    assert len(losses) == 10 and losses[-1] < losses[0]
    assert AutoModelForCausalLM.from_pretrained(world / "sft" / "huggingface").config.model_type == "qwen2"


def test_without_a_server_one_line_says_how_to_start_it(world: Path) -> None:
    began = time.monotonic()
    run = start(
        "main_ppo",
        *PPO,
        f"data.train_file={world / 'train.json'}",
        "actor_rollout_ref.agentgym.env_addr=http://127.0.0.1:9",
        f"actor_rollout_ref.model.path={world / 'model'}",
        f"trainer.default_local_dir={world / 'none'}",
    )
    assert run.returncode == 2 and time.monotonic() - began < 30
    [line] = run.stderr.splitlines()
    assert "http://127.0.0.1:9" in line and "agentgym-rl serve textcraft --host 127.0.0.1 --port 9" in line


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("data.train_file=absent.json", "absent.json: no such file or folder"),
        ("actor_rollout_ref.model.path=/absent/model", "model.path='/absent/model': no such folder"),
        ("actor_rollout_ref.agentgym.task_name=textcarft", "did you mean textcraft?"),
        ("trainer.test_freq=1", "trainer.test_freq=1: validation needs data.val_file"),
        ("trainer.default_local_dir=/proc/run", "trainer.default_local_dir='/proc/run': no files can be written there"),
        ("actor_rollout_ref.rollout.rollout_log_dir=/dev/null/a", "rollout_log_dir='/dev/null/a': no files can be"),
        ("trainer.resume_from_path=global_step_9", "a path is used only with resume_mode=resume_path"),
        ("algorithm.adv_estimator=no_such:thing", "algorithm.adv_estimator='no_such:thing': must be one of grpo"),
    ],
)
def test_wrong_inputs_are_named_in_one_line(world: Path, override: str, text: str) -> None:
    run = start(
        "main_ppo",
        *PPO,
        f"data.train_file={world / 'train.json'}",
        f"actor_rollout_ref.agentgym.env_addr={(world / 'url').read_text()}",
        f"actor_rollout_ref.model.path={world / 'model'}",
        override,
    )
    assert run.returncode == 2, os.linesep.join([run.stdout, run.stderr])
    [line] = run.stderr.splitlines()
    assert text in line
