"""Clients of AgentGym's other servers, which this project does not serve: start them from AgentGym, and name their
address in ``agentgym.env_addr``. See README.md."""

from __future__ import annotations

import functools
from typing import NoReturn

from agentgym_rl.client.base import EnvClient
from agentgym_rl.envs.agentgym_clients.games import (
    AlfWorldClient,
    MazeClient,
    SqlGymClient,
    WebShopClient,
    WordleClient,
)
from agentgym_rl.envs.agentgym_clients.tools import (
    AcademiaClient,
    MovieClient,
    SheetClient,
    TodoClient,
    WeatherClient,
)
from agentgym_rl.envs.registry import EnvSpec
from agentgym_rl.errors import ConfigError

_UNKNOWN = 2**31 - 1
"""Items of a server that alone knows how many it has."""


def _not_served(task: str) -> NoReturn:
    raise ConfigError(f"{task}: only its client is here; start AgentGym's server and give its address (--env-addr URL)")


def _spec(client: type[EnvClient], title: str, num_items: int = _UNKNOWN) -> EnvSpec:
    absent = functools.partial(_not_served, client.task)
    return EnvSpec(
        name=client.task,
        title=title,
        environment=absent,
        client=client,
        num_items=num_items,
        default_port=0,
        data_version=absent,
    )


WEBSHOP = _spec(WebShopClient, "WebShop")
ALFWORLD = _spec(AlfWorldClient, "ALFWorld")
MAZE = _spec(MazeClient, "Maze", num_items=26)
WORDLE = _spec(WordleClient, "Wordle")
SQLGYM = _spec(SqlGymClient, "SQL")
WEATHER = _spec(WeatherClient, "Weather")
MOVIE = _spec(MovieClient, "Movie")
ACADEMIA = _spec(AcademiaClient, "Academia")
TODO = _spec(TodoClient, "Todo")
SHEET = _spec(SheetClient, "Sheet")
