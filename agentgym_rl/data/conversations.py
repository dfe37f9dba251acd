"""Conversation files: rows ``{item_id, conversations: [{from, loss, value}]}``, in JSON or JSONL.

``from`` is ``human``, ``gpt``, ``system`` or ``tool``; rows of ``{role, content}`` (also under ``messages``) are read
as well.
``loss`` says whether an assistant message is trained on: false is no, absent, null or true is yes.
A row may hold the tokens that a rollout recorded (``input_ids``, ``loss_mask``, ``sequence_ids``), as those of
trajectory files do: where they are those of the tokenizer at hand, they are trained on as they were sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Message, Role, Trajectory

SPEAKERS = {Role.USER: "human", Role.ASSISTANT: "gpt", Role.SYSTEM: "system", Role.TOOL: "tool"}
"""A role's name in the ``from`` field."""
_ROLES = {name: role for role, name in SPEAKERS.items()} | {str(role): role for role in Role}


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """What a rollout recorded of each token; columns of equal length, see `agentgym_rl.types.Trajectory`."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    sequence_ids: tuple[int, ...]

    @classmethod
    def of(cls, trajectory: Trajectory) -> TokenRecord:
        """The tokens of a trajectory."""
        return cls(*(tuple(getattr(trajectory, name).tolist()) for name in _RECORD_FIELDS))

    def to_fields(self) -> dict[str, list[int]]:
        """Its fields in a row."""
        return {name: list(getattr(self, name)) for name in _RECORD_FIELDS}


_RECORD_FIELDS = ("input_ids", "loss_mask", "sequence_ids")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and for each whether it is trained on (None where the file does not say)."""

    item_id: str
    """Empty when the row names no item."""
    messages: tuple[Message, ...]
    train_flags: tuple[bool | None, ...]
    record: TokenRecord | None = None
    """The tokens, where a rollout recorded them."""

    @classmethod
    def of(cls, trajectory: Trajectory) -> Conversation:
        """A trajectory to train on, with its tokens if it has any; answers that were not sampled are not trained on."""
        record = TokenRecord.of(trajectory) if trajectory.num_tokens else None
        return cls(trajectory.item.item_id, trajectory.messages, sampled_flags(trajectory), record)

    def to_row(self) -> dict[str, Any]:
        """The row's JSON form."""
        record = {} if self.record is None else self.record.to_fields()
        return {"item_id": self.item_id, "conversations": to_entries(self.messages, self.train_flags), **record}


def to_entries(messages: Iterable[Message], train_flags: Iterable[bool | None]) -> list[dict[str, Any]]:
    """The ``conversations`` field of a row."""
    return [
        {"from": SPEAKERS[Role(message.role)], "loss": flag, "value": message.content}
        for message, flag in zip(messages, train_flags, strict=True)
    ]


def sampled_flags(trajectory: Trajectory) -> tuple[bool | None, ...]:
    """For each message of a trajectory, whether the policy wrote it; None where it is not the assistant's."""
    written = set(trajectory.sequence_ids[trajectory.loss_mask == 1].tolist())
    if not trajectory.num_tokens:  # played without a model of ours: what it wrote is known, the tokens of it are not
        written = {*trajectory.turn_messages, *(aside.message for aside in trajectory.asides)}
    return tuple(
        index in written if message.role == Role.ASSISTANT else None
        for index, message in enumerate(trajectory.messages)
    )


def read_conversations(path: str | Path) -> list[Conversation]:
    """All rows of a ``.json`` (a list) or ``.jsonl`` file; raises `ConfigError` naming file, row and field."""
    path = Path(path)
    conversations = [parse_row(row, where) for row, where in read_rows(path)]
    if not conversations:
        raise ConfigError(f"{path} has no rows")
    return conversations


def write_conversations(path: str | Path, conversations: Sequence[Conversation]) -> None:
    """Write a file that `read_conversations` reads back; its folder is made; `ConfigError` for another suffix."""
    write_rows(path, (conversation.to_row() for conversation in conversations))


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows to a ``.json`` or ``.jsonl`` file; its folder is made; `ConfigError` for another suffix.

    Half a surrogate pair, which UTF-8 may not carry, is replaced.
    """
    path = Path(path)
    check_suffix(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    is_lines = path.suffix == ".jsonl"
    text = "".join(f"{line}\n" for line in lines) if is_lines else "[\n" + ",\n".join(lines) + "\n]\n"
    path.write_text(text, encoding="utf-8", errors="replace")


def parse_row(row: Any, where: str) -> Conversation:
    """Read one row with its token record, if it has one; ``where`` names it in errors, such as ``train.json row 3``."""
    conversation = parse_conversation(row, where)
    if not any(name in row for name in _RECORD_FIELDS):
        return conversation
    return replace(conversation, record=_parse_record(row, len(conversation.messages), where))


def parse_conversation(row: Any, where: str) -> Conversation:
    """The same without tokens."""
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}: expected an object, got {_shown(row)}")
    name = "conversations" if "conversations" in row else "messages"
    entries = row.get(name)
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{where}: field 'conversations' must be a list of messages, got {_shown(entries)}")
    parsed = [_parse_entry(entry, f"{where}: {name}[{index}]") for index, entry in enumerate(entries)]
    messages, flags = zip(*parsed, strict=True)
    return Conversation(_item_id(row, where), messages, flags)


def _parse_record(row: Mapping[str, Any], num_messages: int, where: str) -> TokenRecord:
    columns = [row.get(name) for name in _RECORD_FIELDS]
    for name, column in zip(_RECORD_FIELDS, columns, strict=True):
        if not isinstance(column, list) or not all(type(value) is int and value >= 0 for value in column):
            raise ConfigError(f"{where}: field {name!r} must be a list of ints from 0, got {_shown(column)}")
    ids, mask, owners = (tuple(column) for column in columns if column is not None)
    if not len(ids) == len(mask) == len(owners):
        raise ConfigError(f"{where}: {', '.join(_RECORD_FIELDS)} differ in length: {[*map(len, (ids, mask, owners))]}")
    if not set(mask) <= {0, 1} or (mask and mask[0]):
        raise ConfigError(f"{where}: field 'loss_mask' must hold 0 and 1, and begin with 0, got {_shown(mask)}")
    # A generation prompt may follow the last message: it belongs to one that is not there.
    if owners and max(owners) > num_messages:
        raise ConfigError(f"{where}: field 'sequence_ids' names message {max(owners)} of {num_messages}")
    return TokenRecord(ids, mask, owners)


def _item_id(row: Mapping[str, Any], where: str) -> str:
    item_id = row.get("item_id", "")
    if isinstance(item_id, bool) or not isinstance(item_id, str | int):
        raise ConfigError(f"{where}: field 'item_id' must be a string or an int, got {_shown(item_id)}")
    return str(item_id)


def _parse_entry(entry: Any, where: str) -> tuple[Message, bool | None]:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: expected an object, got {_shown(entry)}")
    speaker_field, text_field = ("from", "value") if "from" in entry else ("role", "content")
    speaker, text, loss = entry.get(speaker_field), entry.get(text_field), entry.get("loss")
    if not isinstance(speaker, str) or speaker not in _ROLES:
        raise ConfigError(f"{where}.{speaker_field}={_shown(speaker)}: must be one of {', '.join(_ROLES)}")
    if not isinstance(text, str):
        raise ConfigError(f"{where}.{text_field}={_shown(text)}: must be a string")
    if loss is not None and not isinstance(loss, bool):
        raise ConfigError(f"{where}.loss={_shown(loss)}: must be true, false or null")
    return Message(_ROLES[speaker], text), loss


def check_suffix(path: Path) -> None:
    """Refuse a name that neither reading nor writing conversations or pairs takes, with `ConfigError`."""
    if path.suffix not in (".json", ".jsonl"):
        raise ConfigError(f"{path}: conversation files end in .json or .jsonl")


def read_rows(path: Path) -> Iterator[tuple[Any, str]]:
    """Each row of a ``.json`` or ``.jsonl`` file with its name in errors."""
    check_suffix(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from error
    if path.suffix == ".jsonl":
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield _load(line, f"{path} line {number}"), f"{path} line {number}"
        return
    rows = _load(text, str(path))
    if not isinstance(rows, list):
        raise ConfigError(f"{path}: expected a list of rows, got {_shown(rows)}")
    for number, row in enumerate(rows, 1):
        yield row, f"{path} row {number}"


def _load(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
