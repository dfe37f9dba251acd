"""An environment of dialect B, whose answers are the bare values that SearchQA's are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from agentgym_rl.client.base import EnvClient
from agentgym_rl.envs.base import Environment, InvalidCall, ResetResult, StepResult
from agentgym_rl.envs.registry import EnvSpec
from agentgym_rl.envs.wire import DIALECT_B
from agentgym_rl.types import StepOutput


@dataclass(frozen=True, slots=True)
class QuizStep(StepResult):
    tries: int


class Quiz(Environment):
    """Say the item's number."""

    def reset(self, data_idx: int) -> ResetResult:
        if not 0 <= data_idx < 100:
            raise InvalidCall(f"data_idx {data_idx}: must be in 0..99")
        self._item, self._tries, self._done = data_idx, 0, False
        self._seen = f"Question: which number is {data_idx}?"
        return ResetResult(self._seen)

    def step(self, action: str) -> QuizStep:
        if self._done:
            raise InvalidCall("the question is answered")
        self._tries += 1
        self._done = action == str(self._item)
        self._seen = "right" if self._done else "wrong"
        return QuizStep(self._seen, int(self._done), self._done, self._tries)

    def observation(self) -> str:
        return self._seen

    def available_actions(self) -> list[str]:
        return [str(self._item), "?"]


class QuizClient(EnvClient):
    task = "quiz"
    task_description = "Answer the question."
    example_action = "?"
    handle_field = "env_idx"

    def _create(self) -> int:
        handle = self._content(self._guarded(lambda: self._connection.post("create", {})), "create")
        assert isinstance(handle, int)
        return handle

    def reset(self, idx: int) -> str:
        self._item, self._step = idx, 0
        observation = self._post("reset", {"id": idx})
        self.info = {"observation": observation, "reward": 0.0, "done": False}
        return self.observation()

    def _read_step(self, content: Any) -> StepOutput:
        return StepOutput(content["observation"], content["reward"], content["done"])


QUIZ_SPEC = EnvSpec(
    name="quiz",
    title="Quiz",
    environment=Quiz,
    client=QuizClient,
    num_items=100,
    default_port=0,
    data_version=lambda: "none",
    runs_inline=True,
    wire=replace(
        DIALECT_B,
        index_field="id",
        create_index_field="id",
        created=lambda handle, start: handle,
        stepped=lambda step: {
            "observation": step.observation,
            "reward": step.reward,
            "done": step.done,
            "info": {"tries": step.tries},
        },
    ),
    commands={
        "hint": lambda environment, fields: {"hint": environment.available_actions()[0], "asked": fields.get("for")}
    },
    step_views={"step_visual": lambda environment, step: {"image": environment.render(), "tries": step.tries}},
    expert=lambda environment: environment.available_actions()[:1],
)
