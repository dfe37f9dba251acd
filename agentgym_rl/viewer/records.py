"""One trajectory made ready for its page: messages in labelled pieces, turns, and tokens by segment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from agentgym_rl.agent.actions import split_thought
from agentgym_rl.rollout.statistics import split_segments
from agentgym_rl.rollout.token_values import read_token_values, token_values_file
from agentgym_rl.viewer.vocabulary import find_tokenizer, spell

_decoder = msgspec.json.Decoder(dict[str, Any])
_COLUMNS = ("input_ids", "loss_mask", "sequence_ids", "rollout_log_probs")
_ROLES = {"human": "user", "gpt": "assistant"}


def record_of(
    row: bytes, *, run_folder: Path | None = None, root: Path | None = None, step: int | None = None
) -> dict[str, Any]:
    """Messages, turns and tokens of a row; what a foreign row lacks is empty.

    ``run_folder``: where a tokenizer and, of training step ``step``, values of tokens are looked for; below ``root``,
    by default that folder, a model that the run names is looked for.
    """
    fields = load_row(row)
    messages = _messages(fields)
    tokens = _tokens(fields)
    if tokens is not None and run_folder is not None:
        tokens |= _spelled(run_folder, root or run_folder, tokens) | _trained_on(run_folder, step, fields, tokens)
    return {
        "messages": messages,
        "turns": _turns(fields, messages),
        "tokens": tokens,
        "extra": _extra(fields.get("extra")),
        "reflection_reward": fields.get("reflection_reward"),
    }


def _extra(value: Any) -> dict[str, Any]:
    """What the environment told beside the turns; the states of each turn, which may be pictures, are the panels'."""
    return {name: each for name, each in value.items() if name != "states"} if isinstance(value, dict) else {}


def load_row(row: bytes) -> dict[str, Any]:
    """The row as plain values; numbers that are not finite become None."""
    try:
        return _decoder.decode(row)
    except msgspec.DecodeError:
        return dict(json.loads(row, parse_constant=lambda name: None))


def _messages(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Each with its text in pieces ``[kind, text]``; pieces without a kind are labels and blanks."""
    parts = fields.get("parts") or []
    turn_of = {message: turn for turn, message in enumerate(_turn_messages(fields))}
    aside_of = {aside.get("message"): aside.get("kind") for aside in fields.get("asides") or []}
    bounds = _token_bounds(fields.get("sequence_ids") or [])
    messages = []
    for index, entry in enumerate(fields.get("conversations") or []):
        role = _role(entry)
        text = str(entry.get("value", entry.get("content", "")))
        messages.append(
            {
                "role": role,
                "loss": entry.get("loss"),
                "turn": turn_of.get(index),
                "aside": aside_of.get(index),
                "pieces": _pieces(text, parts[index]) if index < len(parts) else _guessed_pieces(text, role, entry),
                "tokens": bounds.get(index),
            }
        )
    return messages


def _role(entry: dict[str, Any]) -> str:
    said_by = str(entry.get("from", entry.get("role", "")))
    return _ROLES.get(said_by, said_by)


def _turn_messages(fields: dict[str, Any]) -> list[int]:
    """Index of each turn's message; as `Trajectory.turn_messages`, but asides may stand between the turns."""
    asides = {aside.get("message") for aside in fields.get("asides") or []}
    spoken = [
        index
        for index, entry in enumerate(fields.get("conversations") or [])
        if _role(entry) == "assistant" and index not in asides
    ]
    turns = fields.get("turns")
    return spoken if turns is None else spoken[len(spoken) - len(turns) :]


def _pieces(text: str, parts: Sequence[Sequence[Any]]) -> list[list[str]]:
    pieces, done = [], 0
    for kind, start, end in parts:
        pieces += [["", text[done:start]], [str(kind), text[start:end]]]
        done = end
    return [piece for piece in [*pieces, ["", text[done:]]] if piece[1]]


def _guessed_pieces(text: str, role: str, entry: dict[str, Any]) -> list[list[str]]:
    """For rows that do not tell: thought and action of a model's answer where they stand, all else as one piece."""
    if role == "assistant" and entry.get("loss") is False:
        return [["acknowledgement", text]]
    if role != "assistant":
        return [["", text]] if text else []
    parts, done = [], 0
    for kind, said in zip(("thought", "action"), split_thought(text), strict=True):
        start = text.find(said, done) if said else -1
        if said and start >= 0:
            parts.append((kind, start, start + len(said)))
            done = start + len(said)
    return _pieces(text, parts)


def _turns(fields: dict[str, Any], messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns as the row has them, each with its message's index; without any, the answers that were given."""
    places = _turn_messages(fields)
    turns = fields.get("turns")
    if turns is None:
        return [{"message": place, "tokens": messages[place]["tokens"]} for place in places]
    offset = len(turns) - len(places)  # of a row that tells fewer messages than turns
    known = [None] * offset + places
    return [
        turn | {"message": place, "tokens": None if place is None else messages[place]["tokens"]}
        for turn, place in zip(turns, known, strict=True)
    ]


def _token_bounds(sequence_ids: Sequence[int]) -> dict[int, tuple[int, int]]:
    """For each message, where its tokens begin and end."""
    if not sequence_ids:
        return {}
    ids = np.asarray(sequence_ids)
    starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 1))
    ends = [*starts[1:].tolist(), len(ids)]
    return {int(ids[start]): (start, end) for start, end in zip(starts.tolist(), ends, strict=True)}


def _tokens(fields: dict[str, Any]) -> dict[str, Any] | None:
    """The token columns and their segments; None where the row has none."""
    columns = {name: fields.get(name) or [] for name in _COLUMNS}
    if not columns["input_ids"] or len({len(column) for column in columns.values()}) != 1:
        return None
    segments = split_segments(np.asarray(columns["loss_mask"]))
    return columns | {
        "token_rewards": fields.get("token_rewards") or [],
        "segments": [[segment.name, segment.start, segment.end] for segment in segments],
    }


def _spelled(run_folder: Path, root: Path, tokens: dict[str, Any]) -> dict[str, Any]:
    """What each token spells, where the run left its tokenizer."""
    path = find_tokenizer(run_folder, root)
    pieces = None if path is None else spell(path, tokens["input_ids"])
    return {"pieces": pieces}


def _trained_on(run_folder: Path, step: int | None, fields: dict[str, Any], tokens: dict[str, Any]) -> dict[str, Any]:
    """What training made of each sampled token, null elsewhere, where the run wrote it."""
    if step is None:
        return {"values": {}}
    columns = read_token_values(
        token_values_file(run_folder, step),
        uid=str(fields.get("uid", "")),
        sample_index=fields.get("sample_index", 0),
        trial=fields.get("trial", 1),
    )
    sampled = np.flatnonzero(np.asarray(tokens["loss_mask"]) == 1)
    return {"values": {name: _laid_out(column, sampled, len(tokens["loss_mask"])) for name, column in columns.items()}}


def _laid_out(values_S: np.ndarray, sampled: np.ndarray, length: int) -> list[float | None]:
    """Values at the first sampled positions, to the shortest decimals that are read back as the same float32."""
    row: list[float | None] = [None] * length
    for position, value in zip(sampled.tolist(), values_S, strict=False):
        row[position] = float(str(value))
    return row
