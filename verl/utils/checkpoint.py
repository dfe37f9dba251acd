"""Checkpoint folders: a checkpoint is complete or it does not exist.

Layout under ``default_local_dir``::

    global_step_<N>/actor/               shards of model, optimizer and scheduler
    global_step_<N>/actor/huggingface/   the model for `from_pretrained` and vLLM
    global_step_<N>/critic/              shards of the critic, where there is one
    global_step_<N>/random/<rank>.pt     random states of each worker
    global_step_<N>/trainer.json         the driver's state: step, epoch, config
    latest_checkpointed_iteration.txt    N of the newest complete one

The driver calls `begin` and writes its own state; then the workers copy theirs to host memory, and their
`BackgroundWriter`s write the copies while training goes on; the first of them calls `commit` when all is on the disk.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgym_rl.errors import AgentGymError, ConfigError
from agentgym_rl.files import write_whole
from verl.utils.nested import value_at

LATEST_FILE = "latest_checkpointed_iteration.txt"
ACTOR_FOLDER = "actor"
CRITIC_FOLDER = "critic"
HUGGINGFACE_FOLDER = "huggingface"
RANDOM_FOLDER = "random"
TRAINER_FILE = "trainer.json"
_STEP_FOLDER = re.compile(r"global_step_(\d+)")
_UNFINISHED_SUFFIX = ".unfinished"


class CheckpointError(AgentGymError):
    """A checkpoint could not be written; those that were complete before are untouched."""


@dataclass(frozen=True)
class SaveOrder:
    """Which checkpoint the workers are to write, after `begin`."""

    root: Path
    step: int
    keep: int | None = None
    """As in `commit`."""

    @property
    def folder(self) -> Path:
        """Where it is written until it is complete."""
        return _unfinished_folder(self.root, self.step)


class BackgroundWriter:
    """Writes one worker's part of a checkpoint in a thread of its own; one checkpoint at a time.

    Every worker writes the same checkpoint, and what they write ends collectively: when it is over on one worker, it is
    on the disk for all of them. The worker that ``commits`` then makes it complete.
    """

    def __init__(self, *, commits: bool) -> None:
        self._commits = commits
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._order: SaveOrder | None = None
        self._written: Future[float] | None = None

    def start(self, order: SaveOrder, writes: Sequence[Callable[[], object]]) -> None:
        """Begin to do ``writes``, in turn; waits for an earlier checkpoint first and raises as `finish` does."""
        self.finish()
        self._order, self._written = order, self._thread.submit(self._write, order, writes)

    def finish(self, *, wait: bool = True) -> float | None:
        """Seconds that writing the last checkpoint took; None when there is none.

        ``wait=False`` returns None also when it is still being written. Raises `CheckpointError` when it failed.
        """
        if self._order is None or self._written is None or not (wait or self._written.done()):
            return None
        error = self._written.exception()
        if error is not None:
            raise CheckpointError(_describe_failure(self._order, error)) from error
        return self._written.result()

    def close(self) -> None:
        """End the thread, after what it is writing; failures were for `finish` to say."""
        self._thread.shutdown()

    def _write(self, order: SaveOrder, writes: Sequence[Callable[[], object]]) -> float:
        began = time.perf_counter()
        is_complete = False
        try:
            for write in writes:
                write()
            if self._commits:
                commit(order.root, order.step, keep=order.keep)
            is_complete = True
        finally:
            if self._commits and not is_complete:
                # On a full disk, whatever else writes there needs the room more than half a checkpoint does.
                shutil.rmtree(order.folder, ignore_errors=True)
        return time.perf_counter() - began


def _describe_failure(order: SaveOrder, error: BaseException) -> str:
    last = latest(order.root)
    left = f"the last complete one is {last}" if last else "there is no complete one"
    return f"the checkpoint of step {order.step} could not be written: {_root_cause(error)}; {left}"


def _root_cause(error: BaseException) -> str:
    """The failure in words: of those that a distributed save collects by rank, the first; and what it came from."""
    failures = getattr(error, "failures", None)
    if failures:
        error = failures[min(failures)][0]
    # torch's writer reports a failed write as an error of its own, raised while it handles the system's.
    origin: BaseException | None = error
    while origin is not None and not isinstance(origin, OSError):
        origin = origin.__cause__ or origin.__context__
    shown = origin or error
    return f"{type(shown).__name__}: {shown}"


def begin_save(root: Path, step: int, state: dict[str, Any], *, keep: int | None = None) -> SaveOrder:
    """`begin` and `save_trainer_state`; returns what the workers are to do. `CheckpointError` if the disk fails."""
    order = SaveOrder(root, step, keep)
    try:
        save_trainer_state(begin(root, step), state)
    except OSError as error:
        raise CheckpointError(_describe_failure(order, error)) from error
    return order


def begin(root: Path, step: int) -> Path:
    """A fresh folder to write step ``step``'s checkpoint into; leftovers of interrupted ones are removed."""
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(f"global_step_*{_UNFINISHED_SUFFIX}"):
        shutil.rmtree(leftover)
    folder = _unfinished_folder(root, step)
    folder.mkdir()
    return folder


def commit(root: Path, step: int, *, keep: int | None = None) -> Path:
    """Give the folder of `begin` its final name, point `LATEST_FILE` at it, then remove older ones.

    Of the steps up to this one ``keep`` (at least 1) are kept; None keeps all. Later ones are another run's and stay.
    Returns the final folder. A complete checkpoint of the same step is replaced.
    """
    unfinished, final = _unfinished_folder(root, step), root / f"global_step_{step}"
    _sync_tree(unfinished)
    if final.exists():
        # Renamed first: removing takes long, and a run that is killed meanwhile would have neither of the two.
        replaced = root / f"global_step_{step}.replaced{_UNFINISHED_SUFFIX}"
        final.rename(replaced)
        unfinished.rename(final)
        shutil.rmtree(replaced)
    else:
        unfinished.rename(final)
    _sync(root)
    write_whole(root / LATEST_FILE, str(step))
    if keep is not None:
        for old_step in [s for s in complete_steps(root) if s <= step][:-keep]:
            shutil.rmtree(root / f"global_step_{old_step}")
    return final


def complete_steps(root: Path) -> list[int]:
    """Steps with a complete checkpoint, rising."""
    folders = root.iterdir() if root.is_dir() else ()
    return sorted(int(match[1]) for folder in folders if (match := _STEP_FOLDER.fullmatch(folder.name)))


def latest(root: Path) -> Path | None:
    """The checkpoint that was completed last; None when there is none.

    A folder has its final name only when complete, so one that is newer than `LATEST_FILE` counts even if the run was
    killed before the file said so. A higher step alone says nothing: a run begun anew in the folder of a longer one
    goes on from its own.
    """
    folders = [root / f"global_step_{step}" for step in complete_steps(root)]
    file = root / LATEST_FILE
    named = root / f"global_step_{file.read_text().strip()}" if file.exists() else None
    if named in folders:
        written = file.stat().st_mtime
        folders = [folder for folder in folders if folder == named or folder.stat().st_mtime >= written]
    return folders[-1] if folders else None


def find_resume_folder(root: Path, *, mode: str, path: str | None = None) -> Path | None:
    """The checkpoint to go on from under ``trainer.resume_mode``; None means a fresh start.

    Absolute, since workers may run in other folders. Raises `ConfigError` when ``mode`` is ``resume_path`` and ``path``
    is no complete checkpoint.
    """
    if mode == "disable":
        return None
    if mode == "auto":
        return latest(root.resolve())
    folder = Path(path or "").resolve()
    if not folder.is_dir() or not _STEP_FOLDER.fullmatch(folder.name):
        raise ConfigError(
            f"trainer.resume_from_path={path!r}: no such checkpoint; give an existing folder named global_step_<N>"
        )
    if not (folder / TRAINER_FILE).is_file():
        raise ConfigError(
            f"trainer.resume_from_path={path!r}: no checkpoint of a training run: no {TRAINER_FILE} in it"
        )
    return folder


def step_of(folder: Path) -> int:
    """N of a folder ``global_step_<N>``."""
    match = _STEP_FOLDER.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"{folder} is not named global_step_<N>")
    return int(match[1])


def save_trainer_state(folder: Path, state: dict[str, Any]) -> None:
    """Write the driver's JSON-able state into a folder of `begin`."""
    (folder / TRAINER_FILE).write_text(json.dumps(state, indent=1))


def load_trainer_state(folder: Path) -> dict[str, Any]:
    """What `save_trainer_state` wrote; `ConfigError` when the checkpoint has none."""
    try:
        return json.loads((folder / TRAINER_FILE).read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} has no {TRAINER_FILE}: it is not a checkpoint of a training run") from error


def changed_keys(saved: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """Of dotted ``keys``, those with another value in the configuration ``now`` than in ``saved``: both values."""
    changed = {}
    for key in keys:
        before, after = value_at(saved, key), value_at(now, key)
        if before != after:
            changed[key] = (before, after)
    return changed


def _unfinished_folder(root: Path, step: int) -> Path:
    return root / f"global_step_{step}{_UNFINISHED_SUFFIX}"


def _sync_tree(folder: Path) -> None:
    # A rename can reach the disk before what it names does; after a power cut the folder would be there, half empty.
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
