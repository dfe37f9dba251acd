"""Memory that torch holds of a GPU for later, where others wait for it; a fake notes when it is given back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.models import save_tiny_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from agentgym_rl.rollout.collector import TokenLimits
from agentgym_rl.types import Generation, SamplingParams
from verl.config import ActorConfig, AgentGymConfig, DPOAlgorithmConfig, ModelConfig, OptimConfig, RolloutConfig
from verl.single_controller.base import WorkerContext
from verl.utils import distributed
from verl.utils.devices import release_cached
from verl.workers.data_worker import LearnerSetup
from verl.workers.dpo_worker import DPOWorker
from verl.workers.hybrid import HybridWorker
from verl.workers.offload import Residence
from verl.workers.rollout.engine import Engine, EngineUsage, WeightUpdateTimes
from verl.workers.rollout.engine_group import EngineGroup, Follower
from verl.workers.rollout.worker import RolloutWorker
from verl.workers.setup import ActorSetup, RolloutOrder, RolloutSetup
from verl.workers.sft_worker import SFTWorker

GPU = torch.device("cuda")
RELEASED = "cached memory is released"
Worker = HybridWorker | SFTWorker


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened, in order."""
    noted: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: noted.append(RELEASED))
    return noted


class WatchedEngine(Engine):
    """Samples nothing; notes when it takes memory."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, trajectory_id: str) -> Generation:
        raise NotImplementedError("there are no requests")

    def release(self, trajectory_id: str) -> None: ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdateTimes:
        self._events.append("engine wakes for weights")
        take_all(weights)
        self._events.append("engine has the weights")
        return WeightUpdateTimes(0.0, 0.0, 0.0)

    def sleep(self) -> None:
        self._events.append("engine sleeps")

    def wake(self) -> None:
        self._events.append("engine wakes")

    def raise_if_down(self) -> None: ...

    def usage(self) -> EngineUsage:
        return EngineUsage()

    def close(self) -> None: ...


def take_all(weights: Iterable[object]) -> None:
    for _ in weights:
        pass


@dataclass(frozen=True)
class WatchedGroup(EngineGroup):
    """Two ranks with one engine, of which this process is one; notes when they wait for each other."""

    events: tuple[list[str], ...] = ()

    def wait(self) -> None:
        self.events[0].append("ranks have met")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig(path=str(save_tiny_model(tmp_path_factory.mktemp("model"))))


@pytest.fixture
def context() -> WorkerContext:
    return WorkerContext(0, 1, 1, "cpu", torch.distributed.HashStore(), lambda _: None)


@pytest.fixture(params=["ppo", "sft"])
def worker(
    request: pytest.FixtureRequest, model: ModelConfig, context: WorkerContext, tmp_path: Path, events: list[str]
) -> Iterator[Worker]:
    """One that trains and plays on the CPU, and takes its device for a GPU."""
    made: Worker
    if request.param == "ppo":
        made = hybrid_worker(model, context, tmp_path)
    else:
        made = SFTWorker(context, learner_setup(model), rollout_setup(model, tmp_path))
    player = player_of(made)
    player._engine.close()
    player._engine, player._device = WatchedEngine(events), GPU
    yield made
    made.close()


def hybrid_worker(model: ModelConfig, context: WorkerContext, folder: Path) -> HybridWorker:
    training = ActorSetup(ActorConfig(), ref=None, critic=None, total_updates=1, loss_norm_constant=1.0)
    return HybridWorker(context, rollout_setup(model, folder), training)


def rollout_setup(model: ModelConfig, folder: Path) -> RolloutSetup:
    return RolloutSetup(
        model,
        AgentGymConfig(task_name="textcraft", env_addr="http://127.0.0.1:1"),
        RolloutConfig(name="hf"),
        TokenLimits(8, 8, 8, 16),
        str(folder),
        seed=0,
    )


def learner_setup(model: ModelConfig) -> LearnerSetup:
    return LearnerSetup(model, OptimConfig(), max_token_len=100, grad_clip=1.0, total_updates=1, seed=0)


def player_of(worker: Worker) -> RolloutWorker:
    return worker if isinstance(worker, HybridWorker) else worker._need_player()


def test_an_engine_takes_weights_when_all_its_ranks_have_released_memory_and_they_release_what_gathering_took(
    worker: Worker, events: list[str]
) -> None:
    player_of(worker)._group = WatchedGroup(2, 0, events=(events,))
    worker.sync_weights(1)
    assert events == [
        RELEASED,
        "ranks have met",
        "engine wakes for weights",
        "engine has the weights",
        RELEASED,
    ]


def test_a_rank_that_lends_its_device_releases_memory_before_its_leaders_engine_wakes(
    worker: Worker, events: list[str]
) -> None:
    def give_weights(weights: Iterable[object]) -> None:
        take_all(weights)
        events.append("weights are shown to the leader's engine")

    player = player_of(worker)
    player._engine, player._group = Follower(give_weights), WatchedGroup(2, 1, events=(events,))
    worker.sync_weights(1)
    assert events == [RELEASED, "ranks have met", "weights are shown to the leader's engine", RELEASED]


@pytest.mark.parametrize("worker", ["ppo"], indirect=True)
def test_memory_is_released_before_a_steps_rollouts(worker: HybridWorker, events: list[str]) -> None:
    worker.start_step(1)
    order = RolloutOrder(1, 1, SamplingParams(max_tokens=1, temperature=1.0), "step1")
    worker.generate([], order)
    assert events == [RELEASED, "engine wakes", "engine sleeps"]


def test_memory_is_released_when_the_models_are_loaded_as_a_rollout_may_come_before_the_first_step(
    model: ModelConfig, context: WorkerContext, tmp_path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = HybridWorker._load_models

    def load_on_a_gpu(worker: HybridWorker, rollout: RolloutSetup, training: ActorSetup) -> None:
        load(worker, rollout, training)
        worker._device = GPU
        events.append("models are loaded")

    monkeypatch.setattr(HybridWorker, "_load_models", load_on_a_gpu)
    hybrid_worker(model, context, tmp_path).close()
    assert events == ["models are loaded", RELEASED]


def test_memory_is_released_where_a_module_leaves_the_device_once_for_all_uses_inside(events: list[str]) -> None:
    module = SimpleNamespace(to=lambda device: events.append(f"module to {torch.device(device).type}"))
    residence = Residence(module, GPU, offload_module=True)  # type: ignore[arg-type]
    events.clear()
    with residence.module_on_device():
        for _ in range(2):
            with residence.module_on_device():
                events.append("micro-batch")
    assert events == ["module to cuda", "micro-batch", "micro-batch", "module to cpu", RELEASED]


def test_what_refers_to_itself_is_found_before_memory_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = Cycle()
    alive: Callable[[], Cycle | None] = weakref.ref(dropped)
    found: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.append(alive() is None))
    del dropped
    release_cached(GPU)
    assert found == [True]


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_a_cpu_has_nothing_to_release(events: list[str]) -> None:
    release_cached(torch.device("cpu"))
    assert events == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_reference_that_is_dropped_is_gone(
    model: ModelConfig, context: WorkerContext, events: list[str], device: str
) -> None:
    worker = DPOWorker(context, learner_setup(model), None, DPOAlgorithmConfig())
    worker._device = torch.device(device)
    reference = sharded_module()
    alive = weakref.ref(reference)
    worker._reference = reference  # type: ignore[assignment]  # Of a reference it is the module that takes memory.
    del reference
    gc.disable()  # Nothing but the worker itself is to find it.
    try:
        worker.drop_reference()
        assert alive() is None
    finally:
        gc.enable()
        worker.close()
    assert events == ([RELEASED] if device == "cuda" else [])


def sharded_module() -> nn.Module:
    """One that was used, as FSDP sets it up for good at its first pass."""
    distributed.init_single_process_group(torch.device("cpu"))
    module = nn.Linear(2, 2)
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    module(torch.ones(1, 2))
    return module
