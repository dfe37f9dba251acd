"""One of several ranks that form engine groups over gloo and check what they then know of each other.

Usage: ``python -m support.engine_group_program RANK WORLD PORT SIZE``
"""

from __future__ import annotations

import os
import sys

import pytest
import torch
from support.ranks import join, leave

from agentgym_rl.errors import EngineError
from verl.workers.rollout.engine_group import EngineGroup


def main(rank: int, world_size: int, port: int, size: int) -> None:
    join(rank, world_size, port)
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
    leave()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
