"""Which checkpoint a run goes on from, and whether it can; without torch, so that a dry run asks the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentgym_rl.errors import ConfigError
from verl.config import ModelConfig, PPOConfig, SFTConfig, TrainingRunConfig
from verl.models.shapes import read_config
from verl.utils.checkpoint import (
    ACTOR_FOLDER,
    CRITIC_FOLDER,
    HUGGINGFACE_FOLDER,
    changed_keys,
    find_resume_folder,
    load_trainer_state,
)
from verl.utils.nested import value_at

_SHAPE_FIELDS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"),
)
"""Of a ``config.json``: those that the names and sizes of weights follow from."""


def ppo_checkpoint(config: PPOConfig) -> Path | None:
    """The checkpoint that a PPO run goes on from, a complete one; None for a fresh start.

    Raises `ConfigError` when the one asked for does not exist, or the run cannot go on from it.
    """
    folder, key = _asked_for(config.trainer), "actor_rollout_ref.model"
    if folder is None:
        return None
    _check_kind(folder, "ppo")
    if config.needs_critic:
        _check_has_critic(folder)
    if not config.trainer.rollout_only:
        _check_trained_weights(folder, asdict(config), key)
        _check_shape(folder, config.actor_rollout_ref.model, key)
    return folder


def data_checkpoint(config: SFTConfig, *, kind: str) -> Path | None:
    """The same for training on data; ``kind`` is ``sft`` or ``dpo``."""
    folder = _asked_for(config.trainer)
    if folder is not None:
        _check_kind(folder, kind)
        _check_trained_weights(folder, asdict(config), "model")
        _check_shape(folder, config.model, "model")
    return folder


def _asked_for(trainer: TrainingRunConfig) -> Path | None:
    """The folder that the configuration names, or finds."""
    return find_resume_folder(Path(trainer.default_local_dir), mode=trainer.resume_mode, path=trainer.resume_from_path)


def _check_kind(folder: Path, kind: str) -> None:
    """The checkpoint must be of the same kind of training."""
    found = load_trainer_state(folder).get("kind", "ppo")
    if found != kind:
        raise ConfigError(
            f"{folder} is a checkpoint of {found} and not of {kind}: take another trainer.default_local_dir; to train "
            f"its model further, let the model's path be {_exported(folder)}"
        )


def _check_has_critic(folder: Path) -> None:
    """It must have been written by a run with a critic."""
    if not (folder / CRITIC_FOLDER).is_dir():
        raise ConfigError(
            f"{folder} has no {CRITIC_FOLDER}/, which a run with a critic would go on from: take an "
            "algorithm.adv_estimator without one, or trainer.resume_mode=disable with actor_rollout_ref.model.path="
            f"{_exported(folder)}"
        )


def _check_trained_weights(folder: Path, config: Mapping[str, Any], model_key: str) -> None:
    """Its run must have trained the same weights of its model, or there is no optimizer state for them, or an adapter
    that means something else. ``model_key`` is the dotted key of the model in ``config``, and in that run's."""
    saved = load_trainer_state(folder)["config"]
    names = ["lora_rank", "freeze"]
    if value_at(saved, f"{model_key}.lora_rank") and value_at(config, f"{model_key}.lora_rank"):
        names += ["lora_alpha", "target_modules"]  # which say nothing without an adapter
    for key, (before, now) in changed_keys(saved, config, [f"{model_key}.{name}" for name in names]).items():
        if before is not None and _in_order(before) != _in_order(now):
            raise ConfigError(
                f"{key}={now!r}: the run that wrote {folder} had {before!r}, and only with that can it go on; to train "
                "its model further otherwise, take another trainer.default_local_dir, and let the model's path be "
                f"{_exported(folder)}"
            )


def _check_shape(folder: Path, model: ModelConfig, model_key: str) -> None:
    """Its weights must fit into the model, as far as both have a ``config.json`` here."""
    saved, now = read_config(str(_exported(folder))) or {}, read_config(model.path) or {}
    for field in _SHAPE_FIELDS:
        before, after = saved.get(field), now.get(field)
        if before is not None and after is not None and before != after:
            raise ConfigError(
                f"{model_key}.path={model.path!r}: has {field} {after!r}, and the model in {folder} {before!r}: go on "
                "with the model that the run began with, or take another trainer.default_local_dir"
            )


def _in_order(value: Any) -> Any:
    """A list of names without the order in which they were given."""
    return sorted(value) if isinstance(value, list | tuple) else value


def _exported(folder: Path) -> Path:
    """The checkpoint's model, as `from_pretrained` takes it."""
    return folder / ACTOR_FOLDER / HUGGINGFACE_FOLDER
