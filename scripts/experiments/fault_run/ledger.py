"""What the servers really did, call by call, written down between servers and training.

Nothing of it passes through the code that is under test: not through its clients, its collector or its metrics.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

_RUN_ONCE = ("/create", "/reset", "/step")
"""Calls that change something. Others, such as a question for the server's health, may be answered anew."""


class Ledger:
    """Appends a line for each call that a server answered; for any number of threads."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._lock = Lock()
        self.num_calls = self.num_steps = 0
        """Lines written so far, and those of them that tell of a step in an episode."""

    def write(self, server: str, life: int, request_id: str, path: str, fields: Any, status: int, answer: Any) -> None:
        """``life``: how often the server has been started; handles of different lives have nothing in common."""
        row = {"server": server, "life": life, "id": request_id, "path": path, "fields": fields}
        line = json.dumps(row | {"status": status, "answer": answer}, separators=(",", ":")) + "\n"
        with self._lock:
            self._file.write(line)
            self.num_calls += 1
            self.num_steps += path == "/step" and status == 200  # a look whether there is such a path has another

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class Executed:
    """One action that a server ran, and what it answered."""

    action: str
    observation: str
    reward: float
    """This step's own."""
    done: bool


@dataclass(eq=False, slots=True)
class Episode:
    """What a server played on one session from one reset to the next."""

    task: str
    index: int
    opening: str
    """The first observation."""
    steps: list[Executed] = field(default_factory=list)


@dataclass(frozen=True)
class LedgerContents:
    episodes: tuple[Episode, ...]
    num_calls: int
    repeated: int
    """Calls that were sent again under the id of an answered one, and got its answer."""
    contradictions: tuple[str, ...]
    """Ids that were answered in two ways: a call that was executed twice."""


def read_ledger(path: Path) -> LedgerContents:
    """The episodes that a ledger tells of."""
    answers: dict[tuple[str, int, str], Any] = {}
    current: dict[tuple[str, int, int], Episode] = {}
    episodes: list[Episode] = []
    counts, contradictions = Counter[str](), []
    for row in _rows(path):
        counts["calls"] += 1
        key = (row["server"], row["life"], row["id"])
        if key in answers:
            counts["repeated"] += 1
            if row["path"] in _RUN_ONCE and answers[key] != row["answer"]:
                contradictions.append(f"{row['path']} {key}")
            continue
        answers[key] = row["answer"]
        if not _is_success(row):
            continue
        session = (row["server"], row["life"], row["fields"].get("id", 0))
        if row["path"] == "/reset":
            task = row["server"].partition("-")[0]
            current[session] = Episode(task, row["fields"]["data_idx"], row["answer"]["observation"])
            episodes.append(current[session])
        elif row["path"] == "/step":
            current[session].steps.append(_executed(row))
    return LedgerContents(tuple(episodes), counts["calls"], counts["repeated"], tuple(contradictions))


def _is_success(row: dict[str, Any]) -> bool:
    return row["status"] == 200 and isinstance(row["answer"], dict) and "error" not in row["answer"]


def _executed(row: dict[str, Any]) -> Executed:
    answer = row["answer"]
    return Executed(row["fields"]["action"], answer["observation"], float(answer["reward"]), answer["done"])


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)
