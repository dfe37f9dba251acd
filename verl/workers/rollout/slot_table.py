"""Which sequence's tokens lie in which slot of the ``hf`` engine's KV cache."""

from __future__ import annotations

import itertools

import numpy as np

_COLUMN_STEP = 256


class SlotTable:
    """Token ids cached per slot, slots' owners, and the choice of a slot for a new sequence.

    A slot is *owned* by a trajectory that may come back with its next turn, and *busy* while a turn is being decoded.
    Released slots keep their tokens until another trajectory needs the place, so that later prompts can share a prefix.
    """

    def __init__(self, capacity: int) -> None:
        """``capacity``: slots that may exist at once."""
        self.capacity = capacity
        self._ids = np.zeros((0, _COLUMN_STEP), dtype=np.int64)
        self._lengths = np.zeros(0, dtype=np.int64)
        self._owners: list[str | None] = []
        self._busy: list[bool] = []
        self._last_use: list[int] = []
        self._clock = itertools.count()
        self._slot_of: dict[str, int] = {}

    def length(self, slot: int) -> int:
        """Tokens whose keys and values the slot holds."""
        return int(self._lengths[slot])

    def owns(self, trajectory_id: str) -> bool:
        return trajectory_id in self._slot_of

    def acquire(self, trajectory_id: str, prompt: np.ndarray) -> tuple[int, int, int] | None:
        """A slot for a turn of this trajectory, busy from now on; None when all are busy.

        Returns ``(slot, source, shared)``: the first ``shared`` tokens of ``prompt`` lie in slot ``source`` and count
        as cached in ``slot``; the caller copies them when the two differ. At least one prompt token is left to compute.
        """
        slot = self._slot_of.get(trajectory_id)
        if slot is not None:
            source, shared = slot, self._shared_prefix(prompt, slice(slot, slot + 1))[1]
        else:
            slot = self._free_slot()
            if slot is None:
                return None
            source, shared = self._shared_prefix(prompt, slice(None))
            self._assign(slot, trajectory_id)
        self._ensure_columns(len(prompt))
        self._ids[slot, :shared] = prompt[:shared]
        self._lengths[slot] = shared
        self._busy[slot] = True
        return slot, source, shared

    def extend(self, slot: int, token_ids: np.ndarray) -> None:
        """Record that the keys and values of these further tokens are in the slot now."""
        start = self._lengths[slot]
        end = start + len(token_ids)
        self._ensure_columns(end)
        self._ids[slot, start:end] = token_ids
        self._lengths[slot] = end

    def set_idle(self, slot: int) -> None:
        """The turn is over; the owner keeps the slot unless the place is needed."""
        self._busy[slot] = False
        self._last_use[slot] = next(self._clock)

    def release(self, trajectory_id: str) -> None:
        """The trajectory needs its slot no more; unknown ids are ignored."""
        slot = self._slot_of.pop(trajectory_id, None)
        if slot is not None:
            self._owners[slot] = None

    def _shared_prefix(self, prompt: np.ndarray, slots: slice) -> tuple[int, int]:
        """Slot among ``slots`` with the longest prefix of ``prompt``, and that length, below ``len(prompt)``."""
        width = min(len(prompt) - 1, self._ids.shape[1])
        lengths = self._lengths[slots]
        if not width or not lengths.any():
            return slots.start or 0, 0
        differs = self._ids[slots, :width] != prompt[:width]
        shared = np.minimum(np.where(differs.any(1), differs.argmax(1), width), lengths)
        best = int(shared.argmax())
        return (slots.start or 0) + best, int(shared[best])

    def _free_slot(self) -> int | None:
        """An unowned slot, else a new one, else that of the idle trajectory unused for longest."""
        unowned = self._least_recent(lambda slot: self._owners[slot] is None and not self._busy[slot])
        if unowned is not None:
            return unowned
        if len(self._owners) < self.capacity:
            return self._new_slot()
        return self._least_recent(lambda slot: not self._busy[slot])

    def _least_recent(self, condition) -> int | None:
        slots = [slot for slot in range(len(self._owners)) if condition(slot)]
        return min(slots, key=self._last_use.__getitem__, default=None)

    def _new_slot(self) -> int:
        self._ids = np.vstack([self._ids, np.zeros((1, self._ids.shape[1]), dtype=np.int64)])
        self._lengths = np.append(self._lengths, 0)
        self._owners.append(None)
        self._busy.append(False)
        self._last_use.append(next(self._clock))
        return len(self._owners) - 1

    def _assign(self, slot: int, trajectory_id: str) -> None:
        previous = self._owners[slot]
        if previous is not None:
            del self._slot_of[previous]
        self._owners[slot] = trajectory_id
        self._slot_of[trajectory_id] = slot

    def _ensure_columns(self, length: int) -> None:
        missing = length - self._ids.shape[1]
        if missing > 0:
            grow = max(missing, self._ids.shape[1])
            self._ids = np.pad(self._ids, ((0, 0), (0, grow)))
