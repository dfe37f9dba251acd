"""The device that a run computes on. torch is imported when it is asked: a misspelled key is found without it."""

from __future__ import annotations

import gc
import os
import resource
import sys
from typing import TYPE_CHECKING

from agentgym_rl.errors import ConfigError

if TYPE_CHECKING:
    import torch


def resolve_device(name: str) -> str:
    """``cpu`` or ``cuda`` for ``trainer.device``; raises `ConfigError` for ``cuda`` on a machine without."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    # Workers of a cluster may have the devices that the driver's own machine lacks.
    if name == "cuda" and not torch.cuda.is_available() and not os.environ.get("RAY_ADDRESS"):
        raise ConfigError("trainer.device='cuda': torch finds no CUDA device here; take cpu or auto")
    return name


def device_name(device: torch.device) -> str:
    """What the driver calls a GPU; ``cpu`` for a CPU."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def peak_memory_gib(device: torch.device) -> dict[str, float]:
    """The most memory that this process held so far, by metric.

    ``perf/max_memory_gib`` is what counts: tensors on the GPU, or resident memory on a CPU. On a GPU there are also
    ``perf/max_memory_reserved_gib``, which torch took of it, and ``perf/max_host_memory_gib``, resident memory.
    """
    import torch

    unit = 1 if sys.platform == "darwin" else 1024
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
    if device.type != "cuda":
        return {"perf/max_memory_gib": resident}
    return {
        "perf/max_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        "perf/max_memory_reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
        "perf/max_host_memory_gib": resident,
    }


def release_cached(device: torch.device) -> None:
    """Give back what torch holds of a GPU's memory for later, so that other processes can have it.

    Takes tenths of a second, and torch asks for memory anew afterwards: for the ends of phases, not of micro-batches.
    """
    import torch

    if device.type == "cuda":
        gc.collect()  # A module of FSDP refers to itself, and is there until this finds that nobody else does.
        torch.cuda.empty_cache()
