"""Trajectory files: ``<folder>/step<N>/<rank>.jsonl``, one row per trajectory.

A row has AgentGym-RL's fields ``item_id``, ``conversations`` and ``reward``, and everything else that a `Trajectory`
holds, so that it can be read back. A fault has ``reward`` and ``score`` null: it is not a reward of 0.

What the agent's way of thinking made of the messages:

* ``parts``: for each entry of ``conversations``, in the same order, a list of ``[kind, start, end]``: its characters
  ``value[start:end]`` are a ``plan``, ``thought``, ``action``, ``reflection``, ``observation``, ``instruction`` or
  ``acknowledgement`` (`PartKind`). Labels such as ``Thought:`` and blanks belong to no part. In a message of
  ``human`` a ``plan`` or ``reflection`` is one that is shown again. ``parts`` is empty in rows of older files.
* ``asides``: assistant messages that are no turn (a plan before the first action, a reflection after the last):
  ``{kind, message, finish_reason, num_tokens, generation_s}``, where ``message`` is the index in ``conversations``.
  ``turns`` holds only what the environment was asked: the assistant messages after the opening that are no aside.
* ``trial`` and ``num_trials``: under ``reflect``, which trial of the sample this is and how many it made; rows of the
  same ``uid`` and ``sample_index`` belong together and are written one after the other. ``reflection_reward``: the
  next trial's score, or null.

Rows are appended one by one; a process that dies while writing leaves at most its last row torn.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np

from agentgym_rl.data.conversations import parse_conversation, sampled_flags, to_entries
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Aside, FinishReason, Item, Part, PartKind, StopReason, Trajectory, Turn

FORMAT_VERSION = 1
TRAJECTORY_FOLDER = "trajectories"
"""Where trainings and evaluations keep trajectory files, below their own folder."""
_COLUMNS = {"input_ids": np.int32, "loss_mask": np.int8, "sequence_ids": np.int32, "rollout_log_probs": np.float32}
_INTEGER_COLUMNS = ("input_ids", "loss_mask", "sequence_ids")
_PLAIN_FIELDS = (
    *("uid", "sample_index", "attempt", "success", "prompt_length", "policy_version", "max_rounds"),
    *("duration_s", "error", "extra"),
)
_TRIAL_FIELDS: dict[str, Any] = {"trial": 1, "num_trials": 1, "reflection_reward": None}
"""Plain fields that older files lack, and what they mean there."""
_TURN_FIELDS = tuple(field.name for field in fields(Turn))
_ASIDE_FIELDS = tuple(field.name for field in fields(Aside))
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_encode_integers = msgspec.json.Encoder().encode


class TrajectoryLog:
    """Appends trajectories to a file; a context manager.

    A row that an earlier process left torn is removed first. With ``append=False`` what the file held is removed.
    """

    def __init__(self, path: str | Path, *, append: bool = True) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if append and self.path.exists():
            _mend(self.path)
        self._file = self.path.open("a" if append else "w", encoding="utf-8")

    def write(self, trajectory: Trajectory) -> None:
        """Append one row and hand it to the operating system; an OSError, as of a full disk, names the file."""
        with self._naming_itself():
            self._file.write(_line(to_row(trajectory)))
            self._file.flush()

    def close(self) -> None:
        with self._naming_itself():
            self._file.close()

    @contextmanager
    def _naming_itself(self) -> Iterator[None]:
        """Errors of the system say the path, which it does not know: it writes to a number."""
        try:
            yield
        except OSError as error:
            error.filename = str(self.path)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class LogContents:
    """What trajectory files hold."""

    trajectories: tuple[Trajectory, ...]
    """File by file in the order of their names, row by row."""
    torn: tuple[Path, ...]
    """Files whose last row was cut while it was being written; that row is left out."""


def read_trajectories(path: str | Path) -> LogContents:
    """Read one file, or all ``.jsonl`` files of a folder and its subfolders; a path that does not exist holds nothing.

    Of a folder of results or of a training, which keep other records as well, what lies in their `TRAJECTORY_FOLDER`.
    Raises `ConfigError` naming file and line for a row, other than a torn last one, that is no trajectory.
    """
    path = Path(path)
    files = _files_of(path) if path.is_dir() else [path] if path.exists() else []
    trajectories: list[Trajectory] = []
    torn: list[Path] = []
    for file in files:
        rows, is_torn = _read_rows(file)
        trajectories += [from_row(row, f"{file} line {number}") for number, row in enumerate(rows, 1)]
        torn += [file] * is_torn
    return LogContents(tuple(trajectories), tuple(torn))


def _files_of(folder: Path) -> list[Path]:
    found = sorted(folder.rglob("*.jsonl"))
    return [file for file in found if TRAJECTORY_FOLDER in file.relative_to(folder).parent.parts] or found


def read_row(line: str | bytes, where: str) -> Trajectory:
    """Read one line of a file. Raises `ConfigError` naming ``where`` for what is no trajectory."""
    return from_row(_load(line, where), where)


def to_row(trajectory: Trajectory) -> dict[str, Any]:
    """The JSON form of a trajectory."""
    score = None if trajectory.masked else trajectory.score
    positions = np.flatnonzero(trajectory.token_rewards).tolist()
    return {
        "format": FORMAT_VERSION,
        "item_id": trajectory.item.item_id,
        "task": trajectory.item.task,
        "category": trajectory.item.category,
        "conversations": to_entries(trajectory.messages, sampled_flags(trajectory)),
        "reward": score,
        "score": score,
        "stop_reason": str(trajectory.stop_reason),
        **{name: getattr(trajectory, name) for name in (*_PLAIN_FIELDS, *_TRIAL_FIELDS)},
        "parts": [[[str(part.kind), part.start, part.end] for part in parts] for parts in trajectory.parts],
        "turns": [{name: getattr(turn, name) for name in _TURN_FIELDS} for turn in trajectory.turns],
        "asides": [{name: getattr(aside, name) for name in _ASIDE_FIELDS} for aside in trajectory.asides],
        **{name: getattr(trajectory, name).tolist() for name in _INTEGER_COLUMNS},
        "rollout_log_probs": _float32_column(trajectory.rollout_log_probs),
        "token_rewards": [[position, float(trajectory.token_rewards[position])] for position in positions],
    }


def _line(row: dict[str, Any]) -> str:
    """A row, which is used up, as a line of JSON.

    The columns of integers, most of a row, are left to a faster encoder. Of floats it would write other texts.
    """
    integers = {name: row.pop(name) for name in _INTEGER_COLUMNS}
    behind = {name: row.pop(name) for name in ("rollout_log_probs", "token_rewards")}
    return f"{_encode(row)[:-1]},{_encode_integers(integers).decode()[1:-1]},{_encode(behind)[1:]}\n"


def _float32_column(values_T: np.ndarray) -> list[float]:
    """The shortest decimals that are read back as the same float32; most are 0, where nothing was sampled."""
    column = [0.0] * len(values_T)
    positions = np.flatnonzero(values_T)
    for position, value in zip(positions.tolist(), values_T[positions], strict=True):
        column[position] = float(str(value))  # of a float32 scalar: as many digits as it needs and no more
    return column


def from_row(row: Any, where: str) -> Trajectory:
    """Read a row back, equal to the last bit. Raises `ConfigError` naming ``where`` and the field that is wrong."""
    if not isinstance(row, dict) or row.get("format") != FORMAT_VERSION:
        seen = row.get("format") if isinstance(row, dict) else row
        raise ConfigError(f"{where}: no trajectory of format {FORMAT_VERSION} (format={str(seen)[:40]!r})")
    try:
        return _from_row(row, where)
    except ConfigError as error:
        raise error if str(error).startswith(where) else ConfigError(f"{where}: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error


def _from_row(row: dict[str, Any], where: str) -> Trajectory:
    task = row.get("task") or row["item_id"].rpartition("_")[0]
    # A fault before the first observation has no messages.
    messages = parse_conversation(row, where).messages if row["conversations"] else ()
    columns: dict[str, Any] = {name: np.array(row[name], dtype) for name, dtype in _COLUMNS.items()}
    if len({len(column) for column in columns.values()}) != 1:
        raise ConfigError(f"{where}: {', '.join(_COLUMNS)} differ in length")
    token_rewards = np.zeros(len(columns["input_ids"]), np.float32)
    for position, reward in row["token_rewards"]:
        token_rewards[position] = reward
    return Trajectory(
        item=Item.parse(row["item_id"], task, row["category"]),
        messages=messages,
        turns=tuple(Turn(**turn | {"finish_reason": FinishReason(turn["finish_reason"])}) for turn in row["turns"]),
        token_rewards=token_rewards,
        score=0.0 if row["score"] is None else row["score"],
        stop_reason=StopReason(row["stop_reason"]),
        parts=tuple(
            tuple(Part(PartKind(kind), start, end) for kind, start, end in parts) for parts in row.get("parts", ())
        ),
        asides=tuple(_aside(aside) for aside in row.get("asides", ())),
        **columns,
        **{name: row[name] for name in _PLAIN_FIELDS},
        **{name: row.get(name, default) for name, default in _TRIAL_FIELDS.items()},
    )


def _aside(row: dict[str, Any]) -> Aside:
    kinds = {"kind": PartKind(row["kind"]), "finish_reason": FinishReason(row["finish_reason"])}
    return Aside(**row | kinds)


def _read_rows(path: Path) -> tuple[list[Any], bool]:
    """All whole rows of a file, and whether its last one is torn."""
    lines = path.read_bytes().split(b"\n")
    tail = lines.pop()  # empty when the last row is whole
    rows = [_load(line, f"{path} line {number}") for number, line in enumerate(lines, 1)]
    if not tail:
        return rows, False
    return ([*rows, json.loads(tail)], False) if _is_json(tail) else (rows, True)


def _load(line: str | bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _mend(path: Path) -> None:
    """Make the file end with a whole row."""
    content = path.read_bytes()
    tail = content[content.rfind(b"\n") + 1 :]
    if not tail:
        return
    with path.open("rb+") as file:
        if _is_json(tail):
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        else:
            file.truncate(len(content) - len(tail))
