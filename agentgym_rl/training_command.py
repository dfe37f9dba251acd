"""The subcommand ``agentgym-rl train``: training in short form, for those who do not know the trainer's keys."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import sys
from typing import Any

from agentgym_rl.errors import ConfigError

_PROGRAM = "verl.agent_trainer.main_ppo"


def add_train(subcommands: Any) -> None:
    parser = subcommands.add_parser(
        "train",
        help="train a model on an environment by reinforcement learning",
        description="Prints the full command, which starts from presets, and runs it. Any key=value may follow and "
        "overrides them; docs/configuration.md lists all keys and presets. trainer.dry_run=true only says what would "
        "be done.",
    )
    parser.add_argument("--model", required=True, metavar="PATH", help="folder or hub name of a language model")
    parser.add_argument("--task", required=True, metavar="NAME", dest="environment", help="such as textcraft")
    parser.add_argument("--algorithm", default="scaling_inter_rl", metavar="NAME", help="default: %(default)s")
    parser.add_argument("--data-path", metavar="PATH", help="item list to train on; default: the task's")
    parser.add_argument("--env-addr", metavar="URL", help="the environment's server; default: the task's port here")
    parser.add_argument("--hardware", metavar="NAME", help="cpu, gpu_24gb, node_8 or nodes; default: one GPU or CPU")
    parser.add_argument("--out", metavar="PATH", help="folder of checkpoints, metrics and trajectories")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="handed on to the trainer")
    parser.set_defaults(run=_train)


def _train(options: argparse.Namespace) -> None:
    """Become the trainer, so that its signals and its exit status are its own."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("training needs torch: pip install 'agentgym-rl[train]'")
    arguments = ["-m", _PROGRAM, *trainer_arguments(options)]
    print(shlex.join(["python", *arguments]), flush=True)
    os.execv(sys.executable, [sys.executable, *arguments])


def trainer_arguments(options: argparse.Namespace) -> list[str]:
    """What ``main_ppo`` is to be given."""
    named = {
        "task": options.environment,
        "algorithm": options.algorithm,
        "hardware": options.hardware,
        "actor_rollout_ref.model.path": _as_value(options.model),
        "data.train_file": _as_value(options.data_path),
        "actor_rollout_ref.agentgym.env_addr": options.env_addr,
        "trainer.default_local_dir": _as_value(options.out),
    }
    return [f"{key}={value}" for key, value in named.items() if value is not None] + options.overrides


def _as_value(path: str | None) -> str | None:
    """A path as the trainer's command line reads it: quoted where it has characters that mean something there.

    What has brackets around it is a list, and stays as it is.
    """
    if path is None or re.fullmatch(r"\[.*\]|[\w/.~+-]+( +[\w/.~+-]+)*", path, re.ASCII):
        return path
    return "'" + path.replace("'", r"\'") + "'"
