"""The device that a worker computes on, and the process group of its peers."""

from __future__ import annotations

import resource
import sys

import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from agentgym_rl.errors import ConfigError
from verl.single_controller.base import WorkerContext


def resolve_device(name: str) -> str:
    """``cpu`` or ``cuda`` for ``trainer.device``; raises `ConfigError` for ``cuda`` on a machine without."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device='cuda': torch finds no CUDA device here; take cpu or auto")
    return name


def join_peers(context: WorkerContext) -> torch.device:
    """Set this worker's threads, form the process group of all workers, and return this worker's device.

    Collectives take CPU tensors over gloo and CUDA ones over nccl.
    """
    torch.set_num_threads(context.num_threads)
    disable_progress_bar()  # A bar per model and worker would drown the driver's own.
    # Ray shows each worker its own GPU alone, so that it is number 0 everywhere.
    device = torch.device("cuda", 0) if context.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("process_group", context.store),
        rank=context.rank,
        world_size=context.world_size,
    )
    return device


def peak_memory_gib(device: torch.device) -> float:
    """The most memory that this process held so far: on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
