"""Which known name a misspelled one was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

_MOST_EDITS = 2
"""Typing mistakes in a name that it is still recognised behind."""


def nearest_key(key: str, known: Sequence[str]) -> str | None:
    """The known full key most like ``key``; None when none is like it.

    One that ends so; else one that a few typing mistakes lead to; else one that is alike as a whole, or in its last
    name alone.
    """
    ending = [known_key for known_key in known if known_key.endswith(f".{key}")]
    if "." in key and ending:
        return ending[0]
    last_name = key.rsplit(".", 1)[-1]
    names = {known_key.rsplit(".", 1)[-1]: known_key for known_key in reversed(known)}
    return nearest_name(key, known) or _look_alike(key, {name: name for name in known}) or _look_alike(last_name, names)


def nearest_name(name: str, known: Sequence[str]) -> str | None:
    """The known name that fewest typing mistakes lead to; None when each takes more than two, or more than half of the
    name."""
    counts = {other: edits(name, other) for other in known if abs(len(other) - len(name)) <= _MOST_EDITS}
    best = min(counts, key=lambda other: counts[other], default=None)
    return best if best is not None and counts[best] <= min(_MOST_EDITS, len(name) / 2) else None


def _look_alike(text: str, names: dict[str, str]) -> str | None:
    found = difflib.get_close_matches(text, names, n=1, cutoff=0.75)
    return names[found[0]] if found else None


def edits(one: str, other: str) -> int:
    """Letters to insert, leave out, replace, or exchange with their neighbour, to get from one text to the other.

    The optimal string alignment distance (https://en.wikipedia.org/wiki/Damerau-Levenshtein_distance), row by row.
    """
    # Full keys mostly share their branches, and a misspelled one all but a letter with the right one.
    one, other = _without_common_start(one, other)
    one, other = _without_common_start(one[::-1], other[::-1])
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        row = [i]
        for j, other_letter in enumerate(other, start=1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (letter != other_letter))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == other_letter:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
    return last[-1]


def _without_common_start(one: str, other: str) -> tuple[str, str]:
    shorter = min(len(one), len(other))
    start = next((i for i in range(shorter) if one[i] != other[i]), shorter)
    return one[start:], other[start:]
