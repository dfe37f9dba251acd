"""SIGTERM to a run on two Ray workers: it saves, and what goes on equals a run that was never stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.servers import serve_process
from transformers import AutoModelForCausalLM

from verl.utils.tracking import read_metrics

pytestmark = [pytest.mark.server, pytest.mark.ray]

LIMIT_S = 240.0


@pytest.fixture(scope="module")
def arguments(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    items = tmp_path_factory.mktemp("items") / "train.json"
    items.write_text(json.dumps([f"textcraft_{index}" for index in range(8)]))
    with serve_process("textcraft") as server:
        yield [
            f"data.train_file={items}",
            "data.train_batch_size=4",
            "data.max_response_length=400",
            "actor_rollout_ref.agentgym.task_name=textcraft",
            f"actor_rollout_ref.agentgym.env_addr={server.url}",
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            # A random model crafts nothing, so entropy is what it is trained on.
            "actor_rollout_ref.actor.entropy_coeff=0.1",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.rollout.max_tokens=12",
            "algorithm.rounds_ctrl.rounds=2",
            "trainer.device=cpu",
            "trainer.n_gpus_per_node=2",
            "trainer.num_threads=1",
            "trainer.logger=[jsonl]",
            "trainer.total_training_steps=4",
        ]


def start(arguments: list[str], folder: Path) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "verl.agent_trainer.main_ppo", *arguments, f"trainer.default_local_dir={folder}"]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(run: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status and what was written to stderr."""
    try:
        _, errors = run.communicate(timeout=LIMIT_S)
    finally:
        run.kill()
    return run.returncode, errors


def rows_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return read_metrics(path) if path.exists() else []


def learnt(folder: Path) -> list[tuple[float, ...]]:
    keys = ("step", "actor/entropy", "actor/grad_norm", "rollout/sampled_tokens_mean", "training/tokens")
    return [tuple(row[key] for key in keys) for row in rows_of(folder)]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder / "global_step_4" / "actor" / "huggingface").state_dict()


def test_two_workers_that_were_asked_to_end_go_on_as_if_never_stopped(arguments: list[str], tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    status, errors = finish(start(arguments, whole))
    assert status == 0, errors

    run = start(arguments, parts)
    deadline = time.monotonic() + LIMIT_S
    while not rows_of(parts) and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    run.terminate()
    status, errors = finish(run)
    assert status == 128 + signal.SIGTERM, errors
    last_step = rows_of(parts)[-1]["step"]
    assert 1 <= last_step < 4
    assert errors.splitlines()[-1].startswith(f"terminated after step {last_step}; the same command goes on from ")
    assert [path.name for path in parts.glob("global_step_*")] == [f"global_step_{last_step}"]

    status, errors = finish(start(arguments, parts))
    assert status == 0, errors
    assert learnt(parts) == learnt(whole)
    expected, found = weights_of(whole), weights_of(parts)
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
