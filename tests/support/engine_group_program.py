"""One of several ranks that form engine groups over gloo and check what they then know of each other.

Usage: ``python -m support.engine_group_program RANK WORLD PORT SIZE``
"""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.distributed as dist

from agentgym_rl.errors import EngineError
from verl.utils import distributed
from verl.workers.rollout.engine_group import EngineGroup


def main(rank: int, world_size: int, port: int, size: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    distributed.init_process_group(store, rank=rank, world_size=world_size, device=torch.device("cpu"))
    first = rank - rank % size
    members = list(range(first, first + size))
    group = EngineGroup.join(size, torch.device("cpu"))
    assert (group.size, group.place, group.leads) == (size, rank - first, rank == first)
    assert group.visible_devices == ()
    assert group.exchange(rank) == members
    # Each worker of CUDA sees its own GPU alone, and may know it by any name.
    os.environ["CUDA_VISIBLE_DEVICES"] = f"GPU-{rank}"
    assert EngineGroup.join(size, torch.device("cuda")).visible_devices == tuple(f"GPU-{each}" for each in members)
    for visible in ("", "0,1"):
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
        with pytest.raises(EngineError, match=f"CUDA_VISIBLE_DEVICES='{visible}' in the worker of rank {rank}"):
            EngineGroup.join(size, torch.device("cuda"))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
