"""Sessions on environment servers that a person, or a served model, plays through the viewer.

Only servers and models that were named when the viewer was started are called. A session is closed by its page, after
half an hour without a call, and when the viewer ends.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentgym_rl.agent.actions import parse_action
from agentgym_rl.client.addresses import parse_addresses
from agentgym_rl.client.base import EnvClient
from agentgym_rl.envs.registry import get_spec
from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.hosted.endpoint import HostedModel, find_key
from agentgym_rl.rollout.handler import RewardRule
from agentgym_rl.rollout.log import TrajectoryLog
from agentgym_rl.types import Item, Message, Role, StepOutput, StopReason, Trajectory, Turn, encodable
from agentgym_rl.viewer.episodes import text_turn, untokenized

BY_HAND = "hand"
_CALL_TIMEOUT_S = 60.0
_MODEL_TIMEOUT_S = 120.0
_IDLE_S = 1800.0
_MAX_SESSIONS = 16
_CLOSE_WAIT_S = 5.0
"""A call in flight ends before its game is closed, unless it takes longer; a model may."""


class PlayError(Exception):
    """What was asked cannot be done now; its text says why."""


@dataclass(frozen=True, slots=True)
class EnvServer:
    """An environment's server."""

    task: str
    url: str


@dataclass(frozen=True)
class PlaySettings:
    """Whom the viewer may call, and where it may write."""

    servers: tuple[EnvServer, ...] = ()
    models: tuple[HostedModel, ...] = ()
    folder: Path | None = None
    """Where trajectories are saved; None: nowhere."""


class Game:
    """One episode on one session; for one thread at a time."""

    def __init__(self, server: EnvServer, item: int) -> None:
        """Create a session and begin the item; raises `EnvError`."""
        self.id = secrets.token_urlsafe(12)
        self.server, self.item = server, item
        self.lock = threading.Lock()
        self.touched_at = 0.0
        """When it was last used, by the clock of `Games`."""
        client_class = get_spec(server.task).client
        self._client: EnvClient = client_class(server.url, timeout=_CALL_TIMEOUT_S, max_retries=2)
        client = self._client
        self._rule = RewardRule(client.reward_is_cumulative, client.succeeds_from(), client.reward_scale)
        self._began_at = time.monotonic()
        self.messages: list[Message] = []
        self.turns: list[Turn] = []
        self.players: list[str] = []
        """Who wrote each turn: `BY_HAND` or a model's name."""
        self.done, self._score = False, 0.0
        self._states: list[Any] = []
        try:
            observation = encodable(client.reset(item))
        except EnvError:
            client.close()
            raise
        self._states.append(client.viewer_state)
        self.messages = [*client.conversation_start, Message(Role.USER, observation)]

    def actions(self) -> list[str]:
        """Actions that make sense now; raises `EnvError`."""
        return [] if self.done else self._client.available_actions()

    def act(self, text: str, player: str = BY_HAND, generation_s: float = 0.0) -> None:
        """Play a turn; a bare action is put in the form ``Action: ...``. Raises `EnvError` or `PlayError`."""
        if self.done:
            raise PlayError("the episode has ended: begin an item")
        if player == BY_HAND and parse_action(text) is None:
            text = f"Action: {text}"
        start = time.monotonic()
        output = self._client.step(text)
        observation, reward = encodable(output.state), self._earned(output)
        self.done = output.done
        times = (generation_s, time.monotonic() - start)
        self.turns.append(text_turn(text, observation, reward, done=output.done, times=times))
        self.players.append(player)
        self._states.append(self._client.viewer_state)
        self.messages.append(Message(Role.ASSISTANT, text))
        if not output.done:
            self.messages.append(Message(Role.USER, observation))

    def _earned(self, output: StepOutput) -> float:
        """This turn's own reward, scaled as in training."""
        reward = self._rule.scale * output.reward
        earned = reward - self._score if self._rule.is_cumulative else reward
        self._score += earned
        return earned

    def trajectory(self) -> Trajectory:
        """The episode so far; one that has not ended counts as stopped by its player."""
        states = self._states if any(state is not None for state in self._states) else None
        return untokenized(
            item=Item(self.server.task, self.item),
            messages=self.messages,
            turns=self.turns,
            success=self._rule.is_success(self._score),
            stop_reason=StopReason.DONE if self.done else StopReason.MAX_ROUNDS,
            uid=f"play/{self.id}",
            max_rounds=len(self.turns),
            duration_s=time.monotonic() - self._began_at,
            extra={"played_by": list(self.players)} | ({"states": list(states)} if states else {}),
        )

    def close(self) -> None:
        self._client.close()


@dataclass(eq=False)
class Games:
    """All games of the viewer, of any number of threads."""

    settings: PlaySettings
    clock: Callable[[], float] = time.monotonic
    _games: dict[str, Game] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, server_number: int, item: int) -> Game:
        """A new game on one of the configured servers; raises `PlayError` and `EnvError`."""
        if not 0 <= server_number < len(self.settings.servers):
            raise PlayError(f"there is no server number {server_number}: start the viewer with --env TASK=URL")
        self.close_idle()
        with self._lock:
            if len(self._games) >= _MAX_SESSIONS:
                raise PlayError(f"{_MAX_SESSIONS} games are open: close one")
        game = Game(self.settings.servers[server_number], item)
        with self._lock:
            game.touched_at = self.clock()
            self._games[game.id] = game
        return game

    def find(self, id: str) -> Game:
        """The game called ``id``, which counts as used now; raises `PlayError` when it is closed."""
        with self._lock:
            game = self._games.get(id)
            if game is None:
                raise PlayError("this game is closed: begin another")
            game.touched_at = self.clock()
            return game

    def model(self, name: str) -> HostedModel:
        """One of the configured models; raises `PlayError`."""
        for model in self.settings.models:
            if model.model == name:
                return model
        raise PlayError(f"there is no model {name!r}: start the viewer with --model NAME=URL")

    def save(self, game: Game) -> Path:
        """Write the game's trajectory, over an earlier state of the same game; raises `PlayError` and `OSError`."""
        if self.settings.folder is None:
            raise PlayError("nothing is written: start the viewer with --save-to FOLDER")
        if not game.turns:
            raise PlayError("no turn has been played yet")
        day = datetime.now(UTC).strftime("%Y-%m-%d")
        path = self.settings.folder / f"{game.server.task}-{game.item}-{day}-{game.id}.jsonl"
        with TrajectoryLog(path, append=False) as log:
            log.write(game.trajectory())
        return path

    def close(self, id: str) -> bool:
        """End a game; False when there was none."""
        with self._lock:
            game = self._games.pop(id, None)
        if game is None:
            return False
        in_turn = game.lock.acquire(timeout=_CLOSE_WAIT_S)
        try:
            game.close()
        finally:
            if in_turn:
                game.lock.release()
        return True

    def close_idle(self) -> None:
        """End the games that were left."""
        with self._lock:
            left = [id for id, game in self._games.items() if self.clock() - game.touched_at > _IDLE_S]
        for id in left:
            self.close(id)

    def close_all(self) -> None:
        with self._lock:
            open_games = list(self._games)
        for id in open_games:
            self.close(id)


def parse_servers(values: Sequence[str]) -> tuple[EnvServer, ...]:
    """Of ``TASK=URL``; raises `ConfigError`."""
    return tuple(_parse_server(value) for value in values)


def _parse_server(value: str) -> EnvServer:
    task, _, address = value.partition("=")
    if not address:
        raise ConfigError(f"--env {value!r}: must be TASK=URL, such as textcraft=http://127.0.0.1:36001")
    get_spec(task)  # says which tasks there are
    return EnvServer(task, parse_addresses(address)[0])


def parse_models(values: Sequence[str], key_variable: str | None = None) -> tuple[HostedModel, ...]:
    """Of ``NAME=URL``, the URL up to ``/v1``, with the key that `find_key` finds; raises `ConfigError`."""
    models = []
    for value in values:
        name, _, url = value.rpartition("=")
        if not name or not url.startswith(("http://", "https://")):
            raise ConfigError(f"--model {value!r}: must be NAME=URL, such as qwen=http://127.0.0.1:8000/v1")
        key, variable = find_key(url, key_variable)
        models.append(HostedModel(url, name, key, variable, timeout_s=_MODEL_TIMEOUT_S))
    return tuple(models)
