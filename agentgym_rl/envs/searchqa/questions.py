"""Questions by item number, from files in the forms of FlashRAG and Search-R1.

Item numbers are those of the original data wherever its files are given: each split begins at its own number, whatever
else is there.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgym_rl.envs.searchqa.files import SUFFIXES, read_rows
from agentgym_rl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Question:
    """One question and what answers it."""

    text: str
    answers: tuple[str, ...]
    """Each is right."""


@dataclass(frozen=True)
class Split:
    """A part of the original data and its place in the item numbers."""

    group: str
    """``test`` or ``train``."""
    dataset: str
    """Also the ``data_source`` of its rows in Search-R1's files."""
    file: str
    """Stem of its file in FlashRAG's folder of the dataset."""
    start: int
    size: int

    @property
    def name(self) -> str:
        return f"{self.group} {self.dataset}"


def _splits() -> Iterator[Split]:
    start = 0
    for group, dataset, file, size in (
        ("test", "nq", "test", 3_610),
        ("test", "triviaqa", "test", 11_313),
        ("test", "popqa", "test", 14_267),
        ("test", "hotpotqa", "dev", 7_405),
        ("test", "2wikimultihopqa", "dev", 12_576),
        ("test", "musique", "dev", 2_417),
        ("test", "bamboogle", "test", 125),
        ("train", "nq", "train", 79_168),
        ("train", "hotpotqa", "train", 90_447),
    ):
        yield Split(group, dataset, file, start, size)
        start += size


SPLITS = tuple(_splits())


@dataclass(frozen=True)
class Block:
    """Questions with consecutive item numbers."""

    name: str
    start: int
    questions: Sequence[Question]
    size: int
    """Item numbers that belong to it, loaded or not."""


class Questions:
    """Looks questions up by item number."""

    def __init__(self, blocks: Iterable[Block], source: str) -> None:
        self.blocks = tuple(sorted((block for block in blocks if block.questions), key=lambda block: block.start))
        self.source = source
        if not self.blocks:
            raise ConfigError(f"questions {source}: there are none")
        self._starts = [block.start for block in self.blocks]

    def __len__(self) -> int:
        return sum(len(block.questions) for block in self.blocks)

    @property
    def num_items(self) -> int:
        """The highest item number and 1."""
        last = self.blocks[-1]
        return last.start + len(last.questions)

    def __contains__(self, item: int) -> bool:
        return self._find(item) is not None

    def __getitem__(self, item: int) -> Question:
        """Raises `KeyError`, whose text says which items there are."""
        found = self._find(item)
        if found is None:
            raise KeyError(f"item {item}: {self._why_absent(item)}")
        return found

    def _find(self, item: int) -> Question | None:
        position = bisect.bisect_right(self._starts, item) - 1
        if position < 0:
            return None
        block = self.blocks[position]
        offset = item - block.start
        return block.questions[offset] if offset < len(block.questions) else None

    def _why_absent(self, item: int) -> str:
        loaded = ", ".join(
            f"{block.name} {block.start}..{block.start + len(block.questions) - 1}" for block in self.blocks
        )
        missing = next((split for split in SPLITS if split.start <= item < split.start + split.size), None)
        belongs = f" (in the original data it is of {missing.name})" if missing else ""
        return f"not among the questions of {self.source}, which are {loaded}{belongs}"


def load_questions(path: Path) -> Questions:
    """The questions of a file, numbered from 0, or of a folder, numbered as in the original data.

    A folder holds FlashRAG's ``<dataset>/<test|dev|train>.jsonl``, or Search-R1's ``test.parquet`` and
    ``train.parquet``, whose rows name their ``data_source``; either may be JSONL or parquet, and any may be absent.
    """
    if path.is_dir():
        return Questions(_blocks_of_folder(path), str(path))
    questions = tuple(read_question(row, where) for where, row in read_rows(path))
    return Questions([Block(path.stem, 0, questions, len(questions))], str(path))


def read_question(row: dict[str, Any], where: str) -> Question:
    """``{"question": ..., "golden_answers": [...]}``; raises `ConfigError`."""
    text, answers = row.get("question"), row.get("golden_answers")
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{where}: question={text!r}: must be a text")
    if isinstance(answers, str):
        answers = [answers]
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise ConfigError(f"{where}: golden_answers={answers!r}: must be a list of texts, not empty")
    return Question(text.strip(), tuple(answers))


def _blocks_of_folder(folder: Path) -> Iterator[Block]:
    merged = {group: _merged(folder, group) for group in ("test", "train")}
    for split in SPLITS:
        own = _one_of(folder / split.dataset, split.file)
        rows = merged[split.group].get(split.dataset)
        if own is not None and rows:
            raise ConfigError(f"questions {folder}: {split.name} is both in {own} and in {split.group}.*: remove one")
        if own is not None:
            rows = [read_question(row, where) for where, row in read_rows(own)]
        if rows:
            yield _block(split, rows, folder)


def _block(split: Split, questions: list[Question], folder: Path) -> Block:
    if len(questions) > split.size:
        raise ConfigError(
            f"questions {folder}: {split.name} has {len(questions)} questions, of the original data it has "
            f"{split.size}: more would take the numbers of the next split; give the file itself instead of the folder"
        )
    return Block(split.name, split.start, tuple(questions), split.size)


def _merged(folder: Path, group: str) -> dict[str, list[Question]]:
    """Questions by dataset of a file of several, in its order."""
    path = _one_of(folder, group)
    found: dict[str, list[Question]] = defaultdict(list)
    known = {split.dataset for split in SPLITS if split.group == group}
    for where, row in read_rows(path) if path is not None else ():
        source = row.get("data_source")
        if source not in known:
            raise ConfigError(f"{where}: data_source={source!r}: must be one of {', '.join(sorted(known))}")
        found[source].append(read_question(row, where))
    return found


def _one_of(folder: Path, stem: str) -> Path | None:
    """The file of this name, of either kind; None when there is none."""
    found = [folder / (stem + suffix) for suffix in SUFFIXES if (folder / (stem + suffix)).is_file()]
    if len(found) > 1:
        raise ConfigError(f"questions: both {found[0]} and {found[1]} exist: remove one")
    return found[0] if found else None
