"""The subcommand ``agentgym-rl view``."""

from __future__ import annotations

import argparse
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from agentgym_rl.client.addresses import TOKEN_VARIABLE, checked_token, environment_token
from agentgym_rl.envs.commands import port
from agentgym_rl.errors import ConfigError

if TYPE_CHECKING:
    from agentgym_rl.viewer.library import Library

_DEFAULT_PORT = 36100
_FIRST_LOOK_S = 0.2
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def add_view(subcommands: Any) -> None:
    parser = subcommands.add_parser("view", help="look at trainings and trajectories in the browser")
    parser.add_argument("path", type=Path, help="a run, a folder of runs, or one trajectory file (.jsonl)")
    parser.add_argument("--port", type=port, default=_DEFAULT_PORT, help="0 takes a free one")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 serves other machines, too, with a token")
    parser.add_argument("--token", help=f"what the browser must know; default: the variable {TOKEN_VARIABLE}, if set")
    playing = parser.add_argument_group("playing by hand or with a served model")
    playing.add_argument("--env", action="append", default=[], metavar="TASK=URL", help="a server to play on")
    playing.add_argument(
        "--model", action="append", default=[], metavar="NAME=URL", help="OpenAI-compatible, up to /v1; may play, too"
    )
    playing.add_argument(
        "--api-key-env", metavar="VAR", help="variable with the models' key; default: at OpenAI, OPENAI_API_KEY"
    )
    playing.add_argument("--save-to", type=Path, metavar="FOLDER", help="where played trajectories may be written")
    parser.set_defaults(run=_view)


def _view(options: argparse.Namespace) -> None:
    try:
        from agentgym_rl.viewer.app import build_app
    except ModuleNotFoundError as error:
        raise ConfigError(f"the viewer needs the package {error.name}: pip install 'agentgym-rl[viewer]'") from error
    from agentgym_rl.envs.serving import Server, bind, url_of
    from agentgym_rl.viewer.library import Library
    from agentgym_rl.viewer.playing import PlaySettings, parse_models, parse_servers
    from agentgym_rl.viewer.security import Access, host_names

    access = Access(_token(options), host_names([options.host]))
    play = PlaySettings(parse_servers(options.env), parse_models(options.model, options.api_key_env), options.save_to)
    library = Library(options.path)
    app = build_app(library, access=access, play=play)
    _warn_of_nothing(library, options.path)
    listener = bind(options.host, options.port)
    query = f"/?token={quote(access.token)}" if access.token else ""
    Server(app, on_ready=lambda: print(f"viewing {options.path} on {url_of(listener)}{query}", flush=True)).run(
        sockets=[listener]
    )


def _warn_of_nothing(library: Library, path: Path) -> None:
    """A line on standard error where nothing is found yet; the viewer takes up what comes later."""
    library.refresh(_FIRST_LOOK_S)
    if not library.runs() and library.progress().is_complete:
        print(
            f"warning: no run in {path} yet: looked for metrics.jsonl and for trajectory files (*.jsonl), "
            "also in the folders below; what is written there later is shown",
            file=sys.stderr,
            flush=True,
        )


def _token(options: argparse.Namespace) -> str:
    """The chosen token; a fresh one where other machines could ask and none was chosen."""
    chosen = environment_token() if options.token is None else checked_token(options.token, "--token")
    if not chosen and options.host not in _LOOPBACK:
        return secrets.token_urlsafe(16)
    return chosen or ""
