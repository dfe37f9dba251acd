"""Seeds: every random stream of a run is derived from the run's seed and from what it is for."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np

from agentgym_rl.seeds import derive_seed

__all__ = ["derive_seed", "load_random_state", "random_state", "save_random_state", "seed_everything"]


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's global generators of this process."""
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def save_random_state(path: Path, state: dict[str, Any]) -> None:
    """Write what `random_state` returned."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    torch.save(state, content)
    # Not by torch itself, which does not say that the disk is full when it is.
    path.write_bytes(content.getbuffer())


def load_random_state(path: Path) -> None:
    """Put this process's global generators where `random_state` found those of the process that wrote ``path``."""
    import torch

    state = torch.load(path, weights_only=False)  # our own file: tuples of Python and numpy
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def random_state() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's global generators, and of the current CUDA device's; copies."""
    import torch

    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})
