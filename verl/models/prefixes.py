"""Tokens that trajectories of one group have in common at their beginning, which a model computes once.

Members of a group answer the same item, so that system prompt, task and first observation are the same ids, and often
the first actions too. What a causal model makes of them depends on nothing later: one copy in the row serves all
members, each of which goes on from it with its own tokens. Numbers and gradients are those of whole sequences, up to
rounding.
Axes: ``T`` tokens of a batch, ``B`` its sequences, ``P`` tokens of the row that is computed, ``S`` loss tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verl.models.attention import Packing
from verl.protocol import DataProto

_LEAST = 16
"""Tokens in common from which a second attention call costs less than computing them again."""


@dataclass(frozen=True)
class Family:
    """Neighbours in a batch, of one group, and how many first tokens all of them share."""

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

    A sequence above ``max_tokens`` is a family of its own. Each member keeps at least one token for itself.
    """
    groups = batch.group_ids_B.tolist()
    ids = np.split(batch.input_ids_T.cpu().numpy(), batch.offsets_B1[1:-1].cpu().numpy())
    lengths = [len(each) for each in ids]
    families: list[Family] = []
    for index in indices:
        related = families and groups[families[-1].members[0]] == groups[index]
        grown = _with_member(families[-1], index, ids) if related else None
        if grown is None or (max_tokens is not None and grown.cost(lengths) > max_tokens):
            families.append(Family([index], 0))
        else:
            families[-1] = grown
    return families


def _with_member(family: Family, index: int, ids: list[np.ndarray]) -> Family | None:
    """The family with one more member; None where they have too little in common."""
    first = ids[family.members[0]]
    most = min(len(first), len(ids[index])) - 1
    if len(family.members) > 1:
        most = min(most, family.prefix)
    different = np.flatnonzero(first[:most] != ids[index][:most])
    prefix = int(different[0]) if len(different) else most
    return Family([*family.members, index], prefix) if prefix >= _LEAST else None


@dataclass(frozen=True, eq=False)
class Row:
    """What of a micro-batch is computed, in which order, and where each loss token is predicted."""

    tokens_P: torch.Tensor
    """int64: positions in ``T``."""
    before_S: torch.Tensor
    """int64: position in ``P`` of the state that each loss token follows from."""
    packing: Packing

    @classmethod
    def of(cls, batch: DataProto, *, shares_prefixes: bool) -> Row:
        """Lay out a batch on its device; without ``shares_prefixes`` the row is the batch as it is."""
        targets_S = batch.loss_mask_T.nonzero()[:, 0]
        families = find_families(batch, range(len(batch))) if shares_prefixes else []
        if not any(family.prefix for family in families):
            everything_P = torch.arange(batch.num_tokens, device=targets_S.device)
            # A loss token is never its sequence's first, so the state before it belongs to the same sequence.
            return cls(everything_P, targets_S - 1, Packing.of(batch.offsets_B1))
        tokens_P, place_T, packing = _lay_out(batch, families)
        device = targets_S.device
        before_S = torch.from_numpy(place_T).to(device)[targets_S - 1]
        return cls(torch.from_numpy(tokens_P).to(device), before_S, packing)


def _lay_out(batch: DataProto, families: list[Family]) -> tuple[np.ndarray, np.ndarray, Packing]:
    """``P`` tokens and, of each of ``T``, its place among them: first what is shared, then what is not."""
    offsets = batch.offsets_B1.tolist()
    shared = [family for family in families if family.prefix]
    starts = [offsets[family.members[0]] for family in shared]
    stretches = [(start, start + family.prefix) for start, family in zip(starts, shared, strict=True)]
    continued: list[int | None] = [None] * len(stretches)
    place_T = np.empty(batch.num_tokens, np.int64)
    num_placed = 0
    for (start, end), family in zip(stretches, shared, strict=True):
        for member in family.members:
            place_T[offsets[member] : offsets[member] + end - start] = np.arange(num_placed, num_placed + end - start)
        num_placed += end - start
    number_of = {id(family): number for number, family in enumerate(shared)}
    for family in families:
        for member in family.members:
            start, end = offsets[member] + family.prefix, offsets[member + 1]
            place_T[start:end] = np.arange(num_placed, num_placed + end - start)
            num_placed += end - start
            stretches.append((start, end))
            continued.append(number_of.get(id(family)))
    tokens_P = np.concatenate([np.arange(start, end) for start, end in stretches])
    lengths = [end - start for start, end in stretches]
    return tokens_P, place_T, Packing.continuing(lengths, continued, device=batch.input_ids_T.device)
