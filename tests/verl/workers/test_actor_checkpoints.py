"""What a checkpoint of a model holds: the weights and the optimizer of the moment when it was begun, for any ranks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import random_batch
from support.models import save_tiny_model
from support.ranks import run_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.config import ActorConfig, ModelConfig, OptimConfig
from verl.trainer.core_algos import BatchTotals
from verl.utils import checkpoint
from verl.utils.checkpoint import BackgroundWriter, CheckpointError
from verl.workers.actor import Actor


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def make_actor(model: Path) -> Actor:
    return Actor(
        ModelConfig(path=str(model)),
        ActorConfig(optim=OptimConfig(lr=1e-2)),
        device="cpu",
        temperature=1.0,
        total_updates=4,
        loss_norm_constant=1.0,
    )


def update(actor: Actor) -> None:
    batch = random_batch([5, 17, 3, 40])
    actor.update([batch], [BatchTotals.of(batch)])


def weights_of(actor: Actor) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in actor.state_dict_items()}


def assert_equal(found: Any, expected: Any, name: str = "state") -> None:
    assert type(found) is type(expected), name
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), name
        for key, value in expected.items():
            assert_equal(found[key], value, f"{name}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), name
        for index, value in enumerate(expected):
            assert_equal(found[index], value, f"{name}[{index}]")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), name
    else:
        assert found == expected, name


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """What one and two ranks saved while they trained on, by their number."""
    folders = {}
    for world_size in (1, 2):
        folders[world_size] = tmp_path_factory.mktemp(f"saved{world_size}")
        run_ranks("support.checkpoint_program", world_size, model, folders[world_size])
    return folders


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1)])
def test_weights_and_optimizer_are_the_same_with_another_number_of_ranks(
    saved: dict[int, Path], model: Path, tmp_path: Path, writers: int, readers: int
) -> None:
    run_ranks("support.checkpoint_program", readers, model, tmp_path, saved[writers] / "actor")
    expected, found = torch.load(saved[writers] / "state.pt"), torch.load(tmp_path / "state.pt")
    assert any("exp_avg" in state for state in expected["optimizer"]["state"].values())
    assert expected["num_updates"] == 2
    assert_equal(found, expected)


@pytest.mark.parametrize("writers", [1, 2])
def test_the_exported_model_is_that_of_the_same_moment(saved: dict[int, Path], writers: int) -> None:
    exported = AutoModelForCausalLM.from_pretrained(saved[writers] / "huggingface").state_dict()
    expected = torch.load(saved[writers] / "state.pt")["model"]
    assert all(torch.equal(tensor, expected[f"model.{name}"]) for name, tensor in exported.items())
    assert AutoTokenizer.from_pretrained(saved[writers] / "huggingface").chat_template


def test_training_that_goes_on_does_not_reach_what_is_being_saved(model: Path, tmp_path: Path) -> None:
    actor, may_write = make_actor(model), threading.Event()
    update(actor)
    expected = weights_of(actor)
    order, writer = checkpoint.begin_save(tmp_path, 1, {}), BackgroundWriter(commits=True)
    writer.start(order, [may_write.wait, actor.prepare_save(order.folder / "actor", export_to=order.folder / "hf")])
    update(actor)
    trained = weights_of(actor)
    assert any(not torch.equal(trained[name], tensor) for name, tensor in expected.items())
    may_write.set()
    writer.finish()
    writer.close()

    resumed = make_actor(model)
    resumed.load(tmp_path / "global_step_1" / "actor")
    assert_equal(weights_of(resumed), expected)
    update(resumed)
    assert_equal(weights_of(resumed), trained)


def test_a_disk_that_fills_up_while_the_shards_are_written_is_named(model: Path, tmp_path: Path) -> None:
    actor, writer = make_actor(model), BackgroundWriter(commits=True)
    checkpoint.begin_save(tmp_path, 1, {})
    checkpoint.commit(tmp_path, 1)
    order = checkpoint.begin_save(tmp_path, 2, {})
    (order.folder / "actor").mkdir()
    (order.folder / "actor" / "__0_0.distcp").symlink_to("/dev/full")
    writer.start(order, [actor.prepare_save(order.folder / "actor")])
    with pytest.raises(CheckpointError, match=r"step 2 .*No space left on device.*complete one is .*global_step_1"):
        writer.finish()
    writer.close()
    assert checkpoint.latest(tmp_path) == tmp_path / "global_step_1" and not order.folder.exists()
