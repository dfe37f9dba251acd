"""Discounted sums from the end, over many sequences laid end to end at once.

Axes: ``S`` places, ``N`` blocks of `BLOCK` places each.
"""

from __future__ import annotations

import torch

BLOCK = 32
"""Places that one row of a matrix product covers; 16 to 64 take about the same time."""


def suffix_sums(values_S: torch.Tensor, decay_S: torch.Tensor) -> torch.Tensor:
    """``y[s] = values[s] + decay[s] * y[s + 1]``, in the type of ``values_S``; a decay of 0 ends a sequence.

    A blocked scan (Blelloch 1990, "Prefix sums and their applications"): every block alone, then the same for the sums
    that blocks hand to those before them, then both together. No loop is longer than `BLOCK`. What is summed has one
    sign more often than not, and later terms enter with smaller factors, so nothing cancels.
    """
    if len(values_S) <= 1:
        return values_S.clone()
    num_blocks = -(-len(values_S) // BLOCK)
    values_NL, decay_NL = _blocks(values_S, num_blocks), _blocks(decay_S.to(values_S.dtype), num_blocks)
    sums_NL, reach_NL = _within_blocks(values_NL, decay_NL)
    if num_blocks > 1:
        # What comes into a block from behind: the whole sum at the next block's first place.
        first_N = suffix_sums(sums_NL[:, 0], reach_NL[:, 0])
        sums_NL[:-1].addcmul_(reach_NL[:-1], first_N[1:, None])
    return sums_NL.view(-1)[: len(values_S)]


def _blocks(values_S: torch.Tensor, num_blocks: int) -> torch.Tensor:
    short = num_blocks * BLOCK - len(values_S)
    return torch.cat([values_S, values_S.new_zeros(short)]).view(num_blocks, BLOCK)


def _within_blocks(values_NL: torch.Tensor, decay_NL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of each block alone, and the factor with which what follows the block reaches each of its places."""
    common = decay_NL.max()  # Ends of turns and sequences, the exceptions, decay more.
    even_N = (decay_NL == common).all(1)
    steps_L = torch.arange(BLOCK)
    # Within a block of one decay, weights are its powers: a triangular matrix.
    exponents_LL = (steps_L[:, None] - steps_L).to(values_NL.dtype)
    weights_LL = torch.where(exponents_LL >= 0, common**exponents_LL, 0.0)
    sums_NL = values_NL @ weights_LL
    reach_NL = (common ** (BLOCK - steps_L)).expand_as(values_NL)
    if not bool(even_N.all()):
        reach_NL = reach_NL.clone()
        odd_N = (~even_N).nonzero()[:, 0]
        sums_NL[odd_N], reach_NL[odd_N] = _place_by_place(values_NL[odd_N], decay_NL[odd_N])
    return sums_NL, reach_NL


def _place_by_place(values_NL: torch.Tensor, decay_NL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Transposed, so that each of the steps reads and writes one stretch of memory.
    values_LN, decay_LN = values_NL.T.contiguous(), decay_NL.T.contiguous()
    for place in range(BLOCK - 2, -1, -1):
        values_LN[place].addcmul_(decay_LN[place], values_LN[place + 1])
        decay_LN[place].mul_(decay_LN[place + 1])
    return values_LN.T, decay_LN.T
