"""Discounted sums from the end, over many sequences laid end to end at once.

Axes: ``S`` places, ``O`` those of them that hold a decay unlike the others, ``N`` blocks of ``L`` = `BLOCK` places
each, ``M`` blocks with such places.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

BLOCK = 32
"""Places that one row of a matrix product covers; 16 to 64 take about the same time."""
_FEW = 2048
"""Places that a plain loop takes no longer for than the calls of one more level of blocks."""


@dataclass(frozen=True, eq=False)
class Decay:
    """The factor at each of ``S`` places on what the next place brings: one and the same but at a few places."""

    common: float
    odd_O: np.ndarray
    """int64, rising: the places with another factor, such as the ends of sequences and turns."""
    factors_O: torch.Tensor
    """float64: theirs; 0 ends a sequence."""

    def times(self, factor: float) -> Decay:
        """Each factor times ``factor``."""
        return Decay(self.common * factor, self.odd_O, self.factors_O * factor)


def suffix_sums(values_S: torch.Tensor, decay: Decay) -> torch.Tensor:
    """``y[s] = values[s] + decay[s] * y[s + 1]``, in the type of ``values_S``.

    A blocked scan (Blelloch 1990, "Prefix sums and their applications"): every block alone, then the same for the sums
    that blocks hand to those before them, then both together. No loop is longer than a few thousand places. Nothing is
    ever divided by a small factor or taken from a large sum, so that precision does not suffer.
    """
    if len(values_S) <= _FEW:
        return _one_by_one(values_S, decay)
    values_NL = _blocks(values_S)
    # By NumPy, which lays large arrays on large pages: page faults of a fresh tensor take longer than the product.
    sums_NL = torch.from_numpy(values_NL.numpy() @ _powers_below_diagonal(decay.common, values_S.dtype).numpy())
    # Blocks in which all places have the same decay, nearly all, are done; those that hold others go place by place.
    odd_blocks_M, decay_ML = _odd_blocks(decay, values_S.dtype)
    odd_M = torch.from_numpy(odd_blocks_M)
    odd_sums_ML, odd_reach_ML = _place_by_place(values_NL[odd_M], decay_ML)
    sums_NL[odd_M] = odd_sums_ML
    # What comes into a block from behind: the whole sum at the next block's first place.
    reach = Decay(decay.common**BLOCK, odd_blocks_M, odd_reach_ML[:, 0].double())
    carry_N = suffix_sums(sums_NL[:, 0], reach).roll(-1)
    carry_N[-1] = 0.0
    sums_NL.addr_(carry_N, _powers(decay.common, torch.arange(BLOCK, 0, -1), values_S.dtype))
    sums_NL[odd_M] = odd_sums_ML.addcmul_(odd_reach_ML, carry_N[odd_M, None])
    return sums_NL.view(-1)[: len(values_S)]


def _one_by_one(values_S: torch.Tensor, decay: Decay) -> torch.Tensor:
    # NumPy would make integers of an integer's kind, and truncate the other factors to them.
    factors_S = np.full(len(values_S), decay.common, dtype=np.float64)
    factors_S[decay.odd_O] = decay.factors_O.numpy()
    total, sums = 0.0, []
    for value, factor in zip(reversed(values_S.tolist()), reversed(factors_S.tolist()), strict=True):
        total = value + factor * total
        sums.append(total)
    return torch.tensor(sums[::-1], dtype=values_S.dtype)


def _blocks(values_S: torch.Tensor) -> torch.Tensor:
    short = -len(values_S) % BLOCK
    padded_S = torch.cat([values_S, values_S.new_zeros(short)]) if short else values_S.contiguous()
    return padded_S.view(-1, BLOCK)


def _powers(decay: float, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (torch.tensor(decay, dtype=torch.float64) ** exponents).to(dtype)


def _powers_below_diagonal(decay: float, dtype: torch.dtype) -> torch.Tensor:
    """``[L, L]``: what place ``i`` adds to place ``j`` of its block, where all places have this decay."""
    steps_L = torch.arange(BLOCK)
    distance_LL = steps_L[:, None] - steps_L
    return torch.where(distance_LL >= 0, _powers(decay, distance_LL.clamp(min=0), dtype), 0.0)


def _odd_blocks(decay: Decay, dtype: torch.dtype) -> tuple[np.ndarray, torch.Tensor]:
    """Which blocks hold places with a decay of their own, and the decay at all of their places."""
    odd_M, block_O = np.unique(decay.odd_O // BLOCK, return_inverse=True)
    decay_ML = torch.full((len(odd_M), BLOCK), decay.common, dtype=dtype)
    decay_ML[block_O, decay.odd_O % BLOCK] = decay.factors_O.to(dtype)
    return odd_M, decay_ML


def _place_by_place(values_ML: torch.Tensor, decay_ML: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of each block alone, and the factor with which what follows the block reaches each of its places."""
    # Transposed, so that each of the steps reads and writes one stretch of memory.
    values_LM, decay_LM = values_ML.T.contiguous(), decay_ML.T.contiguous()
    for place in range(BLOCK - 2, -1, -1):
        values_LM[place].addcmul_(decay_LM[place], values_LM[place + 1])
        decay_LM[place].mul_(decay_LM[place + 1])
    return values_LM.T.contiguous(), decay_LM.T.contiguous()
