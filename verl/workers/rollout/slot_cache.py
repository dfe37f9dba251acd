"""KV cache of the ``hf`` engine: one slot per sequence, and the attention that reads and writes it.

A forward pass sees the new tokens of many sequences laid end to end, ``[1, T]``; nothing is padded outside attention.
Axes: ``T`` new tokens, ``R`` sequences of the pass, ``S`` slots, ``H`` query heads, ``K`` key/value heads,
``G = H / K``, ``Q`` new tokens of the longest sequence, ``L`` cached tokens, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION_NAME = "agentgym_slot_cache"
"""Name under which `slot_attention` is registered with transformers."""

_LENGTH_STEP, _SLOT_STEP = 64, 32
_SPARE = 8
"""When it gets longer, the cache gets an eighth of its length more at the least: each time all of it is copied."""


class SlotCache:
    """Keys and values per layer as ``[S, K, L, D]``, grown on demand and freed as a whole."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._num_slots = 0
        self._length = 0

    def reserve(self, num_slots: int, length: int) -> None:
        """Make room for slots ``0..num_slots-1`` of ``length`` tokens."""
        self._num_slots = max(self._num_slots, _round_up(num_slots, _SLOT_STEP))
        if length > self._length:
            self._length = _round_up(max(length, self._length + self._length // _SPARE), _LENGTH_STEP)

    def layer(self, index: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's keys and values, at least as large as reserved; ``like`` is a key of shape ``[1, K, T, D]``."""
        entry = self._layers.get(index)
        if entry is None or entry[0].shape[0] < self._num_slots or entry[0].shape[2] < self._length:
            shape = (self._num_slots, like.shape[1], self._length, like.shape[3])
            entry = (_grown(entry and entry[0], shape, like), _grown(entry and entry[1], shape, like))
            self._layers[index] = entry
        return entry

    def copy_prefix(self, source: int, targets: Sequence[int], length: int) -> None:
        """Give slots ``targets`` the first ``length`` tokens of slot ``source``."""
        self.reserve(max(targets) + 1, length)
        for index, (keys, values) in self._layers.items():
            keys, values = self.layer(index, keys[:1])
            targets_R = torch.tensor(targets, device=keys.device)
            keys[targets_R, :, :length] = keys[source, :, :length]
            values[targets_R, :, :length] = values[source, :, :length]

    def free(self) -> None:
        """Give all memory back."""
        self._layers.clear()
        self._num_slots = self._length = 0


class PrefixCopies:
    """Copies of prefixes between slots in the order in which they are asked for, those from one source made at once."""

    def __init__(self, cache: SlotCache) -> None:
        self._cache = cache
        self._targets: dict[tuple[int, int], list[int]] = {}
        """Where the first tokens of a slot, so many, are to go."""
        self._read: set[int] = set()
        self._written: set[int] = set()

    def add(self, source: int, target: int, length: int) -> None:
        """Ask for a copy, which is made by the next `flush` at the latest."""
        if source in self._written or target in self._written or target in self._read:
            self.flush()
        self._targets.setdefault((source, length), []).append(target)
        self._read.add(source)
        self._written.add(target)

    def flush(self) -> None:
        """Make all copies that were asked for."""
        for (source, length), targets in self._targets.items():
            self._cache.copy_prefix(source, targets, length)
        for waiting in (self._targets, self._read, self._written):
            waiting.clear()


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _grown(old: torch.Tensor | None, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    # Zeros, not empty: attention multiplies masked-out values by 0, and 0 x NaN is NaN.
    new = torch.zeros(shape, dtype=like.dtype, device=like.device)
    if old is not None:
        new[: old.shape[0], :, : old.shape[2]] = old
    return new


@dataclass(frozen=True)
class SlotBatch:
    """Where the tokens of one forward pass belong."""

    cache: SlotCache
    token_slot_T: torch.Tensor
    token_position_T: torch.Tensor
    slots_R: torch.Tensor
    row_T: torch.Tensor
    """Index of a token's sequence in this pass, 0..R-1."""
    column_T: torch.Tensor
    """Index of a token among its sequence's new tokens."""
    num_rows: int
    max_new: int
    length: int
    """Tokens of the longest sequence, new ones included."""
    rows_are_slots: bool
    """The keys are read from slots 0..R-1 as they lie, without a copy."""
    mask_RQL: torch.Tensor
    """True where a new token may look."""

    @classmethod
    def build(
        cls, cache: SlotCache, slots: list[int], starts: list[int], counts: list[int], device: torch.device
    ) -> SlotBatch:
        """Sequence i has ``starts[i]`` tokens in slot ``slots[i]`` and ``counts[i]`` new ones."""
        length = max(start + count for start, count in zip(starts, counts, strict=True))
        cache.reserve(max(slots) + 1, length)
        counts_R, starts_R, slots_R = (torch.tensor(x, device=device) for x in (counts, starts, slots))
        order_T = torch.repeat_interleave(torch.arange(len(slots), device=device), counts_R)
        column_T = torch.arange(len(order_T), device=device) - (counts_R.cumsum(0) - counts_R)[order_T]
        # Reading every slot in place costs less than copying out the active ones once more than half are active.
        in_place = 2 * len(slots) > max(slots) + 1
        num_rows = max(slots) + 1 if in_place else len(slots)
        row_T = slots_R[order_T] if in_place else order_T
        max_new = int(counts_R.max())
        position_T = starts_R[order_T] + column_T
        # Padding rows and columns look at key 0 only, so that no softmax is empty.
        last_visible_RQ = torch.zeros(num_rows, max_new, dtype=torch.long, device=device)
        last_visible_RQ[row_T, column_T] = position_T
        mask_RQL = torch.arange(length, device=device) <= last_visible_RQ[..., None]
        return cls(
            cache, slots_R[order_T], position_T, slots_R, row_T, column_T, num_rows, max_new, length, in_place, mask_RQL
        )


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    slot_batch: SlotBatch,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Write the new keys and values into their slots, then attend each new token to its sequence so far.

    Takes ``query [1, H, T, D]`` and ``key``, ``value [1, K, T, D]``; returns ``[1, T, H, D]``.
    """
    batch = slot_batch
    keys, values = batch.cache.layer(cast(int, module.layer_idx), key)
    keys[batch.token_slot_T, :, batch.token_position_T] = key[0].transpose(0, 1)
    values[batch.token_slot_T, :, batch.token_position_T] = value[0].transpose(0, 1)
    keys, values = _read(keys, batch), _read(values, batch)

    num_heads, head_dim = query.shape[1], query.shape[3]
    num_groups = num_heads // keys.shape[1]
    rows = query.new_zeros(batch.num_rows, batch.max_new, num_heads, head_dim)
    rows[batch.row_T, batch.column_T] = query[0].transpose(0, 1)
    # Heads that share keys become further queries of one head: [R, Q, K, G, D] -> [R, K, G x Q, D].
    folded = rows.view(batch.num_rows, batch.max_new, -1, num_groups, head_dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(batch.num_rows, -1, num_groups * batch.max_new, head_dim)
    mask = batch.mask_RQL.repeat(1, num_groups, 1)[:, None]
    out = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling)
    out = out.view(batch.num_rows, -1, num_groups, batch.max_new, head_dim).permute(0, 3, 1, 2, 4)
    out = out.reshape(batch.num_rows, batch.max_new, num_heads, head_dim)
    return out[batch.row_T, batch.column_T][None], None


def _read(layer: torch.Tensor, batch: SlotBatch) -> torch.Tensor:
    if batch.rows_are_slots:
        return layer[: batch.num_rows, :, : batch.length]
    return layer[batch.slots_R, :, : batch.length]


AttentionInterface.register(ATTENTION_NAME, slot_attention)
