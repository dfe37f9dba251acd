"""The sampled tokens of a flat batch, and getting to them and back.

Axes: ``T`` tokens, ``B`` sequences, ``S`` sampled tokens in order, ``U`` turns: the sampled tokens of one message,
``N`` runs of neighbouring ones, ``R`` sequences that have any.
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
    """The turns of a batch that have sampled tokens; construct with `of`.

    Found, summed and filled by their runs of neighbouring sampled tokens, of which there are far fewer than tokens.
    """

    starts_N: np.ndarray
    """int64: in ``T``, where each run begins; rising."""
    ends_N: np.ndarray
    """int64: in ``T``, behind the last token of each run."""
    turn_N: np.ndarray
    """int64: each run's turn, rising; a turn has several runs where tokens between its own were not sampled."""
    starts_U: np.ndarray
    """int64: in ``T``, the first token of each turn."""
    sequence_U: np.ndarray
    """int64: the turn's sequence."""
    loss_mask_T: np.ndarray
    """bool: the batch's."""

    @classmethod
    def of(cls, batch: DataProto) -> Turns:
        """Raises `ValueError` for a batch that does not say which message a token belongs to."""
        if batch.message_ids_T is None:
            raise ValueError("turns need message_ids_T in the batch")
        mask_T, messages_T, offsets_B1 = (
            tensor.numpy() for tensor in (batch.loss_mask_T, batch.message_ids_T, batch.offsets_B1)
        )
        starts_N, ends_N = _runs(mask_T, messages_T)
        sequence_N = np.searchsorted(offsets_B1, starts_N, side="right") - 1
        message_N = messages_T[starts_N]
        begins_N = np.ones(len(starts_N), dtype=bool)
        begins_N[1:] = (sequence_N[1:] != sequence_N[:-1]) | (message_N[1:] != message_N[:-1])
        turn_N = np.cumsum(begins_N) - 1
        return cls(starts_N, ends_N, turn_N, starts_N[begins_N], sequence_N[begins_N], mask_T)

    def __len__(self) -> int:
        return len(self.starts_U)

    @property
    def is_last_U(self) -> np.ndarray:
        """bool: no further turn follows in the sequence."""
        return np.diff(self.sequence_U, append=-1) != 0

    @property
    def last_S(self) -> np.ndarray:
        """int64: which of ``S`` is each turn's last token."""
        lengths_U = np.bincount(self.turn_N, weights=self.ends_N - self.starts_N, minlength=len(self))
        return np.cumsum(lengths_U).astype(np.int64) - 1

    def sums(self, values_T: torch.Tensor) -> torch.Tensor:
        """float64 ``U``: the sum over each turn's sampled tokens."""
        sums_U = torch.zeros(len(self), dtype=torch.float64)
        # Of rewards few differ from 0.
        places_K = np.flatnonzero(values_T.numpy() != 0)
        places_K = places_K[self.loss_mask_T[places_K]]
        bounds_U1 = np.searchsorted(places_K, np.append(self.starts_U, len(self.loss_mask_T)))
        filled = np.flatnonzero(np.diff(bounds_U1))
        sums_U[filled] = _sums_from(values_T[places_K], bounds_U1[filled])
        return sums_U

    def place(self, values_U: torch.Tensor) -> torch.Tensor:
        """float32 ``T``: each turn's value at all of its sampled tokens, 0 elsewhere."""
        # What lies before, in and between the runs, and behind the last one.
        bounds = np.zeros(2 * len(self.starts_N) + 2, np.int64)
        bounds[1:-1:2], bounds[2:-1:2], bounds[-1] = self.starts_N, self.ends_N, len(self.loss_mask_T)
        values = np.zeros(len(bounds) - 1, np.float32)
        values[1::2] = values_U.numpy()[self.turn_N]
        return torch.from_numpy(np.repeat(values, np.diff(bounds)))


def _runs(mask_T: np.ndarray, messages_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64, rising: where neighbouring sampled tokens of one message begin, and behind where they end."""
    # No run reaches into the next sequence, whose first token nothing predicts.
    padded = np.concatenate([[False], mask_T, [False]])
    changes_of_mask = np.flatnonzero(padded[1:] != padded[:-1])
    starts, ends = changes_of_mask[::2], changes_of_mask[1::2]
    # Messages are numbered in order: a run that begins and ends in the same one lies in no other.
    mixed = np.flatnonzero(messages_T[starts] != messages_T[ends - 1])
    if not len(mixed):
        return starts, ends
    changes = [
        start + 1 + np.flatnonzero(np.diff(messages_T[start:end]))
        for start, end in zip(starts[mixed].tolist(), ends[mixed].tolist(), strict=True)
    ]
    return np.sort(np.concatenate([starts, *changes])), np.sort(np.concatenate([ends, *changes]))


def _sums_from(values_S: torch.Tensor, starts: np.ndarray) -> torch.Tensor:
    """float64: the sums of the values from each of the rising ``starts`` to the next one, and to the end."""
    if not len(starts):
        return torch.zeros(0, dtype=torch.float64)
    return torch.from_numpy(np.add.reduceat(values_S.numpy(), starts, dtype=np.float64))
