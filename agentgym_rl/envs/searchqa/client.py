"""The agent's side of SearchQA."""

from __future__ import annotations

from typing import Any

from agentgym_rl.client.bare import BareClient
from agentgym_rl.types import StepOutput


class SearchQAClient(BareClient):
    """Reward 1 for the turn that gives a right answer, else 0. The server finds search and answer in the turn."""

    task = "searchqa"
    task_description = (
        "Answer the question. You may look things up first, once a turn. Actions:\n"
        "<search>words</search>: see passages that speak of them\n"
        "<answer>text</answer>: give the answer, in as few words as can be"
    )
    action_forms = ("<search>words</search>", "<answer>text</answer>")
    example_action = "<search>capital of Kenya</search>"

    def _read_reset(self, content: Any) -> str:
        self.viewer_state = None
        return super()._read_reset(content)

    def _read_step(self, content: Any) -> StepOutput:
        told = content.get("info") if isinstance(content, dict) else None
        golden = told.get("golden_answers") if isinstance(told, dict) else None
        self.viewer_state = {"golden_answers": golden} if golden else None
        return super()._read_step(content)
