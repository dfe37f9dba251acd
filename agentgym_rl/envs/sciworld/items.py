"""Which task and variation an index means: the package's tasks in the order of their ids, all variations of each."""

from __future__ import annotations

import bisect
import functools
import importlib.util
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from agentgym_rl.errors import ConfigError

PACKAGE_VERSION = "1.2.3"
"""The version of ``scienceworld`` whose variations the indices count."""
NUM_ITEMS = 4639
LEFT_OUT = frozenset({"5-1", "5-2", "9-1", "9-2", "9-3", "10-1", "10-2"})
"""Ids of tasks that have no index, as in AgentGym."""


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of experiment."""

    task_id: str
    """``<topic>-<number>``, e.g. ``1-1``."""
    name: str
    """As the simulator calls it, e.g. ``boil``."""


class ItemTable:
    """Index -> task and variation; built from the number of variations that the simulator has of each task."""

    def __init__(self, tasks: tuple[Task, ...], variations: Mapping[str, int]) -> None:
        """``variations``: by task name. Raises `ConfigError` when they do not make up `NUM_ITEMS`."""
        self.tasks = tasks
        counts = [variations[task.name] for task in tasks]
        self._firsts = [0, *itertools.accumulate(counts)]
        if len(self) != NUM_ITEMS:
            raise ConfigError(
                f"the installed scienceworld has {len(self)} items in {len(tasks)} tasks, must be {NUM_ITEMS}: "
                f"run pip install scienceworld=={PACKAGE_VERSION}"
            )

    def __len__(self) -> int:
        return self._firsts[-1]

    def find(self, data_idx: int) -> tuple[Task, int]:
        """Task and variation of an index; raises IndexError outside 0..len - 1."""
        if not 0 <= data_idx < len(self):
            raise IndexError(f"data_idx {data_idx}: must be in 0..{len(self) - 1}")
        number = bisect.bisect_right(self._firsts, data_idx) - 1
        return self.tasks[number], data_idx - self._firsts[number]

    def indices(self, task: Task) -> range:
        """All indices of a task, by variation."""
        number = self.tasks.index(task)
        return range(self._firsts[number], self._firsts[number + 1])


@functools.cache
def package_folder() -> Path:
    """Where the simulator lies; raises `ConfigError` when the package is missing or of another version."""
    # Found without importing it: nothing but its data and its simulator is used.
    package = importlib.util.find_spec("scienceworld")
    if package is None or not package.submodule_search_locations:
        raise ConfigError(
            "SciWorld needs the PyPI package scienceworld: run pip install 'agentgym-rl[envs]' "
            f"(or scienceworld=={PACKAGE_VERSION})"
        )
    if (found := version("scienceworld")) != PACKAGE_VERSION:
        raise ConfigError(
            f"scienceworld {found} is installed, must be {PACKAGE_VERSION}, since another one may have other tasks: "
            f"run pip install scienceworld=={PACKAGE_VERSION}"
        )
    return Path(package.submodule_search_locations[0])


@functools.cache
def indexed_tasks() -> tuple[Task, ...]:
    """The tasks that have indices, in the order of their ids."""
    rows = json.loads((package_folder() / "tasks.json").read_text(encoding="utf-8"))
    tasks = [Task(row["task_id"], row["task_name"]) for row in rows if row["task_id"] not in LEFT_OUT]
    return tuple(sorted(tasks, key=lambda task: tuple(map(int, task.task_id.split("-")))))
