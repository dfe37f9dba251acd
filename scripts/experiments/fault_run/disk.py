"""A disk of the run's own that can be made full at any moment.

As root it is a small file system in memory, which is made smaller than what it is to hold: every write then fails with
ENOSPC. Elsewhere no file of the training processes may grow beyond some kilobytes, and longer writes fail with EFBIG:
the same kind of error, under another number.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

_SIZE_BYTES = 2 * 2**30
_PAGE_BYTES = 4096


class Disk(ABC):
    """Where a run writes to."""

    how: ClassVar[str]
    """What making it full does, for the report."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def fill(self, processes: Iterable[int], *, room_bytes: int) -> None:
        """Leave so much room; ``processes`` are those of the training run."""

    @abstractmethod
    def free(self, processes: Iterable[int]) -> None:
        """Have room again."""

    def close(self) -> None:  # noqa: B027 - nothing to take down where it is a plain folder
        """Keep the files and take the disk down."""


class MemoryDisk(Disk):
    """A tmpfs of its own."""

    how = "ENOSPC on a file system of its own (tmpfs)"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        folder.mkdir(parents=True)
        _mount("-t", "tmpfs", "-o", f"size={_SIZE_BYTES}", "tmpfs", str(folder))

    def fill(self, processes: Iterable[int], *, room_bytes: int) -> None:
        used = shutil.disk_usage(self.folder).used
        self._resize(used + max(room_bytes, _PAGE_BYTES))

    def free(self, processes: Iterable[int]) -> None:
        self._resize(_SIZE_BYTES)

    def close(self) -> None:
        kept = self.folder.with_name(self.folder.name + ".kept")
        shutil.copytree(self.folder, kept, symlinks=True)
        subprocess.run(["umount", str(self.folder)], check=True)
        self.folder.rmdir()
        kept.rename(self.folder)

    def _resize(self, size_bytes: int) -> None:
        _mount("-o", f"remount,size={size_bytes}", str(self.folder))


class LimitedFiles(Disk):
    """A plain folder, and a limit on the size of files."""

    how = "EFBIG by a limit on the size of files (RLIMIT_FSIZE)"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        folder.mkdir(parents=True)

    def fill(self, processes: Iterable[int], *, room_bytes: int) -> None:
        self._limit(processes, room_bytes)

    def free(self, processes: Iterable[int]) -> None:
        self._limit(processes, resource.RLIM_INFINITY)

    def _limit(self, processes: Iterable[int], size_bytes: int) -> None:
        for process in processes:
            with suppress(ProcessLookupError):
                _, most = resource.prlimit(process, resource.RLIMIT_FSIZE)
                resource.prlimit(process, resource.RLIMIT_FSIZE, (size_bytes, most))


def make_disk(folder: Path) -> Disk:
    """The truest one that may be made here; ``folder`` must not exist."""
    try:
        return MemoryDisk(folder)
    except (subprocess.CalledProcessError, FileNotFoundError):
        folder.rmdir()
        return LimitedFiles(folder)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)
