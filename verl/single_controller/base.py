"""WorkerGroup: calls methods of one worker per device, as the trainer sees them."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from agentgym_rl.errors import AgentGymError

if TYPE_CHECKING:
    import torch.distributed

Report = Callable[[int], object]
"""Called with the number of units of work that were finished since the last call."""


class WorkerError(AgentGymError):
    """A worker raised or died; the first one that did."""

    def __init__(self, rank: int, world_size: int, cause: Exception | None, worker_traceback: str) -> None:
        """``cause``: the worker's own exception, None when its process died."""
        what = f"{type(cause).__name__}: {cause}" if cause is not None else "its process died"
        super().__init__(f"worker {rank} of {world_size} failed: {what}")
        self.rank = rank
        self.cause = cause
        self.worker_traceback = worker_traceback


class Interrupted(AgentGymError):
    """Work that can be given up without a trace was given up, because `WorkerGroup.interrupt` asked for it."""


class ClusterError(AgentGymError):
    """What runs the workers, a process of Ray's own, has died."""


def _never() -> bool:
    return False


@dataclass(frozen=True)
class WorkerContext:
    """What a worker knows of its place in the group."""

    rank: int
    world_size: int
    num_threads: int
    """Compute threads of this worker."""
    device: str
    """``cpu`` or ``cuda``."""
    store: torch.distributed.Store
    """Rendezvous of ``torch.distributed``."""
    report: Report
    """Tells the driver how many units of a call's work are done."""
    is_interrupted: Callable[[], bool] = _never
    """True once the driver wants what can be given up to end with `Interrupted`."""


@dataclass(frozen=True)
class WorkerSpec:
    """How to make the workers of a group: ``class(context, *args)`` for each rank."""

    class_path: str
    """``package.module:Class``: imported in the worker's process after its environment is set."""
    args: tuple[Any, ...]
    num_threads: int
    device: str

    def worker_class(self) -> type:
        module, name = self.class_path.split(":")
        return getattr(importlib.import_module(module), name)


class WorkerGroup(ABC):
    """One worker per device, in rank order. A context manager: leaving it ends the workers."""

    world_size: int

    @abstractmethod
    def call_each(
        self,
        method: str,
        args: Sequence[tuple[Any, ...]],
        *,
        on_progress: Report | None = None,
        interruptible: bool = False,
    ) -> list[Any]:
        """Call ``method`` on every worker at once, on rank r with ``args[r]``; results by rank.

        ``on_progress`` gets what the workers report while they work. ``interruptible``: the method heeds
        `WorkerContext.is_interrupted`, and is given time for it when the group is shut down during the call.
        Raises `WorkerError` at the first worker's failure, `ClusterError` if what runs the workers has died,
        `Interrupted` after `interrupt`.
        """

    def call_all(
        self, method: str, *args: Any, on_progress: Report | None = None, interruptible: bool = False
    ) -> list[Any]:
        """Call ``method`` on every worker with the same arguments; results by rank."""
        each = [args] * self.world_size
        return self.call_each(method, each, on_progress=on_progress, interruptible=interruptible)

    @abstractmethod
    def interrupt(self) -> None:
        """Make calls that can be given up, now and from now on, raise `Interrupted`; other calls work as before.

        Returns at once, so that it may be called while this process waits for a call.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers, in limited time whatever has died before; harmless when repeated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
