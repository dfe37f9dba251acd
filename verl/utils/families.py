"""Families: sequences of an item that have their first tokens in common, which are then computed once (`Row`).

They go to one rank and into one micro-batch where that costs less than spreading them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl.protocol import DataProto
from verl.utils.balancing import balanced_partition

_LEAST = 16
"""Tokens in common from which a second attention call costs less than computing them again."""


@dataclass(frozen=True)
class Family:
    """Neighbours in a batch, of one item, and how many first tokens all of them share."""

    members: list[int]
    prefix: int
    """0 where nothing is shared."""

    def cost(self, lengths: Sequence[int]) -> int:
        """In tokens, by the batch's lengths: those of the row, and an eighth of each that a member is spared.

        Attention holds keys and values of the shared tokens once per member: 2 of the 34 or so numbers per unit of
        hidden size that a layer keeps for a token (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198), less
        where heads share keys; an eighth leaves room.
        """
        spared = self.prefix * (len(self.members) - 1)
        return sum(lengths[member] for member in self.members) - spared + spared // 8


def find_families(batch: DataProto, indices: Sequence[int], *, max_tokens: int | None = None) -> list[Family]:
    """The sequences ``indices`` of the batch in families, in order, each of a `Family.cost` within ``max_tokens``.

    A sequence above ``max_tokens`` is a family of its own. Each member keeps at least one token for itself. A sequence
    that has less in common with a family than its members have joins where that costs less than to stand alone.
    """
    items = (batch.group_ids_B if batch.item_ids_B is None else batch.item_ids_B).tolist()
    ids = np.split(batch.input_ids_T.cpu().numpy(), batch.offsets_B1[1:-1].cpu().numpy())
    lengths = [len(each) for each in ids]
    families: list[Family] = []
    for index in indices:
        related = families and items[families[-1].members[0]] == items[index]
        grown = _with_member(families[-1], index, ids) if related else None
        if grown is not None and _pays(families[-1], grown, lengths, max_tokens):
            families[-1] = grown
        else:
            families.append(Family([index], 0))
    return families


def _pays(family: Family, grown: Family, lengths: Sequence[int], max_tokens: int | None) -> bool:
    """Whether one more member costs less in the family than alone, within the limit."""
    cost = grown.cost(lengths)
    return (max_tokens is None or cost <= max_tokens) and cost < family.cost(lengths) + lengths[grown.members[-1]]


def _with_member(family: Family, index: int, ids: list[np.ndarray]) -> Family | None:
    """The family with one more member; None where they have too little in common."""
    first = ids[family.members[0]]
    most = min(len(first), len(ids[index])) - 1
    if len(family.members) > 1:
        most = min(most, family.prefix)
    different = np.flatnonzero(first[:most] != ids[index][:most])
    prefix = int(different[0]) if len(different) else most
    return Family([*family.members, index], prefix) if prefix >= _LEAST else None


def balanced_shares(batch: DataProto, num_shares: int) -> list[list[int]]:
    """Indices of the batch's sequences for each rank, families together where the busiest rank has less work then."""
    lengths: list[int] = batch.lengths_B.tolist()
    alone = balanced_partition(lengths, num_shares)
    families = find_families(batch, range(len(batch)))
    costs = [family.cost(lengths) for family in families]
    together = balanced_partition(costs, num_shares)
    if max(_sum(costs, part) for part in together) >= max(_sum(lengths, part) for part in alone):
        return alone
    return [sorted(index for place in part for index in families[place].members) for part in together]


def _sum(numbers: Sequence[int], indices: Sequence[int]) -> int:
    return sum(numbers[index] for index in indices)
