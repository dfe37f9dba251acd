"""Runs a program as several ranks over gloo, each a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from verl.utils import distributed

TESTS = Path(__file__).parents[1]
RANK_TIMEOUT_S = 240


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(module: str, world_size: int, *arguments: object) -> None:
    """Run ``python -m module RANK WORLD PORT *arguments`` for all ranks at once.

    A failed or stuck rank fails the test and leaves no process.
    """
    port = free_port()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, *map(str, (rank, world_size, port, *arguments))],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=RANK_TIMEOUT_S)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def join(rank: int, world_size: int, port: int) -> None:
    """Called by a rank's program: meet the others, of which there may be none."""
    torch.set_num_threads(1)
    if world_size > 1:
        store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
        distributed.init_process_group(store, rank=rank, world_size=world_size, device=torch.device("cpu"))


def leave() -> NoReturn:
    """Called by a rank's program at its end: it has done what it should, and ends with 0.

    Gloo's threads outlive the group that is destroyed. An interpreter that clears itself away beside them ended once
    with "terminate called without an active exception", so the process ends at once.
    """
    distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
