"""From the command line to a real config object, within a second and without torch, Ray or transformers.

Hydra enters here and nowhere else: it reads the YAML file and parses the overrides. Every key is then looked up in the
dataclass tree of `verl.config`, so that a misspelled or renamed key is answered with the right one.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agentgym_rl.errors import ConfigError
from verl.agent_trainer.presets import GROUPS, Preset, describe_presets, find_presets
from verl.agent_trainer.proposals import nearest_key

ConfigT = TypeVar("ConfigT")

_CONFIG_MODULE = "verl.agent_trainer.config"
_HYDRA_VERSION = "1.3"

_VAL_TEMPERATURE = "actor_rollout_ref.rollout.val_kwargs.temperature (0 means greedy)"
_USE_MAX_TOKEN_LEN = "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu (a token budget)"

RENAMED_KEYS: Mapping[str, str] = {
    "data.train_files": "data.train_file",
    "data.val_files": "data.val_file",
    "data.val_batch_size": "actor_rollout_ref.rollout.max_num_seqs (validation runs all items at once)",
    "data.return_raw_chat": "nothing: conversations come from the environment",
    "data.truncation": "nothing: a prompt that is too long is an error",
    "actor_rollout_ref.agentgym.env_name": "actor_rollout_ref.agentgym.task_name",
    "actor_rollout_ref.agentgym.env_server_base": "actor_rollout_ref.agentgym.env_addr",
    "actor_rollout_ref.agentgym.strategy": "actor_rollout_ref.agentgym.agent",
    "agentgym.strategy": "agentgym.agent",
    "actor_rollout_ref.agentgym.max_rounds": "algorithm.rounds_ctrl.rounds",
    "actor_rollout_ref.hybrid_engine": "nothing: actor and engine always share a worker",
    "actor_rollout_ref.model.use_remove_padding": "nothing: sequences are never padded",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "actor_rollout_ref.actor.ppo_micro_batch_size": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.use_dynamic_bsz": (
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu, used whenever ppo_micro_batch_size_per_gpu is null"
    ),
    "actor_rollout_ref.actor.optim.total_training_steps": "trainer.total_training_steps",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "actor_rollout_ref.actor.optim.lr_warmup_steps",
    "actor_rollout_ref.actor.optim.warmup_style": "actor_rollout_ref.actor.optim.lr_schedule",
    "actor_rollout_ref.ref.log_prob_micro_batch_size": _USE_MAX_TOKEN_LEN,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": _USE_MAX_TOKEN_LEN,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": _USE_MAX_TOKEN_LEN,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": _USE_MAX_TOKEN_LEN,
    "actor_rollout_ref.rollout.prompt_length": "data.max_prompt_length",
    "actor_rollout_ref.rollout.response_length": "data.max_response_length",
    "actor_rollout_ref.rollout.do_sample": _VAL_TEMPERATURE,
    "actor_rollout_ref.rollout.val_kwargs.do_sample": _VAL_TEMPERATURE,
    "algorithm.rounds_ctrl.max_rounds": "algorithm.rounds_ctrl.rounds",
    "algorithm.kl_penalty_type": "algorithm.kl_penalty",
    "algorithm.use_kl_in_reward": "algorithm.kl_ctrl.kl_coef (above 0)",
    "critic.strategy": "nothing: sharding is always FSDP2",
    "critic.ppo_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size": "critic.ppo_max_token_len_per_gpu",
    "critic.forward_micro_batch_size_per_gpu": "critic.ppo_max_token_len_per_gpu",
    "critic.use_dynamic_bsz": "critic.ppo_max_token_len_per_gpu, used whenever ppo_micro_batch_size_per_gpu is null",
    "critic.model.use_remove_padding": "nothing: sequences are never padded",
    "critic.model.tokenizer_path": "nothing: the critic reads the policy's own tokens",
    "critic.model.fsdp_config.fsdp_size": "critic.fsdp_config.fsdp_size",
    "critic.model.fsdp_config.param_offload": "critic.fsdp_config.param_offload",
    "critic.model.fsdp_config.optimizer_offload": "critic.fsdp_config.optimizer_offload",
    "critic.optim.lr_warmup_steps_ratio": "critic.optim.lr_warmup_steps",
    "critic.optim.warmup_style": "critic.optim.lr_schedule",
    "critic.optim.total_training_steps": "trainer.total_training_steps",
    "trainer.remove_previous_ckpt_in_save": "trainer.max_actor_ckpt_to_keep",
    "trainer.val_only": "python -m verl.agent_trainer.main_generation",
    "agentgym.env_name": "agentgym.task_name",
    "agentgym.env_server_base": "agentgym.env_addr",
    "rollout.n": "data.n_samples",
    "rollout.n_samples": "data.n_samples",
    "rollout.prompt_length": "data.max_prompt_length",
    "rollout.response_length": "data.max_response_length",
}
"""Keys of other Verl versions and of older scripts, with what takes their place here (for keys that a root lacks)."""


@dataclass(frozen=True)
class CommandLine:
    """What the user typed."""

    overrides: tuple[str, ...]
    config_name: str
    config_dir: str | None
    """The folder of the user's own YAML files that ``config_name`` is one of; None means this package's."""
    show: bool
    """Print the resolved config and stop."""
    preset_folder: str
    """The folder, in the folder of YAML files, that holds the presets of this program."""


def parse_command_line(argv: Sequence[str], *, program: str, config_name: str) -> CommandLine:
    """Split flags from ``key=value`` overrides; exits with a usage message on an unknown flag."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description="Options are given as key=value; docs/configuration.md says what each key means. "
        "Presets set many at once; a key that is given overrides them.",
        epilog=describe_presets(config_name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--config-name", default=config_name, help="YAML file to start from (default: %(default)s)")
    parser.add_argument("--config-dir", help="folder of your own YAML files, to take --config-name from")
    parser.add_argument("--show-config", action="store_true", help="print the resolved config and stop")
    parsed = parser.parse_intermixed_args(argv)  # flags may stand between overrides
    return CommandLine(tuple(parsed.overrides), parsed.config_name, parsed.config_dir, parsed.show_config, config_name)


def load_config(root: type[ConfigT], command_line: CommandLine) -> ConfigT:
    """The config object of a run. Raises `ConfigError`: unknown, renamed or missing key, wrong type, broken rule."""
    config = OmegaConf.structured(root)
    presets, values = _split(_parse_overrides(command_line.overrides))
    for key, _ in values:
        _type_at(root, key)  # before files are read, since most mistakes are made here
    for key, value in [*_yaml_values(command_line, root, presets), *values]:
        _set(config, root, key, value)
    _refuse_missing(config)
    return _to_object(config)


def as_yaml(config: Any) -> str:
    """The whole config as YAML, for logs and checkpoints."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)


def default_values(root: type, config_name: str) -> dict[str, Any]:
    """Every full key of a config root with its value under this package's YAML file ``config_name``; ``...`` for one
    that must be given."""
    config = OmegaConf.structured(root)
    for key, value in _yaml_values(CommandLine((), config_name, None, False, config_name), root, []):
        _set(config, root, key, value)
    missing = OmegaConf.missing_keys(config)
    return {key: ... if key in missing else _plain(OmegaConf.select(config, key)) for key in known_keys(root)}


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def known_keys(root: type) -> tuple[str, ...]:
    """Every full key of a config root, branches left out."""
    return tuple(_leaves(root, ""))


# ------------------------------------------------------------------------------------------------------- reading


def _yaml_values(command_line: CommandLine, root: type, presets: Sequence[Preset]) -> Iterator[tuple[str, Any]]:
    """Full keys and values of the YAML file and the presets, composed by Hydra.

    Names that begin with ``_`` are no keys: they hold what other values of the files refer to.
    """
    try:
        with _hydra(command_line.config_dir):
            overrides, further = find_presets(
                presets, root, command_line.preset_folder, lambda group: _names(command_line, group)
            )
            composed = compose(command_line.config_name, overrides=[*overrides, *_search_path(command_line)])
    except HydraException as error:
        raise ConfigError(f"--config-name={command_line.config_name}: {_first_line(error)}") from error
    for name, value in OmegaConf.to_container(composed, resolve=False).items():  # type: ignore[union-attr]
        if not str(name).startswith("_"):
            for key, text in _walk_value(str(name), value):
                yield key, OmegaConf.select(composed, key) if _refers_to_no_key(text) else text
    yield from further


def _refers_to_no_key(value: Any) -> bool:
    return isinstance(value, str) and "${_" in value


def _walk_value(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield key, value
        return
    for name, child in value.items():
        yield from _walk_value(f"{key}.{name}", child)


def _hydra(folder: str | None) -> AbstractContextManager[Any]:
    """Hydra, reading the YAML files of ``folder``, or of this package."""
    GlobalHydra.instance().clear()
    if folder is None:
        return initialize_config_module(_CONFIG_MODULE, version_base=_HYDRA_VERSION)
    return initialize_config_dir(str(Path(folder).resolve()), version_base=_HYDRA_VERSION)


def _search_path(command_line: CommandLine) -> list[str]:
    """What makes the files of the user's folder build on those of this package."""
    return [] if command_line.config_dir is None else [f"hydra.searchpath=[pkg://{_CONFIG_MODULE}]"]


def _names(command_line: CommandLine, group: str) -> list[str]:
    """Of the files in a folder on Hydra's search path."""
    return sorted(
        GlobalHydra.instance()
        .config_loader()
        .get_group_options(group, ObjectType.CONFIG, command_line.config_name, _search_path(command_line))
    )


def _split(overrides: Sequence[Override]) -> tuple[list[Preset], list[tuple[str, Any]]]:
    """Presets, and keys with values."""
    presets: list[Preset] = []
    values: list[tuple[str, Any]] = []
    for override in overrides:
        key, value = override.key_or_group, _value_of(override)
        if key in GROUPS and isinstance(value, str):
            presets.append(Preset(key, value))
        else:
            values.append((key, value))
    return presets, values


def _parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Each override by Hydra's grammar; raises `ConfigError` for what is not ``key=value``."""
    parser = OverridesParser.create()
    return [_parse_override(parser, text) for text in overrides]


def _parse_override(parser: OverridesParser, text: str) -> Override:
    if "=" not in text:
        raise ConfigError(f"{text!r}: not of the form key=value")
    try:
        override = parser.parse_override(text)
    except HydraException as error:
        raise ConfigError(f"{text!r}: not of the form key=value: {_first_line(error)}") from error
    if override.is_delete() or (override.is_sweep_override() and not _is_plain_list(override)):
        raise ConfigError(f"{text!r}: only key=value is allowed, neither deletions nor sweeps")
    return override


def _is_plain_list(override: Override) -> bool:
    """True for ``key=a,b``. Hydra would run once for each of the two; here it is a list."""
    return override.is_choice_sweep() and cast(ChoiceSweep, override.value()).simple_form


def _value_of(override: Override) -> Any:
    value = override.value()
    if isinstance(value, ChoiceSweep):
        return [item.text if isinstance(item, QuotedString) else item for item in value.list]
    return value if not isinstance(value, dict) else {str(name): child for name, child in value.items()}


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


# ------------------------------------------------------------------------------------------------------- checking


def _set(config: DictConfig, root: type, key: str, value: Any) -> None:
    """Put one value into the tree; a branch takes a mapping. Raises `ConfigError`."""
    field_type = _type_at(root, key)
    if isinstance(value, dict):
        for child_key, child in _walk_value(key, value):
            if child_key == key or dataclasses.is_dataclass(field_type) is False:
                raise ConfigError(f"{key}={value!r}: must be {type_name(field_type)}")
            _set(config, root, child_key, child)
        return
    if dataclasses.is_dataclass(field_type):
        raise ConfigError(f"{key}={value!r}: is a branch with the keys {', '.join(_field_types(field_type))}")
    if value == "":
        # What `key=$VARIABLE` gives when the variable is not set; as a path it would mean the current folder.
        raise ConfigError(f"{key}='': is empty; must be {type_name(field_type)}")
    if _holds_no_number(value) and field_type not in (str, str | None):
        raise ConfigError(f"{key}={value!r}: must be {type_name(field_type)}, and finite")
    try:
        OmegaConf.update(config, key, value)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}={value!r}: must be {type_name(field_type)}") from error


def _holds_no_number(value: Any) -> bool:
    """Whether a value, or one in a list, is nan or infinite, which comparisons with bounds may let pass."""
    if isinstance(value, list):
        return any(map(_holds_no_number, value))
    return isinstance(value, float) and not math.isfinite(value)


def _type_at(root: type, key: str) -> Any:
    """The declared type of a key; raises `ConfigError` for one that does not exist."""
    node: Any = root
    for name in key.split("."):
        types = _field_types(node) if dataclasses.is_dataclass(node) else {}
        if name not in types:
            raise ConfigError(_unknown_key(root, key))
        node = types[name]
    return node


def _field_types(node: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(node)
    return {field.name: hints[field.name] for field in dataclasses.fields(node)}


def _unknown_key(root: type, key: str) -> str:
    if key in RENAMED_KEYS:
        return f"{key}: unknown key; here it is {RENAMED_KEYS[key]}"
    nearest = nearest_key(key, known_keys(root))
    return f"{key}: unknown key" + (
        f"; did you mean {nearest}?" if nearest else "; docs/configuration.md lists the known keys"
    )


def _leaves(node: Any, prefix: str) -> Iterator[str]:
    for name, field_type in _field_types(node).items():
        if dataclasses.is_dataclass(field_type):
            yield from _leaves(field_type, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


_TYPE_NAMES: Mapping[Any, str] = {
    Any: "a value or a list",
    bool: "true or false",
    int: "an int",
    float: "a number",
    str: "a string",
    type(None): "null",
}


def type_name(field_type: Any) -> str:
    """A type in a user's words: ``an int``, ``a list, each a string``, ``a number or null``."""
    arguments = typing.get_args(field_type)
    if typing.get_origin(field_type) is list:
        return f"a list, each {type_name(arguments[0])}"
    if arguments:
        return " or ".join(map(type_name, arguments))
    return _TYPE_NAMES.get(field_type, str(field_type))


def _refuse_missing(config: DictConfig) -> None:
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ConfigError(f"must be given: {', '.join(missing)}")


def _to_object(config: DictConfig) -> Any:
    """Dataclass objects, whose own rules run now."""
    try:
        return OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ConfigError(_first_line(error)) from error
