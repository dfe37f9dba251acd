"""``trainer.dry_run=true``: what a run would do, after all checks that need neither a model's weights nor a server."""

from __future__ import annotations

from pathlib import Path

from verl.agent_trainer.checks import (
    RunItems,
    check_can_be_made,
    check_generation_settings,
    check_ppo_settings,
    is_model_folder,
    ppo_output_folders,
    report_beyond_context,
)
from verl.config import AgentGymConfig, GenerationConfig, ModelConfig, PPOConfig
from verl.models.shapes import ModelShape, shape_of
from verl.trainer.item_order import order_items
from verl.trainer.memory import Demand, Machine, MemoryPlan, engine_parts, engine_share, plan_memory
from verl.trainer.plan import PPOPlan, describe_generation
from verl.utils.checkpoint import find_resume_folder
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
    resume = find_resume_folder(
        Path(trainer.default_local_dir), mode=trainer.resume_mode, path=trainer.resume_from_path
    )
    machine = Machine(planned_device(trainer.device), trainer.world_size)
    return "\n".join(
        [
            plan.describe(config, machine.device),
            *([f"      goes on from {resume}"] if resume else []),
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
    critic = shape_of(config.critic.model.resolved(branch.model).path) or shape
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
            _engine_memory(config, machine, len(items)),
            _not_looked_at(config.agentgym, config.model),
        ]
    )


def _engine_memory(config: GenerationConfig, machine: Machine, num_items: int) -> str:
    engine = engine_name(config.rollout, machine.device)
    shape = _shape(config.model)
    if shape is None:
        return _unknown_memory(config.model)
    report_beyond_context(config.model, config.data, config.rollout)
    demand = Demand.of(
        config.rollout,
        config.agentgym,
        config.data,
        num_trajectories=min(config.data.batch_size, num_items) * config.data.n_samples,
        num_workers=machine.num_devices,
    )
    parts = tuple(engine_parts(shape, config.model, config.rollout, machine, demand, engine=engine))
    plan = MemoryPlan({}, parts, engine, engine_share(config.rollout, machine, engine))
    return plan.describe(machine, _source(config.model))


def planned_device(name: str) -> str:
    """``cpu`` or ``cuda``; a GPU that is asked for by name need not be here."""
    return resolve_device(name) if name == "auto" else name


def _shape(model: ModelConfig) -> ModelShape | None:
    is_model_folder(model)
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
