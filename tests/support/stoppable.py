"""Programs that tests end from outside, in processes that start at once: what they import is imported before."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from support.environments import Script
from support.parity import TASK, parity_spec

from agentgym_rl.envs.registry import register
from agentgym_rl.types import Item
from verl.agent_trainer.entry import run
from verl.config import ActorConfig, ModelConfig, OptimConfig, PPOConfig
from verl.trainer.core_algos import BatchTotals
from verl.trainer.ppo import run_ppo
from verl.utils import checkpoint
from verl.utils.checkpoint import BackgroundWriter
from verl.workers.actor import Actor

# By name, and nothing of the tests' own folder: the server of forks does not look there.
_IMPORTED_BEFORE = ["verl.trainer.ppo", "verl.workers.hybrid", "transformers.models.qwen2.modeling_qwen2"]


def start(program: Callable[..., Any], *arguments: Any, log: Path) -> BaseProcess:
    """``program(*arguments)`` in a process of its own, which writes what it says to ``log``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_BEFORE)
    process = context.Process(target=_logged, args=(program, arguments, log), daemon=True)
    process.start()
    return process


def _logged(program: Callable[..., Any], arguments: Sequence[Any], log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    torch.set_num_threads(1)
    program(*arguments)


def train(overrides: Sequence[str]) -> None:
    """A training run on the parity environment as its entry point makes it; ends the process with its status."""
    register(parity_spec(Script()))

    def work(config: PPOConfig) -> None:
        run_ppo(config, train_items=[Item(TASK, index) for index in range(8)], val_items=())

    sys.exit(run(overrides, work, PPOConfig, program="test", config_name="ppo_trainer"))


def save_for_ever(root: Path, model: Path, batch: Any) -> None:
    """Go on from the latest checkpoint, then train and save without a pause, as many steps as there is time for."""
    actor, writer = make_actor(model), BackgroundWriter(commits=True)
    folder = checkpoint.latest(root)
    step = verify(folder, actor) if folder else 0
    while True:
        step += 1
        actor.update([batch], [BatchTotals.of(batch)])
        with torch.no_grad():
            for parameter in actor.model.parameters():
                parameter.fill_(step)
        writer.finish()
        order = checkpoint.begin_save(root, step, {"step": step}, keep=2)
        actor_folder = order.folder / checkpoint.ACTOR_FOLDER
        write = actor.prepare_save(actor_folder, export_to=actor_folder / checkpoint.HUGGINGFACE_FOLDER)
        writer.start(order, [write])


def verify(folder: Path, actor: Actor) -> int:
    """Load a checkpoint of `save_for_ever`; every part of it must be of its step, which is returned."""
    from transformers import AutoModelForCausalLM

    step = checkpoint.step_of(folder)
    actor.load(folder / checkpoint.ACTOR_FOLDER)
    exported = AutoModelForCausalLM.from_pretrained(folder / checkpoint.ACTOR_FOLDER / checkpoint.HUGGINGFACE_FOLDER)
    assert checkpoint.load_trainer_state(folder) == {"step": step}
    assert actor.num_updates == step
    for model in (actor.model, exported):
        assert all(bool((parameter == step).all()) for parameter in model.parameters()), f"{folder} mixes steps"
    return step


def make_actor(model: Path) -> Actor:
    return Actor(
        ModelConfig(path=str(model)),
        ActorConfig(optim=OptimConfig(lr=1e-3)),
        device="cpu",
        temperature=1.0,
        total_updates=10**6,
        loss_norm_constant=1.0,
    )
