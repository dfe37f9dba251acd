"""Discounted sums from the end, over many sequences laid end to end at once.

Axes: ``S`` places, ``N`` blocks of ``L`` = `BLOCK` places each, ``O`` blocks that hold a decay unlike the others.
"""

from __future__ import annotations

import numpy as np
import torch

BLOCK = 32
"""Places that one row of a matrix product covers; 16 to 64 take about the same time."""


def suffix_sums(values_S: torch.Tensor, decay_S: torch.Tensor) -> torch.Tensor:
    """``y[s] = values[s] + decay[s] * y[s + 1]``, in the type of ``values_S``; a decay of 0 ends a sequence.

    A blocked scan (Blelloch 1990, "Prefix sums and their applications"): every block alone, then the same for the sums
    that blocks hand to those before them, then both together. No loop is longer than `BLOCK`. Nothing is ever divided
    by a small factor or taken from a large sum, so that precision does not suffer.
    """
    if len(values_S) <= 1:
        return values_S.clone()
    num_blocks = -(-len(values_S) // BLOCK)
    values_NL, decay_NL = _blocks(values_S, num_blocks), _blocks(decay_S.to(values_S.dtype), num_blocks)
    # Nearly all places have the same decay. Ends of turns and sequences, the exceptions, have a smaller one.
    common = decay_NL.max()
    odd_O = torch.from_numpy(np.unique(np.flatnonzero((decay_NL != common).numpy()) // BLOCK))
    sums_NL = values_NL @ _powers_below_diagonal(common)
    odd_sums_OL, odd_reach_OL = _place_by_place(values_NL[odd_O], decay_NL[odd_O])
    sums_NL[odd_O] = odd_sums_OL
    if num_blocks > 1:
        reach_N = (common**BLOCK).repeat(num_blocks)
        reach_N[odd_O] = odd_reach_OL[:, 0]
        # What comes into a block from behind: the whole sum at the next block's first place.
        carry_N = suffix_sums(sums_NL[:, 0], reach_N).roll(-1)
        carry_N[-1] = 0.0
        sums_NL.addr_(carry_N, common ** torch.arange(BLOCK, 0, -1))
        sums_NL[odd_O] = odd_sums_OL.addcmul_(odd_reach_OL, carry_N[odd_O, None])
    return sums_NL.view(-1)[: len(values_S)]


def _blocks(values_S: torch.Tensor, num_blocks: int) -> torch.Tensor:
    short = num_blocks * BLOCK - len(values_S)
    padded_S = torch.cat([values_S, values_S.new_zeros(short)]) if short else values_S.contiguous()
    return padded_S.view(num_blocks, BLOCK)


def _powers_below_diagonal(decay: torch.Tensor) -> torch.Tensor:
    """``[L, L]``: what place ``i`` adds to place ``j`` of its block, where all places have this decay."""
    steps_L = torch.arange(BLOCK)
    distance_LL = steps_L[:, None] - steps_L
    return torch.where(distance_LL >= 0, decay ** distance_LL.clamp(min=0), 0.0)


def _place_by_place(values_OL: torch.Tensor, decay_OL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of each block alone, and the factor with which what follows the block reaches each of its places."""
    # Transposed, so that each of the steps reads and writes one stretch of memory.
    values_LO, decay_LO = values_OL.T.contiguous(), decay_OL.T.contiguous()
    for place in range(BLOCK - 2, -1, -1):
        values_LO[place].addcmul_(decay_LO[place], values_LO[place + 1])
        decay_LO[place].mul_(decay_LO[place + 1])
    return values_LO.T.contiguous(), decay_LO.T.contiguous()
