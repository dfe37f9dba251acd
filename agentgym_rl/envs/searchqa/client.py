"""The agent's side of SearchQA."""

from __future__ import annotations

from typing import Any

from agentgym_rl.client.base import EnvClient
from agentgym_rl.errors import EnvProtocolError
from agentgym_rl.types import StepOutput


class SearchQAClient(EnvClient):
    """Reward 1 for the turn that gives a right answer, else 0."""

    task = "searchqa"
    task_description = (
        "Answer the question. You may look things up first, once a turn. Actions:\n"
        "<search>words</search>: see passages that speak of them\n"
        "<answer>text</answer>: give the answer, in as few words as can be"
    )
    action_forms = ("<search>words</search>", "<answer>text</answer>")
    example_action = "<search>capital of Kenya</search>"
    handle_field = "env_idx"

    def reset(self, idx: int) -> str:
        """Begin question ``idx``; returns instruction and question."""
        self._item, self._step = idx, 0
        content = self._post("reset", {"id": idx})
        if not isinstance(content, str):
            raise EnvProtocolError(self._at("reset", f"expected a string, got {content!r}"))
        self.info = {"observation": content, "reward": 0.0, "done": False}
        return content

    def step(self, text: str) -> StepOutput:
        """Send an assistant's turn, in which the server finds the search or the answer."""
        self._step += 1
        output = self._execute(text)
        self.info = {"observation": output.state, "reward": output.reward, "done": output.done}
        return output

    def _create(self) -> int:
        handle: Any = self._content(self._guarded(lambda: self._connection.post("create", {})), "create")
        if not isinstance(handle, int) or isinstance(handle, bool):
            raise EnvProtocolError(self._at("create", f"expected an integer, got {handle!r}"))
        return handle
