"""The command ``agentgym-rl``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from agentgym_rl.errors import AgentGymError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status. What the user can put right is one line on stderr."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (AgentGymError, OSError) as error:
        print(f"agentgym-rl: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # what a shell reports for a command that Ctrl-C ended
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="agentgym-rl", description="Environments and agents of AgentGym-RL.")
    subcommands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in _SUBCOMMANDS:
        add(subcommands)
    return parser


# Each function adds one subcommand to the parser and sets `run`, which takes the parsed options.


def _add_serve(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser("serve", help="serve an environment over HTTP")
    parser.add_argument("task", help="a registered environment, e.g. textcraft")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=_port, help="0 takes a free one; default: its own")
    parser.add_argument("--session-ttl", type=_seconds, default=3600.0, metavar="S", help="idle life of a session")
    parser.add_argument("--max-sessions", type=_count, default=1024, metavar="N", help="sessions alive at once")
    parser.add_argument("--ready-file", type=Path, metavar="PATH", help="write the server's URL there once it listens")
    parser.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> None:
    from agentgym_rl.envs.registry import get_spec
    from agentgym_rl.envs.server import build_app
    from agentgym_rl.envs.serving import Server, bind, url_of
    from agentgym_rl.install import find_foreign_verl

    # A server needs no `verl`, so this is no error here; who trains in this installation will need to know.
    if (foreign := find_foreign_verl()) is not None:
        print(f"agentgym-rl: warning: {foreign}", file=sys.stderr)
    spec = get_spec(options.task)
    app = build_app(spec, max_sessions=options.max_sessions, session_ttl_s=options.session_ttl)
    listener = bind(options.host, spec.default_port if options.port is None else options.port)

    def announce() -> None:
        print(f"listening on {url_of(listener)}", flush=True)
        if options.ready_file is not None:
            _write_whole(options.ready_file, url_of(listener) + "\n")

    Server(app, on_ready=announce).run(sockets=[listener])


def _add_demonstrate(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser("demonstrate", help="write an expert's episodes as conversations to train on")
    parser.add_argument("task", help="a registered environment that has an expert, e.g. textcraft")
    parser.add_argument("--items", type=Path, required=True, metavar="PATH", help="item list: a file or a folder")
    parser.add_argument("--out", type=Path, required=True, metavar="PATH", help="conversations, .json or .jsonl")
    parser.add_argument("--strategy", default="react", help="react or act: how the agent shall answer")
    parser.set_defaults(run=_demonstrate)


def _demonstrate(options: argparse.Namespace) -> None:
    from agentgym_rl.data.conversations import write_conversations
    from agentgym_rl.data.demonstrations import demonstrate
    from agentgym_rl.data.items import load_items
    from agentgym_rl.envs.registry import get_spec

    spec = get_spec(options.task)
    conversations = demonstrate(load_items(options.items, spec.name), spec, options.strategy)
    write_conversations(options.out, conversations)
    print(f"{len(conversations)} demonstrations in {options.out}")


def _port(text: str) -> int:
    return int(_number(text, int, 0, 65535))


def _count(text: str) -> int:
    return int(_number(text, int, 1, 2**31))


def _seconds(text: str) -> float:
    return _number(text, float, 0.001, 1e9)


def _number(text: str, kind: type[int] | type[float], low: float, high: float) -> float:
    try:
        value = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no {kind.__name__}") from None
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text}: must be in {low:.10g}..{high:.10g}")
    return value


def _write_whole(path: Path, text: str) -> None:
    """Write a file that no reader ever sees half written."""
    aside = path.with_name(path.name + ".part")
    aside.write_text(text)
    aside.replace(path)


_SUBCOMMANDS = (_add_serve, _add_demonstrate)

if __name__ == "__main__":
    sys.exit(main())
