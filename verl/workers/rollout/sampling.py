"""Sampling of the next token for a batch of sequences, each with its own settings and random numbers.

Axes: ``R`` sequences, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentgym_rl.types import SamplingParams


def sample_tokens(
    logits_RV: torch.Tensor, params: Sequence[SamplingParams], uniforms_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one id per row by inverse CDF; ``uniforms_R`` in [0, 1) decides, so a row's result depends on nothing else.

    Returns ids ``[R]`` and their log-probabilities (nats) at the sampling temperature, before top-p and top-k cut.
    A temperature of 0 takes the likeliest id and reports its log-probability at temperature 1.
    """
    temperatures = [p.temperature or 1.0 for p in params]
    # In float32 before the division, as the trainer computes them: a quotient in bfloat16 is off by up to 0.4%.
    logits_RV = logits_RV.float()
    if any(t != 1.0 for t in temperatures):
        logits_RV = logits_RV / logits_RV.new_tensor(temperatures)[:, None]
    log_probs_RV = torch.log_softmax(logits_RV, dim=-1)
    ids_R = _inverse_cdf(_cut(log_probs_RV.exp(), params), uniforms_R)
    greedy = [p.temperature == 0 for p in params]
    if any(greedy):
        ids_R = torch.where(torch.tensor(greedy, device=ids_R.device), log_probs_RV.argmax(-1), ids_R)
    return ids_R, log_probs_RV.gather(1, ids_R[:, None])[:, 0]


def _inverse_cdf(probs_RV: torch.Tensor, uniforms_R: torch.Tensor) -> torch.Tensor:
    # Logits differ in their last digits by what is decoded together. Sums in float32 make much more of that, so that a
    # draw near a bound falls now to its one side and now to the other, and a run cannot be repeated.
    cdf_RV = probs_RV.cumsum(-1, dtype=torch.float64)
    # Scaled by the row's own total, so that rounding in the sum never leaves a draw beyond the last id.
    draws_R1 = uniforms_R[:, None].to(cdf_RV) * cdf_RV[:, -1:]
    ids_R = torch.searchsorted(cdf_RV, draws_R1, right=True)[:, 0]
    return ids_R.clamp_(max=probs_RV.shape[1] - 1)


def _cut(probs_RV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Zero what top-k and top-p leave out; rows without a cut are returned as they are."""
    cut_rows = [i for i, p in enumerate(params) if p.top_p < 1.0 or p.top_k > 0]
    if not cut_rows:
        return probs_RV
    rows = torch.tensor(cut_rows, device=probs_RV.device)
    sorted_probs, order = probs_RV[rows].sort(dim=-1, descending=True)
    top_p = sorted_probs.new_tensor([params[i].top_p for i in cut_rows])[:, None]
    top_k = torch.tensor(
        [params[i].top_k if params[i].top_k > 0 else probs_RV.shape[1] for i in cut_rows], device=probs_RV.device
    )[:, None]
    rank = torch.arange(probs_RV.shape[1], device=probs_RV.device)
    # An id stays while the mass of the likelier ones is below top_p: the likeliest always does.
    keep = (sorted_probs.cumsum(-1) - sorted_probs < top_p) & (rank < top_k)
    keep[:, 0] = True
    kept = torch.zeros_like(sorted_probs).scatter_(1, order, sorted_probs * keep)
    return probs_RV.index_copy(0, rows, kept)
