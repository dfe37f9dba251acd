"""The subcommands of ``agentgym-rl`` about environments: serve, play, check, bench."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym_rl.files import write_whole

if TYPE_CHECKING:
    from agentgym_rl.envs.registry import EnvSpec

_Subcommands = Any
_LOG_LEVELS = ("debug", "info", "warning", "error")


class TaskParser(argparse.ArgumentParser):
    """Parser of a subcommand; one that takes a task also knows the settings of the task that its arguments name."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if args and any(action.dest == "task" for action in self._actions):
            from agentgym_rl.envs.options import add_settings

            add_settings(self, args)
        return super().parse_known_args(args, namespace)


def add_serve(subcommands: _Subcommands) -> None:
    parser = subcommands.add_parser("serve", help="serve an environment over HTTP")
    _add_task(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="0.0.0.0 serves other machines, too; think of AGENTGYM_TOKEN"
    )
    parser.add_argument("--port", type=port, help="0 takes a free one; default: its own")
    parser.add_argument("--workers", type=count, default=1, metavar="N", help="processes that share the port")
    parser.add_argument("--session-ttl", type=seconds, default=3600.0, metavar="S", help="idle life of a session")
    parser.add_argument("--max-sessions", type=count, default=1024, metavar="N", help="sessions alive at once")
    parser.add_argument("--ready-file", type=Path, metavar="PATH", help="write the server's URL there once it listens")
    parser.add_argument("--log-level", choices=_LOG_LEVELS, default="warning", help="info: one line per request")
    _add_isolation(parser)
    parser.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> None:
    from agentgym_rl.envs.server import build_app
    from agentgym_rl.envs.serving import Server, bind, set_up_logging, url_of
    from agentgym_rl.install import find_foreign_verl

    # A server needs no `verl`, so this is no error here; who trains in this installation will need to know.
    if (foreign := find_foreign_verl()) is not None:
        print(f"agentgym-rl: warning: {foreign}", file=sys.stderr)
    spec = _chosen_spec(options)
    chosen_port = spec.default_port if options.port is None else options.port

    def announce(listener: Any) -> None:
        print(f"listening on {url_of(listener)}", flush=True)
        if options.ready_file is not None:
            write_whole(options.ready_file, url_of(listener) + "\n")

    if options.workers > 1:
        _serve_with_workers(spec, options, chosen_port, announce)
        return
    set_up_logging(options.log_level)
    app = build_app(spec, max_sessions=options.max_sessions, session_ttl_s=options.session_ttl)
    listener = bind(options.host, chosen_port)
    Server(app, on_ready=lambda: announce(listener)).run(sockets=[listener])


def _serve_with_workers(spec: EnvSpec, options: argparse.Namespace, chosen_port: int, announce: Any) -> None:
    from agentgym_rl.envs.workers import Supervisor

    spec.data_version()  # what is missing is said here, not by each worker
    Supervisor(
        spec,
        num_workers=options.workers,
        host=options.host,
        port=chosen_port,
        max_sessions=options.max_sessions,
        session_ttl_s=options.session_ttl,
        log_level=options.log_level,
        on_ready=announce,
    ).run()


def add_play(subcommands: _Subcommands) -> None:
    parser = subcommands.add_parser("play", help="step an environment by hand in the terminal")
    _add_task(parser)
    parser.add_argument("--item", type=index, default=0, metavar="N", help="the item to play")
    parser.add_argument("--env-addr", metavar="URL", help="play on this server instead of in this process")
    parser.set_defaults(run=_play)


def _play(options: argparse.Namespace) -> None:
    from agentgym_rl.envs.options import configured_spec
    from agentgym_rl.envs.playing import LocalPlayer, RemotePlayer, play

    spec = configured_spec(options)
    _check_address(options)
    player = RemotePlayer(spec, options.env_addr) if options.env_addr else LocalPlayer(spec)
    try:
        play(player, options.item, sys.stdin, lambda text: print(text, flush=True))
    finally:
        player.close()


def add_check(subcommands: _Subcommands) -> None:
    parser = subcommands.add_parser("check", help="check that an environment keeps what its users rely on")
    _add_task(parser)
    parser.add_argument("--items", type=index, nargs="+", metavar="N", help="items to look at; default: five, spread")
    parser.add_argument("--steps", type=count, default=20, metavar="N", help="actions of an episode at most")
    parser.add_argument("--call-timeout", type=seconds, default=60.0, metavar="S", help="what one call may take")
    parser.add_argument(
        "--expert-success",
        type=share,
        metavar="SHARE",
        help="least share of items, 0 to 1, that the expert must solve; default: the EnvSpec's. It plays --items, "
        "by default as many as two seconds allow, up to 100",
    )
    parser.set_defaults(run=_check)


def _check(options: argparse.Namespace) -> int:
    from agentgym_rl.envs.checking import Verdict, check_environment, sample_items, spread_items
    from agentgym_rl.envs.options import configured_spec

    spec = configured_spec(options)
    if options.expert_success is not None:
        spec = replace(spec, expert_success=options.expert_success)
    spec.data_version()
    items = options.items or sample_items(spec.num_items)
    further = () if options.items else spread_items(spec.num_items)
    failed = 0
    for result in check_environment(
        spec, items, steps=options.steps, call_timeout_s=options.call_timeout, expert_items=further
    ):
        print(f"{result.verdict:8} {result.name:40} {result.detail}", flush=True)
        failed += result.verdict == Verdict.FAILED
    print(f"{spec.title}: {f'{failed} checks failed' if failed else 'all checks passed'}")
    return 1 if failed else 0


def add_bench(subcommands: _Subcommands) -> None:
    parser = subcommands.add_parser("bench", help="measure an environment's server, and what simple policies score")
    _add_task(parser)
    parser.add_argument("--clients", type=count, default=8, metavar="N", help="sessions at once")
    parser.add_argument("--seconds", type=seconds, default=5.0, metavar="S", help="how long they play")
    parser.add_argument("--workers", type=count, default=1, metavar="N", help="worker processes of the server")
    parser.add_argument("--episodes", type=count, default=20, metavar="N", help="items that each policy plays; spread")
    parser.add_argument("--steps", type=count, default=20, metavar="N", help="actions of an episode at most")
    parser.add_argument("--env-addr", metavar="URL", help="measure this server instead of one of its own")
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> None:
    from contextlib import nullcontext

    from agentgym_rl.envs.benching import load, policy_scores, served
    from agentgym_rl.envs.checking import sample_items
    from agentgym_rl.envs.options import configured_spec, settings_arguments

    spec = configured_spec(options)
    _check_address(options)
    arguments = ["--workers", str(options.workers), *settings_arguments(options)]
    server: Any = nullcontext((options.env_addr, None)) if options.env_addr else served(spec.name, arguments)
    with server as (url, pid):
        result = load(spec, url, clients=options.clients, seconds=options.seconds, pid=pid)
    print(f"{result.steps_per_s:.1f} steps/s with {result.clients} clients")
    if result.bytes_per_session is not None:
        print(f"{result.bytes_per_session / 1000:.0f} kB per session")
    for call in result.calls:
        print(f"{call.name:8} p50 {1000 * call.p50_s:9.2f} ms   p99 {1000 * call.p99_s:9.2f} ms   ({call.count} calls)")
    for score in policy_scores(spec, sample_items(spec.num_items, options.episodes), steps=options.steps):
        print(
            f"{score.policy:8} score {score.mean_score:8.3f}   success {score.success:5.1%}   "
            f"{score.mean_steps:5.1f} steps   ({score.episodes} episodes)"
        )


# ------------------------------------------------------------------------------------------------------------- options


def _add_task(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "task", help="a registered environment, e.g. textcraft; `COMMAND TASK --help` lists its settings"
    )


def _add_isolation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("environments that live in child processes")
    group.add_argument("--started-ahead", type=index, metavar="N", help="children kept ready for new sessions")
    group.add_argument("--call-timeout", type=seconds, metavar="S", help="a child that does not answer is killed then")


def _check_address(options: argparse.Namespace) -> None:
    """Find within seconds that a server of the task answers at ``--env-addr``, if that is given."""
    from agentgym_rl.client.check import check_server

    if options.env_addr is not None:
        check_server(options.env_addr, options.task, user="this")


def _chosen_spec(options: argparse.Namespace) -> EnvSpec:
    """The spec under the settings and the isolation that the options choose."""
    from agentgym_rl.envs.options import configured_spec
    from agentgym_rl.errors import ConfigError

    spec = configured_spec(options)
    named = {"started_ahead": options.started_ahead, "call_timeout_s": options.call_timeout}
    changes = {name: value for name, value in named.items() if value is not None}
    if not changes:
        return spec
    if spec.isolation is None:
        raise ConfigError(f"{spec.name} lives in the server's process: --started-ahead and --call-timeout have no use")
    return replace(spec, isolation=replace(spec.isolation, **changes))


def port(text: str) -> int:
    return int(_number(text, int, 0, 65535))


def count(text: str) -> int:
    return int(_number(text, int, 1, 2**31))


def index(text: str) -> int:
    return int(_number(text, int, 0, 2**62))


def seconds(text: str) -> float:
    return _number(text, float, 0.001, 1e9)


def share(text: str) -> float:
    return _number(text, float, 0, 1)


def _number(text: str, kind: type[int] | type[float], low: float, high: float) -> float:
    try:
        value = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no {kind.__name__}") from None
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text}: must be in {low:.10g}..{high:.10g}")
    return value
