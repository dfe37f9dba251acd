"""The driver's side of checkpoints, for every trainer: begin one, learn what came of it, leave after SIGTERM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.config import TrainingRunConfig
from verl.single_controller.base import WorkerGroup
from verl.single_controller.signals import Terminated
from verl.trainer.metrics import Stopwatch
from verl.utils import checkpoint


class CheckpointSaver:
    """Has the workers write checkpoints, one at a time, while training goes on."""

    def __init__(self, workers: WorkerGroup, trainer: TrainingRunConfig, root: Path) -> None:
        """Checkpoints go into ``root``."""
        self._workers, self._trainer, self._root = workers, trainer, root
        self._is_saving = False
        self.saved_step = 0
        """The last step of which a checkpoint was begun, by this run or the one that it goes on from."""

    def save(self, step: int, state: dict[str, Any]) -> dict[str, float]:
        """Begin to write the checkpoint of ``step``; it will be complete, or not there at all.

        Training goes on meanwhile; `finish` tells what came of it. ``state`` is the driver's.
        """
        watch = Stopwatch()
        with watch.measure("save"):
            written = self.finish()
            order = checkpoint.begin_save(self._root, step, state, keep=self._trainer.max_actor_ckpt_to_keep)
            self._workers.call_all("save", order)
            self._is_saving, self.saved_step = True, step
            if not self._trainer.async_save:
                written = self.finish()
        return watch.seconds | written

    def finish(self, *, wait: bool = True) -> dict[str, float]:
        """How long the last checkpoint took to write, if that is over; raises when it failed."""
        if not self._is_saving:
            return {}
        seconds = self._workers.call_all("finish_save", wait)
        if None in seconds and not wait:
            return {}
        self._is_saving = False
        return {"checkpoint/write_s": max(seconds)}

    def save_last(self, step: int, state: Callable[[], dict[str, Any]]) -> Path:
        """The complete checkpoint of the last finished step, written now unless it was; `Terminated` where there is
        no such step."""
        if step == 0:
            raise Terminated("terminated before the first step was finished: nothing to save")
        if self.saved_step != step:
            self.save(step, state())
        self.finish()
        return self._root / f"global_step_{step}"


def terminated(step: int, folder: Path) -> Terminated:
    """What a trainer raises after `CheckpointSaver.save_last`."""
    return Terminated(f"terminated after step {step}; the same command goes on from {folder}")
