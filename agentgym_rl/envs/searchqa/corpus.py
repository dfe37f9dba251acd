"""The passages that are searched: a JSONL file, read in place through a memory map, so that processes share it."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from agentgym_rl.envs.searchqa.files import content_digest, decoded_row, made_once, read_rows
from agentgym_rl.errors import ConfigError

_OFFSETS = "offsets.npy"
_CONVERTED = "passages.jsonl"
_SHOW_PROGRESS_FROM = 200_000
"""Passages."""


@dataclass(frozen=True, slots=True)
class Passage:
    """What a search returns one of."""

    title: str
    text: str

    @property
    def contents(self) -> str:
        """Title and text, as an index sees them."""
        return f"{self.title}\n{self.text}"


def read_passage(row: Any, where: str) -> Passage:
    """``{"contents": "title\\ntext"}`` or ``{"title": ..., "text": ...}``; raises `ConfigError`."""
    contents = row.get("contents") if isinstance(row, dict) else None
    if isinstance(contents, str):
        title, _, text = contents.partition("\n")
    elif isinstance(row, dict) and isinstance(row.get("title"), str) and isinstance(row.get("text"), str):
        title, text = row["title"], row["text"]
    else:
        fields = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise ConfigError(f"{where}: a passage has contents, or title and text; this has {fields or 'nothing'}")
    title = title.strip()
    if len(title) > 1 and title[0] == title[-1] == '"':  # as the Wikipedia dump of Search-R1 writes it
        title = title[1:-1]
    return Passage(title, text.strip())


class Corpus:
    """Passages by number. Safe to use from several threads."""

    def __init__(self, path: Path, offsets: np.ndarray, digest: str) -> None:
        self.path = path
        self.digest = digest
        """Of the content of the file that the passages come from."""
        self._offsets = offsets
        with path.open("rb") as file:
            self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @classmethod
    def open(cls, path: Path, cache: Path) -> Corpus:
        """The passages of a JSONL or parquet file; raises `ConfigError` when it has none.

        Where its lines begin (and, of a parquet file, the lines themselves) is worked out once and kept in ``cache``.
        """
        digest = content_digest(path, cache)
        folder = made_once(cache / f"corpus-{digest}", lambda folder: _prepare(path, folder))
        lines = folder / _CONVERTED if path.suffix == ".parquet" else path
        return cls(lines, np.load(folder / _OFFSETS, mmap_mode="r"), digest)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> Passage:
        where = f"{self.path} passage {number}"
        line = self._lines[int(self._offsets[number]) : int(self._offsets[number + 1])]
        return read_passage(decoded_row(line, where), where)

    def passages(self, purpose: str, *, show: bool = False) -> Iterator[Passage]:
        """All of them, in order, with a progress bar that says what for if they are many, or by ``show``."""
        quiet = not show and len(self) < _SHOW_PROGRESS_FROM
        for number in tqdm(range(len(self)), desc=purpose, unit=" passages", disable=quiet):
            yield self[number]


def _prepare(path: Path, folder: Path) -> None:
    lines = path
    if path.suffix == ".parquet":
        lines = folder / _CONVERTED
        with lines.open("w", encoding="utf-8") as converted:
            for where, row in read_rows(path):
                converted.write(json.dumps({"contents": read_passage(row, where).contents}) + "\n")
    elif path.suffix != ".jsonl":
        raise ConfigError(f"corpus {path}: must end in .jsonl or .parquet")
    offsets = _line_offsets(lines)
    if len(offsets) < 2:
        raise ConfigError(f"corpus {path}: holds no passages")
    np.save(folder / _OFFSETS, offsets)


def _line_offsets(path: Path) -> np.ndarray:
    """Where the lines begin, then the end of the last: int64 ``[passages + 1]``. A blank line belongs to the one
    before."""
    offsets, end = [], 0
    with path.open("rb") as lines:
        for line in lines:
            if line.strip():
                offsets.append(end)
            end += len(line)
    return np.array([*offsets, end], dtype=np.int64)
