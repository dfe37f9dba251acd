"""DataProto: a batch of token sequences laid end to end, with offsets; no padding anywhere.

Axes of tensors: ``T`` tokens of the whole batch, ``B`` sequences, ``B1`` = B + 1.
A value that belongs to a token (its mask, log-probability, reward, advantage) stands at that token's own position:
``log_probs_T[t]`` is the log-probability of ``input_ids_T[t]`` given what precedes it in its own sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from agentgym_rl.types import PartKind, Trajectory


def group_code(uid: str) -> int:
    """The int64 that stands for a group: a hash of its uid, so that every process finds the same one by itself."""
    return int.from_bytes(hashlib.blake2b(uid.encode(), digest_size=8).digest(), "little", signed=True)


@dataclass(frozen=True, eq=False)
class DataProto:
    """Token sequences and what is known of each token and each sequence.

    Construct with `from_trajectories` or `from_sequences`; they enforce that a sequence's first token, which nothing
    precedes, is never a loss token, and that a masked sequence (a fault) has no loss token at all.
    """

    offsets_B1: torch.Tensor
    """int64: sequence ``b`` holds tokens ``offsets_B1[b]`` to ``offsets_B1[b + 1]``, never none."""
    input_ids_T: torch.Tensor
    """int64."""
    position_ids_T: torch.Tensor
    """int64: 0, 1, 2, ... within each sequence."""
    loss_mask_T: torch.Tensor
    """bool: True on the sampled tokens that are trained on."""
    rollout_log_probs_T: torch.Tensor
    """float32 nats, the engine's own; 0 where not sampled."""
    token_rewards_T: torch.Tensor
    """float32: a turn's reward on its last sampled token."""
    scores_B: torch.Tensor
    """float64."""
    masked_B: torch.Tensor
    """bool: faults; they keep their row and count nowhere."""
    group_ids_B: torch.Tensor
    """int64: `group_code` of the uid; equal for trajectories of the same item in the same step."""
    old_log_probs_T: torch.Tensor | None = None
    """float32: the actor's, before this step's first update; meaningful on loss tokens only."""
    ref_log_probs_T: torch.Tensor | None = None
    """float32: the reference model's; meaningful on loss tokens only."""
    kl_T: torch.Tensor | None = None
    """float32 nats: of the actor, before this step's first update, to the reference over the whole vocabulary; 0 where
    not sampled."""
    advantages_T: torch.Tensor | None = None
    """float32: 0 where not sampled."""
    returns_T: torch.Tensor | None = None
    """float32: 0 where not sampled."""
    values_T: torch.Tensor | None = None
    """float32: the critic's, before this step's first update; meaningful on loss tokens only."""
    baselines_B: torch.Tensor | None = None
    """float64: the score of a greedy rollout of the same item; NaN where it failed."""
    item_ids_B: torch.Tensor | None = None
    """int64: `group_code` of the item in this step, where sequences of one item are in several groups: they may have
    their beginning in common all the same."""
    message_ids_T: torch.Tensor | None = None
    """int32: index of the message that a token belongs to."""
    anchor_ids_T: torch.Tensor | None = None
    """int64: on sampled tokens the `group_code` of the observation that their turn answers; 0 elsewhere."""

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory]) -> DataProto:
        """Lay the trajectories end to end, in their order. Raises `ValueError` when one has no tokens.

        Messages and anchors are set, model outputs and advantages are not.
        """
        loss_masks = [np.zeros_like(t.loss_mask) if t.masked else t.loss_mask for t in trajectories]
        batch = cls.from_sequences([t.input_ids for t in trajectories], loss_masks)
        return batch.replace(
            rollout_log_probs_T=_flat([t.rollout_log_probs for t in trajectories], torch.float32),
            token_rewards_T=_flat([t.token_rewards for t in trajectories], torch.float32),
            scores_B=torch.tensor([t.score for t in trajectories], dtype=torch.float64),
            masked_B=torch.tensor([t.masked for t in trajectories], dtype=torch.bool),
            group_ids_B=torch.tensor([group_code(t.uid) for t in trajectories], dtype=torch.int64),
            message_ids_T=_flat([t.sequence_ids for t in trajectories], torch.int32),
            anchor_ids_T=_flat([_anchors(t) for t in trajectories], torch.int64),
        )

    @classmethod
    def from_sequences(
        cls, input_ids: Sequence[Sequence[int] | np.ndarray], loss_masks: Sequence[Sequence[int] | np.ndarray]
    ) -> DataProto:
        """Sequences without rewards or groups, e.g. conversations for SFT; one id list and one 0/1 mask per sequence.

        Raises `ValueError` naming the sequence when it is empty, its mask has another length, or its first token is
        to be trained on.
        """
        for index, (ids, mask) in enumerate(zip(input_ids, loss_masks, strict=True)):
            _check_sequence(index, ids, mask)
        lengths_B = torch.tensor([len(ids) for ids in input_ids], dtype=torch.int64)
        num_tokens, num_sequences = int(lengths_B.sum()), len(lengths_B)
        return cls(
            offsets_B1=_offsets(lengths_B),
            input_ids_T=_flat(input_ids, torch.int64),
            position_ids_T=_ranges(torch.zeros_like(lengths_B), lengths_B),
            loss_mask_T=_flat(loss_masks, torch.bool),
            rollout_log_probs_T=torch.zeros(num_tokens),
            token_rewards_T=torch.zeros(num_tokens),
            scores_B=torch.zeros(num_sequences, dtype=torch.float64),
            masked_B=torch.zeros(num_sequences, dtype=torch.bool),
            group_ids_B=torch.arange(num_sequences),
        )

    @classmethod
    def concat(cls, batches: Sequence[DataProto]) -> DataProto:
        """The sequences of all batches, in order.

        An optional field must be set in all of them or in none; `ValueError` otherwise, or when there is no batch.
        """
        if not batches:
            raise ValueError("concat needs at least one batch")
        columns = {f.name: [getattr(batch, f.name) for batch in batches] for f in fields(cls) if f.name != "offsets_B1"}
        for name, parts in columns.items():
            if len({part is None for part in parts}) == 2:
                raise ValueError(f"concat: {name} is set in some batches and missing in others")
        joined: dict[str, Any] = {n: None if parts[0] is None else torch.cat(parts) for n, parts in columns.items()}
        return cls(offsets_B1=_offsets(torch.cat([batch.lengths_B for batch in batches])), **joined)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.offsets_B1) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids_T)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the loss sees."""
        return int(self.loss_mask_T.sum())

    @property
    def lengths_B(self) -> torch.Tensor:
        """int64: tokens of each sequence."""
        return self.offsets_B1.diff()

    @property
    def sampled_lengths_B(self) -> torch.Tensor:
        """int64: loss tokens of each sequence."""
        counts = torch.zeros(len(self), dtype=torch.int64, device=self.offsets_B1.device)
        return counts.index_add_(0, self.sequence_index_T, self.loss_mask_T.long())

    @property
    def sequence_index_T(self) -> torch.Tensor:
        """int64: the sequence that each token belongs to."""
        rows = torch.arange(len(self), device=self.offsets_B1.device)
        return rows.repeat_interleave(self.lengths_B, output_size=self.num_tokens)

    def select(self, indices: Sequence[int] | torch.Tensor) -> DataProto:
        """The sequences at ``indices`` (0..B-1, any order, repeats allowed) as a new batch."""
        index = torch.as_tensor(indices, dtype=torch.int64, device=self.offsets_B1.device)
        tokens = self.token_positions(index)
        picked: dict[str, Any] = {"offsets_B1": _offsets(self.lengths_B[index])}
        for name, tensor in self._tensors():
            if name != "offsets_B1":
                picked[name] = tensor[tokens if name.endswith("_T") else index]
        return self.replace(**picked)

    def token_positions(self, indices: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """int64: where in ``T`` the tokens of the sequences at ``indices`` stand, i.e. of `select`'s result."""
        index = torch.as_tensor(indices, dtype=torch.int64, device=self.offsets_B1.device)
        return _ranges(self.offsets_B1[:-1][index], self.lengths_B[index])

    def for_model(self) -> DataProto:
        """The same without what only advantages are made from, to send to workers."""
        return self.replace(baselines_B=None, message_ids_T=None, anchor_ids_T=None)

    def replace(self, **changes: Any) -> DataProto:
        """A batch that differs in the named fields and shares the others."""
        return replace(self, **changes)

    def to(self, device: torch.device | str) -> DataProto:
        """The same batch on ``device``."""
        return self.replace(**{name: tensor.to(device) for name, tensor in self._tensors()})

    def _tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        for f in fields(self):
            tensor = getattr(self, f.name)
            if tensor is not None:
                yield f.name, tensor

    def __reduce__(self) -> tuple[Any, ...]:
        # NumPy arrays pickle as out-of-band buffers: Ray then shares one copy, where torch would serialise storages.
        return _from_arrays, ({name: tensor.cpu().numpy() for name, tensor in self._tensors()},)


def _anchors(trajectory: Trajectory) -> np.ndarray:
    """int64 ``T``: see `DataProto.anchor_ids_T`."""
    previous = ["", *(_observed(trajectory, index) for index in range(len(trajectory.messages)))]
    codes = np.array([group_code(content) for content in previous], dtype=np.int64)
    # A token's message stands one later in `previous`, so that its own index finds the message before.
    return np.where(trajectory.loss_mask, codes[trajectory.sequence_ids], 0)


def _observed(trajectory: Trajectory, index: int) -> str:
    """What the environment said in a message, without what the agent keeps in view beside it, such as its plan."""
    content = trajectory.messages[index].content
    parts = trajectory.parts[index] if index < len(trajectory.parts) else ()
    observed = [content[part.start : part.end] for part in parts if part.kind == PartKind.OBSERVATION]
    return "".join(observed) or content


def _from_arrays(arrays: dict[str, np.ndarray]) -> DataProto:
    # Copied, because Ray's buffers are read-only and torch has no read-only tensors.
    return DataProto(**{name: torch.tensor(array) for name, array in arrays.items()})


def _check_sequence(index: int, ids: Sequence[int] | np.ndarray, mask: Sequence[int] | np.ndarray) -> None:
    if len(ids) == 0:
        raise ValueError(f"sequence {index} has no tokens")
    if len(ids) != len(mask):
        raise ValueError(f"sequence {index} has {len(ids)} tokens and a loss mask of length {len(mask)}")
    if mask[0]:
        raise ValueError(
            f"sequence {index}: its first token has loss mask 1, but nothing precedes it to predict it from"
        )


def _flat(parts: Sequence[Sequence[Any] | np.ndarray], dtype: torch.dtype) -> torch.Tensor:
    if not parts:
        return torch.zeros(0, dtype=dtype)
    return torch.as_tensor(np.concatenate([np.asarray(part) for part in parts])).to(dtype)


def _offsets(lengths_B: torch.Tensor) -> torch.Tensor:
    return torch.cat([lengths_B.new_zeros(1), lengths_B.cumsum(0)])


def _ranges(starts_B: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """``starts_B[b], starts_B[b] + 1, ...`` for ``lengths_B[b]`` numbers each, end to end."""
    before_B = lengths_B.cumsum(0) - lengths_B
    shift_T = (starts_B - before_B).repeat_interleave(lengths_B)
    return torch.arange(len(shift_T), device=starts_B.device) + shift_T
