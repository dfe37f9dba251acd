"""How a worker takes its place among its peers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from verl.single_controller.base import WorkerContext
from verl.utils.distributed import init_process_group


def join_peers(context: WorkerContext) -> torch.device:
    """Set this worker's threads, form the process group of all workers, and return this worker's device."""
    torch.set_num_threads(context.num_threads)
    disable_progress_bar()  # A bar per model and worker would drown the driver's own.
    # Ray shows each worker its own GPU alone, so that it is number 0 everywhere.
    device = torch.device("cuda", 0) if context.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.PrefixStore("process_group", context.store)
    init_process_group(store, rank=context.rank, world_size=context.world_size, device=device)
    return device
