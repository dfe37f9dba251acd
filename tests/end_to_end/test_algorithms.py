"""main_ppo with what the default algorithm lacks, as a user runs it: a tiny random model against a TextCraft server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models import tiny_qwen2
from support.servers import serve_process
from support.tokenizers import make_tokenizer

from verl.utils.tracking import read_metrics

pytestmark = pytest.mark.server

PPO = (
    "data.train_batch_size=2",
    "data.max_response_length=400",
    "actor_rollout_ref.agentgym.task_name=textcraft",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.max_tokens=12",
    "algorithm.rounds_ctrl.rounds=2",
    "trainer.device=cpu",
    "trainer.worker_group=local",
    "trainer.num_threads=1",
    "trainer.total_training_steps=2",
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a model and a list of items, and the URL of a running server in ``url``."""
    folder, tokenizer = tmp_path_factory.mktemp("world"), make_tokenizer()
    tiny_qwen2(vocab_size=len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "train.json").write_text(json.dumps([{"item_id": f"textcraft_{index}"} for index in range(8)]))
    with serve_process("textcraft") as server:
        (folder / "url").write_text(server.url)
        yield folder


def train(world: Path, name: str, *overrides: str) -> tuple[list[dict[str, Any]], str]:
    """Run main_ppo into the folder ``name`` of the world; returns its metrics and what it printed."""
    argv = [
        *PPO,
        f"data.train_file={world / 'train.json'}",
        f"actor_rollout_ref.agentgym.env_addr={(world / 'url').read_text()}",
        f"actor_rollout_ref.model.path={world / 'model'}",
        f"trainer.default_local_dir={world / name}",
        *overrides,
    ]
    program = [sys.executable, "-m", "verl.agent_trainer.main_ppo", *argv]
    run = subprocess.run(program, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return read_metrics(world / name / "metrics.jsonl"), run.stdout


# A random model crafts nothing. What the KL costs, once entropy has moved the policy, is its reward.
GAE = (
    "algorithm.adv_estimator=gae",
    "algorithm.lam=0.95",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=1.0",
    "actor_rollout_ref.actor.entropy_coeff=0.1",
    "critic.optim.lr=1e-3",
    "critic.ppo_epochs=2",
)


@pytest.fixture(scope="module")
def with_critic(world: Path) -> tuple[list[dict[str, Any]], str]:
    """Two steps of PPO with a critic, on one worker."""
    return train(world, "gae", *GAE)


def test_ppo_with_a_critic_trains_policy_and_values(world: Path, with_critic: tuple[list[dict[str, Any]], str]) -> None:
    rows, printed = with_critic
    assert "2 updates of the critic a step" in printed
    assert rows[1]["rollout/kl_mean"] > 0 and rows[1]["rollout/kl_coef"] < rows[0]["rollout/kl_coef"] == 1
    assert rows[1]["critic/grad_norm"] > 0 and rows[1]["critic/return_mean"] != 0
    assert rows[1]["actor/pg_loss"] != 0 and rows[1]["advantages/std"] == pytest.approx(1, abs=0.05)
    saved = world / "gae" / "global_step_2"
    assert (saved / "critic" / ".metadata").is_file() and (saved / "actor" / ".metadata").is_file()


@pytest.mark.ray
def test_two_ray_workers_train_a_critic_as_one_does(world: Path, with_critic: tuple[list[dict[str, Any]], str]) -> None:
    rows, _ = train(world, "pair", *GAE, "trainer.worker_group=ray", "trainer.n_gpus_per_node=2")
    for row, expected in zip(rows, with_critic[0], strict=True):
        for key in ("critic/grad_norm", "critic/return_mean", "actor/grad_norm", "rollout/kl_coef", "training/tokens"):
            assert row[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-6), key


def test_dynamic_sampling_ends_within_its_rounds_and_says_that_nothing_was_learned(world: Path) -> None:
    rows, printed = train(
        world,
        "dynamic",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=success",
        "algorithm.filter_groups.max_num_gen_batches=2",
    )
    assert "groups without different success are replaced, in up to 2 rounds of sampling a step" in printed
    for step, row in enumerate(rows, start=1):
        assert row["rollout/gen_batches"] == 2 and row["rollout/trajectories"] == 8
        assert row["rollout/groups_left_out"] == 4 and row["training/updates"] == 0
        assert f"step {step}: no group has different results after 2 rounds of sampling" in printed
    assert len(rows) == 2
