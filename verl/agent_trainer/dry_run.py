"""``trainer.dry_run=true``: what a run would do, after all checks that need neither a model's weights nor a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentgym_rl.agent.chat import ChatTemplate
from verl.agent_trainer.checks import (
    RunItems,
    check_agentevol_settings,
    check_can_be_made,
    check_generation_settings,
    check_ppo_settings,
    check_sft_settings,
    is_model_folder,
    is_sound_folder,
    max_played_at_once,
    ppo_output_folders,
    report_beyond_context,
    sft_output_folders,
)
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
from verl.models.shapes import ModelShape, shape_of
from verl.trainer.examples import TrainingData
from verl.trainer.item_order import order_items
from verl.trainer.memory import (
    Demand,
    Machine,
    MemoryPlan,
    engine_parts,
    engine_share,
    plan_data_memory,
    plan_memory,
)
from verl.trainer.plan import PPOPlan, describe_generation
from verl.trainer.resuming import ppo_checkpoint
from verl.utils.devices import resolve_device
from verl.utils.model_folder import find_model
from verl.workers.rollout.selection import engine_name


def describe_ppo(config: PPOConfig) -> str:
    """The plan of a training run, for the user; makes nothing and asks nobody. Raises `ConfigError`."""
    branch, trainer = config.actor_rollout_ref, config.trainer
    plan = _ppo_plan(config, check_ppo_settings(config))
    _check_estimator(config)
    if trainer.replay:
        from verl.trainer.replay import check_replay  # which imports torch

        check_replay(config, plan.total_steps)
    for key, folder in ppo_output_folders(config).items():
        check_can_be_made(key, folder)
    resume = ppo_checkpoint(config)
    machine = Machine(planned_device(trainer.device), trainer.world_size)
    return "\n".join(
        [
            plan.describe(config, machine.device),
            *_goes_on(resume),
            _ppo_memory(config, machine),
            _not_looked_at(None if trainer.replay else branch.agentgym, branch.model),
        ]
    )


def _ppo_plan(config: PPOConfig, items: RunItems) -> PPOPlan:
    order = order_items(items.train, config.actor_rollout_ref.agentgym.tasks, config.data)
    return PPOPlan.of(
        config, num_items=len(items.train), num_val_items=len(items.val), steps_per_epoch=order.batches_per_epoch
    )


def _check_estimator(config: PPOConfig) -> None:
    if ":" in config.algorithm.adv_estimator:  # the others are known to the config
        from verl.trainer.core_algos import find_estimator  # which imports torch

        find_estimator(config.algorithm.adv_estimator)


def _ppo_memory(config: PPOConfig, machine: Machine) -> str:
    branch = config.actor_rollout_ref
    engine = engine_name(branch.rollout, machine.device)
    shape = _shape(branch.model)
    if shape is None:
        return _unknown_memory(branch.model)
    report_beyond_context(branch.model, config.data, branch.rollout)
    critic_model = config.critic.model.resolved(branch.model)
    critic = _shape(critic_model, "critic.model.path") or shape
    return plan_memory(config, shape, critic, machine, engine=engine).describe(machine, _source(branch.model))


def describe_evaluation(config: GenerationConfig) -> str:
    """The plan of an evaluation, likewise."""
    items = check_generation_settings(config)
    config.model.path = find_model(config.model.path)
    check_can_be_made("rollout.rollout_log_dir", str(config.rollout.rollout_log_dir))
    machine = Machine(planned_device(config.trainer.device), config.trainer.world_size)
    return "\n".join(
        [
            describe_generation(config, num_items=len(items), num_done=0, device=machine.device),
            _engine_memory(
                config.model,
                config.agentgym,
                config.rollout,
                config.data,
                machine,
                min(config.data.batch_size, len(items)) * config.data.n_samples,
            ),
            _not_looked_at(config.agentgym, config.model),
        ]
    )


def describe_sft(config: SFTConfig) -> str:
    """The plan of a supervised or preference training, likewise; rows are encoded where the model's folder is there."""
    val_items = check_sft_settings(config)
    for key, folder in sft_output_folders(config).items():
        check_can_be_made(key, folder)
    from verl.trainer.data_trainer import DataPlan, order_rows  # which import torch
    from verl.trainer.dpo import DPOTrainer, read_dpo_data
    from verl.trainer.sft import SFTTrainer, read_sft_data

    data: TrainingData[Any]
    if isinstance(config, DPOConfig):
        if config.ref.path is not None:
            is_sound_folder(ModelConfig(path=config.ref.path), "ref.path")
        kind, data = DPOTrainer.kind, read_dpo_data(config, _chat(config.model))
    else:
        kind, data = SFTTrainer.kind, read_sft_data(config, _chat(config.model))
    order = order_rows(range(len(data)), config.data)
    plan = DataPlan.of(config, order, val_items, kind=kind)
    machine = Machine(planned_device(config.trainer.device), config.trainer.world_size)
    return "\n".join(
        [
            data.describe(held_out={item.item_id for item in val_items}),
            plan.describe(config, order, machine.device),
            *_goes_on(plan.resume_from),
            _sft_memory(config, machine, num_trajectories=len(val_items) * config.rollout.val_kwargs.n),
            _not_looked_at(config.agentgym if config.trainer.validates else None, config.model),
        ]
    )


def _sft_memory(config: SFTConfig, machine: Machine, *, num_trajectories: int) -> str:
    engine = engine_name(config.rollout, machine.device) if config.trainer.validates else None
    shape = _shape(config.model)
    if shape is None:
        return _unknown_memory(config.model)
    if engine is not None:
        report_beyond_context(config.model, config.data, config.rollout)
    plan = plan_data_memory(config, shape, machine, engine=engine, num_trajectories=num_trajectories)
    return plan.describe(machine, _source(config.model))


def describe_agentevol(config: AgentEvolConfig) -> str:
    """The plan of AgentEvol, likewise; of its trainings what the base data alone tells."""
    items = check_agentevol_settings(config)
    check_can_be_made("trainer.default_local_dir", config.trainer.default_local_dir)
    if config.algorithm.first_policy is not None:
        is_sound_folder(ModelConfig(path=config.algorithm.first_policy), "algorithm.first_policy")
    from verl.trainer.agentevol import describe_run, read_base  # which import torch

    base = read_base(config)
    machine = Machine(planned_device(config.trainer.device), config.trainer.world_size)
    at_once = max_played_at_once(config, items)
    played = _engine_memory(config.model, config.agentgym, config.rollout, config.data, machine, at_once)
    return "\n".join(
        [
            describe_run(config, items.train, items.val, base),
            *dict.fromkeys((played, _trained_memory(config, machine))),  # once where nothing is known of the model
            _not_looked_at(config.agentgym, config.model),
        ]
    )


def _trained_memory(config: AgentEvolConfig, machine: Machine) -> str:
    from verl.trainer.agentevol import training_config

    shape = _shape(config.model)
    if shape is None:
        return _unknown_memory(config.model)
    plan = plan_data_memory(training_config(config, config.data.train_batch_size), shape, machine, engine=None)
    return f"between explorations, {plan.describe(machine, _source(config.model))}"


def _engine_memory(
    model: ModelConfig,
    agentgym: AgentGymConfig,
    rollout: RolloutConfig,
    data: TrajectoryLengths,
    machine: Machine,
    num_trajectories: int,
) -> str:
    """Of an engine that has a device to itself."""
    engine = engine_name(rollout, machine.device)
    shape = _shape(model)
    if shape is None:
        return _unknown_memory(model)
    report_beyond_context(model, data, rollout)
    demand = Demand.of(rollout, agentgym, data, num_trajectories=num_trajectories, num_workers=machine.num_devices)
    parts = tuple(engine_parts(shape, model, rollout, machine, demand, engine=engine))
    plan = MemoryPlan({}, parts, engine, engine_share(rollout, machine, engine))
    return plan.describe(machine, _source(model))


def _chat(model: ModelConfig) -> ChatTemplate | None:
    """The tokenizer's, where the model's folder is here."""
    if not is_sound_folder(model):
        return None
    from verl.models.loading import load_tokenizer  # which imports transformers

    return ChatTemplate(load_tokenizer(model))


def _goes_on(resume: Path | None) -> list[str]:
    return [f"      goes on from {resume}"] if resume else []


def planned_device(name: str) -> str:
    """``cpu`` or ``cuda``; a GPU that is asked for by name need not be here."""
    return resolve_device(name) if name == "auto" else name


def _shape(model: ModelConfig, key: str = "model.path") -> ModelShape | None:
    is_sound_folder(model, key)
    return shape_of(model.path)


def _source(model: ModelConfig) -> str:
    if is_model_folder(model):
        return f"{model.path}/config.json"
    return f"what is known of {Path(model.path).name}"


def _unknown_memory(model: ModelConfig) -> str:
    why = "its architecture is not one whose sizes are known here" if is_model_folder(model) else "no such folder here"
    return f"memory: not known, since nothing is known of model.path={model.path}: {why}"


def _not_looked_at(agentgym: AgentGymConfig | None, model: ModelConfig) -> str:
    """What a real start would look at beyond this; None where no server is asked."""
    server = "" if agentgym is None else f"the server at {agentgym.env_addr}; "
    weights = "the weights in" if is_model_folder(model) else "not here:"
    return f"not looked at: {server}{weights} model.path={model.path}"
