"""How a worker takes its place among its peers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from verl.single_controller.base import WorkerContext


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
