"""The sampled tokens of a flat batch, and getting to them and back.

Axes: ``T`` tokens, ``B`` sequences, ``S`` sampled tokens in order, ``U`` turns: runs of sampled tokens of one message.
On the CPU, where the driver keeps its batches. NumPy looks tokens up there: finding and placing the sampled ones among
8 million takes it a third of torch's time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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
    def last_S(self) -> torch.Tensor:
        """int64: for each sequence that has sampled tokens, which of ``S`` is its last."""
        return torch.from_numpy(self.bounds_B1[1:][self.counts_B > 0] - 1)

    @cached_property
    def sequence_S(self) -> torch.Tensor:
        """int64: the sequence of each sampled token."""
        return torch.from_numpy(np.repeat(np.arange(len(self.counts_B)), self.counts_B))

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
        message_S, sequence_S = sampled.take(batch.message_ids_T), sampled.sequence_S
        begins_S = torch.ones(len(sampled), dtype=torch.bool)
        begins_S[1:] = (message_S[1:] != message_S[:-1]) | (sequence_S[1:] != sequence_S[:-1])
        starts_U = begins_S.nonzero()[:, 0]
        sequence_U = sequence_S[starts_U]
        is_last_U = torch.ones(len(starts_U), dtype=torch.bool)
        is_last_U[:-1] = sequence_U[1:] != sequence_U[:-1]
        return cls(starts_U, sequence_U, is_last_U)

    @property
    def before_S(self) -> torch.Tensor:
        """int64: which of ``S`` are a turn's last token that another turn of the sequence follows."""
        follows_U = ~self.is_last_U[:-1]
        return self.starts_U[1:][follows_U] - 1

    def sums(self, values_S: torch.Tensor) -> torch.Tensor:
        """float64 ``U``: the sum over each turn's tokens."""
        if not len(self.starts_U):
            return torch.zeros(0, dtype=torch.float64)
        return torch.from_numpy(np.add.reduceat(values_S.double().numpy(), self.starts_U.numpy()))

    def repeat(self, values_U: torch.Tensor, num_sampled: int) -> torch.Tensor:
        """``S``: each turn's value at all of its tokens."""
        lengths_U = np.diff(self.starts_U.numpy(), append=num_sampled)
        return torch.from_numpy(np.repeat(values_U.numpy(), lengths_U))
