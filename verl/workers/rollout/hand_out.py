"""Hands the requests of one rollout out to whichever worker has room, so that a slow one holds nobody up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist

from agentgym_rl.rollout.collector import RolloutRequest


class HandOut:
    """One worker's way to the requests that all workers share; iterating yields the indices that fall to this worker.

    Counters in the workers' common store decide, each in one atomic step: every index goes to exactly one worker, at
    the moment at which it asks, and no worker keeps any in reserve. A worker takes the members of one group after the
    other, so that its engine computes their common prompt once. When no group is untouched any more, it takes single
    members of those that others have begun.
    """

    def __init__(self, requests: Sequence[RolloutRequest], store: dist.Store, *, name: str) -> None:
        """``name`` tells rollouts on one store apart; all workers give the same requests and name."""
        self._store = dist.PrefixStore(f"hand_out/{name}", store)
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(request.uid, []).append(index)
        self._groups = list(groups.values())
        self.taken: list[int] = []
        """What fell to this worker so far."""

    def __iter__(self) -> Iterator[int]:
        for index in self._indices():
            self.taken.append(index)
            yield index

    def forget(self, *, num_workers: int) -> None:
        """Say that this worker takes no more; the last of ``num_workers`` clears the store."""
        if self._count("through") == num_workers:
            for key in ("begun", "through", *map(_taken_of, range(len(self._groups)))):
                self._store.delete_key(key)

    def _indices(self) -> Iterator[int]:
        while (group := self._count("begun") - 1) < len(self._groups):
            yield from self._left_of(group)
        # The latest first: the earlier ones have most likely been used up.
        for group in reversed(range(len(self._groups))):
            yield from self._left_of(group)

    def _left_of(self, group: int) -> Iterator[int]:
        members = self._groups[group]
        while (place := self._count(_taken_of(group)) - 1) < len(members):
            yield members[place]

    def _count(self, key: str) -> int:
        return self._store.add(key, 1)


def _taken_of(group: int) -> str:
    return f"taken/{group}"
