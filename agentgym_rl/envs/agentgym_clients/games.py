"""Clients of AgentGym's servers for WebShop, ALFWorld, the maze, Wordle and SQL."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from agentgym_rl.agent.actions import end_of_thinking, parse_action
from agentgym_rl.client.bare import BareClient
from agentgym_rl.client.base import EnvClient
from agentgym_rl.errors import EnvProtocolError
from agentgym_rl.types import StepOutput


class WebShopClient(BareClient):
    """Reward 0..1 for the product that is bought."""

    task = "webshop"
    task_description = (
        "Shop for what the instruction asks for. Actions:\n"
        "search[words]: where the page has a search bar\n"
        "click[text]: a button or link of the page, named exactly as shown; on a product's page choose its options, "
        "then click[Buy Now], which ends the task"
    )
    action_forms = ("search[words]", "click[text]")
    example_action = "click[Back to Search]"
    index_field = "session_id"
    state_field = "state"

    def available_actions(self) -> list[str]:
        """What can be clicked now, and the search where the page has one."""
        reply = self._guarded(lambda: self._connection.get("available_actions", {self.handle_field: self._handle}))
        content = self._content(reply, "available_actions")
        has_bar = self._field(content, "has_search_bar", "available_actions")
        clickables = self._field(content, "clickables", "available_actions")
        return [*(["search[words]"] if has_bar else []), *(f"click[{each}]" for each in clickables)]

    def _action_in(self, text: str) -> str | None:
        return parse_action(text)


class SqlGymClient(BareClient):
    """Reward 1 for the statement whose result answers the question."""

    task = "sqlgym"
    task_description = (
        "Answer the question by one SQLite statement on the database that is described. Write it in a block:\n"
        "```sql\nSELECT ...;\n```"
    )
    action_forms = ("```sql\nSELECT ...;\n```",)
    example_action = "```sql SELECT 1;```"
    index_field = "item_id"
    state_field = "state"

    def _action_in(self, text: str) -> str | None:
        blocks = _BLOCK.finditer(text, end_of_thinking(text))
        statements = [block["code"].strip() for block in blocks if block["language"].lower() in _SQL]
        return next(filter(None, reversed(statements)), None) or parse_action(text)


_BLOCK = re.compile(r"```(?P<language>[^\s`]*)(?P<code>.*?)```", re.DOTALL)
"""Of any language: else the end of one would pass for the beginning of the next."""
_SQL = ("", "sql", "sqlite")


class AlfWorldClient(EnvClient):
    """Reward 1 for the step that reaches the goal, else 0."""

    task = "alfworld"
    task_description = (
        "Reach the goal in the household. Every observation lists the actions that are possible; write one of them "
        "exactly as it is listed. 'Nothing happens' means that an action was not possible."
    )
    action_forms = ("go to <place>", "take <object> from <place>", "open <place>", "look", "inventory")
    example_action = "look"
    takes_games = True
    _possible: list[str]

    def reset(self, idx: int | str) -> str:
        """Begin game ``idx``: its number, or the path of its file on the server."""
        self._item, self._step = idx if isinstance(idx, int) else None, 0
        content = self._post("reset", {"game": idx, "world_type": "Text"})
        self.info = {"observation": self._with_actions(content, "reset"), "reward": 0.0, "done": False}
        return self.observation()

    def available_actions(self) -> list[str]:
        """Those that the latest answer listed."""
        return list(self._possible)

    def _read_step(self, content: Any) -> StepOutput:
        done = self._truth(content, "done", "step")
        state = self._text(content, "observation", "step") if done else self._with_actions(content, "step")
        return StepOutput(state, self._number(content, "reward", "step"), done)

    def _with_actions(self, content: Any, path: str) -> str:
        actions = self._field(content, "available_actions", path)
        if not isinstance(actions, list) or not all(isinstance(action, str) for action in actions):
            raise EnvProtocolError(self._at(path, f"available_actions={actions!r} is not a list of texts"))
        self._possible = actions
        return f"{self._text(content, 'observation', path)}\nPossible actions: {', '.join(actions)}"


class _RoomClient(EnvClient):
    """Of a server that has several games, each under a path of its own; its address may be given with or without it."""

    room: ClassVar[str]

    def __init__(self, env_server_base: str, *args: Any, **options: Any) -> None:
        super().__init__(env_server_base.rstrip("/").removesuffix(f"/{self.room}") + f"/{self.room}", *args, **options)


class MazeClient(_RoomClient):
    """The reward is the server's own for each move."""

    task = "maze"
    room = "maze"
    task_description = (
        "Reach the goal in the maze in as few moves as can be. To the right the second coordinate grows, downwards the "
        "first one. Walls beside you block the way. Actions: move up, move down, move left, move right"
    )
    action_forms = ("move up", "move down", "move left", "move right")
    example_action = "move up"

    def reset(self, idx: int) -> str:
        """Begin maze ``idx``: 0..25."""
        self._item, self._step = idx, 0
        content = self._post("reset", {"game": idx})
        self.info = {"observation": self._read_reset(content), "reward": 0.0, "done": False}
        return self.observation()

    def _execute(self, action: str) -> StepOutput:
        direction = action.lower()
        return super()._execute(f"move {direction}" if direction in _DIRECTIONS else action)


_DIRECTIONS = ("up", "down", "left", "right")


class WordleClient(_RoomClient):
    """Reward 1 for the right word, else 0: the server's -1..0, and 1."""

    task = "wordle"
    room = "wordle"
    task_description = (
        "Find the hidden word of five letters in six guesses. After a guess each of its letters is marked: g is at its "
        "place, y is in the word but elsewhere, b is not in the word. Guess with the letters apart, as in: c r a n e"
    )
    action_forms = ("<five letters>",)
    example_action = "c r a n e"

    def reset(self, idx: int) -> str:
        """Begin the game of seed ``idx``; returns the words that may be guessed."""
        self._item, self._step = idx, 0
        self._post("reset", {"seed": idx})
        words = " ".join(word.replace(" ", "") for word in self.available_actions())
        self.info = {"observation": f"Words that may be guessed: {words}", "reward": 0.0, "done": False}
        return self.observation()

    def available_actions(self) -> list[str]:
        """The words that fit what is known."""
        reply = self._guarded(lambda: self._connection.get("filtered_vocab", {self.handle_field: self._handle}))
        words = self._content(reply, "filtered_vocab")
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise EnvProtocolError(self._at("filtered_vocab", f"expected a list of words, got {str(words)[:200]}"))
        return words

    def _execute(self, action: str) -> StepOutput:
        return super()._execute(" ".join(action.lower().replace(" ", "")))

    def _read_step(self, content: Any) -> StepOutput:
        output = super()._read_step(content)
        return StepOutput(output.state, output.reward + 1.0, output.done)
