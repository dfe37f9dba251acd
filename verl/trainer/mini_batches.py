"""Cutting a step's batch into mini-batches of whole groups, and those into shares of equal work for the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl.protocol import DataProto
from verl.trainer.core_algos import BatchTotals
from verl.trainer.item_order import ItemOrder
from verl.utils.families import balanced_shares
from verl.utils.seeding import derive_seed


@dataclass(frozen=True, eq=False)
class SharedMiniBatch:
    """A mini-batch by rank, and its counts over all of them."""

    shares: tuple[DataProto, ...]
    totals: BatchTotals


def mini_batch_rows(
    row_uids: Sequence[str], step_uids: Sequence[str], *, groups: int, epochs: int, shuffle: bool, seed: int
) -> list[list[int]]:
    """Rows of each mini-batch: ``groups`` whole groups each, through all of ``step_uids`` ``epochs`` times over.

    ``row_uids`` names the group of each row of the batch; rows that faults removed are simply not there, and a
    mini-batch of which nothing is left is left out. Where ``groups`` does not divide the number of groups, one of an
    epoch is smaller. With ``shuffle`` each epoch deals the groups out anew, by ``seed``.
    """
    if not row_uids:
        return []
    rows: dict[str, list[int]] = {}
    for row, uid in enumerate(row_uids):
        rows.setdefault(uid, []).append(row)
    places = [*step_uids, *(f"absent {place}" for place in range(-len(step_uids) % groups))]
    dealt = []
    for epoch in range(epochs):
        order = ItemOrder(places, batch_size=groups, seed=derive_seed(seed, epoch), shuffle=shuffle)
        for number in range(1, order.batches_per_epoch + 1):
            dealt.append([row for uid in order.batch(number) for row in rows.get(uid, ())])
    return [sorted(mini_batch) for mini_batch in dealt if mini_batch]


def share_mini_batch(mini_batch: DataProto, world_size: int) -> SharedMiniBatch:
    """Shares of about equal work; some are empty when there are fewer sequences than ranks."""
    mini_batch = mini_batch.for_model()
    parts = balanced_shares(mini_batch, world_size)
    return SharedMiniBatch(tuple(mini_batch.select(part) for part in parts), BatchTotals.of(mini_batch))
