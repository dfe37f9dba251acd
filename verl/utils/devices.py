"""The device that a run computes on."""

from __future__ import annotations

import os
import resource
import sys

import torch

from agentgym_rl.errors import ConfigError


def resolve_device(name: str) -> str:
    """``cpu`` or ``cuda`` for ``trainer.device``; raises `ConfigError` for ``cuda`` on a machine without."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    # Workers of a cluster may have the devices that the driver's own machine lacks.
    if name == "cuda" and not torch.cuda.is_available() and not os.environ.get("RAY_ADDRESS"):
        raise ConfigError("trainer.device='cuda': torch finds no CUDA device here; take cpu or auto")
    return name


def peak_memory_gib(device: torch.device) -> float:
    """The most memory that this process held so far: on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
