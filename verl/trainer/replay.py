"""Trajectories on disk as the input of a training step: what a run writes of each step, and how it is read back.

Beside its trajectory files a step's folder holds ``step.json``, which names the step's trajectories in their order and
the groups that were trained on. It is written last: a step without it was not finished. So a replayed step
(``trainer.replay``) sees the very batch that the original one saw, and what is missing is found before a model loads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.errors import ConfigError
from agentgym_rl.files import write_whole
from agentgym_rl.rollout.log import TRAJECTORY_FOLDER, read_row, read_trajectories
from agentgym_rl.types import SamplingParams, Trajectory
from verl.config import PPOConfig
from verl.trainer.step_rollouts import StepRollouts

STEP_FILE = "step.json"
_FORMAT = 1

Key = tuple[str, int, int]
"""What tells a trajectory from all others of its step: uid, sample index, trial."""


@dataclass(frozen=True)
class StepRecord:
    """What ``step.json`` says."""

    step: int
    samples: tuple[Key, ...]
    """In the order of the requests."""
    greedy: tuple[Key, ...]
    kept: tuple[str, ...]
    """Uids of the groups that are trained on, in order."""
    num_rounds: int
    """Of sampling, with ``algorithm.filter_groups``."""
    num_groups: int
    is_filtered: bool

    @property
    def num_trajectories(self) -> int:
        return len(self.samples) + len(self.greedy)


def write_step(folder: Path, step: int, rollouts: StepRollouts) -> None:
    """Complete the folder of a step, whose trajectory files are written, by its ``step.json``."""
    record = {
        "format": _FORMAT,
        "step": step,
        "samples": [_key(trajectory) for trajectory in rollouts.trajectories],
        "greedy": [_key(trajectory) for trajectory in rollouts.greedy.values()],
        "kept": list(rollouts.kept),
        "num_rounds": rollouts.num_rounds,
        "num_groups": rollouts.num_groups,
        "is_filtered": rollouts.is_filtered,
    }
    write_whole(_step_folder(folder, step) / STEP_FILE, json.dumps(record))


def forget_later_steps(folder: Path, last_step: int) -> None:
    """Of a run that goes on after ``last_step``: what it made of later steps before it died is not finished any more.

    A replay would otherwise take them for the ones that follow.
    """
    for step in finished_steps(folder):
        if step > last_step:
            (_step_folder(folder, step) / STEP_FILE).unlink()


def read_record(folder: Path, step: int) -> StepRecord:
    """The record of a step; raises `ConfigError` when the folder has none, or a broken one."""
    path = _step_folder(folder, step) / STEP_FILE
    if not path.is_file():
        raise ConfigError(
            f"trainer.replay: no {path}; steps there: {_shown(finished_steps(folder))}. The file is written when all "
            "trajectories of a step are there"
        )
    try:
        row: Mapping[str, Any] = json.loads(path.read_text())
        for name, wanted in (("format", _FORMAT), ("step", step)):
            if row[name] != wanted:
                raise ConfigError(f"trainer.replay: {path} has {name} {row[name]!r}, must be {wanted}")
        return StepRecord(
            step=row["step"],
            samples=tuple(_as_key(key) for key in row["samples"]),
            greedy=tuple(_as_key(key) for key in row["greedy"]),
            kept=tuple(row["kept"]),
            num_rounds=row["num_rounds"],
            num_groups=row["num_groups"],
            is_filtered=row["is_filtered"],
        )
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"trainer.replay: {path} is no record of a step: {error}") from error


def read_step(folder: Path, step: int) -> StepRollouts:
    """The rollouts of a step, as the run that wrote them had them; raises `ConfigError` when some are not there."""
    record, contents = read_record(folder, step), read_trajectories(_step_folder(folder, step))
    if contents.torn:
        raise ConfigError(f"trainer.replay: {contents.torn[0]}: its last row is torn")
    found = {_key(trajectory): trajectory for trajectory in contents.trajectories}
    _check_same(found, record, _step_folder(folder, step))
    samples = [found[key] for key in record.samples]
    kept: dict[str, list[Trajectory]] = {uid: [] for uid in record.kept}
    for trajectory in samples:
        if trajectory.uid in kept and not trajectory.masked:
            kept[trajectory.uid].append(trajectory)
    return StepRollouts(
        trajectories=samples,
        kept=kept,
        greedy={key[0]: found[key] for key in record.greedy},
        num_rounds=record.num_rounds,
        num_groups=record.num_groups,
        is_filtered=record.is_filtered,
    )


def replay_folder(path: str) -> Path:
    """The folder of ``step<N>`` folders that ``trainer.replay`` names: itself, or that of the run in it.

    Raises `ConfigError` when there is none.
    """
    given = Path(path).resolve()
    for folder in (given, given / TRAJECTORY_FOLDER):
        if any(folder.glob("step*")):
            return folder
    raise ConfigError(f"trainer.replay={path!r}: no folders step<N> in it; give a run's folder, or its trajectories'")


def finished_steps(folder: Path) -> list[int]:
    """Steps that the folder holds whole, rising."""
    numbers = [path.parent.name.removeprefix("step") for path in folder.glob(f"step*/{STEP_FILE}")]
    return sorted(int(number) for number in numbers if number.isdecimal())


def check_replay(config: PPOConfig, total_steps: int) -> None:
    """Raise `ConfigError` when a step of the run is missing, cut short, or not what the run can train on: another
    number of groups than a batch has, or no greedy rollouts for ``remax``.

    Looks at sizes alone; rows are read when their step comes.
    """
    folder, batch_size = replay_folder(str(config.trainer.replay)), config.data.train_batch_size
    steps = finished_steps(folder)
    missing = sorted(set(range(1, total_steps + 1)) - set(steps))
    if missing:
        raise ConfigError(
            f"trainer.replay={config.trainer.replay!r}: holds steps {_shown(steps)} whole, and the run has "
            f"{total_steps}; {_advice(missing)}"
        )
    for step in range(1, total_steps + 1):
        record = read_record(folder, step)
        _check_size(folder, record)
        if config.algorithm.adv_estimator == "remax" and not record.greedy:
            raise ConfigError(
                f"algorithm.adv_estimator=remax: step {step} in trainer.replay={config.trainer.replay!r} has no greedy "
                "rollouts, since another estimator sampled it; take another one here too"
            )
        few = len(record.kept) < batch_size and record.is_filtered
        if len(record.kept) != batch_size and not few:
            raise ConfigError(
                f"data.train_batch_size={batch_size}: step {step} in trainer.replay={config.trainer.replay!r} has "
                f"{len(record.kept)} items"
            )


def check_tokenizer(folder: Path, chat: ChatTemplate, model_path: str) -> None:
    """Raise `ConfigError` when the ids in the folder are another tokenizer's: they do not read as what was said.

    Looks at one trajectory of the first step. Blanks are let be, for libraries differ in how they tidy them up.
    """
    trajectory = next((t for t in _rows(_step_folder(folder, 1)) if t.num_sampled_tokens), None)
    if trajectory is None:
        return
    for message in np.unique(trajectory.sequence_ids[trajectory.loss_mask == 1]).tolist():
        sampled = (trajectory.sequence_ids == message) & (trajectory.loss_mask == 1)
        read, said = chat.decode(trajectory.input_ids[sampled]), trajectory.messages[message].content
        if read.split() != said.split() and "".join(read.split()) != "".join(said.split()):
            raise ConfigError(
                f"trainer.replay: {_step_folder(folder, 1)}: message {message} of {trajectory.item.item_id} is "
                f"{said[:60]!r}, and reads {read[:60]!r} by the tokenizer of actor_rollout_ref.model.path="
                f"{model_path!r}: another model's tokens cannot be trained on"
            )


def _rows(folder: Path) -> Iterator[Trajectory]:
    """A step's trajectories one by one, so that looking at the first does not cost reading all."""
    for file in sorted(folder.glob("*.jsonl")):
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                yield read_row(line, f"{file} line {number}")


class ReplaySampler:
    """Takes the place of a `StepSampler`: the trajectories of each step come from files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def sample(self, step: int, *, max_rounds: int, sampling: SamplingParams) -> StepRollouts:
        """What was sampled in ``step``, under the horizon and the sampling of then."""
        return read_step(self._folder, step)


def _check_size(folder: Path, record: StepRecord) -> None:
    files = sorted(_step_folder(folder, record.step).glob("*.jsonl"))
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, contents, strict=True):
        if content and not content.endswith(b"\n"):
            raise ConfigError(f"trainer.replay: {file}: its last row is torn")
    rows = sum(content.count(b"\n") for content in contents)
    if rows != record.num_trajectories:
        raise ConfigError(
            f"trainer.replay: {_step_folder(folder, record.step)} has {rows} rows in {len(files)} files, its "
            f"{STEP_FILE} names {record.num_trajectories}: a file is missing, or was changed"
        )


def _check_same(found: Mapping[Key, Trajectory], record: StepRecord, folder: Path) -> None:
    named = {*record.samples, *record.greedy}
    for what, keys in (("lacks", named - found.keys()), ("has, unknown to its step.json,", found.keys() - named)):
        if keys:
            uid, sample, trial = min(keys)
            raise ConfigError(
                f"trainer.replay: {folder} {what} {len(keys)} trajectories, among them {uid} sample {sample} trial "
                f"{trial}"
            )


def _advice(missing: Iterable[int]) -> str:
    first = min(missing)
    if first == 1:
        return "step 1 must be there"
    return f"trainer.total_training_steps={first - 1} trains on those before step {first}"


def _shown(steps: Sequence[int]) -> str:
    if not steps:
        return "none"
    if list(steps) == list(range(steps[0], steps[-1] + 1)):
        return f"{steps[0]}-{steps[-1]}"
    return ", ".join(map(str, steps))


def _step_folder(folder: Path, step: int) -> Path:
    return folder / f"step{step}"


def _key(trajectory: Trajectory) -> Key:
    return trajectory.uid, trajectory.sample_index, trajectory.trial


def _as_key(row: Sequence[Any]) -> Key:
    uid, sample, trial = row
    return uid, sample, trial
