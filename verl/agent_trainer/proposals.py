"""Which known name a misspelled one was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

_LIKENESS = 0.75
"""Share of letters, as difflib counts, that a name has in common with one that it is taken for."""


def nearest_key(key: str, known: Sequence[str]) -> str | None:
    """The known full key most like ``key``: one that ends so, else by the whole path, else by its last name alone.

    None when none is like it.
    """
    ending = [known_key for known_key in known if known_key.endswith(f".{key}")]
    if "." in key and ending:
        return ending[0]
    names = {known_key.rsplit(".", 1)[-1]: known_key for known_key in reversed(known)}
    return nearest_name(key, known) or _look_up(key.rsplit(".", 1)[-1], names)


def nearest_name(name: str, known: Sequence[str]) -> str | None:
    """The known name most like ``name``; None when none is like it."""
    return _look_up(name, {other: other for other in known})


def _look_up(text: str, names: Mapping[str, str]) -> str | None:
    found = difflib.get_close_matches(text, names, n=1, cutoff=_LIKENESS)
    return names[found[0]] if found else None
