"""Where a model's files are: a folder, a checkpoint, a run, or a name on the hub."""

from __future__ import annotations

from pathlib import Path

from agentgym_rl.evaluation.versions import fingerprint

_LATEST = "latest_checkpointed_iteration.txt"
_IN_A_CHECKPOINT = ("actor/huggingface", "huggingface")


def find_model(path: str) -> str:
    """The Hugging Face folder that ``path`` leads to; ``path`` itself where it leads to none.

    ``path`` may be that folder, a checkpoint ``<run>/global_step_<N>``, or a run's folder, whose latest complete
    checkpoint is taken.
    """
    folder = Path(path)
    if (folder / "config.json").is_file():
        return path
    latest = folder / _LATEST
    checkpoint = folder / f"global_step_{latest.read_text().strip()}" if latest.is_file() else folder
    for place in _IN_A_CHECKPOINT:
        if (checkpoint / place / "config.json").is_file():
            return str(checkpoint / place)
    return path


def model_version(path: str) -> str | None:
    """What tells these weights from others: a hash of a folder's files, or the hub's revision; None when unknown."""
    folder = Path(path)
    if folder.is_dir():
        return fingerprint(folder)
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(path, "config.json")
    return Path(cached).parent.name if isinstance(cached, str) else None
