"""What a checkpoint does to the optimizer: of the run that goes on, and of one that resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import random_batch
from support.models import save_tiny_model

from verl.config import FSDPConfig, ModelConfig, OptimConfig
from verl.trainer.core_algos import BatchTotals
from verl.workers import language_model
from verl.workers.packed_model import MicroBatchLimits
from verl.workers.sft import SupervisedTrainer

OTHER_DEVICE = torch.device("meta")
"""In the place of a GPU."""

MakeLearner = Callable[..., SupervisedTrainer]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_learner(model: Path) -> MakeLearner:
    def make(fsdp: FSDPConfig | None = None, **optim: Any) -> SupervisedTrainer:
        return SupervisedTrainer(
            ModelConfig(path=str(model)),
            OptimConfig(**{"lr": 1e-3, "lr_warmup_steps": 2, **optim}),
            MicroBatchLimits(),
            device="cpu",
            total_updates=8,
            fsdp=fsdp,
        )

    return make


def losses(learner: SupervisedTrainer, *, updates: int) -> list[tuple[float, float]]:
    """Loss and learning rate of each update."""
    batch = random_batch([5, 17, 3])
    results = [learner.update(batch, BatchTotals.of(batch)) for _ in range(updates)]
    return [(each["train/loss"], each["train/lr"]) for each in results]


def same_weights(a: SupervisedTrainer, b: SupervisedTrainer) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.model.parameters(), b.model.parameters(), strict=True))


def options(learner: SupervisedTrainer) -> list[dict[str, object]]:
    """Of each parameter group, what is not its parameters or set at each update."""
    groups = learner._optimizer.param_groups
    return [{key: value for key, value in group.items() if key not in ("params", "lr")} for group in groups]


def state_of(learner: SupervisedTrainer) -> list[torch.Tensor]:
    return [tensor for state in learner._optimizer.state.values() for tensor in state.values()]


def places(learner: SupervisedTrainer) -> set[str]:
    return {tensor.device.type for tensor in state_of(learner)}


@pytest.mark.parametrize("updates_before", [0, 1, 2])
@pytest.mark.parametrize("saves", [1, 2])
def test_a_checkpoint_changes_nothing_whenever_it_is_written(
    make_learner: MakeLearner, tmp_path: Path, updates_before: int, saves: int
) -> None:
    unsaved, saved, resumed = make_learner(), make_learner(), make_learner()
    expected = losses(unsaved, updates=5)

    before = losses(saved, updates=updates_before)
    for number in range(saves):
        saved.save(tmp_path / str(number))
    assert before + losses(saved, updates=5 - updates_before) == expected

    resumed.load(tmp_path / str(saves - 1))
    assert losses(resumed, updates=5 - updates_before) == expected[updates_before:]
    assert same_weights(saved, unsaved) and same_weights(resumed, unsaved)


def test_a_resumed_run_has_the_optimizer_that_its_own_configuration_describes(
    make_learner: MakeLearner, tmp_path: Path
) -> None:
    first = make_learner(lr=1e-4, weight_decay=0.01, betas=[0.9, 0.999])
    losses(first, updates=1)
    first.save(tmp_path / "first")
    asked = {"lr": 1e-3, "weight_decay": 0.3, "betas": [0.8, 0.95], "lr_warmup_steps": 0}
    fresh, resumed = make_learner(**asked), make_learner(**asked)
    resumed.load(tmp_path / "first")
    assert options(resumed) == options(fresh) != options(first)
    assert losses(resumed, updates=1)[0][1] == 1e-3


@pytest.mark.parametrize(("offload", "place"), [(False, "meta"), (True, "cpu")])
def test_a_checkpoint_before_the_first_update_leaves_the_optimizer_where_it_belongs(
    make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch, offload: bool, place: str
) -> None:
    moves = Moves(monkeypatch)
    learner = make_learner(FSDPConfig(param_offload=True, optimizer_offload=offload))
    learner.packed.device = OTHER_DEVICE  # The weights stay on the host, as those that are offloaded do.
    learner._state()
    assert moves.places == [place] and places(learner) == {place}


@pytest.mark.parametrize(("offload", "place"), [(False, "meta"), (True, "cpu")])
def test_a_resumed_optimizer_rests_where_the_configuration_says_and_not_where_the_weights_are(
    make_learner: MakeLearner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offload: bool, place: str
) -> None:
    first = make_learner()
    losses(first, updates=1)
    first.save(tmp_path / "first")
    resumed = make_learner(FSDPConfig(param_offload=True, optimizer_offload=offload))
    resumed.packed.device = OTHER_DEVICE
    # Nothing can be read into tensors on the meta device: these say where they are sent, and are copies on the host.
    moves = Moves(monkeypatch, copies=True)
    resumed.load(tmp_path / "first")
    assert moves.places == [place]
    assert [id(tensor) for tensor in state_of(resumed)] == [id(tensor) for tensor in moves.copies]
    assert all(torch.equal(a, b) for a, b in zip(state_of(resumed), state_of(first), strict=True))


class Moves:
    """Where an optimizer's state is sent from here on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, copies: bool = False) -> None:
        """With ``copies`` it stays on the host, in other tensors."""
        self.places: list[str] = []
        self.copies: list[torch.Tensor] = []
        self._copies, self._move = copies, language_model.move_optimizer
        monkeypatch.setattr(language_model, "move_optimizer", self._record)

    def _record(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.places.append(device.type)
        if not self._copies:
            self._move(optimizer, device)
            return
        for state in optimizer.state.values():
            state |= {name: tensor.clone() for name, tensor in state.items()}
            self.copies += state.values()
