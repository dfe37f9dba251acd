"""How many threads each process may compute with: the one place that decides it.

Two busy processes with two threads each are about ten times slower on two cores than with one thread each: their
threads wait for one another while spinning. So every process that this project starts (workers with their engine
and tokenizer, environment servers, the driver) gets its number from here.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",  # torch's own loops
    "MKL_NUM_THREADS",  # torch's matrix products on x86
    "OPENBLAS_NUM_THREADS",  # numpy
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",  # the tokenizers library
)


def available_cores() -> int:
    """Cores that this process may run on, at least 1; respects CPU affinity where the system has it."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return max(1, os.cpu_count() or 1)


def threads_per_worker(num_workers: int, *, cores: int | None = None) -> int:
    """Threads for each of ``num_workers`` busy processes of one machine, at least 1.

    One core is left to the environment server and the driver, which work while the workers do.
    """
    if num_workers < 1:
        raise ValueError(f"num_workers={num_workers}: must be at least 1")
    cores = available_cores() if cores is None else cores
    return max(1, (cores - 1) // num_workers)


def thread_environment(num_threads: int) -> dict[str, str]:
    """Environment variables that hold a process started with them to ``num_threads`` compute threads."""
    if num_threads < 1:
        raise ValueError(f"num_threads={num_threads}: must be at least 1")
    # A tokenizer that is used from many request threads gains nothing from a pool of its own.
    return dict.fromkeys(_THREAD_VARIABLES, str(num_threads)) | {"TOKENIZERS_PARALLELISM": "false"}


def limit_threads(num_threads: int, environ: MutableMapping[str, str] | None = None) -> None:
    """Hold this process to ``num_threads``: changes ``environ`` (default: the process's own) in place.

    Libraries read these variables when they are first imported, so call it before importing numpy, torch or tokenizers.
    """
    (os.environ if environ is None else environ).update(thread_environment(num_threads))
