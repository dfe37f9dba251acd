"""Tokens that trajectories of one group have in common at their beginning, which a model computes once.

Members of a group answer the same item, so that system prompt, task and first observation are the same ids, and often
the first actions too. What a causal model makes of them depends on nothing later: one copy in the row serves all
members, each of which goes on from it with its own tokens. Numbers and gradients are those of whole sequences, up to
rounding.
Axes: ``T`` tokens of a batch, ``B`` its sequences, ``P`` tokens of the row that is computed, ``S`` loss tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from verl.models.attention import Packing
from verl.protocol import DataProto
from verl.utils.families import Family, find_families


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
