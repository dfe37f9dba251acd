"""docs/configuration.md is what the configuration says of itself, and leaves nothing out."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

import verl.config

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_configuration_docs.py"


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_configuration_docs", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # its dataclasses look it up there
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_up_to_date(docs: ModuleType) -> None:
    assert docs.DOCUMENT.read_text() == docs.document(), "run: python scripts/make_configuration_docs.py"


def test_every_program_is_in_it(docs: ModuleType) -> None:
    roots = {
        kind
        for kind in vars(verl.config).values()
        if dataclasses.is_dataclass(kind) and "Root of ``python -m" in (kind.__doc__ or "")
    }
    assert roots == {root for root, _ in docs.PROGRAMS.values()}


def test_every_key_says_what_it_means(docs: ModuleType) -> None:
    silent = {
        f"{branch.kind.__name__}.{key}"
        for root, _ in docs.PROGRAMS.values()
        for branch in docs.branches(root)
        for key in branch.keys
        if not docs.meaning(branch.kind, key)
    }
    assert silent == set()


def test_a_row_has_type_default_and_meaning(docs: ModuleType) -> None:
    text = docs.document()
    assert "| `timeout` | a number | `600` | Seconds one trajectory may take (stop reason `deadline`). |" in text
    assert "| `train_file` | " in text and "must be given" in text
    # ppo_trainer.yaml overrides the dataclass, whose default is 1
    assert "| `n` | an int | `4` | Trajectories per item in a training step (the group). |" in text
    assert "| `algorithm=scaling_inter_rl` | ScalingInter-RL: " in text
