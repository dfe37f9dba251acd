"""The same training over one, two and three processes; each program of `support.rank_program` is one rank."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.models import save_tiny_model
from transformers import AutoModelForCausalLM

TESTS = Path(__file__).parents[2]
RANK_TIMEOUT_S = 240


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(world_size: int, model: Path, out: Path, load: Path | None = None) -> Path:
    """Run the program on all ranks; returns ``out``. A failed or stuck rank fails the test and leaves no process."""
    out.mkdir()
    port = free_port()
    program = [sys.executable, "-m", "support.rank_program"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    ranks = [
        subprocess.Popen(
            [*program, *map(str, (rank, world_size, port, model, out)), *([str(load)] if load else [])],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=RANK_TIMEOUT_S)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return out


def outcome(folder: Path) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    return json.loads((folder / "metrics_0.json").read_text()), torch.load(folder / "weights.pt")


def assert_same(one: Path, other: Path) -> None:
    (metrics, weights), (other_metrics, other_weights) = outcome(one), outcome(other)
    assert metrics == pytest.approx(other_metrics, rel=1e-4, abs=1e-6)
    assert weights.keys() == other_weights.keys()
    for name, tensor in weights.items():
        assert torch.allclose(tensor, other_weights[name], atol=1e-5), name


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one_rank(model, tmp_path_factory):
    return run_ranks(1, model, tmp_path_factory.mktemp("one") / "out")


@pytest.fixture(scope="module")
def two_ranks(model, tmp_path_factory):
    return run_ranks(2, model, tmp_path_factory.mktemp("two") / "out")


def test_two_ranks_give_the_loss_and_weights_of_one(one_rank, two_ranks):
    assert_same(two_ranks, one_rank)


def test_every_rank_reports_the_same_metrics(two_ranks):
    assert (two_ranks / "metrics_0.json").read_text() == (two_ranks / "metrics_1.json").read_text()


def test_a_rank_without_sequences_takes_part(model, one_rank, tmp_path):
    assert_same(run_ranks(3, model, tmp_path / "out"), one_rank)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_of_two_ranks_goes_on_with_another_number(model, one_rank, two_ranks, world_size, tmp_path):
    expected = run_ranks(1, model, tmp_path / "expected", load=one_rank / "actor")
    assert_same(run_ranks(world_size, model, tmp_path / "out", load=two_ranks / "actor"), expected)


def test_an_export_of_two_ranks_holds_the_whole_model(two_ranks):
    exported = AutoModelForCausalLM.from_pretrained(two_ranks / "huggingface")
    assert exported.config.architectures == ["Qwen2ForCausalLM"]
    _, weights = outcome(two_ranks)
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, weights[name]), name
