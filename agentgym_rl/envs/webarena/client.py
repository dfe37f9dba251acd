"""The agent's side of WebArena."""

from __future__ import annotations

from typing import Any

from agentgym_rl.client.base import EnvClient
from agentgym_rl.errors import EnvProtocolError, EnvTimeout
from agentgym_rl.types import StepOutput


class WebArenaClient(EnvClient):
    """The reward comes with the step that ends the episode.

    After each call the server is asked for the whole prompt (page, address, objective, last action), for that is what
    an agent needs; this way it also works with servers whose ``/step`` tells the page only.
    """

    task = "webarena"
    task_description = (
        "Do the task in the browser. You see the visible part of the page, a line per element: [id] role 'name'. Use "
        "one action a turn, between triple backticks:\n"
        "click [id], hover [id]\n"
        "type [id] [text] [1]: click, add the text, press Enter; 0 presses nothing\n"
        "press [keys]: such as ctrl+a\n"
        "scroll [down], scroll [up]\n"
        "goto [url], go_back, go_forward\n"
        "new_tab, tab_focus [n], close_tab\n"
        "stop [answer]: the task is done; the answer in as few words as can be, N/A if it cannot be done, empty if "
        "nothing was asked"
    )
    action_forms = (
        "```click [id]```", "```hover [id]```", "```type [id] [text] [0|1]```", "```press [keys]```",
        "```scroll [up|down]```", "```goto [url]```", "```new_tab```", "```tab_focus [n]```", "```close_tab```",
        "```go_back```", "```go_forward```", "```stop [answer]```",
    )  # fmt: skip
    example_action = "```scroll [down]```"
    handle_field = "env_idx"

    def reset(self, idx: int) -> str:
        """Begin task ``idx``; raises `EnvTimeout` when the server's browser did not load its page in time."""
        self._item, self._step = idx, 0
        content = self._post("reset", {"seed": 0, "idx": idx})
        if self._field(content, "sites", "reset") == "Error":
            raise EnvTimeout(self._at("reset", f"the browser reports {content.get('observation')}"))
        self._keep_picture(content)
        self.info = {"observation": self._prompt(), "reward": 0.0, "done": False}
        return self.observation()

    def step(self, text: str) -> StepOutput:
        """Execute the action in an assistant's turn, which the server finds in it."""
        self._step += 1
        content = self._post("step", {"action": text})
        self._keep_picture(content.get("info") if isinstance(content, dict) else None)
        done = self._truth(content, "terminated", "step") or self._truth(content, "truncated", "step")
        reward = self._number(content, "reward", "step") if done else 0.0
        output = StepOutput(self._prompt(), reward, done)
        self.info = {"observation": output.state, "reward": reward, "done": done}
        return output

    def _prompt(self) -> str:
        reply = self._guarded(lambda: self._connection.get("observation", {self.handle_field: self._handle}))
        content: Any = self._content(reply, "observation")
        if not isinstance(content, str):
            raise EnvProtocolError(self._at("observation", f"expected a string, got {content!r}"))
        return content

    def _keep_picture(self, told: Any) -> None:
        """A screenshot, where the server was asked to send them, is for the viewer."""
        screenshot = told.get("screenshot") if isinstance(told, dict) else None
        self.viewer_state = {"screenshot": screenshot} if screenshot else None
