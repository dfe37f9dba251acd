"""Ulysses sequence parallelism: a group of ranks shares the tokens of one packed row.

Each rank computes everything but attention for its own stretch of the row. For attention the ranks exchange: instead of
all heads of its stretch, a rank then holds its share of the heads for the whole row, and afterwards they exchange back.
Jacobs et al. 2023, https://arxiv.org/abs/2309.14509.
Axes: ``T`` tokens of the row, ``P`` tokens of one rank's stretch, ``H`` heads, ``D`` head size, ``R`` ranks, ``S``
loss tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from agentgym_rl.errors import ConfigError


@dataclass(frozen=True, eq=False)
class SequenceParallel:
    """The ranks that share a row, and this rank's place among them."""

    group: dist.ProcessGroup
    size: int
    rank: int

    def stretch(self, num_tokens: int) -> slice:
        """This rank's part of a row of ``num_tokens``, a multiple of `size`."""
        length = num_tokens // self.size
        return slice(self.rank * length, (self.rank + 1) * length)

    def gather_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[1, H, P, D]`` of this rank's stretch to ``[1, H / R, T, D]``: its share of heads, for all tokens."""
        _, heads, length, size = tensor.shape
        parts = tensor.reshape(self.size, heads // self.size, length, size)
        received = _Exchange.apply(parts, self.group)
        return received.permute(1, 0, 2, 3).reshape(1, heads // self.size, self.size * length, size)

    def scatter_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """Back: ``[1, T, H / R, D]`` to ``[1, P, H, D]``."""
        _, tokens, heads, size = tensor.shape
        parts = tensor.reshape(self.size, tokens // self.size, heads, size)
        received = _Exchange.apply(parts, self.group)
        return received.permute(1, 0, 2, 3).reshape(1, tokens // self.size, self.size * heads, size)

    def share_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """Keys or values ``[1, K, P, D]``, heads repeated as often as needed so that each rank gets a whole number."""
        return tensor.repeat_interleave(math.lcm(tensor.shape[1], self.size) // tensor.shape[1], dim=1)

    def merge(self, own_S: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, each with numbers where the others have 0; gradients go to whose the numbers are."""
        return _Merge.apply(own_S, self.group)


def check_heads(config: PretrainedConfig, size: int) -> None:
    """Raise `ConfigError` unless ``size`` ranks can share out the heads of this model."""
    heads = config.num_attention_heads
    groups = heads // (getattr(config, "num_key_value_heads", None) or heads)
    kv_heads = heads // groups
    if heads % size or groups % (math.lcm(kv_heads, size) // kv_heads):
        raise ConfigError(
            f"ulysses_sequence_parallel_size={size}: model {config.model_type!r} has {heads} heads and {kv_heads} "
            "key/value heads, which so many ranks cannot share evenly"
        )


class _Exchange(torch.autograd.Function):
    """Part ``i`` of ``[R, ...]`` goes to rank ``i``; comes back with what each rank sent here, in rank order."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchange(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchange(grads[0], ctx.group), None


def _exchange(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


class _Merge(torch.autograd.Function):
    """All ranks compute the same loss of the merged numbers, so each takes the gradient of its own and no other's."""

    @staticmethod
    def forward(ctx: Any, own_S: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        merged_S = own_S.clone()
        dist.all_reduce(merged_S, group=group)
        return merged_S

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None
