"""Files that SearchQA reads and makes: rows of JSONL and parquet, and a cache folder that several processes share."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from agentgym_rl.errors import ConfigError

SUFFIXES = (".jsonl", ".parquet")
_BLOCK_BYTES = 1 << 24
_PARQUET_ROWS = 4096
_SHOW_PROGRESS_FROM_BYTES = 1 << 28
"""Reading less takes about a second."""


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row of a file, after words for where it stands; raises `ConfigError` for what is no row."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: must end in {' or '.join(SUFFIXES)}")
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{path} line {number}", decoded_row(line, f"{path} line {number}")


def decoded_row(line: bytes, where: str) -> dict[str, Any]:
    """A line of a JSONL file; raises `ConfigError`."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: must be a JSON object, is {type(row).__name__}")
    return row


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError:
        raise ConfigError(f"{path}: parquet needs pyarrow; run pip install 'agentgym-rl[train]'") from None
    try:
        number = 0
        for batch in parquet.ParquetFile(path).iter_batches(_PARQUET_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield f"{path} row {number}", row
    except ArrowInvalid as error:
        raise ConfigError(f"{path}: not valid parquet: {error}") from None


# --------------------------------------------------------------------------------------------------------------- cache


def cache_folder(chosen: Path | None) -> Path:
    """Where what is made from corpora is kept: ``chosen``, or the user's cache. It may be deleted at any time."""
    if chosen is not None:
        return chosen
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentgym-rl" / "searchqa"


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """``folder``, filled by ``make`` where it does not exist.

    It is made under another name and then renamed, so it is complete or does not exist; of several processes that want
    it, one makes it and the others wait.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock")):
        if not folder.is_dir():
            partial = folder.with_name(folder.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)  # what a process that was killed left
            partial.mkdir()
            make(partial)
            partial.rename(folder)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock ``path`` alone; it is free again when the process ends, however it ends."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def content_digest(path: Path, cache: Path) -> str:
    """A digest of a file's content, by which what is made from it is named.

    It is remembered with the file's size and times, since reading a large corpus at every start would take minutes.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    found = path.stat()
    seen = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
    memo = cache / "digests" / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:24]}.json"
    try:
        known = json.loads(memo.read_text())
        if known["seen"] == seen:
            return str(known["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # never computed, or written by another version
    digest = _digest(path, found.st_size)
    memo.parent.mkdir(parents=True, exist_ok=True)
    whole = memo.with_suffix(f".{os.getpid()}")
    whole.write_text(json.dumps({"seen": seen, "digest": digest}))
    whole.replace(memo)
    return digest


def _digest(path: Path, size: int) -> str:
    digest = hashlib.blake2b(digest_size=12)
    quiet = size < _SHOW_PROGRESS_FROM_BYTES
    with (
        path.open("rb") as file,
        tqdm(total=size, desc=f"reading {path.name}", unit="B", unit_scale=True, disable=quiet) as bar,
    ):
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            bar.update(len(block))
    return digest.hexdigest()
