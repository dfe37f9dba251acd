"""Checkpoint folders: a checkpoint is complete or it does not exist.

Layout under ``default_local_dir``::

    global_step_<N>/actor/               shards of model, optimizer and scheduler
    global_step_<N>/actor/huggingface/   the model for `from_pretrained` and vLLM
    global_step_<N>/trainer.json         the driver's state
    latest_checkpointed_iteration.txt    N of the newest complete one

The driver owns the protocol: `begin`, let the workers write, `commit`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from agentgym_rl.errors import ConfigError

LATEST_FILE = "latest_checkpointed_iteration.txt"
ACTOR_FOLDER = "actor"
HUGGINGFACE_FOLDER = "huggingface"
TRAINER_FILE = "trainer.json"
_STEP_FOLDER = re.compile(r"global_step_(\d+)")
_UNFINISHED_SUFFIX = ".unfinished"


def begin(root: Path, step: int) -> Path:
    """A fresh folder to write step ``step``'s checkpoint into; leftovers of interrupted ones are removed."""
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(f"global_step_*{_UNFINISHED_SUFFIX}"):
        shutil.rmtree(leftover)
    folder = root / f"global_step_{step}{_UNFINISHED_SUFFIX}"
    folder.mkdir()
    return folder


def commit(root: Path, step: int, *, keep: int | None = None) -> Path:
    """Give the folder of `begin` its final name, point `LATEST_FILE` at it, then remove older ones.

    Of the steps up to this one ``keep`` (at least 1) are kept; None keeps all. Later ones are another run's and stay.
    Returns the final folder. A complete checkpoint of the same step is replaced.
    """
    unfinished, final = root / f"global_step_{step}{_UNFINISHED_SUFFIX}", root / f"global_step_{step}"
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
    write_atomically(root / LATEST_FILE, str(step))
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


def write_atomically(path: Path, text: str) -> None:
    """Write a small file that a reader, even after a crash, finds whole or as it was."""
    aside = path.with_name(path.name + _UNFINISHED_SUFFIX)
    aside.write_text(text)
    _sync(aside)
    aside.replace(path)


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
