"""Which items a training step sees: a pure function of the seed and the step.

`ItemOrder` goes through one list; `TaskMixture` through the items of several tasks, each with a share of every batch.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Generic, Protocol, TypeVar

from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Item
from verl.config import DataConfig
from verl.utils.seeding import derive_seed

RowT = TypeVar("RowT")


class Order(Protocol[RowT]):
    """Batches of rows by step, counted from 1 over all epochs."""

    @property
    def batches_per_epoch(self) -> int: ...

    def epoch_of(self, step: int) -> int:
        """Epoch of a step, counted from 0."""
        ...

    def batch(self, step: int) -> list[RowT]:
        """The rows of training step ``step``; none comes twice."""
        ...

    def others(self, step: int) -> Iterator[RowT]:
        """Further rows for training step ``step``, without end; of as many as a batch has, none comes twice."""
        ...


def order_items(items: Sequence[Item], tasks: Sequence[str], data: DataConfig) -> Order[Item]:
    """The order in which a run with these tasks sees its items, as ``data`` says; raises `ConfigError` as either."""
    if data.task_weights is None:
        return ItemOrder(items, batch_size=data.train_batch_size, seed=data.seed, shuffle=data.shuffle)
    items_of = {task: [item for item in items if item.task == task] for task in tasks}
    weights = dict(zip(tasks, data.task_weights, strict=True))
    return TaskMixture(items_of, weights, batch_size=data.train_batch_size, seed=data.seed, shuffle=data.shuffle)


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


class TaskMixture:
    """Batches in which every task has its share.

    Whose turn it is follows from the weights alone, by the divisor method of Sainte-Lague (Balinski & Young 1982, "Fair
    Representation"): after any number of items each task has its share of them to within about one. Each task goes
    through its own items, shuffled anew each time that it comes to their end; then those that are in the same batch
    already wait until the others have come. An epoch is as many items as all tasks have together.
    """

    def __init__(
        self,
        items: Mapping[str, Sequence[Item]],
        weights: Mapping[str, float],
        *,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        """Raises `ConfigError` when a task has fewer items than its share of a batch, or all have fewer than one."""
        self._items = {task: tuple(rows) for task, rows in items.items()}
        total = sum(weights[task] for task in self._items)
        self._weights = {task: weights[task] / total for task in self._items}
        self._batch_size, self._seed, self._shuffle = batch_size, seed, shuffle
        self._num_items = sum(map(len, self._items.values()))
        if batch_size > self._num_items:
            raise ConfigError(f"data.train_batch_size={batch_size}: data.train_file has only {self._num_items} rows")
        self._check_shares()
        self._start_over()

    @property
    def batches_per_epoch(self) -> int:
        return self._num_items // self._batch_size

    def epoch_of(self, step: int) -> int:
        """Epoch of a step, counted from 0."""
        return (step - 1) // self.batches_per_epoch

    def batch(self, step: int) -> list[Item]:
        """The items of training step ``step``.

        It follows from the steps before, which are gone through again when an earlier one is asked for: some
        microseconds each.
        """
        if step < 1:
            raise ValueError(f"step={step}: training steps are counted from 1")
        if step < self._step:
            self._start_over()
        while self._step < step:
            self._advance()
        return list(self._batch)

    def others(self, step: int) -> Iterator[Item]:
        """Further items for training step ``step``, by the tasks' shares: of each first those outside its batch.

        They are in an order of the step's own, and no item comes twice before all of its task have come.
        """
        batch = set(self.batch(step))
        supplies = {}
        for task, items in self._items.items():
            rest = list(items)
            random.Random(derive_seed("other items", self._seed, step, task)).shuffle(rest)
            rest.sort(key=batch.__contains__)
            supplies[task] = cycle(rest)
        return (next(supplies[task]) for task in _turns(self._weights))

    def _start_over(self) -> None:
        self._step = 0
        self._batch: list[Item] = []
        self._turns = _turns(self._weights)
        self._epochs = dict.fromkeys(self._items, -1)
        self._queues: dict[str, list[Item]] = {task: [] for task in self._items}
        """What is left of each task's epoch, the next one last."""

    def _advance(self) -> None:
        self._step += 1
        batch: list[Item] = []
        for task in islice(self._turns, self._batch_size):
            if not self._queues[task]:
                self._queues[task] = self._next_epoch(task, batch)
            batch.append(self._queues[task].pop())
        self._batch = batch

    def _next_epoch(self, task: str, batch: Sequence[Item]) -> list[Item]:
        """A task's items, the next one last; those of ``batch`` come at the end."""
        self._epochs[task] += 1
        items = list(self._items[task])
        if self._shuffle:
            random.Random(derive_seed("item order", self._seed, task, self._epochs[task])).shuffle(items)
        items.sort(key=set(batch).__contains__)
        return items[::-1]

    def _check_shares(self) -> None:
        shares = {task: weight * self._batch_size for task, weight in self._weights.items()}
        # Whole shares come out exactly; others may be rounded up, and are so in different batches for different tasks.
        are_whole = all(abs(share - round(share)) < 1e-9 for share in shares.values())
        for task, share in shares.items():
            most = round(share) if are_whole else min(self._batch_size, int(share) + 2)
            if most > len(self._items[task]):
                raise ConfigError(
                    f"data.task_weights gives {task} up to {most} of data.train_batch_size={self._batch_size} items, "
                    f"and data.train_file has {len(self._items[task])}; lower its weight or the batch size"
                )


def _turns(weights: Mapping[str, float]) -> Iterator[str]:
    """Whose turn it is, without end; of equal claims the first task's comes first."""
    counts: Counter[str] = Counter()
    while True:
        task = max(weights, key=lambda name: weights[name] / (2 * counts[name] + 1))
        counts[task] += 1
        yield task
