"""Which known name a misspelled one was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

_LIKENESS = 0.75
"""Share of letters, as difflib counts, that a name has in common with one that it is taken for."""


def nearest_key(key: str, known: Sequence[str]) -> str | None:
    """The known full key most like ``key``: one that ends so, else one of its branch that has all the words of its last
    name (``total_training_steps`` for ``total_steps``), else by the whole path, else by its last name alone.

    None when none is like it.
    """
    ending = [known_key for known_key in known if known_key.endswith(f".{key}")]
    if "." in key and ending:
        return ending[0]
    if (fuller := _fuller_key(key, known)) is not None:
        return fuller
    names = {known_key.rsplit(".", 1)[-1]: known_key for known_key in reversed(known)}
    return nearest_name(key, known) or _look_up(key.rsplit(".", 1)[-1], names)


def _fuller_key(key: str, known: Sequence[str]) -> str | None:
    """The known key with the fewest words beyond those of ``key``."""
    branch, _, name = key.rpartition(".")
    asked = set(name.split("_")) - {""}
    words = {
        other: set(other.rpartition(".")[2].split("_"))
        for other in known
        if other.rpartition(".")[0] == branch or not branch
    }
    having = [other for other in words if asked <= words[other]]
    return min(having, key=lambda other: len(words[other]), default=None) if asked else None


def nearest_name(name: str, known: Sequence[str]) -> str | None:
    """The known name most like ``name``; None when none is like it."""
    return _look_up(name, {other: other for other in known})


def _look_up(text: str, names: Mapping[str, str]) -> str | None:
    found = difflib.get_close_matches(text, names, n=1, cutoff=_LIKENESS)
    return names[found[0]] if found else None
