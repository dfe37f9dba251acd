"""Mappings within mappings, such as a configuration, by dotted keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flat_items(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each full key with its value: ``trainer.seed``, 0."""
    for name, value in nested.items():
        if isinstance(value, Mapping):
            yield from flat_items(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def value_at(nested: Mapping[str, Any], key: str) -> Any:
    """The value of a full key; None where there is no such key."""
    value: Any = nested
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
