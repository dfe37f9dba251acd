"""How an environment's calls look in JSON: the two dialects, and where one environment departs from them.

A `Wire` is data of an `EnvSpec`. Start from a dialect and replace what differs::

    wire=replace(DIALECT_B, index_field="id", created=lambda handle, start: handle)

Answers are made of the objects that the environment returned. An environment whose answers hold more than observation,
reward and done returns subclasses of `ResetResult` and `StepResult` with further fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from agentgym_rl.envs.base import ResetResult, StepResult

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class MalformedRequest(Exception):
    """The request is not of the protocol's form."""


def _created_object(handle: int, start: ResetResult | None) -> Any:
    observation = "" if start is None else start.observation
    return {"id": handle, "observation": observation, "done": False, "reward": 0}


def _reset_object(handle: int, start: ResetResult) -> Any:
    return {"id": handle, "observation": start.observation, "done": False, "reward": 0}


def _step_object(step: StepResult) -> Any:
    return {"observation": step.observation, "reward": step.reward, "done": step.done}


@dataclass(frozen=True)
class Wire:
    """Field names and forms of answers of one environment; the defaults are TextCraft's."""

    handle_field: str = "id"
    """The session, in bodies and queries."""
    index_field: str = "data_idx"
    """The item that ``/reset`` begins; absent means item 0."""
    create_index_field: str | None = None
    """The item that ``/create`` begins, where its body may name one; absent means item 0."""
    starts_on_create: bool = True
    """True when ``/create`` begins an episode. Otherwise nothing but ``/reset`` and ``/close`` is allowed before the
    first reset, and ``created`` gets None."""
    refuses_with_200: bool = True
    """Dialect A: what the environment refuses is HTTP 200 with ``{"error": text}``. Dialect B: 404 (no such session) or
    400 with ``{"detail": text}``."""
    created: Callable[[int, ResetResult | None], Any] = _created_object
    """(handle, start of the episode) -> answer to ``/create``."""
    was_reset: Callable[[int, Any], Any] = _reset_object
    """(handle, what `Environment.reset` returned) -> answer to ``/reset``."""
    stepped: Callable[[Any], Any] = _step_object
    """What `Environment.step` returned -> answer to ``/step``."""
    closed: Callable[[bool], Any] = bool
    """Whether there was such a session -> answer to ``/close``."""

    def refusal(self, text: str, *, known_session: bool = True) -> tuple[int, Any]:
        """Status and content of the answer to a call that the environment refuses."""
        if self.refuses_with_200:
            return 200, {"error": text}
        return 400 if known_session else 404, {"detail": text}


DIALECT_A = Wire()
"""Of TextCraft, BabyAI, SciWorld: handle field ``id``; refusals are HTTP 200 with ``{"error": text}``."""

DIALECT_B = Wire(
    handle_field="env_idx",
    index_field="idx",
    refuses_with_200=False,
    created=lambda handle, start: {"env_idx": handle},
    was_reset=lambda handle, start: start.observation,
    stepped=lambda step: {"observation": step.observation, "reward": step.reward, "done": step.done, "info": {}},
)
"""Of SearchQA, WebArena: handle field ``env_idx``; refusals are 400 or 404 with ``{"detail": text}``."""


def encode(content: Any) -> bytes:
    """``content`` as JSON; raises TypeError for what JSON cannot say."""
    try:
        return _encode(content)
    except UnicodeEncodeError:  # a lone surrogate, which models do write; JSON's escapes carry it
        return json.dumps(content, separators=(",", ":")).encode()


def decode_object(body: bytes) -> Mapping[str, Any]:
    """The JSON object of a body; an empty one counts as ``{}``. Raises `MalformedRequest`."""
    if not body.strip():
        return {}
    try:
        fields = _decode(body)
    except (msgspec.DecodeError, RecursionError):
        fields = _decode_leniently(body)
    if not isinstance(fields, dict):
        raise MalformedRequest(f"the body is {type(fields).__name__}, must be a JSON object")
    return fields


def _decode_leniently(body: bytes) -> Any:
    """What the fast decoder refuses and Python's own reads (lone surrogates), or the error in words."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedRequest(f"the body is not JSON: {error}") from None


def read_integer(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """An integer, or (in queries) its decimal text; raises `MalformedRequest`."""
    value = fields.get(name, default)
    if type(value) is int:
        return value
    if isinstance(value, str) and value.isascii() and value.removeprefix("-").isdigit() and len(value) < 20:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise MalformedRequest(f"{name}={value!r}: must be an integer")
    return value


def read_text(fields: Mapping[str, Any], name: str) -> str:
    """A string; raises `MalformedRequest`."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise MalformedRequest(f"{name}={value!r}: must be a string")
    return value
