"""Writes what training made of each sampled token, for the viewer: see `agentgym_rl.rollout.token_values`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from agentgym_rl.rollout.token_values import (
    TOKEN_VALUES_FOLDER,
    TOKENIZER_FILE,
    token_values_file,
    write_token_values,
)
from verl.protocol import DataProto
from verl.trainer.credit import TrainingRow


def log_token_values(
    run_folder: Path,
    step: int,
    rows: Sequence[TrainingRow],
    batch: DataProto,
    entropies_T: torch.Tensor | None,
) -> None:
    """Write advantages, and log-probs, values and entropies where they are known, of the batch's sampled tokens.

    ``rows`` are the batch's sequences, in order.
    """
    columns = {
        "advantages": batch.advantages_T,
        "log_probs": batch.old_log_probs_T,
        "ref_log_probs": batch.ref_log_probs_T,
        "values": batch.values_T,
        "entropies": entropies_T,
    }
    mask_T = batch.loss_mask_T
    sampled = {name: column[mask_T].float().numpy() for name, column in columns.items() if column is not None}
    lengths = [int(part.sum()) for part in mask_T.split(batch.lengths_B.tolist())]
    trajectories = [row.trajectory for row in rows]
    write_token_values(token_values_file(run_folder, step), trajectories, lengths, sampled)


def copy_tokenizer(run_folder: Path, model_path: str) -> None:
    """Lay the model's ``tokenizer.json``, where its folder has one, beside the values."""
    source = Path(model_path) / TOKENIZER_FILE
    if source.is_file():
        (run_folder / TOKEN_VALUES_FOLDER).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, run_folder / TOKEN_VALUES_FOLDER / TOKENIZER_FILE)
