"""Reference: the frozen policy that KL terms are taken to."""

from __future__ import annotations

import torch

from verl.config import ModelConfig, RefConfig
from verl.protocol import DataProto
from verl.workers.language_model import MicroBatchLimits, load_policy_module, packed_log_probs


class Reference:
    """Log-probs under weights that never change; in a process group of several ranks its methods are collective."""

    def __init__(
        self, model_config: ModelConfig, ref_config: RefConfig, *, device: torch.device | str, temperature: float
    ) -> None:
        """``temperature`` is that of sampling. Raises `ConfigError` as `load_policy`."""
        self.device = torch.device(device)
        self._module, _ = load_policy_module(model_config, self.device, temperature)
        self._module.requires_grad_(False).eval()
        self._limits = MicroBatchLimits(max_tokens=ref_config.log_prob_max_token_len_per_gpu)

    def log_probs(self, batch: DataProto) -> torch.Tensor:
        """Log-probs ``T`` of the batch's loss tokens, 0 elsewhere; float32 nats on the CPU."""
        log_probs_T, _ = packed_log_probs(self._module, batch, self._limits, self.device)
        return log_probs_T
