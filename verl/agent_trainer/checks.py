"""What can be wrong with a run's inputs, found within seconds and before any model loads."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

from agentgym_rl.client.check import check_server
from agentgym_rl.data.items import ItemList, overlap
from agentgym_rl.envs.registry import get_spec
from agentgym_rl.errors import ConfigError, EnvUnreachable
from agentgym_rl.types import Item
from verl.agent_trainer.capacity import hold_to_capacity
from verl.config import (
    AgentEvolConfig,
    AgentGymConfig,
    DPOConfig,
    GenerationConfig,
    ModelConfig,
    PPOConfig,
    RolloutConfig,
    SFTConfig,
    TrajectoryLengths,
)
from verl.models.shapes import read_config
from verl.utils.devices import resolve_device
from verl.utils.model_files import check_policy_files, check_weight_files
from verl.utils.model_folder import find_model
from verl.utils.tracking import check_loggers
from verl.workers.rollout.selection import engine_name

_SECONDS_PER_TRY = 0.2
_HUB_WAIT_S = 3.0
_WEIGHTS_ALONE = ("critic.model.path", "ref.path")
"""Keys of models whose tokenizer is never asked."""


@dataclass(frozen=True)
class RunItems:
    """The items of a training run."""

    train: tuple[Item, ...]
    val: tuple[Item, ...]
    lists: tuple[ItemList, ...] = ()
    """Where they come from."""

    @classmethod
    def load(
        cls, tasks: Sequence[str], train_file: str | Sequence[str], val_file: str | Sequence[str] | None
    ) -> RunItems:
        """Read them; raises `ConfigError`."""
        train = ItemList.load("data.train_file", train_file, tasks)
        if not val_file:
            return cls(train.items, (), (train,))
        val = ItemList.load("data.val_file", val_file, tasks)
        return cls(train.items, val.items, (train, val))


def check_ppo_inputs(config: PPOConfig) -> RunItems:
    """Everything that a look can find wrong with a training run; returns its items. Raises `ConfigError`."""
    branch = config.actor_rollout_ref
    items = check_ppo_settings(config)
    check_model_path(branch.model)
    report_beyond_context(branch.model, config.data, branch.rollout)
    if config.needs_critic:
        check_model_path(config.critic.model.resolved(branch.model), "critic.model.path")
    for key, folder in ppo_output_folders(config).items():
        check_output_folder(key, folder)
    if not config.trainer.replay:
        _check_rollouts(config, items)
    return items


def _check_rollouts(config: PPOConfig, items: RunItems) -> None:
    """What trajectories are made with: servers and their capacity, and the engine."""
    branch = config.actor_rollout_ref
    check_environment(branch.agentgym, *items.lists)
    with_greedy = config.algorithm.adv_estimator == "remax"  # One more of each item.
    train = config.data.train_batch_size * (branch.rollout.n + with_greedy)
    val = len(items.val) * branch.rollout.val_kwargs.n
    num_engines = config.trainer.world_size // branch.rollout.tensor_model_parallel_size
    hold_to_capacity(branch.agentgym, num_workers=num_engines, at_once=max(train, val))
    # Last, since it imports torch.
    engine_name(branch.rollout, resolve_device(config.trainer.device))


def check_ppo_settings(config: PPOConfig) -> RunItems:
    """The part of it that needs neither model nor server nor device, and makes no folders."""
    branch = config.actor_rollout_ref
    check_loggers(config.trainer.logger)
    items = RunItems.load(known_tasks_of(branch.agentgym), config.data.train_file, config.data.val_file)
    if config.trainer.test_freq > 0 and not items.val:
        raise ConfigError(f"trainer.test_freq={config.trainer.test_freq}: validation needs data.val_file")
    if config.trainer.val_before_train and not items.val:
        raise ConfigError("trainer.val_before_train=True: validation needs data.val_file")
    report_overlap(items.train, items.val)
    return items


def ppo_output_folders(config: PPOConfig) -> dict[str, str]:
    """Folders that a training run writes to, by key."""
    folders = {"trainer.default_local_dir": config.trainer.default_local_dir}
    if config.actor_rollout_ref.rollout.rollout_log_dir is not None:
        folders["actor_rollout_ref.rollout.rollout_log_dir"] = config.actor_rollout_ref.rollout.rollout_log_dir
    return folders


def check_generation_inputs(config: GenerationConfig) -> tuple[Item, ...]:
    """The same for an evaluation."""
    listed = _evaluation_list(config)
    config.model.path = find_model(config.model.path)
    check_model_path(config.model)
    report_beyond_context(config.model, config.data, config.rollout)
    check_output_folder("rollout.rollout_log_dir", str(config.rollout.rollout_log_dir))
    check_environment(config.agentgym, listed)
    at_once = min(config.data.batch_size, len(listed.items)) * config.data.n_samples
    num_engines = config.trainer.world_size // config.rollout.tensor_model_parallel_size
    hold_to_capacity(config.agentgym, num_workers=num_engines, at_once=at_once)
    engine_name(config.rollout, resolve_device(config.trainer.device))
    return listed.items


def check_generation_settings(config: GenerationConfig) -> tuple[Item, ...]:
    """The part of it that needs neither model nor server nor device, and makes no folders."""
    return _evaluation_list(config).items


def _evaluation_list(config: GenerationConfig) -> ItemList:
    listed = ItemList.load("data.path", config.data.path, known_tasks_of(config.agentgym))
    if config.rollout.rollout_log_dir is None:
        raise ConfigError("rollout.rollout_log_dir=null: an evaluation needs a folder for its results")
    return listed


def check_sft_inputs(config: SFTConfig) -> tuple[Item, ...]:
    """The same for supervised and preference training; returns the items of validation, none where nothing is
    validated."""
    listed = _sft_list(config)
    check_model_path(config.model)
    for key, folder in sft_output_folders(config).items():
        check_output_folder(key, folder)
    if listed is None:
        return ()
    _check_played(config, listed, max_at_once=len(listed.items) * config.rollout.val_kwargs.n)
    return listed.items


def check_sft_settings(config: SFTConfig) -> tuple[Item, ...]:
    """The part of it that needs neither model nor server nor device, and makes no folders."""
    listed = _sft_list(config)
    return () if listed is None else listed.items


def _sft_list(config: SFTConfig) -> ItemList | None:
    """The items of validation, None where nothing is validated."""
    check_loggers(config.trainer.logger)
    if not Path(config.data.train_file).is_file():
        raise ConfigError(f"data.train_file={config.data.train_file!r}: no such file")
    if not config.trainer.validates:
        return None
    return ItemList.load("data.val_file", config.data.val_file, known_tasks_of(config.agentgym))


def sft_output_folders(config: SFTConfig) -> dict[str, str]:
    """Folders that a training on data writes to, by key."""
    folders = {"trainer.default_local_dir": config.trainer.default_local_dir}
    if config.trainer.validates and config.rollout.rollout_log_dir is not None:
        folders["rollout.rollout_log_dir"] = config.rollout.rollout_log_dir
    return folders


def check_dpo_inputs(config: DPOConfig) -> tuple[Item, ...]:
    """The same for preference training, with its reference."""
    if config.ref.path is not None:
        check_model_path(ModelConfig(path=config.ref.path), "ref.path")
    return check_sft_inputs(config)


def check_agentevol_inputs(config: AgentEvolConfig) -> RunItems:
    """The same for AgentEvol."""
    items = check_agentevol_settings(config)
    check_model_path(config.model)
    if config.algorithm.first_policy is not None:
        check_model_path(ModelConfig(path=config.algorithm.first_policy), "algorithm.first_policy")
    check_output_folder("trainer.default_local_dir", config.trainer.default_local_dir)
    _check_played(config, *items.lists, max_at_once=max_played_at_once(config, items))
    return items


def check_agentevol_settings(config: AgentEvolConfig) -> RunItems:
    """The part of it that needs neither model nor server nor device, and makes no folders."""
    check_loggers(config.trainer.logger)
    items = RunItems.load(known_tasks_of(config.agentgym), config.data.train_file, config.data.val_file)
    if config.data.base_file is not None and not Path(config.data.base_file).is_file():
        raise ConfigError(f"data.base_file={config.data.base_file!r}: no such file")
    return items


def max_played_at_once(config: AgentEvolConfig, items: RunItems) -> int:
    """Most trajectories that exploration or evaluation has in flight."""
    explored = min(config.data.gen_batch_size, len(items.train)) * config.rollout.n
    evaluated = min(config.data.gen_batch_size, len(items.val)) * config.rollout.val_kwargs.n
    return max(explored, evaluated)


def _check_played(config: SFTConfig | AgentEvolConfig, *lists: ItemList, max_at_once: int) -> None:
    """What a model that is trained on data needs beside that to play."""
    report_beyond_context(config.model, config.data, config.rollout)
    check_environment(config.agentgym, *lists)
    num_engines = config.trainer.world_size // config.rollout.tensor_model_parallel_size
    hold_to_capacity(config.agentgym, num_workers=num_engines, at_once=max_at_once)
    # Last, since it imports torch.
    engine_name(config.rollout, resolve_device(config.trainer.device))


def report_overlap(train: Sequence[Item], val: Sequence[Item]) -> None:
    """Say so when items are trained on and validated on: their scores then tell nothing of unseen ones."""
    shared = overlap(val, train)
    if shared:
        shown = ", ".join(shared[:5]) + (", ..." if len(shared) > 5 else "")
        print(f"warning: {len(shared)} items are in data.train_file and in data.val_file: {shown}", flush=True)


def check_model_path(config: ModelConfig, key: str = "model.path") -> None:
    """The folder of a model, or a name that the hub (or its cache on this machine) knows.

    Raises `ConfigError`, in which ``key`` is what the user gave the path by.
    """
    if is_sound_folder(config, key):
        return
    folder = Path(config.path)
    # A hub name is `name` or `owner/name`; anything else was meant as a path.
    if folder.is_absolute() or config.path.startswith(".") or len(folder.parts) > 2:
        raise ConfigError(f"{key}={config.path!r}: no such folder")
    _check_hub(config.path, key)


def is_sound_folder(config: ModelConfig, key: str = "model.path") -> bool:
    """`is_model_folder`, with `ConfigError` for a folder whose files are not a whole model."""
    is_there = is_model_folder(config, key)
    if is_there and key in _WEIGHTS_ALONE:
        check_weight_files(config, key)
    elif is_there:
        check_policy_files(config, key)
    return is_there


def is_model_folder(config: ModelConfig, key: str = "model.path") -> bool:
    """True for a folder with a ``config.json``, False where nothing is; `ConfigError` for any other folder or file."""
    folder = Path(config.path)
    if (folder / "config.json").is_file():
        return True
    if folder.exists():
        raise ConfigError(f"{key}={config.path!r}: has no config.json, so it is no Hugging Face model folder")
    return False


def report_beyond_context(model: ModelConfig, data: TrajectoryLengths, rollout: RolloutConfig) -> None:
    """Say so when sequences may grow longer than the model's ``config.json`` says that it can read.

    The ``vllm`` engine refuses that when it starts. transformers, and so the ``hf`` engine, goes on: what is sampled
    beyond is of little worth.
    """
    fields = read_config(model.path) or {}
    context = fields.get("max_position_embeddings")
    scaling = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    longest = rollout.limits(data).longest
    if context is not None and longest > context * scaling.get("factor", 1):
        print(
            f"warning: sequences may have {longest} tokens (data.max_prompt_length={data.max_prompt_length}, "
            f"data.max_response_length={data.max_response_length}, rollout.max_model_len={rollout.max_model_len}), and "
            f"the model in {model.path} reads {context}",
            flush=True,
        )


def _check_hub(name: str, key: str) -> None:
    """Look the name up, for so long: without a network the hub's library goes on trying for half a minute."""
    problems: SimpleQueue[str | None] = SimpleQueue()
    # A daemon, because the look-up cannot be stopped and must not keep the process from ending.
    Thread(target=lambda: problems.put(_hub_problem(name)), name="hub-lookup", daemon=True).start()
    try:
        problem = problems.get(timeout=_HUB_WAIT_S)
    except Empty:
        problem = f"no answer within {_HUB_WAIT_S:g} s; download the model, and give its folder"
    if problem is not None:
        raise ConfigError(f"{key}={name!r}: no such folder, and not found on the hub: {problem}")


def _hub_problem(name: str) -> str | None:
    """Why the model cannot be had from the hub or its cache on this machine; None when it can."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HTTPError

    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)  # its lines about each new try would bury ours
    try:
        hf_hub_download(name, "config.json")
    except (OSError, ValueError, HTTPError) as error:  # the last: of the HTTP library, when a connection breaks
        return str(error).strip().splitlines()[0]
    finally:
        log.setLevel(level)
    return None


def check_output_folder(key: str, folder: str) -> None:
    """Make the folder that ``key`` names, unless it is there, and find that files can be made in it."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{key}={folder!r}: no files can be written there: {error.strerror}") from error


def check_can_be_made(key: str, folder: str) -> None:
    """`check_output_folder` by a look, which makes nothing."""
    path = Path(folder).resolve()
    there = next(place for place in (path, *path.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}={folder!r}: no files can be written there: {there} is no folder to write to")


def known_tasks_of(config: AgentGymConfig) -> tuple[str, ...]:
    """The names of a run's tasks, each of which is a registered environment."""
    return tuple(get_spec(task).name for task in config.tasks)


def check_environment(config: AgentGymConfig, *lists: ItemList) -> None:
    """Servers of all tasks answer, and have the items of the lists."""
    try:
        for task, addresses in config.servers.items():
            served = check_server(addresses, task, wait_s=config.max_retries * _SECONDS_PER_TRY)
            for listed in lists:
                listed.check_range(task, served, owner=f"the server at {', '.join(addresses)}")
    except EnvUnreachable as error:
        raise ConfigError(str(error)) from error
