"""The records that cross borders: items, messages, turns, generations, trajectories.

Everything here is immutable and free of torch, Ray and HTTP, so that servers, viewers and learners can share it.
Axes of arrays: ``T`` tokens of one trajectory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Real
from typing import Any, Protocol

import numpy as np

from agentgym_rl.errors import ConfigError, EnvProtocolError


class Role(StrEnum):
    """Who speaks in a message."""

    SYSTEM = "system"
    USER = "user"
    """The environment, or the instruction."""
    TOOL = "tool"
    """The environment, where it answers a function call in a template that has a frame of its own for that."""
    ASSISTANT = "assistant"
    """The model."""


def encodable(text: str) -> str:
    """Halves of surrogate pairs, which JSON can carry, replaced: no tokenizer takes them, no UTF-8 file holds them."""
    return text if text.isascii() else text.encode(errors="surrogatepass").decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: str


class PartKind(StrEnum):
    """What a stretch of a message's text is."""

    INSTRUCTION = "instruction"
    """The task's rules and the form of an answer, and what the agent's way of thinking asks for ("Write a plan")."""
    ACKNOWLEDGEMENT = "acknowledgement"
    """The assistant's fixed answer to the instruction; the model did not write it."""
    OBSERVATION = "observation"
    """What the environment said."""
    THOUGHT = "thought"
    """Written by the model before it acts."""
    ACTION = "action"
    """Written by the model: what it asks of the environment."""
    PLAN = "plan"
    """In an assistant's message: written there by the model; in a user's: shown again, to keep it in view."""
    REFLECTION = "reflection"
    """In an assistant's message: what the model wrote after a failed trial; in a user's: shown in a later trial."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a message: ``content[start:end]``."""

    kind: PartKind
    start: int
    end: int


_ITEM_ID = re.compile(r"(?P<task>.+)_(?P<index>\d+)")


@dataclass(frozen=True, slots=True)
class Item:
    """One task instance: the environment's name and what its ``reset`` takes."""

    task: str
    index: int
    category: str = ""
    """Where the evaluation counts it; empty when the item file names none."""
    game: str = ""
    """Path of a game on the server, which ``reset`` takes in place of the index; empty where items are numbered."""

    @property
    def item_id(self) -> str:
        """The form that item files and logs use: ``<task>_<index>``, or the path of the game."""
        return self.game or f"{self.task}_{self.index}"

    @property
    def reset_key(self) -> int | str:
        """What an environment's client resets to."""
        return self.game or self.index

    @classmethod
    def parse(cls, value: str | int, task: str | Sequence[str], category: str = "") -> Item:
        """Read ``<task>_<int>``, a bare int, or the path of a game, which has a ``/``.

        ``task``: the run's, or all of several; then an int or a path, which do not say theirs, are refused. Raises
        `ConfigError` on anything else or on another task's item.
        """
        tasks = (task,) if isinstance(task, str) else tuple(task)
        match = _ITEM_ID.fullmatch(value) if isinstance(value, str) else None
        if match is not None and match["task"] in tasks:
            return cls(match["task"], int(match["index"]), category)
        is_index = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        is_game = isinstance(value, str) and "/" in value
        if (is_index or is_game) and len(tasks) > 1:
            raise ConfigError(f"item_id {value!r} does not say its task, one of {', '.join(tasks)}")
        if is_index:
            return cls(tasks[0], int(value), category)
        if is_game:
            return cls(tasks[0], 0, category, game=str(value))
        if match is None:
            raise ConfigError(f"item_id {value!r} is neither '<task>_<int>' nor an int >= 0 nor the path of a game")
        allowed = repr(tasks[0]) if len(tasks) == 1 else f"one of {', '.join(tasks)}"
        raise ConfigError(f"item_id {value!r} belongs to task {match['task']!r}, this run is for {allowed}")


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What an environment client returns for one action; ``reward`` is as `EnvClient` documents it for its task.

    Raises `EnvProtocolError` for a state that is no text or a reward that is no finite number: one such value would
    spoil a whole batch.
    """

    state: str
    reward: float
    done: bool

    def __post_init__(self) -> None:
        if not isinstance(self.state, str):
            raise EnvProtocolError(f"state={self.state!r} is not a string")
        # The abstract type alone would do, and takes ten times as long.
        if not isinstance(self.reward, (float, int, Real)) or not math.isfinite(self.reward):
            raise EnvProtocolError(f"reward={self.reward!r} is not a finite number")


class FinishReason(StrEnum):
    """Why an engine ended one generation."""

    STOP = "stop"
    """A stop token was sampled; it is the last id of the generation."""
    LENGTH = "length"
    """``max_tokens`` ids were sampled."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one turn is sampled."""

    max_tokens: int
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps all tokens."""
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    """Makes this request reproducible whatever runs beside it; None draws from the engine's own stream."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What an engine sampled for one turn."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Log-probability (nats) of each sampled id under the sampling temperature, before top-p and top-k cut.

    vLLM reports it after the cut; training, which needs it, samples without one."""
    finish_reason: FinishReason
    policy_version: int
    """Version of the weights, i.e. the training step whose update made them; 0 is the initial model."""


class TokenGenerator(Protocol):
    """All that the collector knows of a model: token ids in, token ids and log-probs out."""

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, trajectory_id: str) -> Generation:
        """Sample one turn after ``prompt_ids`` (the whole sequence so far).

        ``trajectory_id`` names the sequence across its turns, so that an engine can keep its KV cache.
        Raises `EngineError` when the engine cannot answer, and `ContextFullError` when the sequence leaves the model
        no room, which ends the trajectory by length.
        """
        ...

    def release(self, trajectory_id: str) -> None:
        """Say that no further turn follows; unknown ids are ignored."""
        ...


class StopReason(StrEnum):
    """Why a trajectory ended: exactly one per trajectory."""

    DONE = "done"
    """The environment ended the episode."""
    MAX_ROUNDS = "max_rounds"
    """The number of assistant turns of this training step is used up."""
    LENGTH = "length"
    """No token budget was left for a turn, or an observation did not fit, or a hosted model's context was full."""
    ENV_ERROR = "env_error"
    """The environment or its server failed; a fault, never a reward."""
    ENGINE_ERROR = "engine_error"
    """The engine failed; a fault."""
    DEADLINE = "deadline"
    """The trajectory took longer than ``agentgym.timeout``; a fault."""

    @property
    def is_fault(self) -> bool:
        """True when the trajectory must not be trained on nor counted in any average."""
        return self in (StopReason.ENV_ERROR, StopReason.ENGINE_ERROR, StopReason.DEADLINE)


@dataclass(frozen=True, slots=True)
class Turn:
    """One round: what the model wrote and what the environment answered."""

    text: str
    """The assistant's text, decoded without special tokens."""
    observation: str | None
    """The environment's answer; None when the turn was never executed (a fault)."""
    reward: float
    """This turn's own reward: turn rewards sum to the trajectory's score."""
    done: bool
    finish_reason: FinishReason
    num_tokens: int
    """Sampled tokens."""
    generation_s: float
    """Seconds from the request to the engine until its answer."""
    env_s: float
    """Seconds of the environment's step."""


@dataclass(frozen=True, slots=True)
class Aside:
    """An assistant message that asks nothing of the environment, such as a plan or a reflection. It is no turn."""

    kind: PartKind
    message: int
    """Its index in `Trajectory.messages`."""
    finish_reason: FinishReason
    num_tokens: int
    """Sampled tokens."""
    generation_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One finished episode: messages, turns and the exact token record of it.

    Under a way of thinking that tries an item again (``reflect``), each trial is a trajectory of its own: those of one
    sample share ``uid`` and ``sample_index`` and are counted by ``trial``. What the model wrote after a failed trial
    ends that trial's trajectory; it is rewarded by what the next trial earned, ``reflection_reward``.

    Arrays have shape ``[T]`` and equal length. Attention is 1 everywhere and positions are 0, 1, 2, ..., so neither is
    stored.
    """

    item: Item
    uid: str
    """Group: trajectories of the same item in the same training step share it."""
    sample_index: int
    """Which member of the group, 0..n-1."""
    attempt: int
    """1, or 2 when the first attempt ended in a fault."""
    messages: tuple[Message, ...]
    turns: tuple[Turn, ...]
    input_ids: np.ndarray
    """int32."""
    loss_mask: np.ndarray
    """int8: 1 exactly on sampled tokens."""
    sequence_ids: np.ndarray
    """int32: index of the message that a token belongs to."""
    rollout_log_probs: np.ndarray
    """float32 nats: the engine's own; 0 where not sampled."""
    token_rewards: np.ndarray
    """float32: each turn's reward on its last sampled token, 0 elsewhere; sums to `score`."""
    prompt_length: int
    """Tokens before the first sampled one; what follows counts as the response."""
    score: float
    success: bool
    stop_reason: StopReason
    policy_version: int
    max_rounds: int
    """The horizon this trajectory ran under."""
    duration_s: float
    error: str = ""
    """Empty, or ``<ErrorType>: message`` of a fault."""
    extra: dict[str, Any] = field(default_factory=dict)
    """JSON-able values of the environment that a viewer may show."""
    parts: tuple[tuple[Part, ...], ...] = ()
    """For each message, what its stretches are, in order and without overlap; labels and blanks belong to none."""
    asides: tuple[Aside, ...] = ()
    """Assistant messages beside those of the turns."""
    trial: int = 1
    """Which trial of this sample at its item, counted from 1; later ones follow a failure and see its reflection."""
    num_trials: int = 1
    """How many trials the sample made in all."""
    reflection_reward: float | None = None
    """Score of the next trial, which the reflection at the end of this one is rewarded by. None: no reflection, or
    a next trial that ended in a fault and so is no reward."""

    def __repr__(self) -> str:
        """One line without the arrays: a task's or an error's message shows it whole."""
        return (
            f"Trajectory({self.item.item_id} sample {self.sample_index}, {self.stop_reason}, score {self.score:g}, "
            f"{len(self.turns)} turns, {self.num_tokens} tokens)"
        )

    @property
    def masked(self) -> bool:
        """True for faults: no loss, in no statistic."""
        return self.stop_reason.is_fault

    @property
    def is_last_trial(self) -> bool:
        """True for the trajectory that tells what came of its sample."""
        return self.trial == self.num_trials

    @property
    def reflection(self) -> Aside | None:
        """What the model wrote after this trial had failed."""
        last = self.asides[-1] if self.asides else None
        return last if last is not None and last.kind == PartKind.REFLECTION else None

    @property
    def turn_messages(self) -> tuple[int, ...]:
        """Index of each turn's message: of the assistant's messages, asides apart, the last ones, after the opening."""
        asides = {aside.message for aside in self.asides}
        spoken = [
            index
            for index, message in enumerate(self.messages)
            if message.role == Role.ASSISTANT and index not in asides
        ]
        return tuple(spoken[len(spoken) - len(self.turns) :])

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_sampled_tokens(self) -> int:
        return int(self.loss_mask.sum())
