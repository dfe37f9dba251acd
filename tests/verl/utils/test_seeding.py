"""Random states come back as they were, and a disk that cannot hold them is told as what it is."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from verl.utils.seeding import load_random_state, random_state, save_random_state


def test_a_saved_state_goes_on_where_it_was(tmp_path: Path) -> None:
    save_random_state(tmp_path / "random" / "0.pt", random_state())
    expected = (random.random(), torch.rand(3).tolist())
    load_random_state(tmp_path / "random" / "0.pt")
    assert (random.random(), torch.rand(3).tolist()) == expected


def test_a_full_disk_is_told_as_such() -> None:
    with pytest.raises(OSError, match="No space left on device"):
        save_random_state(Path("/dev/full"), random_state())
