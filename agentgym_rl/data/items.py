"""Item lists: which task instances a run trains or is evaluated on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Item

_SUFFIXES = (".json", ".jsonl", ".parquet")


def load_items(path: str | Path, task: str | Sequence[str]) -> list[Item]:
    """The items of a file, or of an evaluation folder, each once.

    A file holds rows with ``item_id`` (``<task>_<int>``, an int, or the path of a game where the task has such), or
    bare ids: JSON (a list), JSONL or parquet. A folder holds ``<task>_test.json`` and one file per category, whose stem
    is the category of the items it lists. ``task``: of all items, or several of which each row names its own.
    Raises `ConfigError` for a path that does not exist, no items, an unreadable row, or an item listed twice.
    """
    path, tasks = Path(path), (task,) if isinstance(task, str) else tuple(task)
    if path.is_dir():
        items = _load_folder(path, tasks)
    elif path.is_file():
        items = _load_file(path, tasks)
    else:
        raise ConfigError(f"item list {path}: no such file or folder")
    if not items:
        raise ConfigError(f"item list {path}: holds no items")
    _check_games(path, items)
    return items


def load_task_items(key: str, given: str | Sequence[str | None], tasks: Sequence[str]) -> list[Item]:
    """Items of a run with one task or several.

    ``given``: a path, whose rows name their tasks where there are several; or a path for each task in turn, None for a
    task that has none. ``key`` is what the configuration calls it. Raises `ConfigError` as `load_items`, or when the
    number of paths does not fit, or a task has no items where one path is given for all.
    """
    if isinstance(given, str):
        items = _load_as(key, given, tasks)
        missing = [task for task in tasks if all(item.task != task for item in items)]
        if missing:
            raise ConfigError(f"{key}={given!r}: holds no items of {', '.join(missing)}")
        return items
    is_list = isinstance(given, Sequence) and all(path is None or isinstance(path, str) for path in given)
    if not is_list or len(given) != len(tasks):
        raise ConfigError(f"{key}={given!r}: must be a path, or a list with one for each of {', '.join(tasks)}")
    return [
        item for task, path in zip(tasks, given, strict=True) if path is not None for item in _load_as(key, path, task)
    ]


def _load_as(key: str, path: str, tasks: str | Sequence[str]) -> list[Item]:
    try:
        return load_items(path, tasks)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


@dataclass(frozen=True)
class ItemList:
    """The items of a run, with where they come from."""

    key: str
    """What the configuration calls it."""
    given: str | Sequence[str | None]
    """As `load_task_items` takes it."""
    items: tuple[Item, ...]
    tasks: tuple[str, ...]

    @classmethod
    def load(cls, key: str, given: str | Sequence[str | None], tasks: Sequence[str]) -> ItemList:
        """Read it; raises `ConfigError` as `load_task_items`, and for an item that its task is known not to have."""
        found = cls(key, given, tuple(load_task_items(key, given, tasks)), tuple(tasks))
        for task in tasks:
            found.check_range(task, None, owner="the environment")
        return found

    def check_range(self, task: str, served: int | None, *, owner: str) -> None:
        """Refuse items that a task does not have, with file, row and what is allowed.

        ``served``: number of items that the task's server says it has, if it does. ``owner``: who has so many.
        """
        from agentgym_rl.envs.registry import get_spec

        most = get_spec(task).most_items(served)
        own = [item for item in self.items if item.task == task and not item.game]
        outside = [] if most is None else [item for item in own if item.index >= most]
        if outside:
            raise ConfigError(
                f"{self.key}: {self._place_of(outside[0])}: item_id {outside[0].item_id!r} does not exist: {owner} has "
                f"{task}_0 to {task}_{(most or 0) - 1} ({len(outside)} of {len(own)} items are outside)"
            )

    def _place_of(self, item: Item) -> str:
        """File and row of an item."""
        if isinstance(self.given, str):
            path, tasks = Path(self.given), self.tasks
        else:
            path, tasks = Path(self.given[self.tasks.index(item.task)] or ""), (item.task,)
        for file in _files(path, tasks) if path.is_dir() else [path]:
            for number, row in enumerate(_rows(file), start=1):
                if _item(row, tasks, "").item_id == item.item_id:
                    return f"{file} row {number}"
        return str(path)  # somebody changes it meanwhile


def overlap(items: Iterable[Item], others: Iterable[Item]) -> list[str]:
    """Ids of the items that stand in both lists, in the order of ``items``."""
    ids = {item.item_id for item in others}
    return [item.item_id for item in items if item.item_id in ids]


def _load_folder(folder: Path, tasks: Sequence[str]) -> list[Item]:
    """All items of a folder, in the order of ``<task>_test`` and then of the category files."""
    found: dict[str, Item] = {}
    for path in _files(folder, tasks):
        category = "" if path.stem in _whole(tasks) else path.stem
        for item in _load_file(path, tasks):
            earlier = found.get(item.item_id, item)
            if earlier.category not in ("", item.category) and category:
                raise ConfigError(
                    f"{folder}: {item.item_id} stands in two categories, {earlier.category} and {category}"
                )
            found[item.item_id] = replace(item, category=category)
    return list(found.values())


def _files(folder: Path, tasks: Sequence[str]) -> list[Path]:
    """Those of all items first."""
    files = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
    return sorted(files, key=lambda path: path.stem not in _whole(tasks))


def _whole(tasks: Sequence[str]) -> set[str]:
    """Stems of the files that list all items of a task."""
    return {f"{task}_test" for task in tasks}


def _load_file(path: Path, tasks: Sequence[str]) -> list[Item]:
    items: dict[str, Item] = {}
    for number, row in enumerate(_rows(path), start=1):
        item = _item(row, tasks, f"{path} row {number}")
        if item.item_id in items:
            raise ConfigError(f"{path} row {number}: {item.item_id} is listed twice")
        items[item.item_id] = item
    return list(items.values())


def _item(row: Any, tasks: Sequence[str], where: str) -> Item:
    if isinstance(row, dict) and "item_id" not in row:
        raise ConfigError(f"{where}: has no item_id, only {', '.join(map(str, row)) or 'nothing'}")
    try:
        return Item.parse(row["item_id"] if isinstance(row, dict) else row, tasks)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_games(path: Path, items: Iterable[Item]) -> None:
    """Refuse paths of games for a task whose client takes numbers alone."""
    from agentgym_rl.envs.registry import get_spec

    games = {item.task: item.game for item in items if item.game}
    for task, game in games.items():
        if not get_spec(task).client.takes_games:
            raise ConfigError(f"item list {path}: item_id {game!r} is no item of {task}, whose items are numbered")


def _rows(path: Path) -> list[Any]:
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"item list {path}: must end in {', '.join(_SUFFIXES)}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"item list {path}: not UTF-8: {error}") from None
    if path.suffix == ".jsonl":
        lines = enumerate(text.split("\n"), start=1)
        return [_decoded(line, f"{path} line {number}") for number, line in lines if line.strip()]
    rows = _decoded(text, str(path))
    if not isinstance(rows, list):
        raise ConfigError(f"item list {path}: must be a JSON list of rows, is {type(rows).__name__}")
    return rows


def _decoded(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"item list {where}: not valid JSON: {error}") from None


def _parquet_rows(path: Path) -> list[Any]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError:
        raise ConfigError(f"item list {path}: parquet needs pyarrow; run pip install 'agentgym-rl[train]'") from None
    try:
        rows: list[Any] = parquet.read_table(path).to_pylist()
    except ArrowInvalid as error:
        raise ConfigError(f"item list {path}: not valid parquet: {error}") from None
    return rows
