"""Sharing sequences out over ranks, and packing them into micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced_partition(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Indices of ``lengths`` in ``num_parts`` lists whose sums of lengths are close to equal.

    The longest goes first, each to the part that has least (Graham's LPT rule: at most 4/3 of the best possible
    maximum). Indices rise within a part; a part is empty when there are fewer sequences than parts.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts={num_parts}: must be at least 1")
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    # Ties go to the part with fewer sequences, then the lower number: the same input gives the same parts everywhere.
    heap = [(0, 0, part) for part in range(num_parts)]
    for index in _longest_first(lengths):
        total, count, part = heapq.heappop(heap)
        parts[part].append(index)
        heapq.heappush(heap, (total + lengths[index], count + 1, part))
    return [sorted(part) for part in parts]


def pack(lengths: Sequence[int], *, max_tokens: int | None = None, max_sequences: int | None = None) -> list[list[int]]:
    """Indices of ``lengths`` in micro-batches of at most ``max_tokens`` tokens and ``max_sequences`` sequences.

    None sets no limit; a sequence above ``max_tokens`` goes alone. As many micro-batches as the limits need are filled
    evenly, so that none of them is a small rest.
    """
    token_limit = sum(lengths) if max_tokens is None else max_tokens
    count_limit = len(lengths) if max_sequences is None else max_sequences
    alone = [index for index, length in enumerate(lengths) if length > token_limit]
    rest = [index for index, length in enumerate(lengths) if length <= token_limit]
    return [[index] for index in alone] + _pack_evenly(rest, lengths, token_limit, count_limit)


def _pack_evenly(indices: list[int], lengths: Sequence[int], max_tokens: int, max_sequences: int) -> list[list[int]]:
    if not indices:
        return []
    chosen = [lengths[index] for index in indices]
    num_parts = max(-(-sum(chosen) // max_tokens), -(-len(chosen) // max_sequences))
    while True:
        parts = [[indices[place] for place in part] for part in balanced_partition(chosen, num_parts) if part]
        if all(len(p) <= max_sequences and sum(lengths[index] for index in p) <= max_tokens for p in parts):
            return parts
        num_parts += 1


def restore_order(parts: Sequence[Sequence[int]]) -> list[int]:
    """What selects the caller's order from the parts joined: ``joined[restore_order(parts)[i]]`` is sequence ``i``."""
    place = {index: place for place, index in enumerate(index for part in parts for index in part)}
    return [place[index] for index in range(len(place))]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
