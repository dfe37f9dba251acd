"""Every key of the configuration does something: code reads it, beyond the look at its value."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

import verl.config

SOURCES = [*Path(verl.config.__file__).parents[1].rglob("*.py")]
BRANCHES = {
    name: kind
    for name, kind in vars(verl.config).items()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__.startswith(verl.config.__name__)
}
LOOKS = ("__post_init__", "_check_")
"""Functions of the configuration that only look whether values are possible."""


def names_read(tree: ast.AST) -> set[str]:
    """Attributes that code reads, by name, functions that only look at values left out."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith(LOOKS):
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        found |= names_read(node)
    return found


@pytest.fixture(scope="module")
def read() -> set[str]:
    return set().union(*(names_read(ast.parse(path.read_text(encoding="utf-8"))) for path in SOURCES))


@pytest.mark.parametrize("branch", BRANCHES)
def test_every_key_is_read_by_more_than_the_check_of_its_value(branch: str, read: set[str]) -> None:
    unread = {field.name for field in dataclasses.fields(BRANCHES[branch])} - read
    assert unread == set()


def test_a_key_that_is_only_checked_is_not_read() -> None:
    check, use = "def __post_init__(self): assert self.unused > 0", "def use(self): return self.used"
    source = f"class C:\n  {check}\n  {use}\n"
    assert "unused" not in names_read(ast.parse(source)) and "used" in names_read(ast.parse(source))
