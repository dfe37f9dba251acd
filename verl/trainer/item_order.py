"""Which items a training step sees: a pure function of the seed and the step."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Generic, TypeVar

from agentgym_rl.errors import ConfigError
from verl.utils.seeding import derive_seed

RowT = TypeVar("RowT")


class ItemOrder(Generic[RowT]):
    """Batches of rows by step, counted from 1 over all epochs.

    Nothing is carried from step to step, so a resumed run goes on with the rows that it would have seen. Rows that do
    not fill a last batch wait for the next epoch, which is shuffled anew.
    """

    def __init__(self, rows: Sequence[RowT], *, batch_size: int, seed: int, shuffle: bool = True) -> None:
        """Raises `ConfigError` when there are fewer rows than one batch takes."""
        if batch_size > len(rows):
            raise ConfigError(f"data.train_batch_size={batch_size}: data.train_file has only {len(rows)} rows")
        self._rows = tuple(rows)
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._shuffled: tuple[int, list[int]] | None = None  # the epoch asked for last and its order, made once

    @property
    def batches_per_epoch(self) -> int:
        return len(self._rows) // self._batch_size

    def epoch_of(self, step: int) -> int:
        """Epoch of a step, counted from 0."""
        return (step - 1) // self.batches_per_epoch

    def batch(self, step: int) -> list[RowT]:
        """The rows of training step ``step``."""
        return [self._rows[index] for index in self._indices(step)]

    def others(self, step: int) -> Iterator[RowT]:
        """Further rows for training step ``step``: all but its batch, then its batch, and so on without end.

        They are in an order of the step's own, and no row comes twice before all have come.
        """
        # A generator: most steps ask for no further row, and to shuffle many costs more than a small model's update.
        batch = set(self._indices(step))
        rest = list(range(len(self._rows)))
        random.Random(derive_seed("other items", self._seed, step)).shuffle(rest)
        rest.sort(key=batch.__contains__)
        yield from (self._rows[index] for index in cycle(rest))

    def _indices(self, step: int) -> list[int]:
        if step < 1:
            raise ValueError(f"step={step}: training steps are counted from 1")
        start = (step - 1) % self.batches_per_epoch * self._batch_size
        return self._order(self.epoch_of(step))[start : start + self._batch_size]

    def _order(self, epoch: int) -> list[int]:
        if self._shuffled is None or self._shuffled[0] != epoch:
            self._shuffled = (epoch, self._make_order(epoch))
        return self._shuffled[1]

    def _make_order(self, epoch: int) -> list[int]:
        order = list(range(len(self._rows)))
        if self._shuffle:
            random.Random(derive_seed("item order", self._seed, epoch)).shuffle(order)
        return order
