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
    if not lengths:
        return []
    num_parts = 1
    if max_tokens is not None:
        num_parts = max(num_parts, -(-sum(lengths) // max_tokens))
    if max_sequences is not None:
        num_parts = max(num_parts, -(-len(lengths) // max_sequences))
    while True:
        parts = [part for part in balanced_partition(lengths, num_parts) if part]
        if all(_fits(part, lengths, max_tokens, max_sequences) for part in parts):
            return parts
        num_parts += 1


def restore_order(parts: Sequence[Sequence[int]]) -> list[int]:
    """What selects the caller's order from the parts joined: ``joined[restore_order(parts)[i]]`` is sequence ``i``."""
    place = {index: place for place, index in enumerate(index for part in parts for index in part)}
    return [place[index] for index in range(len(place))]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


def _fits(part: list[int], lengths: Sequence[int], max_tokens: int | None, max_sequences: int | None) -> bool:
    if len(part) == 1:
        return True
    few_enough = max_sequences is None or len(part) <= max_sequences
    return few_enough and (max_tokens is None or sum(lengths[index] for index in part) <= max_tokens)
