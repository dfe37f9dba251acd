"""Whether checkpoints are whole: all of their parts load and belong together."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

Weights = dict[str, torch.Tensor]


class CheckpointChecks:
    """Looks at each complete checkpoint of a run once."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._seen: set[tuple[str, int]] = set()
        self.num_checked = 0
        self.problems: list[str] = []

    def look(self) -> None:
        """Check what has come since the last look. The run must not be writing."""
        for folder in sorted(self._run.glob("global_step_*")):
            key = (folder.name, folder.stat().st_mtime_ns)
            if folder.suffix == ".unfinished" or key in self._seen:
                continue
            self._seen.add(key)
            self.num_checked += 1
            try:
                problem = _problem(folder)
            except (OSError, ValueError, KeyError, RuntimeError, CheckpointException) as error:
                problem = f"{type(error).__name__}: {error}"
            if problem:
                self.problems.append(f"{folder.name}: {problem}")


def _problem(folder: Path) -> str:
    """What is wrong with a checkpoint; empty when nothing is."""
    step = int(folder.name.removeprefix("global_step_"))
    said = json.loads((folder / "trainer.json").read_text())["step"]
    if said != step:
        return f"its trainer.json is of step {said}"
    state, exported = shards(folder), exported_weights(folder)
    if state["schedule"]["num_updates"] != step:
        return f"{state['schedule']['num_updates']} updates in {step} steps, each of which makes one"
    for name, tensor in exported.items():
        trained = state["model"].get(f"model.{name}")
        if trained is None or not torch.equal(trained, tensor):
            return f"{name} is not the same in shards and export"
    return ""


def shards(folder: Path) -> dict[str, Any]:
    """What the workers' shards of a checkpoint hold together."""
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "whole.pt"
        dcp_to_torch_save(folder / "actor", whole)
        state: dict[str, Any] = torch.load(whole, weights_only=False)
    return state


def exported_weights(folder: Path) -> Weights:
    """The weights that transformers and vLLM would load."""
    weights: Weights = load_file(folder / "actor" / "huggingface" / "model.safetensors")
    return weights


def difference(first: Path, second: Path) -> str:
    """How the weights of two checkpoints differ; empty when they agree to the last bit."""
    ours, theirs = exported_weights(first), exported_weights(second)
    if ours.keys() != theirs.keys():
        return "they have different tensors"
    for name, tensor in ours.items():
        if not torch.equal(tensor, theirs[name]):
            return f"{name} differs by up to {float((tensor - theirs[name]).abs().max()):g}"
    return ""
