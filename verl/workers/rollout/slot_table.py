"""Which sequence's tokens lie in which slot of the ``hf`` engine's KV cache."""

from __future__ import annotations

import heapq
import itertools

import numpy as np

_ROW_STEP, _COLUMN_STEP = 16, 256


class SlotTable:
    """Token ids cached per slot, slots' owners, and the choice of a slot for a new sequence.

    A slot is *owned* by a trajectory that may come back with its next turn, and *busy* while a turn is being decoded.
    Released slots keep their tokens until another trajectory needs the place, so that later prompts can share a prefix.
    """

    def __init__(self, capacity: int) -> None:
        """``capacity``: slots that may exist at once."""
        self.capacity = capacity
        self._ids = np.zeros((_ROW_STEP, _COLUMN_STEP), dtype=np.int64)
        self._lengths = np.zeros(_ROW_STEP, dtype=np.int64)
        """As ``_ids``, of at least as many rows as there are slots."""
        self._owners: list[str | None] = []
        self._busy: list[bool] = []
        self._last_use: list[int] = []
        self._clock = itertools.count()
        self._slot_of: dict[str, int] = {}
        self._free: list[tuple[int, int]] = []
        """A heap of last use and slot of those that are neither owned nor busy."""

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
            source, shared = slot, self._shared_with(slot, prompt)
        else:
            slot = self._free_slot()
            if slot is None:
                return None
            source, shared = self._longest_shared(prompt)
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
        if self._owners[slot] is None:
            self._set_free(slot)

    def release(self, trajectory_id: str) -> None:
        """The trajectory needs its slot no more; unknown ids are ignored."""
        slot = self._slot_of.pop(trajectory_id, None)
        if slot is not None:
            self._owners[slot] = None
            if not self._busy[slot]:
                self._set_free(slot)

    def _shared_with(self, slot: int, prompt: np.ndarray) -> int:
        """Length of the prefix that the slot shares with ``prompt``, below ``len(prompt)``."""
        width = min(len(prompt) - 1, self.length(slot))
        differs = self._ids[slot, :width] != prompt[:width]
        first = int(differs.argmax()) if width else 0
        return first if width and differs[first] else width

    def _longest_shared(self, prompt: np.ndarray) -> tuple[int, int]:
        """Slot with the longest prefix of ``prompt``, and that length, below ``len(prompt)``."""
        width = min(len(prompt) - 1, self._ids.shape[1])
        lengths = self._lengths[: len(self._owners)]
        if not width or not lengths.any():
            return 0, 0
        differs = self._ids[: len(self._owners), :width] != prompt[:width]
        first = differs.argmax(1)
        first[~differs[np.arange(len(first)), first]] = width  # nothing differs there
        shared = np.minimum(first, lengths)
        best = int(shared.argmax())
        return best, int(shared[best])

    def _free_slot(self) -> int | None:
        """The unowned slot unused for longest, else a new one, else that of the idle trajectory unused for longest."""
        if self._free:
            return heapq.heappop(self._free)[1]
        if len(self._owners) < self.capacity:
            return self._new_slot()
        idle = [slot for slot, is_busy in enumerate(self._busy) if not is_busy]
        return min(idle, key=self._last_use.__getitem__, default=None)

    def _set_free(self, slot: int) -> None:
        heapq.heappush(self._free, (self._last_use[slot], slot))

    def _new_slot(self) -> int:
        slot = len(self._owners)
        if slot == len(self._lengths):
            self._ids = np.pad(self._ids, ((0, slot), (0, 0)))
            self._lengths = np.pad(self._lengths, (0, slot))
        self._owners.append(None)
        self._busy.append(False)
        self._last_use.append(next(self._clock))
        return slot

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
