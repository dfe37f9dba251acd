"""What training made of each sampled token, beside the trajectory files: advantages, log-probabilities, entropies.

One compressed NumPy archive per training step, ``<run>/token_values/step<N>.npz``: ``names`` says which trajectory each
stretch belongs to, ``lengths`` how many sampled tokens it has, and every other member holds float32 values of all
sampled tokens, trajectory by trajectory. ``<run>/token_values/tokenizer.json`` is the model's, so that a reader
can spell token ids. Only a viewer reads these files; a run that resumes does without them.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from agentgym_rl.files import whole_file
from agentgym_rl.types import Trajectory

TOKEN_VALUES_FOLDER = "token_values"
TOKENIZER_FILE = "tokenizer.json"
_OWN_MEMBERS = ("names", "lengths")


def token_values_file(run_folder: Path, step: int) -> Path:
    """Where the values of training step ``step`` stand."""
    return run_folder / TOKEN_VALUES_FOLDER / f"step{step}.npz"


def write_token_values(
    path: Path, trajectories: Sequence[Trajectory], lengths: Sequence[int], columns: Mapping[str, np.ndarray]
) -> None:
    """Write the archive; a reader finds it whole.

    ``lengths``: sampled tokens of each stretch, whose trajectory is named at the same place; each column ``[S]`` has a
    value for all of them, in order.
    Raises ValueError when a column has another length.
    """
    total = sum(lengths)
    for name, column in columns.items():
        if column.shape != (total,):
            raise ValueError(f"{name}: shape {column.shape}, there are {total} sampled tokens")
    path.parent.mkdir(parents=True, exist_ok=True)
    names = np.array([_name(t.uid, t.sample_index, t.trial) for t in trajectories], dtype=np.str_)
    with whole_file(path, outlives_power_cut=False) as file:
        np.savez_compressed(
            file,
            allow_pickle=False,
            names=names,
            lengths=np.asarray(lengths, np.int32),
            **{name: column.astype(np.float32) for name, column in columns.items()},
        )


def read_token_values(path: Path, *, uid: str, sample_index: int, trial: int) -> dict[str, np.ndarray]:
    """Columns ``[S]`` of one trajectory's sampled tokens; empty where the archive is missing, unreadable or lacks it.

    Of a trial with a reflection the trial's tokens come first; a reflection that was not trained on has no values.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            is_own_S = np.repeat(archive["names"] == _name(uid, sample_index, trial), archive["lengths"])
            if not is_own_S.any():
                return {}
            return {name: archive[name][is_own_S] for name in archive.files if name not in _OWN_MEMBERS}
    except (OSError, ValueError, KeyError, IndexError, zipfile.BadZipFile, EOFError):
        return {}


def _name(uid: str, sample_index: int, trial: int) -> str:
    return f"{uid}#{sample_index}#{trial}"
