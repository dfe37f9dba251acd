"""LocalWorkerGroup: one worker in the driver's own process, for debugging on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed

from agentgym_rl.errors import ConfigError
from verl.single_controller.base import Report, WorkerContext, WorkerGroup, WorkerSpec
from verl.utils.distributed import destroy_process_group


class LocalWorkerGroup(WorkerGroup):
    """Exceptions travel up unchanged, so that a debugger stops where they are raised."""

    def __init__(self, spec: WorkerSpec, *, world_size: int = 1) -> None:
        """Make the worker; raises `ConfigError` for a ``world_size`` other than 1."""
        if world_size != 1:
            raise ConfigError(
                f"trainer.worker_group=local with {world_size} workers: it runs one worker in the driver's process; "
                "take worker_group=ray or trainer.nnodes=1 trainer.n_gpus_per_node=1"
            )
        self.world_size = 1
        self._on_progress: Report | None = None
        self._is_interrupted = False
        context = WorkerContext(
            rank=0,
            world_size=1,
            num_threads=spec.num_threads,
            device=spec.device,
            store=torch.distributed.HashStore(),
            report=self._report,
            is_interrupted=lambda: self._is_interrupted,
        )
        try:
            self._worker: Any = spec.worker_class()(context, *spec.args)
        except BaseException:
            destroy_process_group()  # of this process, which lives on
            raise

    def call_each(
        self,
        method: str,
        args: Sequence[tuple[Any, ...]],
        *,
        on_progress: Report | None = None,
        interruptible: bool = False,
    ) -> list[Any]:
        self._on_progress = on_progress
        return [getattr(self._worker, method)(*args[0])]

    def interrupt(self) -> None:
        self._is_interrupted = True

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _report(self, count: int) -> None:
        if self._on_progress is not None:
            self._on_progress(count)
