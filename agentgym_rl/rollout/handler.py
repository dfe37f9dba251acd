"""The token record of one trajectory while it grows: what was sampled, what was not, and what it earned.

A record is append-only and appending costs time in proportion to what is appended. Axis ``T``: tokens so far.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.errors import ConfigError, EngineError
from agentgym_rl.types import (
    Aside,
    Generation,
    Item,
    Message,
    Part,
    PartKind,
    Role,
    StepOutput,
    StopReason,
    Trajectory,
    Turn,
)

_SCORE_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """Token budgets of a trajectory; nothing is ever cut to fit them, the trajectory ends instead."""

    max_prompt_length: int
    """Tokens before the first turn; a longer prompt is a configuration error. In later trials of an item, what the
    agent wrote after the earlier ones may make it longer, at the cost of the response."""
    max_response_length: int
    """All tokens after the prompt, observations included."""
    max_tokens: int
    """Sampled tokens of one turn."""
    max_model_len: int
    """Tokens of the whole sequence."""

    @property
    def longest(self) -> int:
        """Tokens of the longest trajectory that all of them allow."""
        return min(self.max_model_len, self.max_prompt_length + self.max_response_length)


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One trajectory to be made."""

    item: Item
    uid: str
    """Group: the samples of one item in one training step share it."""
    sample_index: int = 0
    """Which member of the group."""
    seed: int | None = None
    """Makes the sampling of this trajectory reproducible; None leaves it to the engine."""
    greedy: bool = False
    """Take the likeliest token each time, whatever temperature the others are sampled at."""


@dataclass(frozen=True, slots=True)
class RewardRule:
    """How an environment client's reward is read."""

    is_cumulative: bool = False
    """True when a step reports the score so far; a turn then earns the difference to the turn before."""
    success_score: float = 1.0
    """The least score that counts as success, before it is scaled."""
    scale: float = 1.0
    """What rewards and scores are multiplied by."""

    def is_success(self, score: float) -> bool:
        """Whether a score, scaled, is one of success."""
        return score >= self.scale * self.success_score - _SCORE_TOLERANCE


class _Tokens:
    """The columns of a growing record, all of one length; appending is amortised O(appended)."""

    def __init__(self, capacity: int = 1024) -> None:
        self.size = 0
        """Tokens so far; the columns reach beyond, with zeros."""
        self.input_ids = np.zeros(capacity, np.int32)
        self.loss_mask = np.zeros(capacity, np.int8)
        self.sequence_ids = np.zeros(capacity, np.int32)
        self.log_probs = np.zeros(capacity, np.float32)

    def append_sampled(self, ids: Sequence[int], log_probs: Sequence[float], sequence_id: int) -> None:
        place = self._claim(len(ids))
        self.input_ids[place] = ids
        self.loss_mask[place] = 1
        self.sequence_ids[place] = sequence_id
        self.log_probs[place] = log_probs

    def append_context(self, ids: Sequence[int], sequence_ids: Sequence[int]) -> None:
        """Append tokens that were not sampled: their mask and log-prob are 0."""
        place = self._claim(len(ids))
        self.input_ids[place] = ids
        self.sequence_ids[place] = sequence_ids

    def view(self, column: np.ndarray) -> np.ndarray:
        """What a column holds so far, read-only and without a copy."""
        view = column[: self.size]
        view.flags.writeable = False
        return view

    def _claim(self, count: int) -> slice:
        """The place of so many more tokens."""
        place = slice(self.size, self.size + count)
        if place.stop > len(self.input_ids):
            self._grow(max(place.stop, 2 * len(self.input_ids)))
        self.size = place.stop
        return place

    def _grow(self, capacity: int) -> None:
        for name in ("input_ids", "loss_mask", "sequence_ids", "log_probs"):
            column = getattr(self, name)
            setattr(self, name, np.pad(column, (0, capacity - len(column))))


@dataclass(frozen=True, slots=True)
class _Pending:
    """A sampled turn that the environment has not answered yet."""

    text: str
    generation: Generation
    generation_s: float
    last_sampled: int | None
    """Position of the turn's last sampled token; None for an empty completion."""


class RolloutHandler:
    """Record of one trajectory: `append_generation`, `append_step` and `append_observation` in turn, then `finish`.

    ``messages`` is the opening conversation, which ends with the first observation, and ``parts`` says for each message
    what its stretches are. `append_aside` takes the place of `append_step` where the environment was not asked.
    Raises `ConfigError` naming the item and both lengths when the prompt exceeds ``limits.max_prompt_length``.
    """

    def __init__(
        self,
        request: RolloutRequest,
        messages: tuple[Message, ...],
        chat: ChatTemplate,
        limits: TokenLimits,
        *,
        max_rounds: int,
        attempt: int = 1,
        trial: int = 1,
        parts: Sequence[tuple[Part, ...]] | None = None,
        rewards: RewardRule | None = None,
        started_at: float | None = None,
    ) -> None:
        """``started_at`` is a `time.monotonic` reading that `Trajectory.duration_s` counts from; None means now."""
        self.request, self.max_rounds, self.attempt, self.trial = request, max_rounds, attempt, trial
        self._chat, self._limits, self._rewards = chat, limits, rewards or RewardRule()
        self._started_at = time.monotonic() if started_at is None else started_at
        self._tokens = _Tokens()
        self._reward_marks: list[tuple[int, float]] = []
        self._pending: _Pending | None = None
        self._versions: list[int] = []
        self.messages: list[Message] = list(messages)
        self.parts: list[tuple[Part, ...]] = [()] * len(messages) if parts is None else list(parts)
        """For each message, what its stretches are."""
        self.turns: list[Turn] = []
        self.asides: list[Aside] = []
        self.viewer_states: list[object] = []
        """What the client told a viewer at the start and after each turn: `EnvClient.viewer_state`."""
        self.score = 0.0
        self.done = False
        self.stop_reason: StopReason | None = None
        prompt = chat.encode_prompt(messages)
        self.prompt_length = len(prompt.ids)
        self._check_prompt()
        beyond = max(0, self.prompt_length - limits.max_prompt_length)
        self._most_tokens = min(limits.max_model_len, self.prompt_length + limits.max_response_length - beyond)
        self._tokens.append_context(prompt.ids, prompt.sequence_ids)

    # ------------------------------------------------------------------------------------------------ the record so far

    @property
    def input_ids(self) -> np.ndarray:
        """int32 ``[T]``."""
        return self._tokens.view(self._tokens.input_ids)

    @property
    def loss_mask(self) -> np.ndarray:
        """int8 ``[T]``: 1 exactly on sampled tokens."""
        return self._tokens.view(self._tokens.loss_mask)

    @property
    def sequence_ids(self) -> np.ndarray:
        """int32 ``[T]``: index of the message that a token belongs to."""
        return self._tokens.view(self._tokens.sequence_ids)

    @property
    def rollout_log_probs(self) -> np.ndarray:
        """float32 ``[T]``: nats, 0 where not sampled."""
        return self._tokens.view(self._tokens.log_probs)

    @property
    def attention_mask(self) -> np.ndarray:
        """int8 ``[T]``: 1 everywhere; made anew at each call."""
        return np.ones(self.num_tokens, np.int8)

    @property
    def position_ids(self) -> np.ndarray:
        """int32 ``[T]``: 0, 1, 2, ...; made anew at each call."""
        return np.arange(self.num_tokens, dtype=np.int32)

    @property
    def num_tokens(self) -> int:
        return self._tokens.size

    @property
    def num_generations(self) -> int:
        """Assistant messages that were sampled and are accounted for."""
        return len(self.turns) + len(self.asides)

    @property
    def succeeded(self) -> bool:
        """Whether the score so far is one of success."""
        return self._rewards.is_success(self.score)

    @property
    def policy_version(self) -> int:
        """Version of the oldest weights that sampled a turn; 0 before the first turn."""
        return min(self._versions, default=0)

    @property
    def turn_rewards(self) -> list[float]:
        return [turn.reward for turn in self.turns]

    @property
    def generation_s(self) -> float:
        """Seconds spent waiting for the engine."""
        return sum(turn.generation_s for turn in self.turns)

    @property
    def env_s(self) -> float:
        """Seconds spent in the environment's steps."""
        return sum(turn.env_s for turn in self.turns)

    def turn_budget(self) -> int:
        """Tokens that the next turn may sample; at 0 no request is to be sent."""
        return max(0, min(self._limits.max_tokens, self._room()))

    def close(self) -> None:
        """Leave no room for any further token: the model takes none."""
        self._most_tokens = self.num_tokens

    # -------------------------------------------------------------------------------------------------------- appending

    def append_generation(self, generation: Generation, generation_s: float = 0.0) -> str:
        """Append a sampled turn and return its text.

        A turn that did not end itself gets its end-of-turn token with loss mask 0, if the budgets leave room for it;
        where they do not, no turn can follow anyway. Raises `EngineError` when the generation is malformed.
        """
        self._check_generation(generation)
        count, index = len(generation.token_ids), len(self.messages)
        self._tokens.append_sampled(generation.token_ids, generation.log_probs, index)
        last_sampled = self.num_tokens - 1 if count else None
        if (not count or generation.token_ids[-1] != self._chat.end_of_turn_id) and self._room() > 0:
            self._tokens.append_context((self._chat.end_of_turn_id,), (index,))
        text = self._chat.decode(generation.token_ids)
        self._append_message(Role.ASSISTANT, text, ())
        self._versions.append(generation.policy_version)
        self._pending = _Pending(text, generation, generation_s, last_sampled)
        return text

    def append_step(self, output: StepOutput, env_s: float = 0.0) -> None:
        """Credit the environment's answer to the turn just sampled; its observation is not appended yet.

        The reward stands on the turn's last sampled token. An empty completion has none: only the score has it.
        """
        pending = self._take_pending()
        reward = self._rewards.scale * float(output.reward)
        earned = reward - (self.score if self._rewards.is_cumulative else 0.0)
        self.score = reward if self._rewards.is_cumulative else self.score + earned
        self.done = bool(output.done)
        if pending.last_sampled is not None and earned:
            self._reward_marks.append((pending.last_sampled, earned))
        self.turns.append(_turn(pending, output.state, earned, self.done, env_s))

    def append_aside(self, kind: PartKind) -> None:
        """Note that the turn just sampled asks nothing of the environment."""
        pending = self._take_pending()
        generation = pending.generation
        self.asides.append(
            Aside(
                kind=kind,
                message=len(self.messages) - 1,
                finish_reason=generation.finish_reason,
                num_tokens=len(generation.token_ids),
                generation_s=pending.generation_s,
            )
        )

    def append_observation(self, text: str, parts: tuple[Part, ...] = (), role: Role = Role.USER) -> bool:
        """Append an observation and the next generation prompt; False, and no change, when they do not fit.

        ``role``: `Role.TOOL` where the chat template has a frame for the results of functions.
        """
        encoded = self._chat.encode_observation(text, len(self.messages), role)
        if len(encoded.ids) > self._room():
            return False
        self._tokens.append_context(encoded.ids, encoded.sequence_ids)
        self._append_message(role, text, parts)
        return True

    def note_parts(self, parts: tuple[Part, ...]) -> None:
        """Say what the stretches of the latest message are."""
        self.parts[-1] = parts

    def finish(self, stop_reason: StopReason, error: str = "") -> Trajectory:
        """Close the record. A turn that the environment never answered is kept with no observation."""
        self.stop_reason = stop_reason
        if self._pending is not None:
            self.turns.append(_turn(self._take_pending(), None, 0.0, False, 0.0))
        return Trajectory(
            item=self.request.item,
            uid=self.request.uid,
            sample_index=self.request.sample_index,
            attempt=self.attempt,
            messages=tuple(self.messages),
            turns=tuple(self.turns),
            input_ids=self.input_ids.copy(),
            loss_mask=self.loss_mask.copy(),
            sequence_ids=self.sequence_ids.copy(),
            rollout_log_probs=self.rollout_log_probs.copy(),
            token_rewards=self._token_rewards(),
            prompt_length=self.prompt_length,
            score=self.score,
            success=not stop_reason.is_fault and self.succeeded,
            stop_reason=stop_reason,
            policy_version=self.policy_version,
            max_rounds=self.max_rounds,
            duration_s=time.monotonic() - self._started_at,
            error=error,
            parts=tuple(self.parts),
            asides=tuple(self.asides),
            trial=self.trial,
            num_trials=self.trial,
            extra={"states": self.viewer_states} if any(state is not None for state in self.viewer_states) else {},
        )

    # ---------------------------------------------------------------------------------------------------------- details

    def _room(self) -> int:
        """Tokens of any kind that may still be appended."""
        return self._most_tokens - self.num_tokens

    def _append_message(self, role: Role, content: str, parts: tuple[Part, ...]) -> None:
        self.messages.append(Message(role, content))
        self.parts.append(parts)

    def _take_pending(self) -> _Pending:
        if self._pending is None:
            raise ValueError("no sampled turn is waiting for the environment's answer")
        pending, self._pending = self._pending, None
        return pending

    def _token_rewards(self) -> np.ndarray:
        rewards = np.zeros(self.num_tokens, np.float32)
        for position, reward in self._reward_marks:
            rewards[position] = reward
        return rewards

    def _check_prompt(self) -> None:
        if self.trial == 1 and self.prompt_length > self._limits.max_prompt_length:
            raise ConfigError(
                f"item {self.request.item.item_id}: its prompt has {self.prompt_length} tokens, more than "
                f"data.max_prompt_length={self._limits.max_prompt_length}"
            )

    def _check_generation(self, generation: Generation) -> None:
        sampled, allowed = len(generation.token_ids), self.turn_budget()
        if sampled > allowed:
            raise EngineError(f"the engine sampled {sampled} tokens where {allowed} were allowed")
        if len(generation.log_probs) != sampled:
            raise EngineError(f"the engine gave {len(generation.log_probs)} log-probs for {sampled} tokens")


def _turn(pending: _Pending, observation: str | None, reward: float, done: bool, env_s: float) -> Turn:
    return Turn(
        text=pending.text,
        observation=observation,
        reward=reward,
        done=done,
        finish_reason=pending.generation.finish_reason,
        num_tokens=len(pending.generation.token_ids),
        generation_s=pending.generation_s,
        env_s=env_s,
    )


def unstarted_trajectory(
    request: RolloutRequest,
    stop_reason: StopReason,
    error: str,
    *,
    attempt: int,
    max_rounds: int,
    duration_s: float,
    trial: int = 1,
) -> Trajectory:
    """A fault before the first observation arrived: a trajectory of no tokens."""
    return Trajectory(
        item=request.item,
        uid=request.uid,
        sample_index=request.sample_index,
        attempt=attempt,
        messages=(),
        turns=(),
        input_ids=np.zeros(0, np.int32),
        loss_mask=np.zeros(0, np.int8),
        sequence_ids=np.zeros(0, np.int32),
        rollout_log_probs=np.zeros(0, np.float32),
        token_rewards=np.zeros(0, np.float32),
        prompt_length=0,
        score=0.0,
        success=False,
        stop_reason=stop_reason,
        policy_version=0,
        max_rounds=max_rounds,
        duration_s=duration_s,
        error=error,
        trial=trial,
        num_trials=trial,
    )
