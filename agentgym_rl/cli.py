"""The command ``agentgym-rl``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentgym_rl.data.commands import add_make_pairs
from agentgym_rl.doctor.command import add_doctor
from agentgym_rl.envs.commands import TaskParser, add_bench, add_check, add_play, add_serve
from agentgym_rl.errors import AgentGymError
from agentgym_rl.evaluation.commands import add_compare, add_eval
from agentgym_rl.training_command import add_train
from agentgym_rl.viewer.command import add_view
from agentgym_rl.viewer.export_command import add_export


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status. What the user can put right is one line on stderr."""
    try:
        options = _parser().parse_args(arguments)
        status: int | None = options.run(options)
    except (AgentGymError, OSError) as error:
        print(f"agentgym-rl: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # what a shell reports for a command that Ctrl-C ended
    return status or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="agentgym-rl", description="Environments and agents of AgentGym-RL.")
    subcommands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=TaskParser)
    for add in _SUBCOMMANDS:
        add(subcommands)
    return parser


# Each function adds one subcommand to the parser and sets `run`, which takes the parsed options and may return an exit
# status.


def _add_demonstrate(subcommands: Any) -> None:
    parser = subcommands.add_parser("demonstrate", help="write an expert's episodes as conversations to train on")
    parser.add_argument("task", help="a registered environment that has an expert, e.g. textcraft")
    parser.add_argument("--items", type=Path, required=True, metavar="PATH", help="item list: a file or a folder")
    parser.add_argument("--out", type=Path, required=True, metavar="PATH", help="conversations, .json or .jsonl")
    parser.add_argument("--agent", default="react", help="react or act: how the agent shall answer")
    parser.set_defaults(run=_demonstrate)


def _demonstrate(options: argparse.Namespace) -> None:
    from agentgym_rl.data.conversations import check_suffix, write_conversations
    from agentgym_rl.data.demonstrations import demonstrate
    from agentgym_rl.data.items import ItemList
    from agentgym_rl.envs.options import configured_spec

    spec = configured_spec(options)
    check_suffix(options.out)
    listed = ItemList.load("--items", str(options.items), [spec.name])
    conversations = demonstrate(listed.items, spec, options.agent)
    write_conversations(options.out, conversations)
    print(f"{len(conversations)} demonstrations in {options.out}")


_SUBCOMMANDS = (
    add_train,
    add_serve,
    add_play,
    add_check,
    add_bench,
    add_eval,
    add_compare,
    add_doctor,
    _add_demonstrate,
    add_make_pairs,
    add_view,
    add_export,
)

if __name__ == "__main__":
    sys.exit(main())
