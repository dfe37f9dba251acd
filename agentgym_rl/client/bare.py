"""Clients of servers that answer with bare values instead of objects."""

from __future__ import annotations

from typing import Any, ClassVar

from agentgym_rl.client.base import EnvClient
from agentgym_rl.errors import EnvProtocolError
from agentgym_rl.types import StepOutput


class BareClient(EnvClient):
    """``/create`` answers with an integer, ``/reset`` with a text or ``[text, null]``. The server finds the action in
    the assistant's turn, which it gets whole.

    A subclass whose server wants the action alone overrides `_action_in`.
    """

    handle_field = "env_idx"
    index_field: ClassVar[str] = "id"
    """The item, in the body of ``/reset``."""
    state_field: ClassVar[str] = "observation"
    """The observation, in the answer to ``/step``."""
    create_fields: ClassVar[dict[str, Any]] = {}
    """The body of ``/create``."""

    def reset(self, idx: int) -> str:
        """Begin task instance ``idx``; returns its first observation."""
        self._item, self._step = idx, 0
        content = self._post("reset", {self.index_field: idx})
        self.info = {"observation": self._read_reset(content), "reward": 0.0, "done": False}
        return self.observation()

    def step(self, text: str) -> StepOutput:
        """Send an assistant's turn; one in which no action is found costs no call."""
        self._step += 1
        action = self._action_in(text)
        output = self._not_understood() if action is None else self._execute(action)
        self.info = {"observation": output.state, "reward": output.reward, "done": output.done}
        return output

    def _action_in(self, text: str) -> str | None:
        """What the server gets of a turn; None when it holds no action."""
        return text

    def _create(self) -> int:
        handle = self._content(self._guarded(lambda: self._connection.post("create", self.create_fields)), "create")
        if not isinstance(handle, int) or isinstance(handle, bool):
            raise EnvProtocolError(self._at("create", f"expected an integer, got {handle!r}"))
        return handle

    def _read_reset(self, content: Any) -> str:
        text = content[0] if isinstance(content, list) and content else content
        if not isinstance(text, str):
            raise EnvProtocolError(self._at("reset", f"expected a text, got {content!r}"))
        return text

    def _read_step(self, content: Any) -> StepOutput:
        return StepOutput(
            state=self._text(content, self.state_field, "step"),
            reward=self._number(content, "reward", "step"),
            done=self._truth(content, "done", "step"),
        )
