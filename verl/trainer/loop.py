"""TrainingLoop: what every trainer does around its steps: validation, checkpoints, the log, resuming, SIGTERM.

The driver's side: models run in the workers.
"""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

from agentgym_rl.errors import AgentGymError, TooManyFailures
from verl.config import PPOConfig, SFTConfig
from verl.single_controller.base import ClusterError, Interrupted, WorkerError, WorkerGroup, WorkerSpec
from verl.single_controller.signals import StopRequest, stop_on_sigterm
from verl.single_controller.start import start_workers
from verl.trainer.item_order import Order
from verl.trainer.metrics import Stopwatch
from verl.trainer.saving import CheckpointSaver, terminated
from verl.trainer.validation import Validation
from verl.utils import checkpoint
from verl.utils.tracking import Tracker, make_tracker

ConfigT = TypeVar("ConfigT", bound=PPOConfig | SFTConfig)


class TrainingLoop(ABC, Generic[ConfigT]):
    """Trains step by step with the workers it is given; a subclass says what a step is."""

    kind: ClassVar[str]
    """What is trained, in checkpoints."""
    order_keys: ClassVar[tuple[str, ...]]
    """What decides which rows a step sees."""
    row_name: ClassVar[str]
    """What a row is, of several."""

    def __init__(
        self,
        config: ConfigT,
        root: Path,
        order: Order[Any],
        *,
        total_steps: int,
        validation: Validation,
        workers: WorkerGroup,
        tracker: Tracker,
    ) -> None:
        """``root``: where checkpoints go."""
        self._config, self._root, self._order = config, root, order
        self._total_steps, self._validation = total_steps, validation
        self._workers, self._tracker = workers, tracker
        self._saver = CheckpointSaver(workers, config.trainer, root)
        self._steps_done = 0

    def fit(self) -> int:
        """Train until the last step, or until the time for it is over; the number of steps that are done.

        After SIGTERM it saves the last finished step and raises `Terminated`: rollouts are given up, an update is
        finished first. `TooManyFailures` of the environments leaves a checkpoint of the last finished step, too.
        """
        with stop_on_sigterm(self._workers.interrupt, saying="saving the last finished step") as stop:
            try:
                is_over = self._run_steps(stop)
            except Interrupted:
                is_over = False  # Nothing of the step that was given up has reached the weights.
            except AgentGymError as error:
                self._keep_what_is_done(error)
                raise
            if not is_over:
                self._save_and_leave()
            self._saver.finish()
        self._publish()
        return self._steps_done

    def _run_steps(self, stop: StopRequest) -> bool:
        """True at the run's end, False when it was asked to stop."""
        trainer, began = self._config.trainer, time.monotonic()
        if self._steps_done == 0 and trainer.val_before_train:
            self._tracker.log(0, self.validate())
        for step in self._with_progress(range(self._steps_done + 1, self._total_steps + 1)):
            if stop.is_made:
                return False
            metrics = self.train_step(step)
            self._steps_done = step
            is_last = step == self._total_steps or self._time_is_over(time.monotonic() - began)
            try:
                metrics |= self._saver.finish(wait=False)
                if trainer.test_freq > 0 and (is_last or step % trainer.test_freq == 0):
                    metrics |= self.validate()
                if is_last or (trainer.save_freq > 0 and step % trainer.save_freq == 0):
                    metrics |= self.save()
            finally:
                self._tracker.log(step, metrics)
            if is_last:
                break
        return True

    @abstractmethod
    def train_step(self, step: int) -> dict[str, float]:
        """Training step ``step``, counted from 1; returns its metrics."""

    def validate(self) -> dict[str, float]:
        """See `Validation.run`, of the last finished step."""
        watch = Stopwatch()
        with watch.measure("validate"):
            self._give_weights_to_engines()
            metrics = self._validation.run(self._workers, self._steps_done)
        return metrics | watch.seconds

    def save(self) -> dict[str, float]:
        """`CheckpointSaver.save` of the last finished step."""
        return self._saver.save(self._steps_done, self._state())

    def _keep_what_is_done(self, error: AgentGymError) -> None:
        """Before the run ends with ``error``: where environments failed, in a rollout or a validation, the weights are
        those of the last finished step, which is saved; elsewhere the checkpoint that is being written is completed.
        """
        cause = error.cause if isinstance(error, WorkerError) else error
        if isinstance(cause, TooManyFailures):
            if self._steps_done:
                self._workers.interrupt()  # rollouts of other workers
                folder = self._saver.save_last(self._steps_done, self._state)
                print(f"saved after step {self._steps_done}: {folder}; the same command goes on from there", flush=True)
        elif not isinstance(error, WorkerError | ClusterError):  # without all workers it is never complete
            self._saver.finish()

    def _save_and_leave(self) -> NoReturn:
        folder = self._saver.save_last(self._steps_done, self._state)
        self._publish()
        raise terminated(self._steps_done, folder)

    def _state(self) -> dict[str, Any]:
        """The driver in a checkpoint; the rows of each step, and random numbers, follow from step, seeds and config."""
        return {
            "kind": self.kind,
            "step": self._steps_done,
            "epoch": self._order.epoch_of(self._steps_done),
            "config": dataclasses.asdict(self._config),
        }

    def _resume(self, folder: Path) -> None:
        """Take up the checkpoint; for the constructors of subclasses."""
        state = checkpoint.load_trainer_state(folder)
        self._take_up(state)
        self._workers.call_all("load", folder)
        self._steps_done = self._saver.saved_step = state["step"]
        print(f"resumed from {folder}, after step {self._steps_done}", flush=True)
        changed = checkpoint.changed_keys(state["config"], dataclasses.asdict(self._config), self.order_keys)
        for key, (before, now) in changed.items():
            print(
                f"warning: {key} was {before!r} until then and is {now!r} now: other {self.row_name} follow", flush=True
            )

    # ------------------------------------------------------------------------------------ what a subclass may override

    def _take_up(self, state: Mapping[str, Any]) -> None:
        """Go on from what `_state` of an earlier run says, beyond its step."""

    def _give_weights_to_engines(self) -> None:
        """Before a validation, unless they have them."""

    def _time_is_over(self, seconds: float) -> bool:
        """Whether a run that has trained for so long ends with this step."""
        return False

    def _with_progress(self, steps: Iterable[int]) -> Iterable[int]:
        """The steps, shown to the user as they go by."""
        return steps

    def _publish(self) -> None:
        """After the last checkpoint is complete."""


def run_loop(
    make_trainer: Callable[[WorkerGroup, Tracker], TrainingLoop[Any]],
    spec: WorkerSpec,
    config: PPOConfig | SFTConfig,
    root: Path,
    *,
    steps_done: int,
    console_columns: Mapping[str, str],
    console_every: int = 1,
) -> int:
    """Start the workers, train what is left after ``steps_done``, and end them whatever happens; steps that are done
    then."""
    tracker = make_tracker(
        config.trainer,
        root,
        config=dataclasses.asdict(config),
        console_columns=console_columns,
        console_every=console_every,
        resumed_after=steps_done,
    )
    with tracker, start_workers(spec, config.trainer, config.ray_init) as workers:
        return make_trainer(workers, tracker).fit()
