"""The library: which runs and trajectories a folder holds, kept up to date by reading only what was appended.

A run is a folder with a ``metrics.jsonl``, or one that trajectory files stand in or under. Files are only ever opened
for reading, found by walking below the root, and never named by a request: requests name runs and trajectories that
the library has listed itself. Links that lead out of the root are not followed.

`Library.refresh` reads for a limited time and goes on at the next call, so that the first page of a large folder shows
at once.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from agentgym_rl.errors import ConfigError
from agentgym_rl.rollout.log import TRAJECTORY_FOLDER
from agentgym_rl.viewer.rows import NotATrajectory, Summary, decode, summarise

METRICS_FILE = "metrics.jsonl"
_STEP_FOLDER = re.compile(r"(?P<val>val_)?step(?P<step>\d+)")
_SKIPPED_FOLDER = re.compile(r"global_step_\d+.*|tensorboard|\..*")
_ROW_NUMBER = re.compile(r"0|[1-9]\d{0,11}", re.ASCII)
_READ_BYTES = 4 << 20
_LAST_BYTES = 64
_RESCAN_S = 0.5
_RESTS = 4
"""How much longer than looking for files took they are not looked for again."""
_UNLIMITED = float("inf")
_metrics_decoder = msgspec.json.Decoder(dict[str, Any])
_any_decoder = msgspec.json.Decoder()


@dataclass(eq=False)
class _File:
    """A file that rows are appended to, and how far it has been read."""

    path: Path
    name: str
    """Below the root, with ``/``."""
    sort_key: list[tuple[int, str]] = field(default_factory=list)
    inode: int = 0
    size: int = 0
    modified_at: float = 0.0
    """Seconds since 1970."""
    offset: int = 0
    """Bytes read, always at the beginning of a row."""
    num_lines: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Begin and length of each line that was read."""
    problem: str = ""
    """What was wrong with the first unreadable row."""
    num_unreadable: int = 0
    torn: bool = False
    """The last row is not whole, or not yet."""
    generation: int = 0
    """How often the file was found replaced by another."""

    last_bytes: bytes = b""
    """Those before ``offset``."""

    def goes_on(self) -> bool:
        """False when other bytes stand where reading stopped: another file, that was given the same inode."""
        if not self.last_bytes:
            return True
        try:
            with self.path.open("rb") as stream:
                stream.seek(self.offset - len(self.last_bytes))
                return stream.read(len(self.last_bytes)) == self.last_bytes
        except OSError:
            return False

    def restart(self, inode: int) -> None:
        """Forget what was read."""
        self.inode, self.offset, self.num_lines, self.problem, self.num_unreadable = inode, 0, 0, "", 0
        self.spans, self.torn, self.generation, self.last_bytes = [], False, self.generation + 1, b""

    @property
    def unread(self) -> int:
        return self.size - self.offset


@dataclass(eq=False)
class _TrajectoryFile(_File):
    key: str = ""
    run: str = ""
    phase: str = "eval"
    step: int | None = None
    summaries: dict[int, Summary] = field(default_factory=dict)
    """By row, counted from 0; unreadable ones are left out."""

    def restart(self, inode: int) -> None:
        super().restart(inode)
        self.summaries = {}

    def add(self, line: bytes) -> None:
        id = f"{self.key}-{self.num_lines}"
        summary = summarise(line, id=id, run=self.run, phase=self.phase, step=self.step)
        self.summaries[self.num_lines] = summary


@dataclass(eq=False)
class _MetricsFile(_File):
    rows: list[dict[str, Any]] = field(default_factory=list)

    def restart(self, inode: int) -> None:
        super().restart(inode)
        self.rows = []

    def add(self, line: bytes) -> None:
        row = decode(line, _metrics_decoder)
        if type(row.get("step")) is not int:
            raise ValueError("the row has no step")
        self.rows.append(row)


@dataclass(frozen=True)
class Metrics:
    """A run's metrics as they stand now."""

    generation: int
    """Another number says that the rows before do not go on: the run began anew."""
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class Progress:
    """How much of the files has been read."""

    done_bytes: int
    total_bytes: int

    @property
    def is_complete(self) -> bool:
        return self.done_bytes >= self.total_bytes


class Library:
    """What lies below ``root``, a folder or a single trajectory file. Safe to use from several threads."""

    def __init__(self, root: str | Path) -> None:
        """Raises `ConfigError` when there is no such path."""
        self.root = Path(root).resolve()
        if not self.root.exists():
            raise ConfigError(f"{root}: no such file or folder")
        self._base = self.root if self.root.is_dir() else self.root.parent
        self._files: dict[str, _TrajectoryFile] = {}
        """By key."""
        self._metrics: dict[str, _MetricsFile] = {}
        """By run."""
        self._lock = threading.RLock()
        self._next_scan_at = -_UNLIMITED
        self.version = 0
        """Grows with every change."""

    # ----------------------------------------------------------------------------------------------------- questions

    def summaries(self) -> list[Summary]:
        """All trajectories that have been read, file by file in natural order, row by row."""
        with self._lock:
            return [summary for file in self._sorted_files() for summary in file.summaries.values()]

    def find(self, id: str) -> Summary | None:
        """The trajectory called ``id``; None when there is none (any more)."""
        found = self._locate(id)
        return None if found is None else found[1]

    def read_row(self, id: str) -> bytes | None:
        """The row of a trajectory as it stands in its file; None when there is none (any more)."""
        found = self._locate(id)
        if found is None:
            return None
        file, _, span = found
        return next(_read_spans(file.path, [span]), None)

    def read_rows(self, ids: set[str]) -> Iterator[tuple[Summary, bytes]]:
        """Summary and row of each, file by file."""
        for file in self._sorted_files():
            with self._lock:
                own = [each.id for each in file.summaries.values() if each.id in ids]
            chosen = [found for id in own if (found := self._locate(id))]
            spans = [span for _, _, span in chosen]
            rows = zip(chosen, _read_spans(file.path, spans), strict=False)
            yield from ((summary, row) for (_, summary, _), row in rows)

    def place_of(self, id: str) -> tuple[str, int] | None:
        """Path below the root and line number (from 1) of a trajectory."""
        found = self._locate(id)
        return None if found is None else (found[0].name, int(id.rpartition("-")[2]) + 1)

    def at(self, name: str, line: int) -> Summary | None:
        """The trajectory in that line (from 1) of the file called ``name`` below the root; None when there is none."""
        with self._lock:
            keys = [key for key, file in self._files.items() if file.name == name]
        return self.find(f"{keys[0]}-{line - 1}") if keys and line > 0 else None

    def metrics(self, run: str) -> Metrics | None:
        """Metrics of a run; None for one that has no file of them."""
        with self._lock:
            file = self._metrics.get(run)
            return None if file is None else Metrics(file.generation, list(file.rows))

    def runs(self) -> list[str]:
        """Names of all runs: their folders below the root, ``.`` for the root itself."""
        with self._lock:
            holders = {file.run for file in self._files.values() if file.summaries or file.problem or not file.size}
            return sorted(holders | self._metrics.keys(), key=natural)

    def folder_of(self, run: str) -> Path | None:
        """Where a run lies; None for a name that is none of `runs`."""
        return self._base / run if run in self.runs() else None

    def modified_at(self) -> dict[str, float]:
        """For each run when one of its files last changed, seconds since 1970."""
        with self._lock:
            owned = [(file.run, file.modified_at) for file in self._files.values()]
            owned += [(run, file.modified_at) for run, file in self._metrics.items()]
        latest: dict[str, float] = {}
        for run, time_s in owned:
            latest[run] = max(time_s, latest.get(run, 0.0))
        return latest

    def progress(self) -> Progress:
        with self._lock:
            files = [*self._files.values(), *self._metrics.values()]
            return Progress(sum(f.size - (0 if f.torn else f.unread) for f in files), sum(f.size for f in files))

    def problems(self) -> list[str]:
        """A sentence for each file that holds something unreadable."""
        with self._lock:
            files: list[_File] = [*self._sorted_files(), *self._metrics.values()]
            return [
                f"{f.name}: {f.num_unreadable} unreadable row{'s' * (f.num_unreadable > 1)}, the first: {f.problem}"
                for f in files
                if f.problem
            ]

    # ------------------------------------------------------------------------------------------------------- reading

    def refresh(self, budget_s: float = _UNLIMITED) -> None:
        """Find new files and read what was appended, for at most about ``budget_s`` seconds.

        With a limit, files are looked for at most twice a second, and less often where that takes long; a call returns
        at once while another one reads. The time for reading is counted from when the files have been looked for.
        """
        if not self._lock.acquire(blocking=budget_s == _UNLIMITED):
            return
        try:
            began = time.monotonic()
            if budget_s == _UNLIMITED or began >= self._next_scan_at:
                self._scan()
                looked = time.monotonic()
                self._next_scan_at = looked + max(_RESCAN_S, _RESTS * (looked - began))
                began = looked
            files: list[_MetricsFile | _TrajectoryFile] = [*self._metrics.values(), *self._sorted_files()]
            for file in files:
                while file.unread > 0 and not file.torn and self._read_some(file):
                    if time.monotonic() - began > budget_s:
                        return
        finally:
            self._lock.release()

    def _scan(self) -> None:
        """Take up new files, drop those that are gone, and see which have grown or were replaced."""
        found = {path: status for path, status in self._walk()}
        run_folders = {path.parent for path in found if path.name == METRICS_FILE}
        known: dict[Path, _File] = {file.path: file for file in (*self._files.values(), *self._metrics.values())}
        for path in known.keys() - found.keys():
            self._forget(known[path])
        for path, status in found.items():
            file = known.get(path) or self._add(path, run_folders)
            file.modified_at = status.st_mtime
            changed = status.st_size != file.size
            if file.inode != status.st_ino or status.st_size < file.offset or (changed and not file.goes_on()):
                file.restart(status.st_ino)
                self.version += 1
            if changed:
                file.size, file.torn = status.st_size, False

    def _walk(self) -> Iterator[tuple[Path, os.stat_result]]:
        paths = [self.root] if self.root.is_file() else _jsonl_files(self.root)
        for path in paths:
            status = _status(path)
            if status is not None and (not path.is_symlink() or path.resolve().is_relative_to(self._base)):
                yield path, status

    def _add(self, path: Path, run_folders: set[Path]) -> _File:
        name = path.relative_to(self._base).as_posix()
        if path.name == METRICS_FILE:
            run = PurePosixPath(name).parent.as_posix()
            self._metrics[run] = _MetricsFile(path, name)
            return self._metrics[run]
        folders = [path.parent, *path.parent.parents]
        owner = next((folder for folder in folders if folder in run_folders), None)
        run = _run_of(name) if owner is None else owner.relative_to(self._base).as_posix()
        phase, step = _phase_of(name)
        key = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:12]
        self._files[key] = _TrajectoryFile(path, name, natural(name), key=key, run=run, phase=phase, step=step)
        return self._files[key]

    def _forget(self, file: _File) -> None:
        self.version += 1
        self._files = {key: each for key, each in self._files.items() if each is not file}
        self._metrics = {run: each for run, each in self._metrics.items() if each is not file}

    def _read_some(self, file: _TrajectoryFile | _MetricsFile) -> bool:
        """Read whole rows up to a few megabytes; False when there is no further one."""
        try:
            with file.path.open("rb") as stream:
                stream.seek(file.offset)
                data = stream.read(_READ_BYTES)
                while data and b"\n" not in data and (more := stream.read(_READ_BYTES)):
                    data += more
                at_end = file.offset + len(data) >= file.size
        except OSError as error:
            file.problem, file.num_unreadable, file.torn = str(error), max(1, file.num_unreadable), True
            return False
        begin = file.offset
        *lines, tail = data.split(b"\n")
        for line in lines:
            self._take(file, line)
            file.offset += len(line) + 1
        file.torn = at_end and bool(tail)
        if file.torn and _is_whole(tail):
            self._take(file, tail)
            file.offset += len(tail)
            file.torn = False
        if file.offset > begin:
            file.last_bytes = data[: file.offset - begin][-_LAST_BYTES:]
            self.version += 1
        return file.offset > begin

    def _take(self, file: _TrajectoryFile | _MetricsFile, line: bytes) -> None:
        if not line.strip():
            return
        try:
            file.add(line)
        except NotATrajectory:
            pass
        except (ValueError, RecursionError) as error:
            file.num_unreadable += 1
            file.problem = file.problem or f"line {file.num_lines + 1}: {str(error)[:200]}"
        file.spans.append((file.offset, len(line)))
        file.num_lines += 1

    def _locate(self, id: str) -> tuple[_TrajectoryFile, Summary, tuple[int, int]] | None:
        key, _, number = id.rpartition("-")
        with self._lock:
            file = self._files.get(key)
            if file is None or not _ROW_NUMBER.fullmatch(number):
                return None
            summary = file.summaries.get(int(number))
            return None if summary is None else (file, summary, file.spans[int(number)])

    def _sorted_files(self) -> list[_TrajectoryFile]:
        with self._lock:
            return sorted(self._files.values(), key=lambda file: file.sort_key)


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key under which ``step10`` follows ``step9``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _jsonl_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not _SKIPPED_FOLDER.fullmatch(name)]
        yield from (Path(folder, name) for name in names if name.endswith(".jsonl"))


def _run_of(name: str) -> str:
    """The folder that owns a file without metrics: above ``trajectories`` and the steps' folders."""
    parts = PurePosixPath(name).parent.parts
    if parts and _STEP_FOLDER.fullmatch(parts[-1]):
        parts = parts[:-1]
    if parts and parts[-1] == TRAJECTORY_FOLDER:
        parts = parts[:-1]
    return PurePosixPath(*parts).as_posix()


def _phase_of(name: str) -> tuple[str, int | None]:
    match = _STEP_FOLDER.fullmatch(PurePosixPath(name).parent.name)
    if match is None:
        return "eval", None
    return "val" if match["val"] else "train", int(match["step"])


def _read_spans(path: Path, spans: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    """What stands at each span of a file; nothing when it is gone."""
    try:
        with path.open("rb") as stream:
            for start, length in spans:
                stream.seek(start)
                yield stream.read(length)
    except OSError:
        return


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _is_whole(line: bytes) -> bool:
    try:
        decode(line, _any_decoder)
    except (ValueError, RecursionError):
        return False
    return True
