"""Nine lamps in a square; pressing one switches it and its neighbours. All dark within 12 presses is the goal.

Every way to light the square comes from exactly one set of presses, so an item is that set, and the set solves it.
"""

from __future__ import annotations

from itertools import chain, combinations

from agentgym_rl.envs.base import Environment, InvalidCall, ResetResult, StepResult

LAMPS = tuple(column + row for row in "123" for column in "ABC")
MAX_PRESSES = 12
PUZZLES = tuple(chain.from_iterable(combinations(LAMPS, size) for size in range(1, len(LAMPS) + 1)))
"""Item -> the presses that solve it: 9 items of one press, then 36 of two, ...; 511 in all."""


def _switched_by(lamp: str) -> set[str]:
    """The lamp itself and those above, below, left and right of it."""
    column, row = lamp[0], lamp[1]
    near = {chr(ord(column) + step) + row for step in (-1, 0, 1)} | {column + chr(ord(row) + step) for step in (-1, 1)}
    return near.intersection(LAMPS)


class Lights(Environment):
    """Reward 1 for the press that darkens the last lamp, else 0."""

    def reset(self, data_idx: int) -> ResetResult:
        if not 0 <= data_idx < len(PUZZLES):
            raise InvalidCall(f"data_idx={data_idx}: must be in 0..{len(PUZZLES) - 1}")
        self._lit: set[str] = set()
        self._left, self._done = set(PUZZLES[data_idx]), False
        for lamp in self._left:
            self._lit ^= _switched_by(lamp)
        self._presses = 0
        self._observation = self._seen()
        return ResetResult(self._observation)

    def step(self, action: str) -> StepResult:
        if self._done:
            raise InvalidCall("the episode is done: reset it first")
        lamp = action.upper().removeprefix("PRESS").strip()
        solved = False
        if lamp in LAMPS:
            solved = self._press(lamp)
        else:
            self._observation = f"There is no such lamp. Write press and one of {', '.join(LAMPS)}."
        return StepResult(self._observation, reward=float(solved), done=self._done)

    def _press(self, lamp: str) -> bool:
        """Switch lamps; returns whether all are dark now."""
        self._lit ^= _switched_by(lamp)
        self._left ^= {lamp}
        self._presses += 1
        self._done = not self._lit or self._presses == MAX_PRESSES
        self._observation = self._seen() if self._lit else "All lamps are dark."
        return not self._lit

    def _seen(self) -> str:
        """The square, and in words what is lit: small models read words better than places."""
        return f"{self.render()}\nLit: {', '.join(lamp for lamp in LAMPS if lamp in self._lit)}"

    def solution(self) -> list[str]:
        """The presses that are still to be made."""
        return [f"press {lamp}" for lamp in LAMPS if lamp in self._left]

    def observation(self) -> str:
        return self._observation

    def available_actions(self) -> list[str]:
        return [] if self._done else [f"press {lamp}" for lamp in LAMPS]

    def render(self) -> str:
        rows = (" ".join("*" if column + row in self._lit else "." for column in "ABC") for row in "123")
        return "  A B C\n" + "\n".join(f"{number} {row}" for number, row in enumerate(rows, start=1))
