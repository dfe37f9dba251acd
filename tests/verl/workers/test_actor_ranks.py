"""The same training over one, two and three processes; each program of `support.rank_program` is one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.models import save_tiny_model
from support.ranks import run_ranks
from transformers import AutoModelForCausalLM


def run_actor(world_size: int, model: Path, out: Path, load: Path | None = None, *, fsdp_size: int = -1) -> Path:
    """Run `support.rank_program` on all ranks; returns ``out``."""
    out.mkdir()
    run_ranks("support.rank_program", world_size, model, out, fsdp_size, *([load] if load else []))
    return out


def outcome(folder: Path) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    return json.loads((folder / "metrics_0.json").read_text()), torch.load(folder / "weights.pt")


def assert_same(one: Path, other: Path) -> None:
    (metrics, weights), (other_metrics, other_weights) = outcome(one), outcome(other)
    assert metrics == pytest.approx(other_metrics, rel=1e-4, abs=1e-6)
    assert weights.keys() == other_weights.keys()
    for name, tensor in weights.items():
        assert torch.allclose(tensor, other_weights[name], atol=1e-5), name


def size_of(checkpoint: Path) -> int:
    return sum(file.stat().st_size for file in checkpoint.glob("*.distcp"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one_rank(model, tmp_path_factory):
    return run_actor(1, model, tmp_path_factory.mktemp("one") / "out")


@pytest.fixture(scope="module")
def one_goes_on(model, one_rank, tmp_path_factory):
    return run_actor(1, model, tmp_path_factory.mktemp("one_on") / "out", load=one_rank / "actor")


@pytest.fixture(scope="module")
def two_ranks(model, tmp_path_factory):
    return run_actor(2, model, tmp_path_factory.mktemp("two") / "out")


def test_two_ranks_give_the_loss_and_weights_of_one(one_rank, two_ranks):
    assert_same(two_ranks, one_rank)


def test_every_rank_reports_the_same_metrics(two_ranks):
    assert (two_ranks / "metrics_0.json").read_text() == (two_ranks / "metrics_1.json").read_text()


def test_a_rank_without_sequences_takes_part(model, one_rank, tmp_path):
    assert_same(run_actor(3, model, tmp_path / "out"), one_rank)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_of_two_ranks_goes_on_with_another_number(model, one_goes_on, two_ranks, world_size, tmp_path):
    assert_same(run_actor(world_size, model, tmp_path / "out", load=two_ranks / "actor"), one_goes_on)


def test_copies_of_the_model_train_as_one_and_go_on_from_and_to_a_run_without_copies(
    model, one_rank, one_goes_on, tmp_path
):
    copies = run_actor(4, model, tmp_path / "copies", fsdp_size=2)
    assert_same(copies, one_rank)
    assert size_of(copies / "actor") < 1.5 * size_of(one_rank / "actor")  # each shard is written once
    assert_same(run_actor(1, model, tmp_path / "alone", load=copies / "actor"), one_goes_on)
    again = run_actor(4, model, tmp_path / "again", load=one_rank / "actor", fsdp_size=2)
    assert_same(again, one_goes_on)


def test_an_export_of_two_ranks_holds_the_whole_model(two_ranks):
    exported = AutoModelForCausalLM.from_pretrained(two_ranks / "huggingface")
    assert exported.config.architectures == ["Qwen2ForCausalLM"]
    _, weights = outcome(two_ranks)
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, weights[name]), name
