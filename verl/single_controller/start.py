"""Starts the worker group that a run's configuration asks for."""

from __future__ import annotations

from verl.config import RayInitConfig, WorkersConfig
from verl.single_controller.base import WorkerGroup, WorkerSpec
from verl.single_controller.signals import sigterm_handler_kept


def start_workers(spec: WorkerSpec, trainer: WorkersConfig, ray_init: RayInitConfig | None = None) -> WorkerGroup:
    """The group of ``trainer.worker_group`` with ``nnodes`` x ``n_gpus_per_node`` workers."""
    if trainer.worker_group == "local":
        from verl.single_controller.local import LocalWorkerGroup

        return LocalWorkerGroup(spec, world_size=trainer.world_size)
    with sigterm_handler_kept():
        # Debugging in one process needs no Ray, so it is not imported for it.
        from verl.single_controller.ray import RayWorkerGroup

    return RayWorkerGroup(
        spec, nnodes=trainer.nnodes, workers_per_node=trainer.n_gpus_per_node, ray_init=ray_init or RayInitConfig()
    )
