"""A worker whose engine remembers what it sampled, to hold a trajectory's record against."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.types import Generation, SamplingParams
from verl.workers.hybrid import HybridWorker
from verl.workers.rollout.engine import Engine, EngineUsage, WeightUpdateTimes


class Recorder(Engine):
    """An engine, and a copy of all that it gave."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.generations: dict[str, list[Generation]] = defaultdict(list)
        """By trajectory, turn by turn."""

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, trajectory_id: str) -> Generation:
        generation = await self._engine.generate(prompt_ids, sampling, trajectory_id=trajectory_id)
        self.generations[trajectory_id].append(generation)
        return generation

    def release(self, trajectory_id: str) -> None:
        self._engine.release(trajectory_id)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdateTimes:
        return self._engine.load_weights(weights, version)

    def sleep(self) -> None:
        self._engine.sleep()

    def wake(self) -> None:
        self._engine.wake()

    def raise_if_down(self) -> None:
        self._engine.raise_if_down()

    def usage(self) -> EngineUsage:
        return self._engine.usage()

    def close(self) -> None:
        self._engine.close()


class RecordingWorker(HybridWorker):
    """Plays and computes as in training; `generations` tells what its engine gave."""

    _recorder: Recorder

    def _make_engine(self) -> tuple[Engine, ChatTemplate]:
        engine, chat = super()._make_engine()
        self._recorder = Recorder(engine)
        return self._recorder, chat

    def generations(self) -> dict[str, list[Generation]]:
        """By trajectory, turn by turn."""
        return dict(self._recorder.generations)
