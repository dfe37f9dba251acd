"""Variable-length attention for sequences laid end to end, registered with transformers under a name of ours.

A model loaded with ``attn_implementation=PACKED_ATTENTION`` takes one row ``[1, T]`` and the keyword ``packing``.
transformers builds no mask for a name without a mask function, so nothing quadratic in the row ever exists.

Without flash-attn, sequences go through `scaled_dot_product_attention` one by one, neighbours of one length together.
On one CPU thread with 40 sequences of 300 to 600 tokens and 4 heads of 32, that ran at 75,000 tokens/s forward and
backward; padding 4, 10 or 40 sequences of similar length into one call at 56,000, 62,000 and 47,000: the kernel's own
work outweighs the calls saved. 128 sequences of 66 tokens in one call, which needs no padding, save a tenth of the
whole update of a model of 100,000 parameters.
Axes: ``T`` tokens, ``H`` heads, ``D`` head size, ``L`` tokens of one sequence.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from verl.models.sequence_parallel import SequenceParallel

PACKED_ATTENTION = "verl_packed"


@dataclass(frozen=True, eq=False)
class Packing:
    """Where the sequences of a packed row begin and end."""

    lengths: list[int]
    cu_seqlens_B1: torch.Tensor
    """int32, on the row's device."""
    max_length: int
    parallel: SequenceParallel | None = None
    """Set when each rank holds one stretch of the row, and the row is put together for attention."""

    @classmethod
    def of(cls, offsets_B1: torch.Tensor, *, padding: int = 0, parallel: SequenceParallel | None = None) -> Packing:
        """From the offsets of a `DataProto` on its device; ``padding`` tokens follow as a sequence of their own."""
        if padding:
            offsets_B1 = torch.cat([offsets_B1, offsets_B1[-1:] + padding])
        lengths = offsets_B1.diff().tolist()
        return cls(lengths, offsets_B1.to(torch.int32), max(lengths), parallel)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence: ``[1, H, T, D]`` in, ``[1, T, H, D]`` out; keys may have fewer heads.

    Under sequence parallelism ``T`` is this rank's stretch, in and out.

    Never drops out, whatever the model's config says. Raises `ValueError` when a mask was built, because ``packing``
    alone decides who sees whom, and when the model wants scores capped or attention sinks, which would be left out.
    """
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{PACKED_ATTENTION} has no {name!r}, which {type(module).__name__} asks for")
    if attention_mask is not None:
        raise ValueError(
            f"{PACKED_ATTENTION}: packing replaces attention_mask, got one of shape {attention_mask.shape}"
        )
    window = sliding_window if sliding_window is not None and sliding_window < packing.max_length else None
    if packing.parallel is not None:
        parallel = packing.parallel
        query = parallel.gather_heads(query)
        key, value = (parallel.gather_heads(parallel.share_heads(part)) for part in (key, value))
        return parallel.scatter_heads(_attend(query, key, value, packing, scaling, window)), None
    return _attend(query, key, value, packing, scaling, window), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    if query.is_cuda and query.dtype != torch.float32 and _has_flash_attn():
        return _flash(query, key, value, packing, scaling, window)
    return _sequence_by_sequence(query, key, value, packing, scaling, window)


def _sequence_by_sequence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    runs = [(length, len(list(run))) for length, run in groupby(packing.lengths)]
    sizes = [length * count for length, count in runs]
    # split, not slices: the backward of a slice fills a tensor of the whole row, which is quadratic in their number.
    parts = zip(runs, *(tensor.split(sizes, dim=2) for tensor in (query, key, value)), strict=True)
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    for (length, count), *row in parts:
        q, k, v = (tensor[0].unflatten(1, (count, length)).transpose(0, 1) for tensor in row)
        mask = _band(length, window, q.device) if window is not None else None
        output = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None]


def _band(length: int, window: int, device: torch.device) -> torch.Tensor:
    """bool ``[L, L]``: a token sees itself and the ``window - 1`` tokens before it."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    return (distance >= 0) & (distance < window)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    bounds, longest = packing.cu_seqlens_B1, packing.max_length
    output = flash_attn_varlen_func(
        q,
        k,
        v,
        bounds,
        bounds,
        longest,
        longest,
        softmax_scale=scaling,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
    )
    return output[None]


@cache
def _has_flash_attn() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
