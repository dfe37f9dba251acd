"""Word-level differences between two texts, in bounded time whatever the texts hold."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_WORD = re.compile(r"\s*\S+|\s+$")
_MAX_EDITS = 200
"""Texts that differ in more words than this are told apart as a whole: time grows with its square."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a text."""

    text: str
    changed: bool
    """True where the other text has something else, or nothing."""


def compare_texts(left: str, right: str) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Both texts cut into parts, which joined give the texts again; white space between words makes no difference."""
    left_words, right_words = _WORD.findall(left), _WORD.findall(right)
    a, b = [word.strip() for word in left_words], [word.strip() for word in right_words]
    start = _common(a, b)
    end = _common(a[start:][::-1], b[start:][::-1])
    kept = _longest_common(a[start : len(a) - end], b[start : len(b) - end])
    same_a = {*range(start), *(start + i for i, _ in kept), *range(len(a) - end, len(a))}
    same_b = {*range(start), *(start + j for _, j in kept), *range(len(b) - end, len(b))}
    return tuple(_parts(left_words, same_a)), tuple(_parts(right_words, same_b))


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    """Words that both begin with."""
    count = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        count += 1
    return count


def _parts(words: Sequence[str], same: set[int]) -> Iterator[Part]:
    begin = 0
    for index in range(1, len(words) + 1):
        if index == len(words) or (index in same) != (begin in same):
            yield from _stretch("".join(words[begin:index]), changed=begin not in same)
            begin = index


def _stretch(text: str, *, changed: bool) -> Iterator[Part]:
    """One part; the white space before a change is none."""
    gap = len(text) - len(text.lstrip()) if changed else 0
    if gap:
        yield Part(text[:gap], False)
    if text[gap:]:
        yield Part(text[gap:], changed)


def _longest_common(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of indices of a longest common subsequence; none when it takes more than `_MAX_EDITS` edits.

    The greedy algorithm of E. W. Myers, "An O(ND) Difference Algorithm and Its Variations" (1986).
    """
    reach = {1: 0}
    """Diagonal (index in ``a`` minus index in ``b``) -> furthest index in ``a``."""
    history: list[dict[int, int]] = []
    for edits in range(min(len(a) + len(b), _MAX_EDITS) + 1):
        history.append(dict(reach))
        for diagonal in range(-edits, edits + 1, 2):
            x = _furthest(reach, diagonal, edits)
            while x < len(a) and x - diagonal < len(b) and a[x] == b[x - diagonal]:
                x += 1
            reach[diagonal] = x
            if x >= len(a) and x - diagonal >= len(b):
                return _trace(history, len(a), len(b))
    return []


def _furthest(reach: dict[int, int], diagonal: int, edits: int) -> int:
    """Where the edit that leads onto ``diagonal`` ends: an insertion from above, or a deletion from below it."""
    if diagonal == -edits or (diagonal != edits and reach[diagonal - 1] < reach[diagonal + 1]):
        return reach[diagonal + 1]
    return reach[diagonal - 1] + 1


def _trace(history: Sequence[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    """The equal pairs on the way back from the end."""
    pairs: list[tuple[int, int]] = []
    for edits in range(len(history) - 1, -1, -1):
        reach, diagonal = history[edits], x - y
        begin = _furthest(reach, diagonal, edits)
        while x > begin and x > 0 and y > 0:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        if edits:
            inserted = diagonal == -edits or (diagonal != edits and reach[diagonal - 1] < reach[diagonal + 1])
            x, y = (x, y - 1) if inserted else (x - 1, y)
    return pairs[::-1]
