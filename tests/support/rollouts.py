"""Scripted engines and environment clients for rollouts without a model or a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from support.tokenizers import make_tokenizer

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.client.base import EnvClient
from agentgym_rl.errors import EngineError
from agentgym_rl.rollout.collector import RolloutSettings, TokenLimits
from agentgym_rl.rollout.handler import RolloutRequest
from agentgym_rl.types import (
    FinishReason,
    Generation,
    Item,
    Message,
    Role,
    SamplingParams,
    StepOutput,
    StopReason,
    Trajectory,
    Turn,
)

# No frame around any message: an observation costs only its own tokens, and the end of a turn one.
FRAMELESS = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"


def frameless_chat() -> ChatTemplate:
    return ChatTemplate(make_tokenizer(FRAMELESS, eos_token="</s>"))


def make_generation(
    ids: Sequence[int], *, finish_reason: FinishReason = FinishReason.STOP, version: int = 1
) -> Generation:
    return Generation(tuple(ids), tuple(-0.5 for _ in ids), finish_reason, version)


class ScriptedEngine:
    """Writes ``answer(turn)`` each turn, ends it by itself where the budget allows, and remembers what it was asked.

    An answer is a text, which the end-of-turn token follows, or the very ids to sample.
    """

    def __init__(
        self,
        chat: ChatTemplate,
        answer: Callable[[int], str | Sequence[int]] = lambda turn: f"Action: {turn}",
        *,
        delay_s: float = 0.0,
    ) -> None:
        self._chat, self._answer, self._delay_s = chat, answer, delay_s
        self.requests: list[tuple[str, list[int], SamplingParams]] = []
        self.released: list[str] = []
        self._turns: dict[str, int] = {}

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, trajectory_id: str) -> Generation:
        turn = self._turns.setdefault(trajectory_id, 0)
        self._turns[trajectory_id] += 1
        self.requests.append((trajectory_id, list(prompt_ids), sampling))
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        ids = self.sampled(turn)
        cut = ids[: sampling.max_tokens]
        return make_generation(cut, finish_reason=FinishReason.STOP if cut == ids else FinishReason.LENGTH)

    def sampled(self, turn: int) -> tuple[int, ...]:
        """The ids of a turn that no limit cuts."""
        answer = self._answer(turn)
        return self._chat.encode_answer(answer) if isinstance(answer, str) else tuple(answer)

    def release(self, trajectory_id: str) -> None:
        self.released.append(trajectory_id)


class BrokenEngine(ScriptedEngine):
    """Fails at every request."""

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, trajectory_id: str) -> Generation:
        raise EngineError("out of memory")


class ScriptedClient(EnvClient):
    """An environment in this process: ``script(item, step, text)`` gives every answer, and may raise or sleep."""

    task = "toy"
    task_description = "You are a helpful agent."
    example_action = "look"

    def __init__(self, script: Callable[[int, int, str], StepOutput], log: list[str] | None = None) -> None:
        self.env_server_base = "http://toy"
        self.log = log if log is not None else []
        self._script, self._last = script, ""
        self.log.append("open")

    def reset(self, idx: int) -> str:
        self._item, self._step = idx, 0
        self.log.append(f"reset {idx}")
        self._last = self._script(idx, 0, "").state
        return self._last

    def observe(self) -> str:
        return self._last

    def step(self, text: str) -> StepOutput:
        self._step += 1
        assert self._item is not None
        return self._script(self._item, self._step, text)

    def close(self) -> None:
        self.log.append("close")


def ends_after(turns: int, reward: float = 1.0) -> Callable[[int, int, str], StepOutput]:
    """An environment that is done after ``turns`` steps and then pays ``reward``."""

    def script(item: int, step: int, text: str) -> StepOutput:
        done = step == turns
        return StepOutput(f"observation {step} of {item}", reward if done else 0.0, done)

    return script


def make_requests(items: Iterable[int], *, n: int = 1) -> list[RolloutRequest]:
    return [RolloutRequest(Item("toy", item), f"toy_{item}", sample) for item in items for sample in range(n)]


def make_limits(**changes: int) -> TokenLimits:
    return TokenLimits(
        **{"max_prompt_length": 1000, "max_response_length": 10_000, "max_tokens": 50, "max_model_len": 20_000}
        | changes
    )


def make_settings(**changes: Any) -> RolloutSettings:
    values = {"max_rounds": 10, "limits": make_limits(), "sampling": SamplingParams(max_tokens=50), "timeout_s": 60.0}
    return RolloutSettings(**values | changes)


def make_trajectory(
    item: Item,
    *,
    score: float = 0.0,
    success: bool = False,
    sample_index: int = 0,
    turns: int = 2,
    stop_reason: StopReason = StopReason.DONE,
    error: str = "",
) -> Trajectory:
    """A trajectory of three tokens, of which the last two are sampled."""
    turn = Turn("Action: look", "seen", 0.0, False, FinishReason.STOP, 2, 0.1, 0.2)
    return Trajectory(
        item=item,
        uid=item.item_id,
        sample_index=sample_index,
        attempt=1,
        messages=(Message(Role.USER, "start"), Message(Role.ASSISTANT, "Action: look")),
        turns=(turn,) * turns,
        input_ids=np.array([4, 5, 6], np.int32),
        loss_mask=np.array([0, 1, 1], np.int8),
        sequence_ids=np.array([0, 1, 1], np.int32),
        rollout_log_probs=np.array([0, -0.25, -1.5], np.float32),
        token_rewards=np.array([0, 0, score], np.float32),
        prompt_length=1,
        score=score,
        success=success,
        stop_reason=stop_reason,
        policy_version=3,
        max_rounds=10,
        duration_s=1.5,
        error=error,
    )
