"""What the index knows of a trajectory without keeping it: one line of a file in some two dozen values."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec

from agentgym_rl.types import StopReason

_FAULTS = frozenset(reason.value for reason in StopReason if reason.is_fault)


class NotATrajectory(Exception):
    """A row of some other file, such as preference pairs: it has no conversation."""


class _Turn(msgspec.Struct):
    num_tokens: int = 0


class _Row(msgspec.Struct):
    """Of a row only what is needed; the long columns stay undecoded."""

    item_id: str | int = ""
    conversations: msgspec.Raw = msgspec.Raw(b"")
    task: str = ""
    category: str = ""
    uid: str = ""
    sample_index: int = 0
    trial: int = 1
    num_trials: int = 1
    attempt: int = 1
    score: float | None = None
    reward: float | None = None
    success: bool | None = None
    stop_reason: str = ""
    turns: list[_Turn] | None = None
    asides: list[_Turn] = []
    input_ids: msgspec.Raw = msgspec.Raw(b"[]")
    policy_version: int = 0
    max_rounds: int = 0
    duration_s: float = 0.0
    error: str = ""


class Summary(msgspec.Struct, frozen=True, gc=False):
    """One trajectory as lists show it."""

    id: str
    """Names it in addresses: which file, and which row of it."""
    run: str
    phase: str
    """``train``, ``val`` (validation in training) or ``eval``."""
    step: int
    """Training step; of an evaluation the policy's version."""
    task: str
    item_id: str
    category: str
    uid: str
    sample_index: int
    trial: int
    num_trials: int
    attempt: int
    score: float | None
    """None for a fault, and where the file tells none."""
    success: bool | None
    stop_reason: str
    turns: int
    tokens: int
    sampled_tokens: int
    policy_version: int
    max_rounds: int
    duration_s: float
    error: str

    @property
    def is_fault(self) -> bool:
        """True for what counts in no average."""
        return self.stop_reason in _FAULTS


_decoder = msgspec.json.Decoder(_Row)
_turn_counter = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


def summarise(line: bytes, *, id: str, run: str, phase: str, step: int | None) -> Summary:
    """The summary of one row; raises `NotATrajectory` for an object of another kind, and ValueError for anything else
    that is none."""
    row = decode(line, _decoder)
    if not bytes(row.conversations):
        raise NotATrajectory
    item_id = str(row.item_id)
    turns = row.turns if row.turns is not None else [_Turn()] * _count_answers(row.conversations)
    return Summary(
        id=id,
        run=run,
        phase=phase,
        step=row.policy_version if step is None else step,
        task=row.task or item_id.rpartition("_")[0],
        item_id=item_id,
        category=row.category,
        uid=row.uid or item_id,
        sample_index=row.sample_index,
        trial=row.trial,
        num_trials=row.num_trials,
        attempt=row.attempt,
        score=row.reward if row.score is None else row.score,
        success=row.success,
        stop_reason=row.stop_reason,
        turns=len(turns),
        tokens=_length(row.input_ids),
        sampled_tokens=sum(turn.num_tokens for turn in (*turns, *row.asides)),
        policy_version=row.policy_version,
        max_rounds=row.max_rounds,
        duration_s=row.duration_s,
        error=row.error,
    )


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of those that are known; None for none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def decode(line: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
    """Decode JSON, also Python's dialect of it, which knows NaN and half a surrogate pair; raises ValueError."""
    try:
        return decoder.decode(line)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        plain = json.loads(line, parse_constant=lambda name: None)
        return decoder.decode(json.dumps(plain, ensure_ascii=False).encode(errors="replace"))


def _length(array: msgspec.Raw) -> int:
    content = bytes(array).strip(b"[] \t")
    return content.count(b",") + 1 if content else 0


def _count_answers(conversations: msgspec.Raw) -> int:
    """What a row without turns has instead: the messages that the model wrote."""
    speakers = [entry.get("from", entry.get("role", b"")) for entry in decode(bytes(conversations), _turn_counter)]
    return sum(bytes(speaker) in (b'"gpt"', b'"assistant"') for speaker in speakers)
