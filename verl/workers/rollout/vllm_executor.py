"""Executors of engine processes that end with their owner. Loaded in vLLM's processes, and in their owner's by name."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
from pathlib import Path

from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

import verl.workers.rollout.vllm_weights  # noqa: F401 -- registers the transfer through shared memory

_PR_SET_PDEATHSIG = 1
_SHARED_MEMORY = Path("/dev/shm")


class OwnedExecutor(UniProcExecutor):
    """vLLM's executor for one device, in the engine's own process."""

    def _init_executor(self) -> None:
        end_with_parent()
        super()._init_executor()


class OwnedGroupExecutor(MultiprocExecutor):
    """vLLM's executor for several devices: a process for each, which the engine's own process starts and ends."""

    def _init_executor(self) -> None:
        end_with_parent()
        super()._init_executor()
        _forget_names()
        self.collective_rpc(_settle)


def _settle(worker: object) -> None:
    """In the process of each device, once all are connected: leave nothing behind however this process ends."""
    end_with_parent()
    _forget_names()


def _forget_names() -> None:
    """Take away the names of this process's shared memory, which all that use it have mapped by now.

    The kernel then frees it with its last user. vLLM would do so only in a process that ends in order.
    """
    for ring in gc.get_objects():
        if isinstance(ring, ShmRingBuffer) and ring.is_creator:
            ring.shared_memory.unlink()
            ring.is_creator = False
    # On a CPU, activations are exchanged through these.
    if identifier := os.environ.get("VLLM_DIST_IDENT"):
        for segment in _SHARED_MEMORY.glob(f"{identifier}-*-cpushm_*"):
            segment.unlink(missing_ok=True)


def end_with_parent() -> None:
    """Have the kernel end this process when the thread that started it is gone, however it went (Linux).

    vLLM's engine waits on sockets and would outlive an owner that was killed, holding its memory.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)  # It went before the request was made.
