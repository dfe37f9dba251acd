"""The subcommand ``agentgym-rl doctor``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_doctor(subcommands: Any) -> None:
    parser = subcommands.add_parser(
        "doctor",
        help="check this machine, and a model, template and server before training",
        description="Checks what is installed and reachable. With --model, --task and --env-addr it also proves on "
        "that model, its chat template and that server what training relies on; further key=value are the trainer's. "
        "Exit status 1 when something failed.",
    )
    parser.add_argument("--model", metavar="PATH", help="model folder, checkpoint, run, or hub name")
    parser.add_argument("--task", dest="environment", metavar="NAME", help="such as textcraft")
    parser.add_argument("--env-addr", metavar="URL", help="the task's server, or several with commas between")
    parser.add_argument("--folder", type=Path, default=Path(), metavar="PATH", help="where results would go")
    parser.add_argument("--quick", action="store_true", help="leave out the resumed step, which trains twice")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of main_ppo")
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from agentgym_rl.client.addresses import parse_addresses
    from agentgym_rl.doctor.findings import Finding, Verdict, table
    from agentgym_rl.doctor.machine import examine_machine, examine_servers
    from agentgym_rl.envs.registry import get_spec
    from agentgym_rl.errors import ConfigError

    if options.model is not None and (options.environment is None or options.env_addr is None):
        raise ConfigError("doctor --model needs --task and --env-addr, whose server plays the episodes")
    if options.env_addr is not None and options.environment is None:
        raise ConfigError("doctor --env-addr needs --task: which environment should be there?")
    tasks = [] if options.environment is None else [get_spec(options.environment).name]
    findings: list[Finding] = list(
        examine_machine(trains=options.model is not None, tasks=tasks, folder=options.folder)
    )
    if options.env_addr is not None:
        findings += examine_servers({tasks[0]: parse_addresses(options.env_addr)})
    if options.model is not None:
        findings += _prove(options, findings)
    print(table(findings))
    return int(any(finding.verdict == Verdict.FAILED for finding in findings))


def _prove(options: argparse.Namespace, findings: list[Any]) -> list[Any]:
    import importlib

    from agentgym_rl.doctor.findings import Verdict, not_applicable

    needed = [finding for finding in findings if finding.verdict == Verdict.FAILED and finding.name != "disk"]
    if needed:
        names = ", ".join(finding.name for finding in needed)
        return [not_applicable("model, template and server", f"not tried: {names} failed")]
    # By name: this package knows nothing of the learner, which is there only where it is installed.
    prove = importlib.import_module("verl.doctor.proofs").prove
    found: list[Any] = prove(
        options.model, options.environment, options.env_addr, overrides=options.overrides, quick=options.quick
    )
    return found
