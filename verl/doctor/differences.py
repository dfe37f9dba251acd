"""First differences, in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch

_CONTEXT = 8
"""Tokens shown before and after a difference."""


def first_id_difference(
    ours: Sequence[int], theirs: Sequence[int], decode: Callable[[list[int]], str], *, names: tuple[str, str]
) -> str | None:
    """Where two lists of token ids part, with the text around; None when they agree."""
    for position, (one, other) in enumerate(zip_longest(ours, theirs)):
        if one != other:
            before = decode(list(ours[max(0, position - _CONTEXT) : position]))
            shown = [decode(list(ids[position : position + _CONTEXT])) for ids in (ours, theirs)]
            return (
                f"token {position}, after {before!r}: {names[0]} has {one} ({shown[0]!r}), "
                f"{names[1]} {other} ({shown[1]!r})"
            )
    return None


def first_value_difference(
    ours: torch.Tensor, theirs: torch.Tensor, *, names: tuple[str, str], tolerance: float, mean_tolerance: float
) -> str | None:
    """Where two lists of numbers differ by more than ``tolerance``, or that they do so on average; None otherwise."""
    gaps = (ours.double() - theirs.double()).abs()
    beyond = (~(gaps <= tolerance)).nonzero()[:, 0]  # as NaN is
    if len(beyond):
        at = int(beyond[0])
        return (
            f"sampled token {at}: {names[0]} {float(ours[at]):.6f}, {names[1]} {float(theirs[at]):.6f}; "
            f"{len(beyond)} of {len(gaps)} differ by more than {tolerance:g}"
        )
    if len(gaps) and float(gaps.mean()) > mean_tolerance:
        return f"on average they differ by {float(gaps.mean()):.6f}, more than {mean_tolerance:g}"
    return None
