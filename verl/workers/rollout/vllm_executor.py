"""The executor of an engine process that ends with its owner. Loaded in vLLM's process, and in its owner's by name."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

from vllm.v1.executor.uniproc_executor import UniProcExecutor

import verl.workers.rollout.vllm_weights  # noqa: F401 -- registers the transfer through shared memory

_PR_SET_PDEATHSIG = 1


class OwnedExecutor(UniProcExecutor):
    """vLLM's executor for one device, in the engine's own process."""

    def _init_executor(self) -> None:
        end_with_parent()
        super()._init_executor()


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
