"""The agent of a fault run: it acts as ``act`` does, and brings a way to have the model itself raise.

Where the file named by ``AGENTGYM_FAULTS_TRIGGER`` exists, the next forward pass of an engine takes it away and raises
in its place, as it would where memory runs out.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from agentgym_rl.agent.strategies import Act

__all__ = ["Act"]

TRIGGER_VARIABLE = "AGENTGYM_FAULTS_TRIGGER"


def _raise_when_asked(module: torch.nn.Module, inputs: Any) -> None:
    # Engines alone compute in inference mode; training has faults of other kinds.
    if not torch.is_inference_mode_enabled() or not type(module).__name__.endswith("ForCausalLM"):
        return
    try:
        os.unlink(os.environ.get(TRIGGER_VARIABLE, ""))  # by one worker alone
    except FileNotFoundError:
        return
    raise RuntimeError("raised by the fault run, as when memory runs out")


register_module_forward_pre_hook(_raise_when_asked)
