"""Small `DataProto` batches for tests of the learner."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl.protocol import DataProto, group_code


def batch_of(
    loss_masks: Sequence[Sequence[int]],
    *,
    rewards: Sequence[Sequence[float]] | None = None,
    scores: Sequence[float] | None = None,
    groups: Sequence[str] | None = None,
    masked: Sequence[bool] | None = None,
    values: Sequence[Sequence[float]] | None = None,
    messages: Sequence[Sequence[int]] | None = None,
    anchors: Sequence[Sequence[int]] | None = None,
    baselines: Sequence[float] | None = None,
) -> DataProto:
    """Sequences with these masks behind one prompt token each, of which all that is given is 0; ids are 1, 2, 3, ...

    A masked sequence's loss mask is emptied, as `DataProto.from_trajectories` does.
    """
    masked = masked or [False] * len(loss_masks)
    masks = [[0] + [0 if gone else bit for bit in mask] for mask, gone in zip(loss_masks, masked, strict=True)]
    batch = DataProto.from_sequences([list(range(1, len(mask) + 1)) for mask in masks], masks)
    batch = batch.replace(masked_B=torch.tensor(masked))
    for name, rows, dtype in (
        ("token_rewards_T", rewards, torch.float32),
        ("values_T", values, torch.float32),
        ("message_ids_T", messages, torch.int32),
        ("anchor_ids_T", anchors, torch.int64),
    ):
        if rows is not None:
            batch = batch.replace(**{name: torch.tensor([x for row in rows for x in [0, *row]], dtype=dtype)})
    if baselines is not None:
        batch = batch.replace(baselines_B=torch.tensor(baselines, dtype=torch.float64))
    if scores is not None:
        batch = batch.replace(scores_B=torch.tensor(scores, dtype=torch.float64))
    if groups is not None:
        batch = batch.replace(group_ids_B=torch.tensor([group_code(name) for name in groups]))
    return batch


def random_batch(
    lengths: Sequence[int], *, seed: int = 0, vocab_size: int = 64, sampled_share: float = 0.4
) -> DataProto:
    """Random ids, masks and advantages; a sequence may end up without sampled tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    masks = [[0, *(torch.rand(n - 1, generator=generator) < sampled_share).int().tolist()] for n in lengths]
    batch = DataProto.from_sequences(ids, masks)
    advantages_T = torch.randn(batch.num_tokens, generator=generator)
    return batch.replace(advantages_T=torch.where(batch.loss_mask_T, advantages_T, 0.0))
