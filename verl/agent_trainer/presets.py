"""Presets: YAML files that each set the keys of a task, a model, an algorithm or a kind of machine.

They lie in ``verl/agent_trainer/config`` (``configs`` in the project's root), and are chosen by
``task=NAME model=NAME algorithm=NAME hardware=NAME``: Hydra's groups. A preset overrides the values of the file that
``--config-name`` names, and every ``key=value`` overrides the presets, wherever it stands.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentgym_rl.envs.registry import get_spec, known_tasks
from agentgym_rl.errors import ConfigError
from verl.agent_trainer.proposals import nearest_name
from verl.config import AgentGymConfig, ModelConfig

CONFIG_FOLDER = Path(__file__).parent / "config"

GROUPS: Mapping[str, str] = {
    "task": "an environment's items, lengths and horizon",
    "model": "where a model is found",
    "algorithm": "an algorithm as published",
    "hardware": "the machines, and what fits into their memory",
}
"""In the order in which they are read: a later one overrides an earlier one."""


@dataclass(frozen=True)
class Preset:
    """A choice on the command line, such as ``task=textcraft``."""

    group: str
    name: str


def find_presets(
    presets: Sequence[Preset], root: type, folder: str, names_of: Callable[[str], Sequence[str]]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Hydra's overrides that read the presets, and further keys and values that they stand for.

    ``folder`` is the one with the presets of this root; those of models are shared by all. ``names_of`` tells the names
    that Hydra finds in a folder. ``task`` may also name an environment without a preset: then only its name and address
    are set. Raises `ConfigError` for an unknown name, and for a kind of preset that this root has none of.
    """
    overrides: list[str] = []
    values: list[tuple[str, str]] = []
    last_given = {preset.group: preset for preset in presets}
    for preset in (last_given[group] for group in GROUPS if group in last_given):
        group = _group_folder(folder, preset.group)
        names = names_of(group)
        if preset.name in names:
            overrides.append(f"+{group}{_placed(preset, root)}={preset.name}")
        elif preset.group == "task" and names and preset.name in known_tasks():
            values += _task_values(preset.name, root)
        else:
            raise ConfigError(_unknown(preset, names))
    return overrides, values


def describe_presets(folder: str) -> str:
    """One line for each group that a program with this folder has, with the names that come with the package."""
    lines = [f"  {group}=NAME: {', '.join(names)}" for group in GROUPS if (names := list(packaged(folder, group)))]
    return "\n".join(["presets:", *lines])


def packaged(folder: str, group: str) -> dict[str, Path]:
    """The presets of a group that come with the package: name -> file."""
    files = CONFIG_FOLDER / _group_folder(folder, group)
    return {file.stem: file for file in sorted(files.glob("*.yaml"))}


def _group_folder(folder: str, group: str) -> str:
    return "model" if group == "model" else f"{folder}/{group}"


def _placed(preset: Preset, root: type) -> str:
    """The files of models hold the keys of a `ModelConfig`; all others say themselves where their keys belong."""
    return f"@{_branch(root, ModelConfig)}" if preset.group == "model" else ""


def _task_values(task: str, root: type) -> list[tuple[str, str]]:
    branch, port = _branch(root, AgentGymConfig), get_spec(task).default_port
    # Without a port of its own, as an environment that others serve, it has no usual address.
    address = [(f"{branch}.env_addr", f"http://127.0.0.1:{port}")] if port else []
    return [(f"{branch}.task_name", task), *address]


def _branch(root: type, kind: type) -> str:
    """The full name of the first branch of this type."""
    return next(_branches(root, kind, ""))


def _branches(node: type, kind: type, prefix: str) -> Iterator[str]:
    hints = typing.get_type_hints(node)
    for field in dataclasses.fields(node):
        child = hints[field.name]
        if isinstance(child, type) and issubclass(child, kind):
            yield f"{prefix}{field.name}"
        elif dataclasses.is_dataclass(child):
            yield from _branches(typing.cast(type, child), kind, f"{prefix}{field.name}.")


def _unknown(preset: Preset, names: Sequence[str]) -> str:
    choice = f"{preset.group}={preset.name!r}"
    if not names:
        return f"{choice}: this program has no presets of that kind; give the keys themselves"
    proposal = nearest_name(preset.name, names)
    meant = f"; did you mean {preset.group}={proposal}?" if proposal else ""
    return f"{choice}: no such preset; there are {', '.join(names)}{meant}"
