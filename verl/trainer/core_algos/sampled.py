"""The sampled tokens of a flat batch, and getting to them and back.

Axes: ``T`` tokens, ``B`` sequences, ``S`` sampled tokens in order, ``U`` turns: runs of sampled tokens of one message,
``R`` sequences that have any.
On the CPU, where the driver keeps its batches. NumPy looks tokens up there: finding and placing the sampled ones among
8 million takes it a third of torch's time. It also makes the large arrays: on large pages, where a fresh tensor costs a
page fault for every 4 KiB.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from verl.protocol import DataProto


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """Where a batch's sampled tokens stand. Construct with `of`."""

    positions_S: np.ndarray
    """int64: in ``T``, rising."""
    bounds_B1: np.ndarray
    """int64: sequence ``b`` has the sampled tokens ``bounds_B1[b]`` to ``bounds_B1[b + 1]``."""
    num_tokens: int
    """Length of ``T``."""

    @classmethod
    def of(cls, batch: DataProto) -> SampledTokens:
        positions_S = np.flatnonzero(batch.loss_mask_T.numpy())
        return cls(positions_S, np.searchsorted(positions_S, batch.offsets_B1.numpy()), batch.num_tokens)

    def __len__(self) -> int:
        return len(self.positions_S)

    @property
    def counts_B(self) -> np.ndarray:
        """int64: sampled tokens of each sequence."""
        return np.diff(self.bounds_B1)

    @property
    def sequences_R(self) -> np.ndarray:
        """int64: the sequences that have sampled tokens, rising."""
        return np.flatnonzero(self.counts_B)

    @property
    def first_R(self) -> np.ndarray:
        """int64: which of ``S`` is the first of each of `sequences_R`."""
        return self.bounds_B1[self.sequences_R]

    @property
    def last_R(self) -> np.ndarray:
        """int64: which of ``S`` is the last of each of `sequences_R`."""
        return self.bounds_B1[self.sequences_R + 1] - 1

    def sums(self, values_S: torch.Tensor) -> torch.Tensor:
        """float64 ``B``: the sum over each sequence's sampled tokens."""
        sums_B = torch.zeros(len(self.counts_B), dtype=torch.float64)
        sums_B[self.sequences_R] = _sums_from(values_S, self.first_R)
        return sums_B

    def take(self, values_T: torch.Tensor) -> torch.Tensor:
        """``S``: the values at sampled tokens, in their own type."""
        return torch.from_numpy(values_T.numpy().take(self.positions_S))

    def repeat(self, values_B: torch.Tensor) -> torch.Tensor:
        """``S``: each sequence's value at all of its sampled tokens."""
        return torch.from_numpy(np.repeat(values_B.numpy(), self.counts_B))

    def place(self, values_S: torch.Tensor) -> torch.Tensor:
        """float32 ``T``: the values at sampled tokens, 0 elsewhere."""
        values_T = np.zeros(self.num_tokens, np.float32)
        values_T[self.positions_S] = values_S.numpy()
        return torch.from_numpy(values_T)


@dataclass(frozen=True, eq=False)
class Turns:
    """The turns of a batch that have sampled tokens; construct with `of`."""

    starts_U: torch.Tensor
    """int64: which of ``S`` is a turn's first token."""
    sequence_U: torch.Tensor
    """int64: the turn's sequence."""
    is_last_U: torch.Tensor
    """bool: no further turn follows in the sequence."""

    @classmethod
    def of(cls, batch: DataProto, sampled: SampledTokens) -> Turns:
        """Raises `ValueError` for a batch that does not say which message a token belongs to."""
        if batch.message_ids_T is None:
            raise ValueError("turns need message_ids_T in the batch")
        message_S = sampled.take(batch.message_ids_T).numpy()
        begins_S = np.zeros(len(sampled), dtype=bool)
        begins_S[1:] = message_S[1:] != message_S[:-1]
        begins_S[sampled.first_R] = True
        starts_U = np.flatnonzero(begins_S)
        sequence_U = np.searchsorted(sampled.bounds_B1, starts_U, side="right") - 1
        is_last_U = np.diff(sequence_U, append=-1) != 0
        return cls(*map(torch.from_numpy, (starts_U, sequence_U, is_last_U)))

    def last_S(self, num_sampled: int) -> np.ndarray:
        """int64: which of ``S`` is each turn's last token."""
        return np.append(self.starts_U.numpy()[1:], num_sampled)[: len(self.starts_U)] - 1

    def sums(self, values_S: torch.Tensor) -> torch.Tensor:
        """float64 ``U``: the sum over each turn's tokens."""
        return _sums_from(values_S, self.starts_U.numpy())

    def repeat(self, values_U: torch.Tensor, num_sampled: int) -> torch.Tensor:
        """``S``: each turn's value at all of its tokens."""
        lengths_U = np.diff(self.starts_U.numpy(), append=num_sampled)
        return torch.from_numpy(np.repeat(values_U.numpy(), lengths_U))


def _sums_from(values_S: torch.Tensor, starts: np.ndarray) -> torch.Tensor:
    """float64: the sums of the values from each of the rising ``starts`` to the next one, and to the end."""
    if not len(starts):
        return torch.zeros(0, dtype=torch.float64)
    return torch.from_numpy(np.add.reduceat(values_S.numpy(), starts, dtype=np.float64))
