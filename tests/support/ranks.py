"""Runs a program as several ranks over gloo, each a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

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
