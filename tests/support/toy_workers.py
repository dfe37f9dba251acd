"""Small workers that the tests of worker groups run in other processes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import ray
import torch
import torch.distributed as dist

from agentgym_rl.rollout.handler import RolloutRequest
from verl.single_controller.base import WorkerContext
from verl.workers.rollout.hand_out import HandOut


class Calculator:
    """Knows its rank, sums over ranks, fails on demand."""

    def __init__(self, context: WorkerContext, offset: int = 0) -> None:
        self._context = context
        self._offset = offset

    def where(self) -> tuple[int, int, int]:
        return self._context.rank, self._context.world_size, os.getpid()

    def add(self, value: int) -> int:
        return value + self._offset

    def sum_of_ranks(self) -> int:
        context = self._context
        dist.init_process_group("gloo", store=context.store, rank=context.rank, world_size=context.world_size)
        total = torch.tensor(context.rank + 1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        return int(total)

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def work(self, units: int) -> None:
        for _ in range(units):
            self._context.report(1)

    def take_up(self, requests: Sequence[RolloutRequest]) -> list[int]:
        """What falls to this worker; request 0 is not finished before all others are."""
        store, hand_out = self._context.store, HandOut(requests, self._context.store, name="test")
        for index in hand_out:
            store.add("finished", int(index > 0))
            while index == 0 and store.add("finished", 0) < len(requests) - 1:
                time.sleep(0.01)
        hand_out.forget(num_workers=self._context.world_size)
        return hand_out.taken

    def fail_on(self, rank: int) -> None:
        if self._context.rank == rank:
            raise ZeroDivisionError(f"rank {rank} divides by zero")
        time.sleep(600)

    def die_on(self, rank: int) -> None:
        if self._context.rank == rank:
            os._exit(3)
        time.sleep(600)

    def close(self) -> None:
        pass


class BornBroken:
    """Fails while it is made, on one rank; the others would wait for ever."""

    def __init__(self, context: WorkerContext) -> None:
        if context.rank == 1:
            raise FileNotFoundError("no weights here")
        time.sleep(600)
