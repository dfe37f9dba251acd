"""An environment's settings as options of the command line."""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Sequence
from dataclasses import fields, replace
from enum import StrEnum
from typing import Any

from agentgym_rl.envs.registry import EnvSpec, get_spec, known_tasks
from agentgym_rl.errors import ConfigError

_PREFIX = "setting_"


def add_settings(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Add an option for each setting of the first known task among the arguments."""
    tasks = set(known_tasks())
    task = next((argument for argument in arguments if argument in tasks), None)
    spec = None if task is None else get_spec(task)
    if spec is None or spec.settings is None:
        return
    kinds = typing.get_type_hints(type(spec.settings))
    group = parser.add_argument_group(f"settings of {spec.title}")
    for field in fields(spec.settings):
        default = getattr(spec.settings, field.name)
        option = "--" + field.name.replace("_", "-")
        explained = {"help": field.metadata.get("help", ""), "dest": _PREFIX + field.name, "default": None}
        kind = _plain_kind(kinds[field.name])
        if kind is bool:
            group.add_argument(option, action=argparse.BooleanOptionalAction, **explained)
        elif isinstance(kind, type) and issubclass(kind, StrEnum):
            group.add_argument(option, choices=[str(member) for member in kind], type=str, **explained)
        else:
            explained["help"] = f"{explained['help']} (default: {default})".strip()
            group.add_argument(option, type=kind, metavar=kind.__name__.upper(), **explained)


def _plain_kind(kind: Any) -> Any:
    """``X`` of ``X | None``."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return next(part for part in typing.get_args(kind) if part is not type(None))
    return kind


def configured_spec(options: argparse.Namespace) -> EnvSpec:
    """The spec of ``options.task`` under the settings that the options choose."""
    spec = get_spec(options.task)
    chosen = {
        name.removeprefix(_PREFIX): value
        for name, value in vars(options).items()
        if name.startswith(_PREFIX) and value is not None
    }
    if not chosen:
        return spec
    kinds = typing.get_type_hints(type(spec.settings))
    for name, value in chosen.items():
        kind = _plain_kind(kinds[name])
        if issubclass(kind, StrEnum):
            chosen[name] = kind(value)
    try:
        return spec.with_settings(replace(spec.settings, **chosen))
    except ConfigError as error:
        raise ConfigError(f"{options.task}: {error}") from error


def settings_arguments(options: argparse.Namespace) -> list[str]:
    """The arguments that choose the same settings in another command."""
    arguments = []
    for name, value in vars(options).items():
        if name.startswith(_PREFIX) and value is not None:
            option = name.removeprefix(_PREFIX).replace("_", "-")
            if isinstance(value, bool):
                arguments.append(f"--{'' if value else 'no-'}{option}")
            else:
                arguments.append(f"--{option}={value}")
    return arguments
