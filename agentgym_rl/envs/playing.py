"""Step an environment by hand in the terminal, in this process or on a server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from agentgym_rl.envs.base import InvalidCall
from agentgym_rl.envs.registry import EnvSpec
from agentgym_rl.errors import AgentGymError, EnvServerError

HELP = ":actions lists actions, :expert shows the expert's, :render the state, :reset [item] begins again, :quit ends"


class Refused(AgentGymError):
    """The environment does not offer what was asked."""


class Player(ABC):
    """One session, as a person plays it. Its methods raise `Refused`."""

    @abstractmethod
    def reset(self, item: int) -> str:
        """Begin an item; returns what is seen."""

    @abstractmethod
    def step(self, action: str) -> tuple[str, float, bool]:
        """What an action did: observation, reward, done."""

    @abstractmethod
    def actions(self) -> list[str]:
        """Actions that make sense now."""

    @abstractmethod
    def render(self) -> str:
        """The state for a human reader."""

    def expert(self) -> list[str]:
        """The expert's actions from the start of the item."""
        raise Refused("the expert is asked in process only: play without --env-addr")

    @abstractmethod
    def close(self) -> None:
        """End the session."""


class LocalPlayer(Player):
    """Plays in this process."""

    def __init__(self, spec: EnvSpec) -> None:
        self._spec = spec
        self._environment = spec.environment()
        self._item = 0

    def reset(self, item: int) -> str:
        self._item = item
        try:
            return self._environment.reset(item).observation
        except InvalidCall as error:
            raise Refused(str(error)) from error

    def step(self, action: str) -> tuple[str, float, bool]:
        try:
            result = self._environment.step(action)
        except InvalidCall as error:
            raise Refused(str(error)) from error
        return result.observation, result.reward, result.done

    def actions(self) -> list[str]:
        return list(self._environment.available_actions())

    def render(self) -> str:
        return self._environment.render()

    def expert(self) -> list[str]:
        if self._spec.expert is None:
            raise Refused(f"{self._spec.title} has no expert")
        fresh = self._spec.environment()
        try:
            fresh.reset(self._item)
            return self._spec.expert(fresh)
        finally:
            fresh.close()

    def close(self) -> None:
        self._environment.close()


class RemotePlayer(Player):
    """Plays on a server, through the environment's client."""

    def __init__(self, spec: EnvSpec, url: str) -> None:
        self._client = spec.client(url)

    def reset(self, item: int) -> str:
        try:
            return self._client.reset(item)
        except EnvServerError as error:
            raise Refused(str(error)) from error

    def step(self, action: str) -> tuple[str, float, bool]:
        try:
            output = self._client.step(f"Action: {action}")
        except EnvServerError as error:
            raise Refused(str(error)) from error
        return output.state, output.reward, output.done

    def actions(self) -> list[str]:
        return self._client.available_actions()

    def render(self) -> str:
        return self._client.observation()

    def close(self) -> None:
        self._client.close()


def play(player: Player, item: int, lines: Iterable[str], say: Callable[[str], None]) -> None:
    """Play ``item`` with the lines that the person writes; a line that begins with a colon is a command of `HELP`."""
    say(player.reset(item))
    say(f"\n({HELP})")
    for line in lines:
        text = line.strip()
        if text == ":quit":
            return
        try:
            if text.startswith(":"):
                _command(player, text, item, say)
            elif text:
                observation, reward, done = player.step(text)
                say(f"{observation}\n[reward {reward:g}{', done' if done else ''}]")
        except Refused as refusal:
            say(f"refused: {refusal}")


def _command(player: Player, text: str, item: int, say: Callable[[str], None]) -> None:
    name, _, argument = text[1:].partition(" ")
    if name == "actions":
        say("\n".join(player.actions()) or "(the environment lists none)")
    elif name == "expert":
        say("\n".join(player.expert()))
    elif name == "render":
        say(player.render())
    elif name == "reset" and (not argument or argument.isdigit()):
        say(player.reset(int(argument or item)))
    else:
        say(HELP)
