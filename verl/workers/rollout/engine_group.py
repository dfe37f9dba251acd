"""EngineGroup: the ranks whose devices one engine spans (tensor parallelism); Follower: what those without it hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from agentgym_rl.errors import EngineError
from agentgym_rl.types import Generation, SamplingParams
from verl.utils import distributed
from verl.workers.rollout.engine import Engine, EngineUsage, TimedWeights, WeightUpdateTimes

_ValueT = TypeVar("_ValueT")


@dataclass(frozen=True)
class EngineGroup:
    """Consecutive ranks that share one engine. The first of them leads: it owns the engine and its processes."""

    size: int = 1
    place: int = 0
    """This rank's among them."""
    visible_devices: tuple[str, ...] = ()
    """What ``CUDA_VISIBLE_DEVICES`` says on each of them; empty on a CPU and for a group of one."""
    members: dist.ProcessGroup | None = None
    """None: there is nobody to exchange anything with."""

    @classmethod
    def join(cls, size: int, device: torch.device) -> EngineGroup:
        """This rank's group; collective over all ranks, whose number ``size`` must divide.

        Raises `EngineError` where a rank does not see exactly one GPU.
        """
        if size == 1:
            return cls()
        members = distributed.neighbours(size)
        group = cls(size, distributed.rank() % size, members=members)
        if device.type != "cuda":
            return group
        return cls(size, group.place, tuple(group.exchange(_only_visible_device())), members)

    @property
    def leads(self) -> bool:
        return self.place == 0

    def exchange(self, value: _ValueT) -> list[_ValueT]:
        """The value that each rank of the group gives, in rank order; blocks until all have given theirs."""
        if self.members is None:
            return [value]
        values: list[_ValueT] = [value] * self.size
        dist.all_gather_object(values, value, group=self.members)
        return values

    def wait(self) -> None:
        """Return when all ranks of the group have come here."""
        self.exchange(None)


def _only_visible_device() -> str:
    """What names this rank's GPU to other processes. Ray shows each worker its own alone."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not visible or "," in visible:
        raise EngineError(
            f"rollout.tensor_model_parallel_size: CUDA_VISIBLE_DEVICES={visible!r} in the worker of rank "
            f"{distributed.rank()}: must name its GPU and no other"
        )
    return visible


class Follower(Engine):
    """The engine of a rank that lends its device to its group's leader: it samples nothing itself."""

    def __init__(self, give_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], object]) -> None:
        """``give_weights`` does this rank's part of an update, and runs the weights' iterator to its end."""
        self._give_weights = give_weights

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, trajectory_id: str) -> Generation:
        raise EngineError(f"{trajectory_id}: this rank has no engine; ask the first rank of its group")

    def release(self, trajectory_id: str) -> None:
        """Nothing is kept here."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdateTimes:
        timed = TimedWeights(weights)
        self._give_weights(timed)
        self.policy_version = version
        return WeightUpdateTimes(timed.seconds, transfer_s=0.0, load_s=0.0)

    def sleep(self) -> None:
        """The leader's engine gives the memory of all its devices back."""

    def wake(self) -> None:
        """The leader's engine takes the memory of all its devices."""

    def raise_if_down(self) -> None:
        """Nothing can break here."""

    def usage(self) -> EngineUsage:
        return EngineUsage()

    def close(self) -> None:
        """The engine ends with its leader."""
