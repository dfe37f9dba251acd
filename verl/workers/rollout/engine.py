"""Engine: the inference side of the policy, as workers see it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch

from agentgym_rl.types import Generation, SamplingParams


class Engine(ABC):
    """Samples turns with the weights it was last given. Satisfies `agentgym_rl.types.TokenGenerator`."""

    policy_version: int = 0

    @abstractmethod
    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, trajectory_id: str) -> Generation:
        """Sample one turn after ``prompt_ids``, the whole sequence so far; see `TokenGenerator.generate`."""

    @abstractmethod
    def release(self, trajectory_id: str) -> None:
        """Free what is kept for this trajectory; unknown ids are ignored."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take new weights (full tensors under the Hugging Face names) and drop every cache made with the old ones."""

    @abstractmethod
    def sleep(self) -> None:
        """Free cache memory while the actor trains."""

    @abstractmethod
    def wake(self) -> None:
        """Get ready to generate again."""

    @abstractmethod
    def close(self) -> None:
        """End the engine; requests in flight fail with `EngineError`."""
